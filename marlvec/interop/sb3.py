"""A marlvec vectorizer as a VecEnv of Stable-Baselines3: its agents are rows with a shared policy.

`only_decisions` leaves the steps in which an agent made no decision out of rollouts.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
from gymnasium.spaces import Discrete, MultiDiscrete, Space
from numpy.typing import NDArray

from marlvec.errors import ArgumentError, ContractWarning, StateError
from marlvec.extras import needs_extra
from marlvec.interop.rows import RowDriver, ask_envs, missing_is_attribute_error, render_mode_of
from marlvec.vector.settings import env_seeds
from marlvec.vector.vector_env import VectorEnv

with needs_extra("stable_baselines3", "SB3VecEnv", "pip install 'marlvec[sb3]'"):
    from stable_baselines3.common.buffers import RolloutBuffer
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import VecEnv

__all__ = ["SB3VecEnv", "only_decisions"]

_MASKS = "action_masks"  # the method name that sb3-contrib calls

Rows = None | int | Iterable[int]


class SB3VecEnv(VecEnv):  # type: ignore[misc]  # Any where stable_baselines3 is not installed
    """A view of a `VectorEnv` with one group of agents, for Stable-Baselines3 and sb3-contrib.

    One row per agent, R = N * A, and one policy for all. `marlvec.interop.rows.RowDriver` describes rows of
    agents that have ended or wait for their turn; `marlvec.interop.sb3.only_decisions` makes a model learn without
    them.

    * ``dones`` is True once for each agent, when it ends; ``infos[row]["terminal_observation"]`` is its last
      observation, and ``infos[row]["TimeLimit.truncated"]`` is True if only its time was up.
    * ``infos[row]["episode"]`` has its exact return and length, so that no ``VecMonitor`` is needed:
      ``env_is_wrapped(Monitor)`` is True, and ``evaluate_policy`` reads them, under ``VecNormalize`` as well.
    * ``env_method("action_masks")`` returns the masks to sb3-contrib. A model that never requests them, e.g. ``PPO``,
      gets a `ContractWarning` at the first masks that forbid something.
    * Methods and attributes are those of envs: a method is called once for each env of the given rows.
    * ``render()`` tiles one frame per env.

    Args:
        envs: The vectorizer, in same-step mode. No other code may step or reset it.

    Raises:
        MissingExtraError: (By the import.) stable-baselines3 is not installed.
        ArgumentError: There are several groups, the mode differs, or Stable-Baselines3 does not support the spaces:
            Text, Graph and similar ones, and choices that do not start at 0.

    Attributes:
        envs: The vectorizer.
        driver: The `RowDriver` that steps it; its ``alive`` and ``acting``, (R,) bool, mark padding and waiting rows.
        num_envs: R, the number of rows.
        observation_space, action_space: Spaces of one row.
        reset_infos: For each row, infos of its latest reset.
    """

    def __init__(self, envs: VectorEnv) -> None:
        self.driver = RowDriver(envs, "SB3VecEnv")
        self.envs = envs
        group = self.driver.rows.group
        for leaf in (*group.observation_tree.leaves, *group.action_tree.leaves):
            if leaf.is_object:
                raise ArgumentError(f"SB3VecEnv: {leaf} of {envs.spec.name} is a {leaf.space}, which has no array form")
        _check_choices(group.action_space, envs.spec.name)
        self._heeds_masks = not self.driver.has_masks
        super().__init__(self.driver.rows.row_num, deepcopy(group.observation_space), deepcopy(group.action_space))

    # --- reset and step

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        """Set the seed of the next `reset`.

        Args:
            seed: Spread over the envs by `marlvec.env_seeds`; None: a random seed.

        Returns:
            For each row, the seed of its env.
        """
        if seed is None:
            seed = int(np.random.SeedSequence().generate_state(1)[0])
        self._seeds = [s for s in env_seeds(seed, self.envs.num_envs) for _ in range(self.envs.agent_num)]
        return self._seeds

    def set_options(self, options: list[dict[str, Any]] | dict[str, Any] | None = None) -> None:
        """Set the options of the next `reset`.

        Args:
            options: One dict for all, or one per row: equal for all rows of an env.

        Raises:
            ArgumentError: A list of another length, or different options for rows of one env.
        """
        if isinstance(options, list):
            self.driver.rows.per_env(options, "options")
        super().set_options(options)

    def reset(self) -> Any:
        """Begin new episodes in all envs, with the values of `seed` and `set_options`.

        Returns:
            Observations (R, …), or a dict of such arrays.
        """
        first = slice(None, None, self.envs.agent_num)  # of each env
        seeds, options = self._seeds[first], [given or None for given in self._options[first]]
        obs, self.reset_infos = self.driver.reset(
            None if all(seed is None for seed in seeds) else seeds, options if any(options) else None
        )
        self._reset_seeds()
        self._reset_options()
        return obs

    def step_async(self, actions: NDArray[Any]) -> None:
        """Send actions (R, …); rows that do not act may have any action.

        Raises:
            ActionError: Wrong structure, shape, dtype or value; nothing was sent.
        """
        if not self._heeds_masks and not self.driver.action_masks.all():
            self._heeds_masks = True
            warnings.warn(
                f"SB3VecEnv: {self.envs.spec.name} has action masks, but the model has not requested them: PPO and all "
                f"models of Stable-Baselines3 ignore them, and take masked actions. Use MaskablePPO of sb3-contrib",
                ContractWarning,
                stacklevel=3,  # VecEnv.step(), and the model that calls it
            )
        self.driver.send(actions)

    def step_wait(self) -> tuple[Any, NDArray[np.float32], NDArray[np.bool_], list[dict[str, Any]]]:
        """Wait for the step.

        Returns:
            ``(obs, rewards, dones, infos)``: obs (R, …), rewards (R,) float32, dones (R,) bool, one dict per row.
        """
        step = self.driver.recv()
        for row, info in enumerate(step.first_infos):
            if info:
                self.reset_infos[row] = info
        return step.obs, step.rewards.astype(np.float32), step.terminated | step.truncated, step.infos

    def action_masks(self) -> NDArray[np.bool_]:
        """Return masks, (R, k) bool: allowed choices; all True if a row does not act. ArgumentError without choices."""
        self._heeds_masks = True
        return self.driver.action_masks

    def close(self) -> None:
        """Close the vectorizer."""
        self.envs.close()

    # --- the envs behind the rows

    def has_attr(self, attr_name: str) -> bool:
        """Return whether the envs have an attribute; ``"action_masks"`` exists if actions are discrete choices."""
        return self._is_maskable if attr_name == _MASKS else bool(super().has_attr(attr_name))

    def get_attr(self, attr_name: str, indices: Rows = None) -> list[Any]:
        """Return an attribute of the env of each of these rows, one value per row; AttributeError if envs have none."""
        rows = self._rows(indices)
        if attr_name == "render_mode":  # VecEnv reads it, also of envs without one
            return [render_mode_of(self.envs)] * len(rows)
        with missing_is_attribute_error():
            return ask_envs(self._envs_of(rows), partial(self.envs.get_attr, attr_name))

    def set_attr(self, attr_name: str, value: Any, indices: Rows = None) -> None:
        """Set an attribute of the envs of these rows."""
        self.envs.set_attr(attr_name, value, sorted(set(self._envs_of(self._rows(indices)))))

    def env_method(self, method_name: str, *method_args: Any, indices: Rows = None, **method_kwargs: Any) -> list[Any]:
        """Call a method once for each env; return its result for each of these rows, or raise AttributeError."""
        rows = self._rows(indices)
        if method_name == _MASKS and self._is_maskable:
            masks = self.action_masks()
            return [masks[row] for row in rows]
        with missing_is_attribute_error():
            call = partial(self.envs.call, method_name, *method_args, **method_kwargs)
            return ask_envs(self._envs_of(rows), lambda env_ids: call(indices=env_ids))

    def env_is_wrapped(self, wrapper_class: type, indices: Rows = None) -> list[bool]:
        """Return for each row whether its env is wrapped in the class, at any depth; always True for ``Monitor``."""
        rows = self._rows(indices)
        if wrapper_class is Monitor:
            return [True] * len(rows)
        return ask_envs(self._envs_of(rows), partial(self.envs.env_is_wrapped, wrapper_class))

    def get_images(self) -> Sequence[Any]:
        """Return one frame per env."""
        return list(self.envs.render())

    @property
    def _is_maskable(self) -> bool:
        return self.driver.has_masks and isinstance(self.action_space, (Discrete, MultiDiscrete))

    def _envs_of(self, rows: list[int]) -> list[int]:
        return [row // self.envs.agent_num for row in rows]

    def _rows(self, indices: Rows) -> list[int]:
        given = [int(row) for row in self._get_indices(indices)]
        if wrong := [row for row in given if not -self.num_envs <= row < self.num_envs]:
            raise ArgumentError(f"indices: expected rows from 0 to {self.num_envs - 1}, got {wrong[0]}")
        return [row % self.num_envs for row in given]  # -1 is the last row, as in a list


def _check_choices(space: Space[Any], name: str) -> None:
    starts = np.asarray(getattr(space, "start", 0))
    if isinstance(space, (Discrete, MultiDiscrete)) and starts.any():
        raise ArgumentError(
            f"SB3VecEnv: expected choices that start at 0, as Stable-Baselines3 requires; {name} has {space}"
        )


def only_decisions(model: Any) -> Any:
    """Make an on-policy model learn only from rows in which an agent made a decision.

    Its rollouts still contain all rows, as Stable-Baselines3 requires. Rows are selected when the rollout is full:

    * Rows of agents that have ended, or have not joined yet, are left out.
    * Rows of agents that wait for their turn are left out, too. Their rewards are added to those of the previous
      decision, and the next value after a decision is that of the agent's next decision. So ``gamma`` and
      ``gae_lambda`` count decisions, not env steps.
    * A decision whose outcome is unknown at the rollout's end, because the agent waits, is left out; so is a decision
      whose episode was lost to a fault.

    If every agent decides in every step, advantages equal those of Stable-Baselines3 bit for bit.

    Args:
        model: ``PPO``, ``A2C``, ``MaskablePPO`` or another model with a rollout buffer, whose env is an `SB3VecEnv`
            under any ``VecEnvWrapper``. After ``load``, call this again: a saved model has no buffer.

    Returns:
        The model, with another ``rollout_buffer``.

    Raises:
        ArgumentError: Another env, or a buffer of sequences (``RecurrentPPO``): make such envs with ``done_on="any"``,
            so that no agent outlives another.
    """
    buffer = getattr(model, "rollout_buffer", None)
    if not isinstance(buffer, RolloutBuffer):
        raise ArgumentError(f"only_decisions(): expected a model with a rollout buffer, got {type(model).__name__}")
    if hasattr(buffer, "hidden_state_shape"):
        raise ArgumentError(
            f"only_decisions(): {type(model).__name__} learns from unbroken sequences, from which no row can be "
            f"removed; make the envs with done_on='any', so that no agent outlives another"
        )
    _view(model)
    kind = type(f"Decisions{type(buffer).__name__}", (_Decisions, type(buffer)), {"model": model})
    model.rollout_buffer = kind(
        buffer.buffer_size,
        buffer.observation_space,
        buffer.action_space,
        buffer.device,
        gae_lambda=buffer.gae_lambda,
        gamma=buffer.gamma,
        n_envs=buffer.n_envs,
        **model.rollout_buffer_kwargs,
    )
    return model


def _view(model: Any) -> SB3VecEnv:
    env = model.get_env()
    view = None if env is None else env.unwrapped
    if not isinstance(view, SB3VecEnv):
        raise ArgumentError(f"only_decisions(): expected a model whose env is an SB3VecEnv, got {type(view).__name__}")
    return view


class _Decisions:
    """Mixin: SB3 rollout buffer that skips rows without a decision.

    (T, R): ``decided``, the row's action counted; ``lost``, the step lost its episode; ``usable``, it is learned from.
    """

    model: Any

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]  # of the buffer class, the other base
        shape = (self.buffer_size, self.n_envs)  # type: ignore[attr-defined]  # of the buffer class
        self.decided, self.lost, self.usable = np.zeros((3, *shape), np.bool_)

    def add(self, *args: Any, **kwargs: Any) -> None:
        buffer: Any = self
        driver = _view(self.model).driver
        self.decided[buffer.pos], self.lost[buffer.pos] = driver.acted, driver.lost
        super().add(*args, **kwargs)  # type: ignore[misc]  # of the buffer class

    def compute_returns_and_advantage(self, last_values: Any, dones: NDArray[np.bool_]) -> None:
        """Compute generalised advantages from decision to decision."""
        buffer: Any = self
        driver = _view(self.model).driver
        values, discount = buffer.values, buffer.gamma * buffer.gae_lambda
        # For the time after the step: the next decision's value and advantage, the rewards before it, and whether it is
        # beyond this rollout.
        next_values = last_values.clone().cpu().numpy().flatten()
        advantages, rewards = np.zeros((2, buffer.n_envs), np.float32)
        open_ = driver.alive & ~driver.acting
        over = dones.astype(np.bool_)
        for step in reversed(range(buffer.buffer_size)):
            going = 1.0 - over.astype(np.float32)
            next_values, advantages, rewards = next_values * going, advantages * going, rewards * going
            open_ &= ~over
            decided, lost = self.decided[step], self.lost[step]
            rewards = rewards + buffer.rewards[step]
            found = rewards + buffer.gamma * next_values - values[step] + discount * advantages
            # If an agent waited when its episode was lost, the outcome of its decision is unknown.
            open_ |= lost & ~decided
            self.usable[step] = usable = decided & ~lost & ~open_
            here = decided | lost
            buffer.advantages[step] = np.where(usable, found, 0)
            advantages = np.where(usable, found, np.where(here, 0, advantages)).astype(np.float32)
            next_values = np.where(here, values[step], next_values)
            rewards = np.where(here, 0, rewards).astype(np.float32)
            open_ &= ~decided
            over = buffer.episode_starts[step].astype(np.bool_)
        buffer.returns = buffer.advantages + values

    def get(self, batch_size: int | None = None) -> Iterator[Any]:
        """Yield minibatches of the selected rows, in random order; without ``batch_size`` all in one."""
        buffer: Any = self
        if not buffer.full:
            raise StateError(f"get(): expected a full rollout, got {buffer.pos} of {buffer.buffer_size} steps")
        if not buffer.generator_ready:
            self._leave_out()
            buffer.generator_ready = True
        number = len(buffer.values)
        order = np.random.permutation(number)  # noqa: NPY002  # Stable-Baselines3 seeds the global generator
        for start in range(0, number, batch_size or number):
            yield buffer._get_samples(order[start : start + (batch_size or number)])

    def _leave_out(self) -> None:
        buffer: Any = self
        keep = buffer.swap_and_flatten(self.usable).ravel()
        if not keep.any():
            raise StateError(
                f"no decision in the {buffer.buffer_size} steps of this rollout has a known outcome; increase n_steps"
            )
        for name in ("actions", "values", "log_probs", "advantages", "returns", "action_masks"):
            if hasattr(buffer, name):
                setattr(buffer, name, buffer.swap_and_flatten(getattr(buffer, name))[keep])
        obs = buffer.observations
        buffer.observations = (
            {key: buffer.swap_and_flatten(part)[keep] for key, part in obs.items()}
            if isinstance(obs, dict)
            else buffer.swap_and_flatten(obs)[keep]
        )

"""A marlvec vectorizer as a VecEnv of Stable-Baselines3: its agents are rows with a shared policy."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
from gymnasium.spaces import Discrete, MultiDiscrete, Space
from numpy.typing import NDArray

from marlvec.errors import ArgumentError, ContractWarning
from marlvec.extras import needs_extra
from marlvec.interop.rows.driver import RowDriver
from marlvec.interop.rows.view_checks import ask_envs, missing_is_attribute_error, render_mode_of
from marlvec.vector.seeding import env_seeds
from marlvec.vector.vector_env import VectorEnv

with needs_extra("stable_baselines3", "SB3VecEnv", "pip install 'marlvec[sb3]'"):
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import VecEnv

__all__ = ["SB3VecEnv"]

_MASKS = "action_masks"  # the method name that sb3-contrib calls

Rows = None | int | Iterable[int]


class SB3VecEnv(VecEnv):  # type: ignore[misc]  # Any where stable_baselines3 is not installed
    """A view of a `VectorEnv` with one group of agents, for Stable-Baselines3 and sb3-contrib.

    One row per agent, R = N * A, and one policy for all. `marlvec.interop.rows.driver.RowDriver` describes rows of
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
        """Set the seed of the next `reset`; return, for each row, the seed of its env.

        Args:
            seed: Spread over the envs by `marlvec.env_seeds`; None: a random seed.
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
        """Return the action masks, (R, k) bool: what each row may do now; all True if it does not act.

        Raises:
            ArgumentError: The actions are not discrete choices.
        """
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
        """Return an attribute of the env of each of these rows, one value per row.

        Raises:
            AttributeError: The envs have no such attribute.
        """
        rows = self._rows(indices)
        if attr_name == "render_mode":  # VecEnv reads it, also of envs without one
            return [render_mode_of(self.envs)] * len(rows)
        with missing_is_attribute_error():
            return ask_envs(self._envs_of(rows), partial(self.envs.get_attr, attr_name))

    def set_attr(self, attr_name: str, value: Any, indices: Rows = None) -> None:
        """Set an attribute of the envs of these rows."""
        self.envs.set_attr(attr_name, value, sorted(set(self._envs_of(self._rows(indices)))))

    def env_method(self, method_name: str, *method_args: Any, indices: Rows = None, **method_kwargs: Any) -> list[Any]:
        """Call a method of the envs, once for each env; each of these rows gets its env's result.

        Raises:
            AttributeError: The envs have no such method.
        """
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

"""Rollouts of Stable-Baselines3 without the steps in which an agent made no decision.

Axis letters: R rows, one per (env, agent); T steps of a rollout.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.errors import ArgumentError, StateError
from marlvec.extras import needs_extra
from marlvec.interop.sb3.vec_env import SB3VecEnv

with needs_extra("stable_baselines3", "only_decisions()", "pip install 'marlvec[sb3]'"):
    from stable_baselines3.common.buffers import RolloutBuffer

__all__ = ["only_decisions"]


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
        super().reset()  # type: ignore[misc]  # of the buffer class that this is mixed into
        shape = (self.buffer_size, self.n_envs)  # type: ignore[attr-defined]  # likewise, of that class
        self.decided, self.lost, self.usable = np.zeros((3, *shape), np.bool_)

    def add(self, *args: Any, **kwargs: Any) -> None:
        buffer: Any = self
        driver = _view(self.model).driver
        self.decided[buffer.pos], self.lost[buffer.pos] = driver.acted, driver.lost
        super().add(*args, **kwargs)  # type: ignore[misc]  # likewise

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

"""Noise on actions: Gaussian, or an Ornstein-Uhlenbeck process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Space
from numpy.typing import NDArray

from marlvec.connectors._support.agent_table import AgentTable, load_tables, save_tables
from marlvec.connectors._support.executed_actions import ExecutedActions, is_given
from marlvec.connectors._support.row_random import RowRandom
from marlvec.connectors.action.bounds import FloatBoxes
from marlvec.connectors.action.decay import Decay
from marlvec.connectors.connector import ActionConnector, EnvIds, State
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, UnsupportedSpaceError

__all__ = ["GaussianNoise", "OrnsteinUhlenbeckNoise"]


def _noisy(
    rows: Rows, boxes: FloatBoxes, noise_nD: NDArray[np.float64], executed: ExecutedActions, *, clip: bool
) -> Rows:
    """Add noise to the actions that a policy chose."""
    given = is_given(rows)
    actions = boxes.add(rows.actions_for_env, noise_nD, clip=clip)
    if given.any():
        parts = zip(boxes.tree.flatten(actions), boxes.tree.flatten(rows.actions_for_env), strict=True)
        kept = []
        for noisy, before in parts:
            leaf = np.array(noisy)
            leaf[given] = np.asarray(before)[given]
            kept.append(leaf)
        actions = boxes.tree.unflatten(kept)
    return executed.send(rows, actions, explores=True)


class GaussianNoise(ActionConnector):
    """Adds independent normal noise to every element of every Box of floats, while training.

    The batch gets a column ``actions_executed``: the action with its noise, in the policy's space. Off-policy learners
    (DDPG, TD3) take this column; ``actions`` stays what the policy chose. Actions that no policy chose (``off_policy``)
    pass unchanged.

    Other leaves pass unchanged. ``std`` is in the units of the actions: before `UnsquashActions` they go from -1 to 1,
    whatever the env's bounds, and that is where this belongs.

    With ``final`` and ``decay_steps`` the deviation goes linearly from ``std`` to ``final``. Each agent of each env
    counts its own decisions, so with 16 envs a decay over 16,000 steps of all of them is ``decay_steps=1000``. What is
    assigned to ``std`` holds from the next call on.

    Args:
        std: Standard deviation, at first: one number, or one for each element, of all Boxes in a row.
        final: Deviation after the decay; None to stay at ``std``.
        decay_steps: Decisions of an agent, while training, until then.
        clip: Whether to bring what comes out into the bounds of the Box.
        seed: Equal seeds give equal noise.

    Raises:
        ArgumentError: A deviation is not a number from 0 on, or only one of ``final`` and ``decay_steps`` is given.
        UnsupportedSpaceError: Where a space is first seen: it has no Box of floats, or not as many elements as ``std``.
    """

    def __init__(
        self,
        std: float | Sequence[float] = 0.1,
        *,
        final: float | None = None,
        decay_steps: int | None = None,
        clip: bool = True,
        seed: int = 0,
    ) -> None:
        for name, value in (("std", std), ("final", 0.0 if final is None else final)):
            number = np.asarray(value, np.float64)
            if number.ndim > 1 or not (np.isfinite(number) & (number >= 0)).all():
                raise ArgumentError(f"{name} must be a number from 0 on, got {value}")
        self.std = std
        self.final = final
        self.decay_steps = decay_steps
        self.clip = clip
        self.seed = seed
        self._decay = Decay(final, decay_steps)
        self._random = RowRandom(seed, "GaussianNoise")
        self._boxes: FloatBoxes | None = None
        self._executed: ExecutedActions | None = None

    def __call__(self, rows: Rows) -> Rows:
        if self._boxes is None or self._executed is None:
            raise self._not_set_up()
        if not self.training:
            return self._executed.send(rows, rows.actions_for_env, explores=True)
        std: NDArray[np.float64] = self._decay(np.asarray(self.std, np.float64), rows)
        self._decay.count(rows)
        noise = self._random.normal(rows, self._boxes.size) * std
        return _noisy(rows, self._boxes, noise, self._executed, clip=self.clip)

    def setup(self, space: Space[Any]) -> None:
        self._boxes = FloatBoxes(space)
        self._executed = ExecutedActions(space, self.action_space)

    def policy_space(self, space: Space[Any]) -> Space[Any]:
        boxes, given = FloatBoxes(space), np.shape(self.std)
        boxes.need("GaussianNoise")
        if given not in ((), (boxes.size,)):
            raise UnsupportedSpaceError(
                f"std has {given[0]} numbers for the {boxes.size} elements of the float Boxes in {space}"
            )
        return space

    def state_dict(self) -> State:
        return self._decay.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._decay.load_state_dict(state)

    def merge_states(self, states: Sequence[Mapping[str, Any]]) -> State:
        return self._decay.merge_states(states)

    def take_merged(self, state: Mapping[str, Any]) -> None:
        self._decay.take_merged(state)


class OrnsteinUhlenbeckNoise(ActionConnector):
    """Adds an Ornstein–Uhlenbeck process to every element of every Box of floats, while training.

    The batch gets a column ``actions_executed``, and ``off_policy`` actions pass unchanged, as with `GaussianNoise`.
    Each agent has a process of its own, which starts at 0 in each episode and takes one step before each decision:

        x += -theta * x * dt + sigma * sqrt(dt) * N(0, 1)

    This is the noise of Lillicrap et al., "Continuous control with deep reinforcement learning", 2015, whose theta and
    sigma are the defaults; with the ``dt`` of OpenAI's baselines. Other leaves pass unchanged. The noise is in the
    units of the actions: before `UnsquashActions` they go from -1 to 1, and that is where this belongs.

    Args:
        theta: How fast it comes back to 0.
        sigma: How far it is thrown.
        dt: Time from one decision to the next.
        clip: Whether to bring what comes out into the bounds of the Box.
        seed: Equal seeds give equal noise.

    Raises:
        ArgumentError: ``theta`` or ``sigma`` is below 0, or ``dt`` not above it.
        UnsupportedSpaceError: Where a space is first seen: it has no Box of floats.
    """

    def __init__(
        self, theta: float = 0.15, sigma: float = 0.2, dt: float = 1e-2, *, clip: bool = True, seed: int = 0
    ) -> None:
        if not (theta >= 0 and sigma >= 0 and dt > 0 and np.isfinite([theta, sigma, dt]).all()):
            raise ArgumentError(
                f"theta and sigma must be numbers from 0 on, dt above 0; got theta={theta}, sigma={sigma}, dt={dt}"
            )
        self.theta = theta
        self.sigma = sigma
        self.dt = dt
        self.clip = clip
        self.seed = seed
        self._random = RowRandom(seed, "OrnsteinUhlenbeckNoise")
        self._boxes: FloatBoxes | None = None
        self._executed: ExecutedActions | None = None
        self._x = AgentTable()

    def __call__(self, rows: Rows) -> Rows:
        if self._boxes is None or self._executed is None:
            raise self._not_set_up()
        x = self._x.get(rows.env_id, rows.agent_index)
        if "first" in rows:
            x[rows.first] = 0
        if self.training:
            normal = self._random.normal(rows, self._boxes.size)
            x += -self.theta * self.dt * x + self.sigma * np.sqrt(self.dt) * normal
        # In evaluation too: the episodes that end there must not pass their noise on to the next ones.
        self._x.set(rows.env_id, rows.agent_index, x)
        if not self.training:
            return self._executed.send(rows, rows.actions_for_env, explores=True)
        return _noisy(rows, self._boxes, x, self._executed, clip=self.clip)

    def reset(self, env_ids: EnvIds | None = None) -> None:
        self._x.reset(env_ids)

    def setup(self, space: Space[Any]) -> None:
        self._boxes = FloatBoxes(space)
        self._executed = ExecutedActions(space, self.action_space)
        if self._x.shape != (self._boxes.size,):
            self._x = AgentTable((self._boxes.size,))

    def policy_space(self, space: Space[Any]) -> Space[Any]:
        FloatBoxes(space).need("OrnsteinUhlenbeckNoise")
        return space

    def state_dict(self) -> State:
        return {} if self._boxes is None else save_tables({"x": self._x})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._boxes is None:
            raise self._not_set_up()
        load_tables(state, {"x": self._x}, self.name)

"""Rock-paper-scissors, exact with the Parallel form of PettingZoo's ``rps_v2``: both players choose at once."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Discrete
from numpy.typing import NDArray

from marlvec.envs.builtin_ids import pettingzoo_env
from marlvec.errors import ArgumentError
from marlvec.native.kernels import end_episode, kernel
from marlvec.native.native_env import Ids, NativeEnv

SHOWN = 5  # rounds that a picture shows


class RockPaperScissors(NativeEnv):
    """N games of rock-paper-scissors, and of its larger forms, with an odd number of actions."""

    name = "rps_v2"
    agents = ("player_0", "player_1")
    metadata = {"render_modes": ["human", "rgb_array"], "name": name, "is_parallelizable": True, "render_fps": 2}
    state_names = ("rounds", "history")

    def __init__(self, num_envs: int, *, num_actions: int = 3, max_cycles: int = 15, screen_height: int = 800) -> None:
        super().__init__(num_envs)
        if not isinstance(num_actions, (int, np.integer)) or num_actions < 3 or num_actions % 2 == 0:
            raise ArgumentError(f"{self.name}: num_actions: expected an odd int of at least 3, got {num_actions!r}")
        if not isinstance(max_cycles, (int, np.integer)):
            raise ArgumentError(f"{self.name}: max_cycles: expected an int, got {max_cycles!r}")
        self._num_actions, self._max_cycles = int(num_actions), int(max_cycles)
        self._screen_height = screen_height
        self.observation_spaces = (Discrete(self._num_actions + 1),) * 2
        self.action_spaces = (Discrete(self._num_actions),) * 2
        self.rounds = np.zeros(num_envs, np.int64)  # played in this episode
        # both choices of the last rounds, newest first; -1: not played yet
        self.history = np.full((num_envs, SHOWN, 2), -1, np.int64)

    def reset(self, ids: Ids) -> None:
        _reset(ids, self._num_actions, self.rounds, self.history, self.rows.obs[0][0])
        self.set_alive(ids)

    def step(self, ids: Ids) -> None:
        r = self.rows
        actions, obs = r.actions[0][0], r.obs[0][0]
        _step(ids, self.rounds, self.history, actions, obs, r.reward)
        _end(ids, self._max_cycles, self.rounds, r.truncated, r.alive, r.acting, r.done)

    def reference(self, i: int, render_mode: str | None = None) -> Any:
        arguments = {"num_actions": self._num_actions, "max_cycles": self._max_cycles}
        build = {"render_mode": render_mode, "screen_height": self._screen_height}
        env = pettingzoo_env(f"classic/{self.name}", "parallel", **build, **arguments)
        env.reset()
        raw = env.unwrapped
        raw.num_moves = int(self.rounds[i])
        raw.history = self.history[i].ravel().tolist()
        if raw.num_moves:
            raw.state = dict(zip(self.agents, self.history[i, 0].tolist(), strict=True))
            raw.observations = dict(zip(self.agents, self.history[i, 0, ::-1].tolist(), strict=True))
        return env


@kernel
def _reset(ids: Ids, none: int, rounds: NDArray[np.int64], history: NDArray[np.int64], obs: NDArray[np.int64]) -> None:
    for i in ids:
        rounds[i] = 0
        history[i] = -1
        obs[i] = none


@kernel
def _step(
    ids: Ids,
    rounds: NDArray[np.int64],
    history: NDArray[np.int64],
    actions: NDArray[np.int64],
    obs: NDArray[np.int64],
    reward: NDArray[np.float64],
) -> None:
    for i in ids:
        first, second = actions[i, 0], actions[i, 1]
        if first != second:
            # The lower of two choices with equal parity wins, else the higher.
            first_wins = (first > second) != ((first + second) % 2 == 0)
            reward[i, 0] = 1.0 if first_wins else -1.0
            reward[i, 1] = -reward[i, 0]
        rounds[i] += 1
        obs[i, 0] = second
        obs[i, 1] = first
        for k in range(SHOWN - 1, 0, -1):
            history[i, k] = history[i, k - 1]
        history[i, 0] = actions[i]


@kernel
def _end(
    ids: Ids,
    max_cycles: int,
    rounds: NDArray[np.int64],
    truncated: NDArray[np.bool_],
    alive: NDArray[np.bool_],
    acting: NDArray[np.bool_],
    done: NDArray[np.bool_],
) -> None:
    """Truncate both players of the envs in which the last round is over."""
    for i in ids:
        if rounds[i] >= max_cycles:
            end_episode(i, truncated, alive, acting, done)

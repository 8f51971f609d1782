"""Tic-tac-toe, exact with PettingZoo's ``tictactoe_v3``."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

from marlvec.envs.builtin_ids import pettingzoo_env
from marlvec.native.kernels import kernel
from marlvec.native.native_env import Ids
from marlvec.native.turn_game import DRAWN, GOES_ON, ILLEGAL, WON, TurnGame, finish, pass_turn, start

LINES = np.array([(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)], np.int8)


class TicTacToe(TurnGame):
    """N games of tic-tac-toe."""

    name = "tictactoe_v3"
    agents = ("player_1", "player_2")
    observation_spaces = (Box(0, 1, (3, 3, 2), np.int8),) * 2
    action_spaces = (Discrete(9),) * 2
    mask_sizes = (9, 9)
    metadata = {"render_modes": ["human", "rgb_array"], "name": name, "is_parallelizable": False, "render_fps": 1}
    state_names = ("squares",)

    def __init__(self, num_envs: int, *, screen_height: int = 1000) -> None:
        super().__init__(num_envs)
        self.squares = np.zeros((num_envs, 9), np.int8)  # column by column, as PettingZoo; 0: empty, 1 and 2: marks
        self._screen_height = screen_height

    def reset(self, ids: Ids) -> None:
        _reset(ids, self.turn_rows, self.squares, self.mover)

    def step(self, ids: Ids) -> None:
        _step(ids, self.turn_rows, self.squares, self.mover)

    def cut_short(self, ids: Ids) -> None:
        _observe_all(ids, self.turn_rows.obs, self.squares)

    def reference(self, i: int, render_mode: str | None = None) -> Any:
        build = {"render_mode": render_mode, "screen_height": self._screen_height}
        env = pettingzoo_env(f"classic/{self.name}", "aec", **build)
        env.reset()
        env.unwrapped.board.squares = self.squares[i].tolist()
        env.unwrapped.agent_selection = self.agents[self.mover[i]]
        return env


@kernel
def _reset(ids: Ids, rows: Any, squares: NDArray[np.int8], mover: NDArray[np.int64]) -> None:
    for i in ids:
        squares[i] = 0
        mover[i] = 0
        rows.obs[i] = 0
        start(rows, i, 0)


@kernel
def _step(ids: Ids, rows: Any, squares: NDArray[np.int8], mover: NDArray[np.int64]) -> None:
    for i in ids:
        me = int(mover[i])
        outcome = _play(squares[i], me + 1, rows.actions[i, me])
        if outcome == GOES_ON:
            mover[i] = 1 - me
            pass_turn(rows, i, me, 1 - me)
            _observe(rows.obs[i, 1 - me], squares[i], 1 - me)
            for k in range(9):
                rows.masks[i, 1 - me, k] = squares[i, k] == 0
        else:
            legal = outcome != ILLEGAL
            finish(rows, i, me, outcome if legal else -1.0, legal)
            if legal:
                mover[i] = 1 - me
                rows.reward[i, 1 - me] = -outcome
            _observe(rows.obs[i, 0], squares[i], 0)
            _observe(rows.obs[i, 1], squares[i], 1)


@kernel
def _play(squares: NDArray[np.int8], mark: int, action: int) -> int:
    if squares[action] != 0:
        return ILLEGAL
    squares[action] = mark
    for k in range(len(LINES)):
        if squares[LINES[k, 0]] == mark and squares[LINES[k, 1]] == mark and squares[LINES[k, 2]] == mark:
            return WON
    for k in range(9):
        if squares[k] == 0:
            return GOES_ON
    return DRAWN


@kernel
def _observe(obs: NDArray[np.int8], squares: NDArray[np.int8], player: int) -> None:
    """Write one player's view: a plane of its own marks, then a plane of the opponent's."""
    for k in range(9):
        obs[k // 3, k % 3, 0] = squares[k] == player + 1
        obs[k // 3, k % 3, 1] = squares[k] == 2 - player


@kernel
def _observe_all(ids: Ids, obs: NDArray[np.int8], squares: NDArray[np.int8]) -> None:
    for i in ids:
        for a in range(2):
            _observe(obs[i, a], squares[i], a)

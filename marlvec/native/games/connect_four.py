"""Connect four, exact with PettingZoo's ``connect_four_v3``.

A player's stones are the bits of one uint64: bit ``7 * column + height`` from the bottom up. The seventh bit of a
column is always zero, so that shifting by one place along a line (`DIRECTIONS`) never joins one column to the next.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

from marlvec.envs.builtin_ids import pettingzoo_env
from marlvec.native.kernels import kernel
from marlvec.native.native_env import Ids, Rows
from marlvec.native.turn_game import DRAWN, GOES_ON, ILLEGAL, WON, TurnGame, finish, pass_turn, start

HEIGHT, WIDTH = 6, 7

DIRECTIONS = np.array((1, 7, 6, 8), np.uint64)  # up, across, down across, up across

_ONE = np.uint64(1)


class ConnectFour(TurnGame):
    """N games of connect four."""

    name = "connect_four_v3"
    agents = ("player_0", "player_1")
    observation_spaces = (Box(0, 1, (HEIGHT, WIDTH, 2), np.int8),) * 2
    action_spaces = (Discrete(WIDTH),) * 2
    mask_sizes = (WIDTH, WIDTH)
    metadata = {"render_modes": ["human", "rgb_array"], "name": name, "is_parallelizable": False, "render_fps": 2}
    state_names = ("stones", "heights", "last")

    def __init__(self, num_envs: int, *, screen_scaling: int = 9) -> None:
        super().__init__(num_envs)
        self.stones = np.zeros((num_envs, 2), np.uint64)  # each player's stones as bits
        self.heights = np.zeros((num_envs, WIDTH), np.int8)  # stones in each column
        # Position of each player's last stone in an observation (7 * row + column, from the top), or -1. Observations
        # are updated, not rewritten: a player's view gains these two stones.
        self.last = np.full((num_envs, 2), -1, np.int8)
        self._screen_scaling = screen_scaling

    def attach(self, rows: Rows) -> None:
        super().attach(rows)
        # By place, which saves two divisions a move; a view, as rows are contiguous.
        self._cells = self.turn_rows.obs.reshape(self.num_envs, 2, HEIGHT * WIDTH, 2)
        assert np.shares_memory(self._cells, self.turn_rows.obs)

    def reset(self, ids: Ids) -> None:
        _reset(ids, self.turn_rows, self.stones, self.heights, self.last, self.mover)

    def step(self, ids: Ids) -> None:
        _step(ids, self.turn_rows, self._cells, self.stones, self.heights, self.last, self.mover)

    def state_limits(self) -> dict[str, tuple[int, int]]:
        return {**super().state_limits(), "heights": (0, HEIGHT), "last": (-1, HEIGHT * WIDTH - 1)}

    def cut_short(self, ids: Ids) -> None:
        _observe_all(ids, self._cells, self.last)

    def reference(self, i: int, render_mode: str | None = None) -> Any:
        build = {"render_mode": render_mode, "screen_scaling": self._screen_scaling}
        env = pettingzoo_env(f"classic/{self.name}", "aec", **build)
        env.reset()
        for row in range(HEIGHT):
            for column in range(WIDTH):
                place = WIDTH * column + HEIGHT - 1 - row
                marks = [a + 1 for a in range(2) if int(self.stones[i, a]) >> place & 1]
                env.unwrapped.board[WIDTH * row + column] = sum(marks)
        env.unwrapped.agent_selection = self.agents[self.mover[i]]
        return env


@kernel
def _reset(
    ids: Ids,
    rows: Any,
    stones: NDArray[np.uint64],
    heights: NDArray[np.int8],
    last: NDArray[np.int8],
    mover: NDArray[np.int64],
) -> None:
    for i in ids:
        stones[i] = 0
        heights[i] = 0
        last[i] = -1
        mover[i] = 0
        rows.obs[i] = 0
        start(rows, i, 0)


@kernel
def _step(
    ids: Ids,
    rows: Any,
    cells: NDArray[np.int8],
    stones: NDArray[np.uint64],
    heights: NDArray[np.int8],
    last: NDArray[np.int8],
    mover: NDArray[np.int64],
) -> None:
    for i in ids:
        me = int(mover[i])
        other = 1 - me
        outcome = _play(stones, heights, last, i, me, rows.actions[i, me])
        if outcome == GOES_ON:
            mover[i] = other
            pass_turn(rows, i, me, other)
            _observe(cells, last, i, other)
            for column in range(WIDTH):
                rows.masks[i, other, column] = heights[i, column] < HEIGHT
        else:
            legal = outcome != ILLEGAL
            finish(rows, i, me, outcome if legal else -1.0, legal)
            if legal:
                mover[i] = other
                rows.reward[i, other] = -outcome
            _observe(cells, last, i, 0)
            _observe(cells, last, i, 1)


@kernel
def _play(
    stones: NDArray[np.uint64], heights: NDArray[np.int8], last: NDArray[np.int8], i: int, me: int, column: int
) -> int:
    height = heights[i, column]
    if height == HEIGHT:
        return ILLEGAL
    stones[i, me] |= _ONE << np.uint64(WIDTH * column + height)
    heights[i, column] = height + 1
    last[i, me] = WIDTH * (HEIGHT - 1 - height) + column
    if _four_in_line(stones[i, me]):
        return WON
    for k in range(WIDTH):
        if heights[i, k] < HEIGHT:
            return GOES_ON
    return DRAWN


@kernel
def _four_in_line(stones: np.uint64) -> bool:
    for k in range(len(DIRECTIONS)):
        pairs = stones & (stones >> DIRECTIONS[k])
        if pairs & (pairs >> (DIRECTIONS[k] + DIRECTIONS[k])) != 0:
            return True
    return False


@kernel
def _observe(cells: NDArray[np.int8], last: NDArray[np.int8], i: int, player: int) -> None:
    """Update one player's view: a plane of its own stones, then a plane of the opponent's."""
    for plane in range(2):
        place = last[i, player if plane == 0 else 1 - player]
        if place >= 0:
            cells[i, player, place, plane] = 1


@kernel
def _observe_all(ids: Ids, cells: NDArray[np.int8], last: NDArray[np.int8]) -> None:
    for i in ids:
        for a in range(2):
            _observe(cells, last, i, a)

"""The map of pursuit, as tables for the kernels.

Observations and global states are pictures of it, with three planes: walls, pursuers, evaders.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from marlvec.native.jit import kernel
from marlvec.native.native_env import Ids

__all__ = ["Board", "Cells", "make_board", "observe", "write_state"]

_BESIDE = ((-1, 0), (1, 0), (0, 1), (0, -1))  # (dx, dy) of actions 0 to 3; action 4 stays

Cells = NDArray[np.int32]
"""Cells, each as one number, ``y * x_size + x``; or other numbers about cells."""


class Board(NamedTuple):
    """Tables of a map of C cells."""

    go: Cells  # (C, 5), the cell that an action leads to
    beside: Cells  # (C, 4), neighbours; beyond the edge, the cell itself
    wall: NDArray[np.bool_]  # (C,)
    need: Cells  # (C,), how many neighbours must hold pursuers to surround an evader
    corner: Cells  # (C, 2), row and column of `picture` where a pursuer's window begins
    # (rows, columns, 3), walls without agents, in observation planes, with a margin as wide as a pursuer sees
    picture: NDArray[np.float32]
    sight: int  # cells that a pursuer sees


def make_board(x_size: int, y_size: int, sight: int) -> Board:
    """Build the reference's rectangle map, with a wall in the middle."""
    cells = x_size * y_size
    go = np.zeros((cells, 5), np.int32)
    beside = np.zeros((cells, 4), np.int32)
    need = np.zeros(cells, np.int32)
    corner = np.zeros((cells, 2), np.int32)
    across = [0.3 < x / x_size < 1.0 - 0.3 for x in range(x_size)]
    upward = [0.2 < y / y_size < 1.0 - 0.2 for y in range(y_size)]
    wall = np.outer(upward, across)
    picture = np.zeros((y_size + 2 * sight, x_size + 2 * sight, 3), np.float32)
    picture[:, :, 0] = 1
    picture[sight : sight + y_size, sight : sight + x_size, 0] = wall
    for cell in range(cells):
        y, x = divmod(cell, x_size)
        corner[cell] = y, x
        go[cell] = cell
        need[cell] = 4 - (x in (0, x_size - 1)) - (y in (0, y_size - 1))
        for k, (dx, dy) in enumerate(_BESIDE):
            to_x, to_y = x + dx, y + dy
            inside = 0 <= to_x < x_size and 0 <= to_y < y_size
            beside[cell, k] = to_y * x_size + to_x if inside else cell
            if inside and not wall[to_y, to_x] and not wall[y, x]:
                go[cell, k] = beside[cell, k]
            # The reference ignores the first row and column.
            need[cell] -= inside and to_x > 0 and to_y > 0 and wall[to_y, to_x]
    return Board(go, beside, wall.ravel(), need, corner, picture, sight)


@kernel
def observe(
    i: int,
    board: Board,
    picture: NDArray[np.float32],
    pursuers: Cells,
    evaders: Cells,
    gone: NDArray[np.bool_],
    view: NDArray[np.float32],
) -> None:
    """Draw env ``i``'s agents into the picture, copy each pursuer's window, and erase the agents."""
    sight = board.sight
    _draw(i, board.corner, sight, pursuers, evaders, gone, picture)
    flat = picture.reshape(picture.shape[0], 3 * picture.shape[1])
    side = 2 * sight + 1
    for a in range(pursuers.shape[1]):
        row, column = board.corner[pursuers[i, a], 0], 3 * board.corner[pursuers[i, a], 1]
        for y in range(side):
            for k in range(3 * side):
                view[i, a, y, k] = flat[row + y, column + k]
        if side < view.shape[2]:  # an even side: the last row and column stay unseen
            for y in range(view.shape[2]):
                for k in range(0 if y == side else 3 * side, view.shape[3]):
                    view[i, a, y, k] = 1.0 if k % 3 == 0 else 0.0
    for a in range(pursuers.shape[1]):
        row, column = board.corner[pursuers[i, a]]
        picture[row + sight, column + sight, 1] = 0.0
    for e in range(evaders.shape[1]):
        row, column = board.corner[evaders[i, e]]
        picture[row + sight, column + sight, 2] = 0.0


@kernel
def _draw(
    i: int,
    corner: Cells,
    margin: int,
    pursuers: Cells,
    evaders: Cells,
    gone: NDArray[np.bool_],
    picture: NDArray[np.float32],
) -> None:
    for a in range(pursuers.shape[1]):
        row, column = corner[pursuers[i, a]]
        picture[row + margin, column + margin, 1] += 1.0
    for e in range(evaders.shape[1]):
        if not gone[i, e]:
            row, column = corner[evaders[i, e]]
            picture[row + margin, column + margin, 2] += 1.0


@kernel
def write_state(
    ids: Ids, board: Board, pursuers: Cells, evaders: Cells, gone: NDArray[np.bool_], state: NDArray[np.float32]
) -> None:
    """Write global states, (N, y_size, x_size, 3): the picture without its margin."""
    sight = board.sight
    for i in ids:
        state[i] = board.picture[sight : sight + state.shape[1], sight : sight + state.shape[2]]
        _draw(i, board.corner, 0, pursuers, evaders, gone, state[i])

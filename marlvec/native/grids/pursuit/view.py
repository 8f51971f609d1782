"""Observations and global states of pursuit: pictures with three planes (walls, pursuers, evaders)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from marlvec.native.grids.pursuit.board import Board, Cells
from marlvec.native.jit import kernel
from marlvec.native.native_env import Ids

__all__ = ["observe", "write_state"]


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

"""Begins episodes of pursuit: agents in random cells, none beside another of its kind."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.native.grids.pursuit.board import Board, Cells
from marlvec.native.grids.pursuit.view import observe
from marlvec.native.jit import kernel
from marlvec.native.native_env import Ids
from marlvec.native.rng_kernels import bounded, uniform

__all__ = ["begin"]

_PATIENCE = 32  # random tries per cell of the map, before a search for any free cell


@kernel
def begin(
    ids: Ids,
    rng: Any,
    board: Board,
    size: tuple[int, int],
    window: float,
    pursuers: Cells,
    evaders: Cells,
    gone: NDArray[np.bool_],
    frames: NDArray[np.int64],
    view: NDArray[np.float32],
) -> int:
    """Begin episodes; returns the first env whose agents do not fit into its window, or -1."""
    picture = board.picture.copy()
    taken = np.zeros(len(board.wall), np.bool_)
    x_size, y_size = size
    for i in ids:
        left = uniform(rng, i, 0.0, 1.0 - window)
        low = uniform(rng, i, 0.0, 1.0 - window)
        xs = int(x_size * left), int(x_size * (left + window))
        ys = int(y_size * low), int(y_size * (low + window))
        for agents in (pursuers[i], evaders[i]):
            if not _place(rng, i, board, x_size, xs, ys, taken, agents):
                return int(i)
        gone[i] = False
        frames[i] = 0
        observe(i, board, picture, pursuers, evaders, gone, view)
    return -1


@kernel
def _place(
    rng: Any,
    i: int,
    board: Board,
    x_size: int,
    xs: tuple[int, int],
    ys: tuple[int, int],
    taken: NDArray[np.bool_],
    agents: Cells,
) -> bool:
    """Draw a cell for each agent, none beside another's; return False if no cell is left."""
    if xs[1] <= xs[0] or ys[1] <= ys[0]:
        return False
    taken[:] = board.wall
    for a in range(len(agents)):
        tries = 0
        while True:
            x = xs[0] + bounded(rng, i, xs[1] - xs[0])
            y = ys[0] + bounded(rng, i, ys[1] - ys[0])
            cell = y * x_size + x
            if not taken[cell]:
                break
            tries += 1
            if tries % (_PATIENCE * len(taken)) == 0 and not _has_room(taken, x_size, xs, ys):
                return False
        agents[a] = cell
        taken[cell] = True
        for k in range(4):
            taken[board.beside[cell, k]] = True
    return True


@kernel
def _has_room(taken: NDArray[np.bool_], x_size: int, xs: tuple[int, int], ys: tuple[int, int]) -> bool:
    for y in range(ys[0], ys[1]):
        for x in range(xs[0], xs[1]):
            if not taken[y * x_size + x]:
                return True
    return False

"""The map of pursuit, as tables for the kernels."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Board", "Cells", "make_board"]

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

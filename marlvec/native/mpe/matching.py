"""Distances and the cheapest assignment of agents to places, for simple_line and simple_formation.

The reference's ``np.linalg.norm`` is a BLAS dot product, which may use a fused multiply-add. So numpy computes the
distances, for the whole batch: `norms`. The assignment repeats scipy's ``linear_sum_assignment`` step by step, so that
ties are broken alike.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.native.jit import kernel

__all__ = ["match", "norms"]


def norms(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the lengths (…,) of vectors (…, 2), bit for bit as ``np.linalg.norm`` of each single vector."""
    # matmul of a row and a column calls the same BLAS dot product as norm().
    squares = np.matmul(vectors[..., None, :], vectors[..., :, None])[..., 0, 0]
    return np.asarray(np.sqrt(squares))


def match(costs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return each agent's cost in the cheapest assignment, (n, A); ``costs`` (n, A, A) are by agent and place."""
    cheapest = np.empty(costs.shape[:2])
    if costs.shape[1]:
        _match(np.ascontiguousarray(costs), cheapest)
    return cheapest


@kernel
def _match(costs: Any, cheapest: Any) -> None:
    size = costs.shape[1]
    u, v, shortest = np.empty(size), np.empty(size), np.empty(size)
    path, row_of, column_of = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.int64)
    remaining = np.empty(size, np.int64)
    rows, columns = np.empty(size, np.bool_), np.empty(size, np.bool_)
    for i in range(len(costs)):
        u[:], v[:] = 0.0, 0.0
        row_of[:], column_of[:] = -1, -1
        for row in range(size):
            sink, least = _find_path(row, costs[i], u, v, path, row_of, shortest, rows, columns, remaining)
            u[row] += least
            for r in range(size):
                if rows[r] and r != row:
                    u[r] += least - shortest[column_of[r]]
            for c in range(size):
                if columns[c]:
                    v[c] -= least - shortest[c]
            c = sink
            while True:
                r = path[c]
                row_of[c] = r
                column_of[r], c = c, column_of[r]
                if r == row:
                    break
        for row in range(size):
            cheapest[i, row] = costs[i, row, column_of[row]]


@kernel
def _find_path(
    row: Any,
    costs: Any,
    u: Any,
    v: Any,
    path: Any,
    row_of: Any,
    shortest: Any,
    rows: Any,
    columns: Any,
    remaining: Any,
) -> Any:
    """Find the shortest augmenting path from an unassigned row; return its last column and its length."""
    size = len(u)
    left, least, sink = size, 0.0, -1
    for k in range(size):
        remaining[k] = size - k - 1
    rows[:], columns[:] = False, False
    shortest[:] = math.inf
    while sink == -1:
        index, lowest = -1, math.inf
        rows[row] = True
        for k in range(left):
            c = remaining[k]
            reach = least + costs[row, c] - u[row] - v[c]
            if reach < shortest[c]:
                path[c] = row
                shortest[c] = reach
            if shortest[c] < lowest or (shortest[c] == lowest and row_of[c] == -1):
                lowest = shortest[c]
                index = k
        if index < 0:  # NaNs: the reference raises, too
            raise ValueError("matrix contains invalid numeric entries")
        least = lowest
        c = remaining[index]
        if row_of[c] == -1:
            sink = c
        else:
            row = row_of[c]
        columns[c] = True
        left -= 1
        remaining[index] = remaining[left]
    return sink, least

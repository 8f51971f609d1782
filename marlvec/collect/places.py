"""Numbers of envs or lanes as an index."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["Places", "places_of"]

Places = slice | NDArray[np.int64]
"""Where rows stand in an array that has one for each."""


def places_of(ids: NDArray[np.int64]) -> Places:
    """These rows as an index: a slice where they are evenly spaced, which costs a quarter of an array of numbers.

    Args:
        ids: (n,) ascending, none twice.
    """
    n = len(ids)
    if not n:
        return ids
    first, last = int(ids[0]), int(ids[-1])
    if last - first == n - 1:
        return slice(first, last + 1)
    step, rest = divmod(last - first, n - 1)
    if rest or np.count_nonzero(ids[1:] - ids[:-1] != step):
        return ids
    return slice(first, last + 1, step)

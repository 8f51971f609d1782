"""Numbers of envs or lanes as an index."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from marlvec.env_ids import Where, rows_of

__all__ = ["places_of"]


def places_of(ids: NDArray[np.int64]) -> Where:
    """These rows as an index: a slice where they are evenly spaced, which costs a quarter of an array of numbers.

    Args:
        ids: (n,) ascending, none twice.
    """
    rows = rows_of(ids)
    if isinstance(rows, slice) or not len(ids):
        return rows
    first, last = int(ids[0]), int(ids[-1])
    step, rest = divmod(last - first, len(ids) - 1)
    if rest or np.count_nonzero(ids[1:] - ids[:-1] != step):
        return ids
    return slice(first, last + 1, step)

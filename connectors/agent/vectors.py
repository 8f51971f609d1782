"""Observations that are vectors, and get longer."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Space
from numpy.typing import NDArray

from marlvec.connectors.rows import Rows
from marlvec.errors import UnsupportedSpaceError

__all__ = ["append_to_obs", "appended_space"]


def append_to_obs(rows: Rows, extra_nk: NDArray[Any], dtype: np.dtype[Any]) -> Rows:
    """Join (n, d) observations and (n, k) further numbers, in the dtype of `appended_space`."""
    obs = rows.obs
    size = obs.shape[1]
    out = np.empty((len(rows), size + extra_nk.shape[1]), dtype)
    out[:, :size] = obs
    with np.errstate(over="ignore"):  # a number too large for float32 becomes infinite
        out[:, size:] = extra_nk
    return rows.replace(obs=out)


def appended_space(space: Space[Any], extra: Box, times: int, who: str) -> Box:
    """Space of an observation in ``space`` with ``times`` vectors of ``extra`` behind it.

    Its dtype is the observation's, or the one that holds both.

    Raises:
        UnsupportedSpaceError: The observation is not a vector; names who asks for one.
    """
    if not isinstance(space, Box) or len(space.shape) != 1:
        raise UnsupportedSpaceError(f"{who} needs a vector to append to: put FlattenObs before it; got {space}")
    dtype = np.result_type(space.low.dtype, extra.low.dtype)
    low = np.concatenate([space.low, np.tile(extra.low, times)]).astype(dtype)
    high = np.concatenate([space.high, np.tile(extra.high, times)]).astype(dtype)
    return Box(low, high, dtype=dtype.type)

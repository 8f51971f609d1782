"""Env indices: validation of ``env_ids``, options per env, and indices of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.errors import ArgumentError

Ids = NDArray[np.int64]

EnvIds = Sequence[int] | NDArray[Any]
Options = Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None


def check_env_ids(env_ids: EnvIds, num_envs: int) -> NDArray[np.int64]:
    """Return the indices of the chosen envs, given as indices or an (N,) bool mask, in a new array."""
    ids = np.asarray(env_ids)
    if ids.dtype == np.bool_ and ids.shape == (num_envs,):
        return np.flatnonzero(ids)
    if ids.shape == (0,):
        return np.zeros(0, np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ArgumentError(
            f"env_ids must be a list of indices or a bool mask of shape ({num_envs},), "
            f"got shape {ids.shape}, dtype {ids.dtype}"
        )
    if ids[0] >= 0 and ids[-1] < num_envs and np.count_nonzero(ids[1:] > ids[:-1]) == len(ids) - 1:
        return ids.astype(np.int64)  # a copy: the caller may change its array
    if ids.min() < 0 or ids.max() >= num_envs:
        raise ArgumentError(f"env_ids must be from 0 to {num_envs - 1}, got {ids.tolist()}")
    if len(set(ids.tolist())) != len(ids):
        raise ArgumentError(f"env_ids names an env twice: {ids.tolist()}")
    return ids.astype(np.int64)


def spread_options(options: Options, n: int) -> list[dict[str, Any] | None]:
    """Return one options dict (or None) per chosen env, as copies of the caller's dicts."""
    if options is None:
        return [None] * n
    if isinstance(options, Mapping):
        return [dict(options) for _ in range(n)]
    if len(options) != n:
        raise ArgumentError(f"options is a list of {len(options)} for {n} envs; give one dict, or one per env")
    for k, option in enumerate(options):
        if option is not None and not isinstance(option, Mapping):
            raise ArgumentError(f"options[{k}] must be a dict or None, got {type(option).__name__}")
    return [None if option is None else dict(option) for option in options]


def rows_of(ids: NDArray[np.int64]) -> slice | NDArray[np.int64]:
    """Return the index of these envs' rows, given in ascending order: a slice if they are consecutive."""
    if len(ids) and ids[-1] - ids[0] == len(ids) - 1:
        return slice(int(ids[0]), int(ids[-1]) + 1)
    return ids


Where = slice | NDArray[np.int64]

"""A common space for envs whose spaces differ only in their bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict, Space, Tuple

from marlvec.spaces import describe_difference
from marlvec.spaces.tree import map_space

__all__ = ["describe_incompatibility", "widen"]


def widen(a: Space[Any], b: Space[Any]) -> Space[Any]:
    """Return the space that contains the members of both, which differ at most in the bounds of Boxes."""
    if a == b:
        return a
    if isinstance(a, Dict) and isinstance(b, Dict):
        return Dict([(key, widen(sub, b.spaces[key])) for key, sub in a.spaces.items()])
    if isinstance(a, Tuple) and isinstance(b, Tuple):
        return Tuple([widen(x, y) for x, y in zip(a.spaces, b.spaces, strict=True)])
    if isinstance(a, Box) and isinstance(b, Box):
        dtype: Any = a.dtype
        # Without axes the results are scalars, and Box takes no bools.
        low, high = np.asarray(np.minimum(a.low, b.low)), np.asarray(np.maximum(a.high, b.high))
        return Box(low, high, a.shape, dtype)
    return a


def describe_incompatibility(expected: Space[Any], got: Space[Any]) -> str | None:
    """Return where two spaces first differ in more than the bounds of a Box, or None."""
    return describe_difference(map_space(_boundless, expected), map_space(_boundless, got))


def _boundless(space: Space[Any]) -> Space[Any]:
    if not isinstance(space, Box):
        return space
    dtype: Any = np.dtype(space.dtype)
    if dtype.kind == "f":
        return Box(-np.inf, np.inf, space.shape, dtype)
    ends: tuple[Any, Any] = (False, True) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return Box(np.full(space.shape, ends[0], dtype), np.full(space.shape, ends[1], dtype), space.shape, dtype)

"""Room for observations that are not there."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space

__all__ = ["including_blank", "stacked_space"]


def including_blank(leaf: Space[Any]) -> Space[Any]:
    """A leaf's space with its blank: zeros in a Box; all others hold theirs, zeros or their start, already."""
    if isinstance(leaf, Box):
        low, high = np.minimum(leaf.low, 0), np.maximum(leaf.high, 0)
        return Box(low, high, leaf.shape, leaf.low.dtype.type)
    return leaf


def stacked_space(leaf: Space[Any], count: int) -> Space[Any]:
    """Space of ``count`` values of a leaf's space on a new first axis.

    Args:
        leaf: A Box, Discrete, MultiDiscrete or MultiBinary.
        count: How many, at least 1.
    """

    def stack(value: Any) -> Any:
        return np.stack([np.asarray(value)] * count)

    if isinstance(leaf, Box):
        return Box(stack(leaf.low), stack(leaf.high), dtype=leaf.low.dtype.type)
    if isinstance(leaf, (Discrete, MultiDiscrete)):
        choices = leaf.n if isinstance(leaf, Discrete) else leaf.nvec
        return MultiDiscrete(stack(choices), dtype=np.dtype(leaf.dtype).type, start=stack(leaf.start))
    assert isinstance(leaf, MultiBinary)
    return MultiBinary((count, *leaf.shape))

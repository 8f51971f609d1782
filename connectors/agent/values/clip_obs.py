"""`ClipObs`: observations clipped to bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray

from marlvec.connectors.agent._support.leafwise_obs import LeafPlan, LeafwiseObs
from marlvec.errors import ArgumentError, UnsupportedSpaceError
from marlvec.spaces import Leaf

__all__ = ["ClipObs"]


class ClipObs(LeafwiseObs):
    """Clips the values of every Box leaf, and its bounds with them; other leaves pass unchanged.

    A Box of ints is clipped to the whole numbers inside. NaN stays NaN.

    Args:
        low: Smallest value; None for no limit.
        high: Largest value; None for no limit.
        keys: Paths of the leaves to work on; all Boxes where None.

    Raises:
        ArgumentError: Neither is given, or ``low`` is above ``high``; or, where a space is first seen, a path is not
            in it.
        UnsupportedSpaceError: Where a space is first seen: there is no Box, or no value of its dtype lies between.
    """

    _kind = "Boxes"

    def __init__(
        self, low: float | None = None, high: float | None = None, *, keys: Sequence[str] | None = None
    ) -> None:
        super().__init__(keys)
        if low is None and high is None:
            raise ArgumentError("give low, high or both")
        if not (-math.inf if low is None else low) <= (math.inf if high is None else high):
            raise ArgumentError(f"low must not be above high, got {low} and {high}")
        self.low = low
        self.high = high

    def _plan(self, leaf: Leaf) -> LeafPlan | None:
        space = leaf.space
        if not isinstance(space, Box):
            return None
        low, high = self._limits(leaf)
        bottom, top = np.clip(space.low, low, high), np.clip(space.high, low, high)
        return LeafPlan(Box(bottom, top, leaf.shape, leaf.dtype.type), _Clip(low, high))

    def _limits(self, leaf: Leaf) -> tuple[Any, Any]:
        """The limits as numbers of the leaf's dtype."""
        low = -math.inf if self.low is None else self.low
        high = math.inf if self.high is None else self.high
        if leaf.dtype.kind == "f":
            with np.errstate(over="ignore"):
                return leaf.dtype.type(low), leaf.dtype.type(high)
        least, most = (0, 1) if leaf.dtype.kind == "b" else (np.iinfo(leaf.dtype).min, np.iinfo(leaf.dtype).max)
        if low > most or high < least or (bottom := math.ceil(max(low, least))) > (top := math.floor(min(high, most))):
            raise UnsupportedSpaceError(f"{self!r}: no {leaf.dtype} of {leaf} lies between; put CastObs before it")
        return leaf.dtype.type(bottom), leaf.dtype.type(top)


class _Clip:
    """Clips the values of one leaf."""

    def __init__(self, low: Any, high: Any) -> None:
        self.low, self.high = low, high

    def __call__(self, values_n: NDArray[Any]) -> NDArray[Any]:
        clipped: NDArray[Any] = np.clip(values_n, self.low, self.high)
        return clipped

"""`ScaleObs`: bounded observations rescaled to a range such as [0, 1]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray

from marlvec.connectors.agent._support.leafwise_obs import LeafPlan, LeafwiseObs
from marlvec.errors import ArgumentError
from marlvec.spaces import Leaf

__all__ = ["ScaleObs"]


class ScaleObs(LeafwiseObs):
    """Stretches every Box leaf from its bounds to ``[low, high]``, as float32.

    Leaves that are not bounded at both ends pass unchanged. Entry by entry, each from its own bounds, and exact at both
    ends: an image of bytes comes out as ``image / 255``. An entry whose bounds are equal comes out as ``low``.

    Args:
        low: Where the lower bounds go.
        high: Where the upper bounds go.
        keys: Paths of the leaves to work on; all Boxes with bounds where None.

    Raises:
        ArgumentError: ``low`` is not below ``high``, or one is not finite; or, where a space is first seen, a path is
            not in it.
        UnsupportedSpaceError: Where a space is first seen: no Box has bounds at both ends.
    """

    _kind = "Boxes with bounds at both ends"
    _advice = "put ClipObs before it, which sets bounds, or use NormalizeObs in its place"

    def __init__(self, low: float = 0.0, high: float = 1.0, *, keys: Sequence[str] | None = None) -> None:
        super().__init__(keys)
        if not (low < high and np.isfinite([low, high]).all()):
            raise ArgumentError(f"low must be below high and both finite, got {low} and {high}")
        self.low = low
        self.high = high

    def _plan(self, leaf: Leaf) -> LeafPlan | None:
        if not isinstance(leaf.space, Box) or leaf.dtype.kind not in "fiu" or not leaf.space.is_bounded("both"):
            return None
        return LeafPlan(Box(self.low, self.high, leaf.shape, np.float32), _Scale(leaf.space, self.low, self.high))


class _Scale:
    """Linear from a Box's bounds to a range."""

    def __init__(self, space: Box, low: float, high: float) -> None:
        self.low, self.high = np.float32(low), np.float32(high)
        self.to_unit = bool(self.low == 0 and self.high == 1)
        # What float32 holds exactly is worked out in it.
        self.dtype = np.dtype(np.float32 if np.can_cast(space.low.dtype, np.float32) else np.float64)
        bottom, top = (_least(bound.astype(self.dtype)) for bound in (space.low, space.high))
        with np.errstate(over="ignore"):
            if not np.isfinite(top - bottom).all():  # bounds as far apart as floats can be
                self.dtype = np.dtype(np.float64)
                bottom, top = bottom.astype(np.float64), top.astype(np.float64)
        self.shrink = 1.0
        with np.errstate(over="ignore"):
            if not np.isfinite(top - bottom).all():
                self.shrink, bottom, top = 0.5, bottom / 2, top / 2
        self.bottom = bottom
        self.span = np.where(top > bottom, top - bottom, 1).astype(self.dtype)

    def __call__(self, values_n: NDArray[Any]) -> NDArray[Any]:
        if self.shrink != 1.0:
            values_n = np.multiply(values_n, self.shrink, dtype=self.dtype)
        out: NDArray[Any] = np.subtract(values_n, self.bottom, dtype=self.dtype)
        out /= self.span
        if not self.to_unit:
            rest = 1 - out
            rest *= self.low
            out *= self.high
            out += rest  # from both ends, so that both are exact
            np.clip(out, self.low, self.high, out=out)  # rounding pushes it over the edge of a narrow range
        return out.astype(np.float32, copy=False)


def _least(bound: NDArray[Any]) -> NDArray[Any]:
    """One number for bounds that are all equal: faster than a number for each entry."""
    return bound.ravel()[:1].reshape(()) if bound.size and (bound == bound.ravel()[0]).all() else bound

"""`CastObs`: observations in another dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Box
from numpy.typing import DTypeLike, NDArray

from marlvec.connectors._support.leaf_spaces import space_summary
from marlvec.connectors.agent._support.leafwise_obs import LeafPlan, LeafwiseObs
from marlvec.errors import ArgumentError, ContractError, UnsupportedSpaceError
from marlvec.spaces import Leaf

__all__ = ["CastObs"]


class CastObs(LeafwiseObs):
    """Casts every Box leaf to a dtype; other leaves pass unchanged.

    Floats that become ints are rounded, halves to even. Nothing ever wraps around: a Box with bounds beyond what an int
    dtype can hold is refused, and a value beyond its Box raises ContractError.

    Args:
        dtype: A float or int dtype.
        keys: Paths of the leaves to work on; all Boxes where None.

    Raises:
        ArgumentError: ``dtype`` is neither; or, where a space is first seen, a path is not in it.
        UnsupportedSpaceError: Where a space is first seen: there is no Box, or its bounds do not fit an int dtype.

    Attributes:
        dtype: The dtype's name.
    """

    _kind = "Boxes"

    def __init__(self, dtype: DTypeLike, *, keys: Sequence[str] | None = None) -> None:
        super().__init__(keys)
        try:
            wanted = np.dtype(dtype)
        except TypeError as error:
            raise ArgumentError(f"dtype must be one of numpy's, got {dtype!r}") from error
        if wanted.kind not in "fiu":
            raise ArgumentError(f"dtype must be of floats or ints, got {wanted}")
        self.dtype = wanted.name

    def _plan(self, leaf: Leaf) -> LeafPlan | None:
        space, dtype = leaf.space, np.dtype(self.dtype)
        if not isinstance(space, Box):
            return None
        low, high = space.low, space.high
        if dtype.kind in "iu":
            if leaf.dtype.kind == "f":
                low, high = np.rint(low), np.rint(high)
            if not _fits(low, high, dtype):
                raise UnsupportedSpaceError(
                    f"{self!r}: the bounds of {leaf}, {space_summary(space)}, do not fit {dtype}; put ClipObs or "
                    f"ScaleObs before it"
                )
        with np.errstate(over="ignore"):  # a bound beyond the largest float32 is none
            after = Box(low.astype(dtype), high.astype(dtype), leaf.shape, dtype.type)
        return LeafPlan(after, _Cast(leaf, dtype))


class _Cast:
    """Casts the values of one leaf."""

    def __init__(self, leaf: Leaf, dtype: np.dtype[Any]) -> None:
        assert isinstance(leaf.space, Box)
        self.leaf = leaf
        self.low, self.high = leaf.space.low, leaf.space.high
        self.dtype = dtype
        self.may_wrap = dtype.kind in "iu" and not np.can_cast(leaf.dtype, dtype)

    def __call__(self, values_n: NDArray[Any]) -> NDArray[Any]:
        if values_n.dtype == self.dtype:
            return values_n
        if self.may_wrap:
            inside = (values_n >= self.low) & (values_n <= self.high)  # False for NaN
            if not inside.all():
                at = tuple(np.argwhere(~inside)[0])
                raise ContractError(
                    f"{self.leaf} has {values_n[at]} in row {at[0]}, outside of {space_summary(self.leaf.space)}: it "
                    f"cannot become {self.dtype}"
                )
            if values_n.dtype.kind == "f":
                values_n = np.rint(values_n)
        return values_n.astype(self.dtype)


def _fits(low: NDArray[Any], high: NDArray[Any], dtype: np.dtype[Any]) -> bool:
    if not low.size:
        return True
    limits = np.iinfo(dtype)
    least, most = low.min(), high.max()
    # As Python's ints: the largest int64 is no float64.
    return bool(np.isfinite(least) and np.isfinite(most)) and limits.min <= int(least) and int(most) <= limits.max

"""Tolerances for connectors' numbers, and values outside their space."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Space
from numpy.typing import NDArray

from marlvec.errors import ContractError
from marlvec.spaces import Leaf, SpaceTree, membership
from marlvec.spaces.equality import Difference, short

__all__ = ["learnt", "outsider", "summed"]

_ULPS = 64.0  # rounding of a sum taken in another order
_LEARNT = 1e-6  # rounding of learnt statistics


def summed(expected: NDArray[Any], got: NDArray[Any]) -> NDArray[np.bool_]:
    """Return (…,) bool, whether numbers differ by no more than the rounding of a sum in another order."""
    return _within(expected, got, _ULPS * float(np.finfo(expected.dtype).eps), 0.0)


def learnt(expected: NDArray[Any], got: NDArray[Any]) -> NDArray[np.bool_]:
    """Return (…,) bool, whether numbers differ by no more than the rounding of statistics learnt in another order."""
    return _within(expected, got, _LEARNT, 1.0)


def _within(expected: NDArray[Any], got: NDArray[Any], tolerance: float, least: float) -> NDArray[np.bool_]:
    scale = float(np.abs(expected[np.isfinite(expected)]).max(initial=least))
    close: NDArray[np.bool_] = np.isclose(got, expected, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
    return close


def outsider(space: Space[Any], tree: Any, n: int, *, exact: bool = True) -> Difference | None:
    """Return the first value of a column of n rows outside its space.

    `exact`: each leaf must have the space's dtype; else a lossless conversion is enough.
    """
    spaces = SpaceTree(space)
    try:
        values = spaces.flatten(tree)
    except ContractError as error:
        return Difference("", (), "the structure of the space", str(error))
    return next(
        (found for leaf, v in zip(spaces.leaves, values, strict=True) if (found := _in(leaf, v, n, exact))), None
    )


def _in(leaf: Leaf, value: Any, n: int, exact: bool) -> Difference | None:
    if not isinstance(value, np.ndarray):
        return Difference(leaf.path, (), "an array", f"{type(value).__name__} {short(value)}")
    if value.shape != (n, *leaf.shape):
        return Difference(leaf.path, (), f"shape {(n, *leaf.shape)}", str(value.shape))
    if value.dtype != leaf.dtype and (exact or not _fits(value, leaf.dtype)):
        return Difference(leaf.path, (), f"dtype {leaf.dtype}", str(value.dtype))
    members, everywhere = membership(leaf, in_buffer=False), np.ones((n, 1), np.bool_)
    if members is None or (good := members.rows(value[:, None], everywhere)).all():
        return None
    row = int(np.argmin(good))
    return Difference(leaf.path, (row,), *members.refuse(value[row, ...]))


def _fits(value: NDArray[Any], dtype: np.dtype[Any]) -> bool:
    return np.can_cast(value.dtype, dtype, "same_kind") and bool(
        (value.astype(dtype) == value).all() or dtype.kind == "f"
    )

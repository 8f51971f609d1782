"""Gathers array entries, with a fill value for missing ones."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.arguments import whole_number
from marlvec.errors import ArgumentError
from marlvec.trees import Tree, map_tree

__all__ = ["check_step", "gather", "same"]

IntArray = NDArray[np.int64]


def check_step(name: str, value: Any) -> int:
    """Return a position or step as an int; refuse anything but a whole number."""
    step = whole_number(value)
    if step is None:
        raise ArgumentError(f"{name} must be a whole number, got {value!r}")
    return step


def gather(tree: Tree, where: IntArray, fill: Any, what: str) -> Tree:
    """Copy entries ``where`` (k,) of every leaf (n, …) to (k, …); for missing ones (-1) copy ``fill``.

    ``fill`` None raises `IndexError`; a leaf's dtype must be able to hold it (`ArgumentError`).
    """
    missing = where < 0
    if fill is None and missing.any():
        raise IndexError(
            f"{what}: nothing is there at {np.flatnonzero(missing).size} of {len(where)} places, first at number "
            f"{int(np.flatnonzero(missing)[0])}; give fill=, the value to put there"
        )

    def chosen(leaf: NDArray[Any]) -> NDArray[Any]:
        if not missing.any():
            return leaf.take(where, axis=0)
        out: NDArray[Any] = np.empty((len(where), *leaf.shape[1:]), leaf.dtype)
        out[~missing] = leaf[where[~missing]]
        out[missing] = _as_dtype(fill, leaf.dtype, what)
        return out

    return map_tree(chosen, tree)


def _as_dtype(fill: Any, dtype: np.dtype[Any], what: str) -> Any:
    """Convert the fill value to this dtype; unlike numpy, raise instead of wrapping or truncating it."""
    if dtype == np.object_:
        return fill
    try:
        with np.errstate(all="ignore"):
            cast = np.asarray(fill).astype(dtype)
        # Only floats may be rounded.
        fits = cast.shape == () and bool(dtype.kind in "fc" or cast == fill)
    except (TypeError, ValueError, OverflowError):
        fits = False
    if not fits:
        raise ArgumentError(f"{what} is {dtype}, which cannot hold fill={fill!r}")
    return cast


def same(one: NDArray[Any], other: NDArray[Any]) -> bool:
    """Return whether dtype, shape and all entries are equal; NaN equals NaN, and objects must be identical."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.dtype == np.object_:
        return all(a is b for a, b in zip(one.ravel().tolist(), other.ravel().tolist(), strict=True))
    return bool(np.array_equal(one, other, equal_nan=one.dtype.kind in "fc"))

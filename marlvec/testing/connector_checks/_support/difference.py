"""Where two trees of rows or two states differ, and what lies outside its space."""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import Repr
from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space
from numpy.typing import NDArray

from marlvec.connectors.rows import Rows
from marlvec.errors import ContractError
from marlvec.spaces import Leaf, SpaceTree

__all__ = ["Difference", "difference", "nearly", "short", "outsider"]

_REPR = Repr()
_REPR.maxother = _REPR.maxstring = 120
_ULPS = 64.0  # what a sum may lose where it is taken in another order
_LEARNT = 1e-6  # and what statistics may lose


class Difference(NamedTuple):
    """The first place in which two values differ.

    Attributes:
        path: Where in the tree, e.g. ``"obs/camera"``; ``""`` for the value itself.
        at: Where in that array; ``()`` where the arrays themselves differ in kind.
        expected, got: What is there, in words.
    """

    path: str
    at: tuple[int, ...]
    expected: str
    got: str

    def __str__(self) -> str:
        where = [repr(self.path)] if self.path else []
        where += [f"index {self.at if len(self.at) != 1 else self.at[0]}"] if self.at else []
        return ", ".join(where) or "the whole of it"


def difference(expected: Any, got: Any, *, near: bool = False, path: str = "") -> Difference | None:
    """Compare dicts, rows, lists and tuples part by part, arrays by dtype, shape and every number; NaN equals NaN.

    Args:
        expected: What should be.
        got: What is.
        near: Whether floats may differ as much as sums do that are taken in another order; else not by a bit.
        path: Where in a larger tree they are.
    """
    expected, got = (dict(one.items()) if isinstance(one, Rows) else one for one in (expected, got))
    if isinstance(expected, Mapping) and isinstance(got, Mapping):
        if expected.keys() != got.keys():
            return Difference(path, (), f"keys {_keys(expected)}", f"keys {_keys(got)}")
        parts = [(str(key), expected[key], got[key]) for key in expected]
    elif isinstance(expected, (list, tuple)) and type(expected) is type(got):
        if len(expected) != len(got):
            return Difference(path, (), f"length {len(expected)}", f"length {len(got)}")
        parts = [(str(i), a, b) for i, (a, b) in enumerate(zip(expected, got, strict=True))]
    elif isinstance(expected, np.ndarray) and isinstance(got, np.ndarray):
        return _of_arrays(expected, got, near, path)
    else:
        same = type(expected) is type(got) and bool(expected == got or (expected != expected and got != got))
        return None if same else Difference(path, (), _described(expected), _described(got))
    found = (difference(a, b, near=near, path=f"{path}/{key}" if path else key) for key, a, b in parts)
    return next((one for one in found if one), None)


def nearly(expected: Any, got: Any, path: str = "") -> Difference | None:
    """Compare what two connectors learnt: as `difference`, but numbers may be a millionth apart, of whatever type."""
    if isinstance(expected, Mapping) and isinstance(got, Mapping) and expected.keys() == got.keys():
        parts = [(str(key), expected[key], got[key]) for key in expected]
    elif isinstance(expected, (list, tuple)) and isinstance(got, (list, tuple)) and len(expected) == len(got):
        parts = [(str(i), a, b) for i, (a, b) in enumerate(zip(expected, got, strict=True))]
    elif _is_numbers(expected) and _is_numbers(got):
        a, b = np.asarray(expected, np.float64), np.asarray(got, np.float64)
        if a.shape == b.shape:
            scale = float(np.abs(a[np.isfinite(a)]).max(initial=0.0))
            close = np.isclose(b, a, rtol=_LEARNT, atol=_LEARNT * max(scale, 1.0), equal_nan=True)
            return None if close.all() else _at(a, b, ~close, path)
        return Difference(path, (), _described(a), _described(b))
    else:
        return difference(expected, got, path=path)
    found = (nearly(a, b, f"{path}/{key}" if path else key) for key, a, b in parts)
    return next((one for one in found if one), None)


def short(value: Any) -> str:
    """A value for a message, on one line."""
    return " ".join(_REPR.repr(value).split())


def _of_arrays(expected: NDArray[Any], got: NDArray[Any], near: bool, path: str) -> Difference | None:
    if expected.dtype != got.dtype or expected.shape != got.shape:
        return Difference(path, (), f"{expected.dtype} {expected.shape}", f"{got.dtype} {got.shape}")
    if expected.dtype == object:
        unequal = np.array([difference(a, b) is not None for a, b in zip(expected.flat, got.flat, strict=True)], bool)
        unequal = unequal.reshape(expected.shape)
    elif expected.dtype.kind in "fc":
        unequal = ~((expected == got) | ((expected != expected) & (got != got)))
        if near and unequal.any():
            unequal &= ~_close(expected, got)
    else:
        unequal = expected != got
    return _at(expected, got, unequal, path) if unequal.any() else None


def _close(expected: NDArray[Any], got: NDArray[Any]) -> NDArray[np.bool_]:
    finite = np.abs(expected[np.isfinite(expected)])
    tolerance = _ULPS * float(np.finfo(expected.dtype).eps)
    slack = tolerance * float(finite.max(initial=0.0))
    close: NDArray[np.bool_] = np.isclose(got, expected, rtol=tolerance, atol=slack, equal_nan=True)
    return close


def _at(expected: NDArray[Any], got: NDArray[Any], unequal: Any, path: str) -> Difference:
    at = tuple(np.argwhere(unequal)[0].tolist())
    return Difference(path, at, _number(expected[at]), _number(got[at]))


def _is_numbers(value: Any) -> bool:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.dtype.kind in "biuf"
    return isinstance(value, (bool, int, float))


def _number(value: Any) -> str:
    return str(value) if isinstance(value, np.generic) else short(value)  # without the name of its type


def _described(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} {short(value.tolist())}"
    return f"{type(value).__name__} {short(value)}"


def _keys(table: Mapping[Any, Any]) -> str:
    return short(sorted(map(str, table)))


def outsider(space: Space[Any], tree: Any, n: int, *, exact: bool = True) -> Difference | None:
    """The first value of a column (n, …) that its space does not contain.

    Args:
        space: Space of one row's value.
        tree: The column.
        n: How many rows there are.
        exact: Whether each leaf must have the space's dtype; else one that goes into it without loss will do.
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
    wrong = np.argwhere(~_contained(leaf, value))
    if not len(wrong):
        return None
    at = tuple(wrong[0].tolist())
    return Difference(leaf.path, at, _bounds(leaf, at[1:]), str(value[at]))


def _fits(value: NDArray[Any], dtype: np.dtype[Any]) -> bool:
    return np.can_cast(value.dtype, dtype, "same_kind") and bool(
        (value.astype(dtype) == value).all() or dtype.kind == "f"
    )


def _contained(leaf: Leaf, value: NDArray[Any]) -> NDArray[np.bool_]:
    space = leaf.space
    if isinstance(space, Box):
        inside: NDArray[np.bool_] = (value >= space.low) & (value <= space.high)
        return inside
    if isinstance(space, (Discrete, MultiDiscrete)):
        sizes = space.n if isinstance(space, Discrete) else space.nvec
        inside = (value >= space.start) & (value < space.start + sizes)
        return inside
    if isinstance(space, MultiBinary):
        return np.isin(value, (0, 1))
    return np.array([space.contains(one) for one in value], np.bool_)


def _bounds(leaf: Leaf, at: tuple[int, ...]) -> str:
    if isinstance(leaf.space, Box):
        return f"a number from {leaf.space.low[at]} to {leaf.space.high[at]}"
    return f"a member of {leaf.space}"

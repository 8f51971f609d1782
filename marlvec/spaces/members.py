"""Membership in a leaf's space: checks single values with an error message, and many rows at once."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space
from numpy.typing import NDArray

from marlvec.errors import ContractError
from marlvec.spaces.tree import Leaf

_SHOWN = 200  # characters of a value in messages

AnyArray = NDArray[Any]
BoolArray = NDArray[np.bool_]
Refusal = tuple[str, str]
"""What was expected, and what the value is, in words."""
_QuickTest = Callable[[AnyArray], bool]
_Extreme = Callable[..., Any]


def check_member(leaf: Leaf, value: Any) -> None:
    """Raise `ContractError` with the leaf's name unless its space contains a value."""
    if (refusal := _refusal(leaf.space, value)) is not None:
        raise ContractError(f"{leaf}: {_sentence(refusal)}")


def _sentence(refusal: Refusal) -> str:
    return "expected {}, got {}".format(*refusal)


def _refusal(space: Space[Any], value: Any) -> Refusal | None:
    doubt = ""
    try:
        if space.contains(value):
            return None
    except Exception as error:  # Gymnasium's own contains() raises for some values of other types
        doubt = f" (contains() raised {type(error).__name__}: {error})"
    text = repr(value)
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
    return f"a member of {space}", f"{shown}{doubt}"


def fit(row: AnyArray, value: Any, where: Leaf | str) -> AnyArray:
    """Convert a value to an array that can be assigned to its row; raise if numpy would broadcast or change it."""
    try:
        array = np.asarray(value)
    except Exception as error:  # a ragged list, or an object that cannot become an array; errors vary
        raise ContractError(f"{where}: expected shape {row.shape}, got no array at all ({error})") from None
    if array.shape != row.shape:
        raise ContractError(f"{where}: expected shape {row.shape}, got {array.shape}")
    if not array.size or np.can_cast(array.dtype, row.dtype, "safe"):
        return array
    if array.dtype.kind in "iub" and row.dtype.kind in "iub":
        cast = array.astype(row.dtype)
        if np.array_equal(cast, array):
            return cast
        raise ContractError(f"{where}: the value {value!r} does not fit dtype {row.dtype}")
    if array.dtype.kind in "iubf" and row.dtype.kind == "f":
        return array
    raise ContractError(f"{where}: expected dtype {row.dtype}, got {array.dtype}, which would change the value")


class Membership(ABC):
    """Tests membership in a space. Axes: n envs, A_g agents of a group, then the axes of one value."""

    @abstractmethod
    def are_all(self, array: AnyArray) -> bool:
        """Return whether all values are members, by a fast test; False if that is not certain."""

    @abstractmethod
    def rows(self, array: AnyArray, here: BoolArray) -> BoolArray:
        """Return which values of (n, A_g, …) are members, (n, A_g) bool; undefined where `here` (n, A_g) is False."""

    @abstractmethod
    def refuse(self, value: AnyArray) -> Refusal:
        """Describe, for a value that is not a member, what was expected and what it is."""

    def describe(self, value: AnyArray) -> str:
        """Return the result of `refuse` as one sentence."""
        return _sentence(self.refuse(value))


_KINDS: Mapping[Any, type[Space[Any]]] = {kind.contains: kind for kind in (Box, Discrete, MultiBinary, MultiDiscrete)}
"""By the `contains` function: a user's subclass that accepts fewer values has its own."""


def membership(leaf: Leaf, *, in_buffer: bool = True) -> Membership | None:
    """Return the membership test of a leaf's space, as its ``contains`` defines it; None if all values are members.

    Values in a buffer have the leaf's dtype, and are checked on writing if they are objects. Else they are objects, or
    arrays of any dtype that holds numbers of the leaf's kind.
    """
    if 0 in leaf.shape or (leaf.is_object and in_buffer):
        return None
    space: Any = leaf.space
    low: Any
    high: Any
    kind = _KINDS.get(type(space).contains)
    if kind is Discrete:
        low, high = int(space.start), int(space.start) + int(space.n) - 1
    elif kind is MultiDiscrete:
        low, high = space.start, space.start + (space.nvec - 1)
    elif kind is MultiBinary:
        low, high = 0, 1
    elif kind is Box:
        low, high = space.low, space.high
    else:
        return Contained(leaf)
    low, high = np.broadcast_to(low, leaf.shape), np.broadcast_to(high, leaf.shape)
    lowest, highest = _extremes(leaf.dtype)
    is_dtype_known = in_buffer or leaf.dtype.kind == "f"  # all float dtypes have infinities
    needs_low = not (is_dtype_known and (low <= lowest).all())
    needs_high = not (is_dtype_known and (high >= highest).all())
    if not needs_low and not needs_high and leaf.dtype.kind != "f":
        return None
    return _Range(low, high, _quick_test(low if needs_low else None, high if needs_high else None))


def _extremes(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    if dtype.kind == "f":
        return -np.inf, np.inf
    if dtype.kind == "b":
        return False, True
    info: Any = np.iinfo(dtype)
    return info.min, info.max


class _Range(Membership):
    """Members are from ``low`` to ``high``, element by element; NaN is never a member."""

    def __init__(self, low: AnyArray, high: AnyArray, quick_test: _QuickTest) -> None:
        self._low, self._high, self._quick_test = low, high, quick_test

    def are_all(self, array: AnyArray) -> bool:
        return self._quick_test(array)

    def rows(self, array: AnyArray, here: BoolArray) -> BoolArray:
        within = self._within(array)
        good: BoolArray = within.all(axis=tuple(range(2, within.ndim)))
        return good

    def refuse(self, value: AnyArray) -> Refusal:
        bad = np.argwhere(~self._within(value)).tolist()
        at = tuple(bad[0])
        where = f" at index {at}" if at else ""
        count = f"; wrong: {len(bad)} of {value.size} values" if value.size > 1 else ""
        return f"values in [{self._low[at]}, {self._high[at]}]", f"{value[at]}{where}{count}"

    def _within(self, array: AnyArray) -> Any:  # an array; a scalar for a 0-d array
        return (array >= self._low) & (array <= self._high)


class Contained(Membership):
    """Calls the space's ``contains`` for each value: for spaces of objects, and classes with their own ``contains``."""

    def __init__(self, leaf: Leaf) -> None:
        self._leaf = leaf
        self._is_number = leaf.is_object or isinstance(leaf.space, Discrete)

    def are_all(self, array: AnyArray) -> bool:
        return False

    def rows(self, array: AnyArray, here: BoolArray) -> BoolArray:
        good = np.ones(here.shape, np.bool_)
        for i, j in np.argwhere(here).tolist():
            good[i, j] = _refusal(self._leaf.space, self._value(array[i, j, ...])) is None
        return good

    def refuse(self, value: AnyArray) -> Refusal:
        # contains() of a user's space may return different results in two calls.
        return _refusal(self._leaf.space, self._value(value)) or ("a member of its space", repr(value))

    def _value(self, cell: AnyArray) -> Any:
        return cell[()] if self._is_number else cell.astype(self._leaf.dtype, copy=False)


class Finite(Membership):
    """Members are finite: neither NaN nor infinite."""

    def are_all(self, array: AnyArray) -> bool:
        return int(np.count_nonzero(np.isfinite(array))) == array.size

    def rows(self, array: AnyArray, here: BoolArray) -> BoolArray:
        good: BoolArray = np.isfinite(array)
        return good

    def refuse(self, value: AnyArray) -> Refusal:
        return "a finite number", str(value)


def _quick_test(low: AnyArray | None, high: AnyArray | None) -> _QuickTest:
    """Return the fastest test that all values are from ``low`` to ``high``; None: no such bound."""
    # An array with NaN passes none: its minimum and maximum are NaN, and comparisons with NaN are False.
    # ufuncs, since methods and np.all() take twice as long on small arrays.
    least: _Extreme = np.minimum.reduce
    most: _Extreme = np.maximum.reduce
    if low is None and high is None:
        return lambda array: bool((value := least(array, axis=None)) == value)
    if high is None:
        return _one_side(least, operator.ge, low)
    if low is None:
        return _one_side(most, operator.le, high)
    above, below = _one_side(least, operator.ge, low), _one_side(most, operator.le, high)
    return lambda array: above(array) and below(array)


def _one_side(extreme: _Extreme, compare: Callable[[Any, Any], Any], bound: Any) -> _QuickTest:
    limit = bound.flat[0]
    if (bound == limit).all():
        return lambda array: bool(compare(extreme(array, axis=None), limit))
    return lambda array: int(np.count_nonzero(compare(array, bound))) == array.size

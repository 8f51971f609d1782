"""Members of a leaf's space: one value is refused with a message, many rows are distinguished at once."""

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

__all__ = ["Contained", "Finite", "Membership", "check_member", "fit", "membership"]

_SHOWN = 200  # characters of a value in messages

AnyArray = NDArray[Any]
BoolArray = NDArray[np.bool_]
Refusal = tuple[str, str]
"""What was expected, and what a value is instead, in words."""
_QuickTest = Callable[[AnyArray], bool]
_Extreme = Callable[..., Any]


def check_member(leaf: Leaf, value: Any) -> None:
    """Refuse a value that the leaf's space does not contain.

    Raises:
        ContractError: It does not contain it, or it cannot be checked; names the leaf.
    """
    if (refusal := _refusal(leaf.space, value)) is not None:
        raise ContractError(f"{leaf}: {_sentence(refusal)}")


def _sentence(refusal: Refusal) -> str:
    return "expected {}, got {}".format(*refusal)


def _refusal(space: Space[Any], value: Any) -> Refusal | None:
    doubt = ""
    try:
        if space.contains(value):
            return None
    except Exception as error:  # gymnasium's own raise on some values of other types
        doubt = f" (contains() raised {type(error).__name__}: {error})"
    text = repr(value)
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
    return f"a member of {space}", f"{shown}{doubt}"


def fit(row: AnyArray, value: Any, where: Leaf | str) -> AnyArray:
    """Make an array of a value that can be assigned to its row, refusing what numpy would broadcast or convert."""
    try:
        array = np.asarray(value)
    except Exception as error:  # a ragged list, an object that refuses to become an array, each with its own error
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
    """Distinguishes members from others. Axes: n envs, A_g agents of a group, then those of one value."""

    @abstractmethod
    def are_all(self, array: AnyArray) -> bool:
        """Whether all values are members, as quickly as can be; False where that is not certain."""

    @abstractmethod
    def rows(self, array: AnyArray, here: BoolArray) -> BoolArray:
        """Which values are members.

        Args:
            array: (n, A_g, …).
            here: (n, A_g) bool, whose answers are wanted; others mean nothing.

        Returns:
            (n, A_g) bool.
        """

    @abstractmethod
    def refuse(self, value: AnyArray) -> Refusal:
        """Put into words what was expected of a value that is no member, and what it is."""

    def describe(self, value: AnyArray) -> str:
        """Put both of `refuse` into one sentence."""
        return _sentence(self.refuse(value))


_KINDS: Mapping[Any, type[Space[Any]]] = {kind.contains: kind for kind in (Box, Discrete, MultiBinary, MultiDiscrete)}
"""By `contains`: a user's class that narrows what its members are has its own."""


def membership(leaf: Leaf, *, in_buffer: bool = True) -> Membership | None:
    """Build the membership of a leaf's space, as its ``contains`` defines it.

    Args:
        leaf: The leaf.
        in_buffer: Whether values lie in a buffer: in the leaf's dtype, and checked on writing if they are objects.
            Else values are objects, or arrays of any dtype that holds numbers of the leaf's kind.

    Returns:
        None where all values are members: the dtype has no room for others.
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
    is_dtype_known = in_buffer or leaf.dtype.kind == "f"  # any float has room for infinity
    needs_low = not (is_dtype_known and (low <= lowest).all())
    needs_high = not (is_dtype_known and (high >= highest).all())
    if not needs_low and not needs_high and leaf.dtype.kind != "f":
        return None
    return _Range(low, high, _quick_test(low if needs_low else None, high if needs_high else None))


def _extremes(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """The lowest and the highest value that a dtype has room for."""
    if dtype.kind == "f":
        return -np.inf, np.inf
    if dtype.kind == "b":
        return False, True
    info: Any = np.iinfo(dtype)
    return info.min, info.max


class _Range(Membership):
    """Values from ``low`` to ``high``, element by element; NaN is in no range."""

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

    def _within(self, array: AnyArray) -> Any:  # an array, or of a 0-d one a scalar
        return (array >= self._low) & (array <= self._high)


class Contained(Membership):
    """Asks the space itself, value by value: spaces of objects, and of a class with a ``contains`` of its own."""

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
        # A space may change its mind between two questions.
        return _refusal(self._leaf.space, self._value(value)) or ("a member of its space", repr(value))

    def _value(self, cell: AnyArray) -> Any:
        return cell[()] if self._is_number else cell.astype(self._leaf.dtype, copy=False)


class Finite(Membership):
    """Neither NaN nor infinite."""

    def are_all(self, array: AnyArray) -> bool:
        return int(np.count_nonzero(np.isfinite(array))) == array.size

    def rows(self, array: AnyArray, here: BoolArray) -> BoolArray:
        good: BoolArray = np.isfinite(array)
        return good

    def refuse(self, value: AnyArray) -> Refusal:
        return "a finite number", str(value)


def _quick_test(low: AnyArray | None, high: AnyArray | None) -> _QuickTest:
    """The quickest way to see that all values of an array are from ``low`` to ``high``; None: no bound to look at.

    NaN passes none of these: where there is one, it is the minimum and the maximum, and nothing compares with it.
    """
    # By way of the ufuncs: methods and np.all() take twice as long on small arrays.
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

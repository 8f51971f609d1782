"""Members of a leaf's space: one value is refused with a message, many rows are told apart at once."""

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

__all__ = ["Finite", "Membership", "check_member", "membership"]

_SHOWN = 200  # characters of a value in messages

AnyArray = NDArray[Any]
BoolArray = NDArray[np.bool_]
_QuickTest = Callable[[AnyArray], bool]
_Extreme = Callable[..., Any]


def check_member(leaf: Leaf, value: Any) -> None:
    """Refuse a value that the leaf's space does not contain.

    Raises:
        ContractError: It does not contain it, or it cannot be checked; names the leaf.
    """
    doubt = ""
    try:
        if leaf.space.contains(value):
            return
    except Exception as error:  # gymnasium's own raise on some values of other types
        doubt = f" (contains() raised {type(error).__name__}: {error})"
    text = repr(value)
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
    raise ContractError(f"{leaf}: expected a member of {leaf.space}, got {shown}{doubt}")


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
    def describe(self, value: AnyArray) -> str:
        """Say what was expected of this value, which is no member, and what it is."""


_KINDS: Mapping[Any, type[Space[Any]]] = {kind.contains: kind for kind in (Box, Discrete, MultiBinary, MultiDiscrete)}
"""By `contains`: a user's class that narrows what its members are has its own."""


def membership(leaf: Leaf) -> Membership | None:
    """Membership of a leaf's space as its ``contains`` has it; None where there can be no others in a buffer.

    That is so where the dtype has no room for them, and with object leaves, whose values are checked on writing.
    """
    if leaf.is_object or 0 in leaf.shape:
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
        return _Contained(leaf)
    low, high = np.broadcast_to(low, leaf.shape), np.broadcast_to(high, leaf.shape)
    lowest, highest = _extremes(leaf.dtype)
    needs_low, needs_high = not (low <= lowest).all(), not (high >= highest).all()
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
        good: BoolArray = self._within(array).reshape(*here.shape, -1).all(axis=2)
        return good

    def describe(self, value: AnyArray) -> str:
        bad = np.argwhere(~self._within(value)).tolist()
        at = tuple(bad[0])
        where = f" at index {at}" if at else ""
        count = f"; wrong: {len(bad)} of {value.size} values" if value.size > 1 else ""
        return f"expected values in [{self._low[at]}, {self._high[at]}], got {value[at]}{where}{count}"

    def _within(self, array: AnyArray) -> Any:  # an array, or of a 0-d one a scalar
        return (array >= self._low) & (array <= self._high)


class _Contained(Membership):
    """Whatever a space of the user's own, of one of gymnasium's kinds, says that it contains, asked one by one."""

    def __init__(self, leaf: Leaf) -> None:
        self._space = leaf.space
        self._is_number = isinstance(leaf.space, Discrete)

    def are_all(self, array: AnyArray) -> bool:
        return False

    def rows(self, array: AnyArray, here: BoolArray) -> BoolArray:
        good = np.ones(here.shape, np.bool_)
        for i, j in np.argwhere(here).tolist():
            cell = array[i, j, ...]
            good[i, j] = self._space.contains(cell[()] if self._is_number else cell)
        return good

    def describe(self, value: AnyArray) -> str:
        text = repr(value.tolist())
        return f"expected a member of {self._space}, got {text if len(text) <= 200 else text[:200] + '…'}"


class Finite(Membership):
    """Neither NaN nor infinite."""

    def are_all(self, array: AnyArray) -> bool:
        return int(np.count_nonzero(np.isfinite(array))) == array.size

    def rows(self, array: AnyArray, here: BoolArray) -> BoolArray:
        good: BoolArray = np.isfinite(array)
        return good

    def describe(self, value: AnyArray) -> str:
        return f"expected a finite number, got {value}"


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

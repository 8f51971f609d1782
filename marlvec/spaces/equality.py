"""Differences between two spaces or two trees of values; defines equality of values for all of marlvec."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from reprlib import Repr
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

_REPR = Repr()
_REPR.maxother = _REPR.maxstring = 120
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)  # classes with a reliable ==

Close = Callable[[NDArray[Any], NDArray[Any]], NDArray[np.bool_]]
"""Returns which numbers of two float arrays of equal shape and dtype count as equal."""

# Their `==` uses the `==` of their subspaces, whose classes may define none.
_COMPOSITES = (spaces.Sequence, spaces.Graph, spaces.OneOf)


def describe_difference(expected: spaces.Space[Any], got: spaces.Space[Any], path: str = "") -> str | None:
    """Return where two spaces first differ, or None if they are equal."""
    # Two spaces of a class without its own `==` are equal if all their attributes are, except random streams.
    if expected is got:
        return None
    where = path or "/"
    if type(expected) is not type(got):
        return f"at {where}: expected {type(expected).__name__}, got {type(got).__name__}"
    if isinstance(expected, spaces.Dict) and isinstance(got, spaces.Dict):
        if expected.spaces.keys() != got.spaces.keys():
            keys, others = (sorted(map(str, space.spaces)) for space in (expected, got))
            return f"at {where}: expected keys {keys}, got {others}"
        pairs = [(str(key), sub, got.spaces[key]) for key, sub in expected.spaces.items()]
        return next((d for key, a, b in pairs if (d := describe_difference(a, b, f"{path}/{key}"))), None)
    if isinstance(expected, spaces.Tuple) and isinstance(got, spaces.Tuple):
        if len(expected.spaces) != len(got.spaces):
            return f"at {where}: expected length {len(expected.spaces)}, got {len(got.spaces)}"
        both = enumerate(zip(expected.spaces, got.spaces, strict=True))
        return next((d for i, (a, b) in both if (d := describe_difference(a, b, f"{path}/{i}"))), None)
    compares_itself = type(expected).__eq__ is not object.__eq__ and not isinstance(expected, _COMPOSITES)
    if expected == got or (not compares_itself and difference(_state(expected), _state(got)) is None):
        return None
    return f"at {where}: expected {expected}, got {got}"


def _state(space: spaces.Space[Any]) -> dict[str, Any]:
    return {name: value for name, value in vars(space).items() if name != "_np_random"}


class Difference(NamedTuple):
    """The first difference of two values."""

    path: str  # e.g. "obs/camera"; "" for the value itself
    at: tuple[int, ...]  # index in the array at that path; () if the arrays differ in dtype or shape
    expected: str  # in words
    got: str

    def __str__(self) -> str:
        where = [repr(self.path)] if self.path else []
        where += [f"index {self.at if len(self.at) != 1 else self.at[0]}"] if self.at else []
        return ", ".join(where) or "the whole of it"


def difference(
    expected: Any,
    got: Any,
    path: str = "",
    *,
    close: Close | None = None,
    typed: bool = True,
    opaque: bool = False,
) -> Difference | None:
    """Find the first difference of two trees, tables and sequences part by part, arrays by number; NaN equals NaN.

    A table is anything with ``keys()`` and ``[]``; the order of keys does not matter. `close` judges unequal floats.
    `typed=False` compares numbers as float64, and lists with tuples. `opaque=True` lets two objects of one class count
    as equal, if it is not a class of plain values or arrays.
    """
    compare = partial(difference, close=close, typed=typed, opaque=opaque)
    if _is_table(expected) and _is_table(got):
        keys = list(expected.keys())
        if set(keys) != set(got.keys()):
            return Difference(path, (), f"keys {_names(keys)}", f"keys {_names(got.keys())}")
        parts = [(str(key), expected[key], got[key]) for key in keys]
    elif _are_sequences(expected, got, typed=typed):
        if len(expected) != len(got):
            return Difference(path, (), _described(expected), _described(got))
        parts = [(str(i), a, b) for i, (a, b) in enumerate(zip(expected, got, strict=True))]
    else:
        if not typed and _is_numeric(expected) and _is_numeric(got):
            expected, got = np.asarray(expected, np.float64), np.asarray(got, np.float64)
        if isinstance(expected, np.ndarray) and _have_one_form(expected, got):
            unequal = _unequal(expected, got, close, compare)
            if not unequal.any():
                return None
            at = tuple(np.argwhere(unequal)[0].tolist())
            return Difference(path, at, _number(expected[at]), _number(got[at]))
        if type(expected) is type(got) and _is_equal(expected, got, opaque=opaque):
            return None
        return Difference(path, (), _described(expected), _described(got))
    found = (compare(a, b, f"{path}/{key}" if path else key) for key, a, b in parts)
    return next((one for one in found if one), None)


def short(value: Any) -> str:
    """Return a value's text for a message: one line, of limited length."""
    return " ".join(_REPR.repr(value).split())


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) or (hasattr(type(value), "keys") and hasattr(type(value), "__getitem__"))


def _are_sequences(a: Any, b: Any, *, typed: bool) -> bool:
    return isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and (type(a) is type(b) or not typed)


def _is_numeric(value: Any) -> bool:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.dtype.kind in "biuf"
    return isinstance(value, (bool, int, float))


def _have_one_form(a: NDArray[Any], b: Any) -> bool:
    return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape


def _unequal(a: NDArray[Any], b: NDArray[Any], close: Close | None, compare: Callable[..., Any]) -> NDArray[np.bool_]:
    if a.dtype == object:
        cells = [compare(x, y) is not None for x, y in zip(a.ravel(), b.ravel(), strict=True)]
        return np.array(cells, np.bool_).reshape(a.shape)
    unequal = np.asarray(a != b)
    if a.dtype.kind in "fcmM" and unequal.any():
        unequal &= ~((a != a) & (b != b))
        if close is not None and a.dtype.kind in "fc" and unequal.any():
            unequal &= ~close(a, b)
    return unequal


def _is_equal(a: Any, b: Any, *, opaque: bool) -> bool:
    if isinstance(a, np.ndarray):  # dtype or shape differs
        return False
    if isinstance(a, spaces.Space):
        return describe_difference(a, b) is None
    return a is b or (opaque and not isinstance(a, _PLAIN)) or bool(a == b or (a != a and b != b))


def _number(value: Any) -> str:
    return str(value) if isinstance(value, np.generic) else short(value)  # without the name of its type


def _described(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} {short(value.tolist())}"
    return f"{type(value).__name__} {short(value)}"


def _names(keys: Iterable[Any]) -> str:
    return short(sorted(map(str, keys)))

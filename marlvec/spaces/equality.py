"""Where two spaces differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

__all__ = ["describe_difference"]

# Their own `==` asks that of the spaces inside, which may be of a class that has none.
_COMPOSITES = (spaces.Sequence, spaces.Graph, spaces.OneOf)


def describe_difference(expected: spaces.Space[Any], got: spaces.Space[Any], path: str = "") -> str | None:
    """Say where two spaces first differ, or None when they are equal.

    Two spaces of a class without an ``==`` of its own are equal where all that they hold is, their random streams
    aside: every env builds its own.
    """
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
    if expected == got or _hold_the_same(expected, got):
        return None
    return f"at {where}: expected {expected}, got {got}"


def _hold_the_same(a: spaces.Space[Any], b: spaces.Space[Any]) -> bool:
    compares_itself = type(a).__eq__ is not object.__eq__ and not isinstance(a, _COMPOSITES)
    return not compares_itself and _equal(_state(a), _state(b))


def _state(space: spaces.Space[Any]) -> dict[str, Any]:
    return {name: value for name, value in vars(space).items() if name != "_np_random"}


def _equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, spaces.Space):
        return describe_difference(a, b) is None
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_equal(value, b[key]) for key, value in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)

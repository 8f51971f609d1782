"""Functions on the leaves of a space: a short description of one, and the space with its leaves replaced."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from gymnasium import spaces

__all__ = ["map_space", "space_summary"]


def space_summary(space: spaces.Space[Any]) -> str:
    """Say a space in one short line: ``Box (18,) float32 [-10, 10]``."""
    if isinstance(space, spaces.Box):
        low, high = (space.low.min(), space.high.max()) if space.low.size else (0, 0)
        return f"Box {space.shape} {space.dtype} [{low:g}, {high:g}]"
    if isinstance(space, spaces.Dict):
        return "{" + ", ".join(f"{key}: {space_summary(sub)}" for key, sub in space.spaces.items()) + "}"
    if isinstance(space, spaces.Tuple):
        return "(" + ", ".join(space_summary(sub) for sub in space.spaces) + ")"
    return str(space)


AnySpace = spaces.Space[Any]


def map_space(function: Callable[[AnySpace], AnySpace], space: AnySpace) -> AnySpace:
    """Put ``function(leaf)`` in the place of every leaf space; Dicts keep the order of their keys."""
    if isinstance(space, spaces.Dict):
        # An OrderedDict, because Dict sorts the keys of any other.
        return spaces.Dict(OrderedDict((key, map_space(function, sub)) for key, sub in space.spaces.items()))
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([map_space(function, sub) for sub in space.spaces])
    return function(space)

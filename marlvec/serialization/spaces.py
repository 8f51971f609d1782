"""Gymnasium spaces as plain data and back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from reprlib import repr as short
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from gymnasium.error import Error

from marlvec.errors import ArgumentError, SerialisationError
from marlvec.spaces import describe_difference

__all__ = ["make_space", "space_arguments"]


class _Kind(NamedTuple):
    """Functions that read a space's arguments, and that make a space from them."""

    apart: Callable[[Any], Sequence[Any]]
    together: Callable[..., spaces.Space[Any]]


def _box(low: Any, high: Any, dtype: np.dtype[Any]) -> spaces.Space[Any]:
    return spaces.Box(low, high, np.shape(low), dtype.type)


def _discrete(n: int, start: int, dtype: np.dtype[Any]) -> spaces.Space[Any]:
    if dtype == np.int64:
        return spaces.Discrete(n, start=start)  # older versions of Gymnasium have no dtype argument
    return spaces.Discrete(n, start=start, dtype=dtype.type)


def _multi_discrete(nvec: Any, start: Any, dtype: np.dtype[Any]) -> spaces.Space[Any]:
    return spaces.MultiDiscrete(nvec, dtype.type, start=start)


def _text(max_length: int, min_length: int, charset: str) -> spaces.Space[Any]:
    return spaces.Text(max_length, min_length=min_length, charset=charset)


def _dict(items: Sequence[tuple[Any, spaces.Space[Any]]]) -> spaces.Space[Any]:
    return spaces.Dict(OrderedDict(items))  # keeps the order of keys; keys of a plain dict would be sorted


def _sequence(space: spaces.Space[Any], stack: bool) -> spaces.Space[Any]:
    return spaces.Sequence(space, stack=stack)


_KINDS: dict[type[spaces.Space[Any]], _Kind] = {
    spaces.Box: _Kind(lambda s: [s.low, s.high, s.dtype], _box),
    spaces.Discrete: _Kind(lambda s: [int(s.n), int(s.start), s.dtype], _discrete),
    spaces.MultiDiscrete: _Kind(lambda s: [s.nvec, s.start, s.dtype], _multi_discrete),
    spaces.MultiBinary: _Kind(lambda s: [s.n], spaces.MultiBinary),
    spaces.Text: _Kind(lambda s: [s.max_length, s.min_length, "".join(s.character_list)], _text),
    spaces.Dict: _Kind(lambda s: [[[key, sub] for key, sub in s.spaces.items()]], _dict),
    spaces.Tuple: _Kind(lambda s: [list(s.spaces)], spaces.Tuple),
    spaces.OneOf: _Kind(lambda s: [list(s.spaces)], spaces.OneOf),
    spaces.Sequence: _Kind(lambda s: [s.feature_space, s.stack], _sequence),
    spaces.Graph: _Kind(lambda s: [s.node_space, s.edge_space], spaces.Graph),
}
_NAMES = {kind.__name__: kind for kind in _KINDS}


def space_arguments(space: spaces.Space[Any], where: str) -> list[Any]:
    """Return a space's arguments for `make_space`; subspaces stay spaces."""
    kind = _KINDS.get(type(space))
    if kind is None:
        raise SerialisationError(f"{where} is a {type(space).__name__}; only Gymnasium's own spaces can be saved")
    arguments = list(kind.apart(space))
    if (difference := describe_difference(space, kind.together(*arguments))) is not None:
        raise SerialisationError(f"{where} would be another space when read back: {difference}")
    return arguments


def make_space(kind: str, arguments: Sequence[Any]) -> spaces.Space[Any]:
    """Make a space from the name of its class and its arguments; `ArgumentError` if these are invalid."""
    try:
        return _KINDS[_NAMES[kind]].together(*arguments)
    except (LookupError, TypeError, ValueError, AssertionError, AttributeError, ArithmeticError, Error) as error:
        raise ArgumentError(f"cannot make a {short(kind)} from {short(arguments)}: {error!r:.300}") from error

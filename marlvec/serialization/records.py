"""Records as plain data, and back: `from_plain` checks data by the annotations of the record that it builds.

A record is a NamedTuple or a dataclass. Its data is a list of its values in order, or a dict of them by name.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from numbers import Integral, Real
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from marlvec.errors import ArgumentError
from marlvec.serialization.saved import check_fields

Count = Annotated[int, 0]
"""An integer of at least 0; ``Annotated[int, least]`` for other bounds."""
PositiveCount = Annotated[int, 1]


def to_plain(value: Any) -> Any:
    """Return a copy of a value with records and deques as lists, and sets as sorted lists; arrays are not copied."""
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if type(value) is tuple:
        return tuple(map(to_plain, value))
    if isinstance(value, (tuple, list, deque)):
        return [to_plain(item) for item in value]
    if is_dataclass(value):
        return [to_plain(getattr(value, field.name)) for field in fields(value)]
    return value


def from_plain(kind: Any, data: Any, where: str) -> Any:
    """Return the value of a type, built from `to_plain`'s data; `ArgumentError` names the part that does not fit.

    Types: int, float, `Real` (an int or a float stays one), str, bool, Any, `Count`, Literal, tuple, list, set, dict,
    Mapping, records, and a union of one of them with None. Collections are new. Where the type is a list, a set or a
    tuple, the data may be a list or a tuple.
    """
    if type(data) is kind and kind in _SCALARS:  # as almost always
        return data
    origin, args = _parts(kind)
    if origin is Any:
        return data
    if origin in (Union, types.UnionType):
        return None if data is None else from_plain(args[0], data, where)
    if origin in (dict, Mapping):
        if not isinstance(data, Mapping):
            raise _error(where, "a dict", data)
        pairs = ((from_plain(args[0], key, f"{where}: a key"), key, item) for key, item in data.items())
        return {name: from_plain(args[1], item, f"{where}[{key!r:.100}]") for name, key, item in pairs}
    if origin in (list, set, tuple):
        kinds = None if origin is not tuple or args[-1] is Ellipsis else args
        items = _items(data, where, kinds)
        return origin(from_plain(kinds[k] if kinds else args[0], item, f"{where}[{k}]") for k, item in enumerate(items))
    if origin not in _SCALARS:
        return _record(kind, data, where)
    wanted, make, fits = _SCALARS[origin]
    with suppress(OverflowError):  # an integer that is too large for a float
        if fits(data, args) and (origin is bool or not isinstance(data, bool)):
            return make(data)
    raise _error(where, wanted.format(args) if origin is Literal else wanted.format(*args), data)


def read_fields(state: Any, where: str, /, **kinds: Any) -> dict[str, Any]:
    """Return the fields of a state in this order, after a check that it has exactly these, each of its type."""
    check_fields(state, kinds, where)
    return {name: from_plain(kind, state[name], f"{where}: {name}") for name, kind in kinds.items()}


_SCALARS: dict[Any, tuple[str, Callable[[Any], Any], Callable[[Any, Any], bool]]] = {
    int: ("an integer", int, lambda data, _: isinstance(data, Integral)),
    Annotated: ("an integer of at least {1}", int, lambda data, args: isinstance(data, Integral) and data >= args[1]),
    float: ("a number", float, lambda data, _: isinstance(data, Real)),
    Real: ("a number", lambda data: data, lambda data, _: isinstance(data, Real)),
    bool: ("True or False", bool, lambda data, _: isinstance(data, (bool, np.bool_))),
    str: ("a string", str, lambda data, _: isinstance(data, str)),
    Literal: ("one of {}", str, lambda data, args: isinstance(data, str) and data in args),
}
"""Type to its name in messages, its constructor, and a function of data and the type's arguments: whether it fits."""


def _record(kind: Any, data: Any, where: str) -> Any:
    kinds = field_types(kind)
    if not isinstance(data, Mapping):
        data = dict(zip(kinds, _items(data, where, kinds), strict=True))
    return kind(**read_fields(data, where, **kinds))


@cache
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(kind) or kind, get_args(kind)


@cache
def field_types(kind: Any) -> Mapping[str, Any]:
    """Return the type of each field of a record, in order, for `read_fields`."""
    hints = get_type_hints(kind, include_extras=True)
    names = kind._fields if issubclass(kind, tuple) else [field.name for field in fields(kind)]
    return {name: hints[name] for name in names}


def _items(data: Any, where: str, wanted: Collection[Any] | None) -> list[Any] | tuple[Any, ...]:
    """Return a list or tuple with an item for each of `wanted`; None: with any number of items."""
    if not isinstance(data, (list, tuple)) or (wanted is not None and len(data) != len(wanted)):
        raise _error(where, "a list" if wanted is None else f"a list of {len(wanted)}", data)
    return data


def _error(where: str, wanted: str, data: Any) -> ArgumentError:
    return ArgumentError(f"{where}: expected {wanted}, got {data!r:.200}")

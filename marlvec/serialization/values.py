"""Values such as arrays, spaces and connectors as JSON-able data, and a file with one such value.

Numbers, texts, None, bools, lists, dicts and arrays are unchanged; the code that writes the data to a file stores
arrays as separate entries. Every other value becomes a dict whose first key begins with ``$``:

    {"$tuple": [...]}                   a tuple
    {"$float": "inf"}                   a float that JSON has no number for
    {"$scalar": "float32", "value": 1}  a numpy scalar
    {"$dtype": "<f4"}                   a numpy dtype
    {"$items": [[key, value], ...]}     a dict with keys that are not texts, or that begin with $
    {"$function": "name"}               a registered function
    {"$connector": {...}}               a connector
    {"$space": "Box", "args": [...]}    a space
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from reprlib import repr as short  # limits the length of wrong values in messages
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from gymnasium.error import Error
from numpy.typing import NDArray

from marlvec.errors import ArgumentError, CheckpointError, MarlvecError, SerialisationError
from marlvec.serialization.archive import FilePath, read_archive, write_archive
from marlvec.serialization.name_table import CLASSES, FUNCTIONS
from marlvec.spaces import describe_difference

__all__ = ["Config", "decode", "encode", "outline", "read_value", "write_value"]

Config = dict[str, Any]
"""JSON-able data, except for arrays."""


def encode(value: Any, where: str) -> Any:
    """Turn a value of a kind listed above into JSON-able data, exactly; ``where`` names it in messages."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is list:
        return [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if kind is tuple:
        return {"$tuple": [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, dict):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: encode(item, f"{where}[{key!r}]") for key, item in value.items()}
        return {"$items": [[encode(key, where), encode(item, f"{where}[{key!r}]")] for key, item in value.items()]}
    if kind is np.ndarray and not value.dtype.hasobject and value.dtype.names is None:
        return value
    if isinstance(value, (np.number, np.bool_)) and isinstance(plain := value.item(), (bool, int, float)):
        return {"$scalar": value.dtype.str, "value": encode(plain, where)}
    if isinstance(value, np.dtype) and np.dtype(value.str) == value:
        return {"$dtype": value.str}
    if isinstance(value, spaces.Space):
        return {"$space": kind.__name__, "args": encode(_space_arguments(value, where), where)}
    if CLASSES.name_of(kind) is not None:
        return {"$connector": value.to_config()}
    if callable(value):
        return {"$function": _function_name(value, where)}
    raise SerialisationError(
        f"{where} cannot be saved: expected numbers, texts, None, bools, lists, tuples, dicts, plain arrays, "
        f"dtypes, spaces, registered functions and connectors, got {value!r}"
    )


def decode(data: Any) -> Any:
    """Return the value that `encode` was called with; arrays are copied."""
    try:
        return _decode(data)
    except RecursionError as error:
        raise ArgumentError(f"{short(data)} is nested too deeply for a result of encode()") from error


def _decode(data: Any) -> Any:
    if isinstance(data, np.ndarray):
        return data.copy()
    if isinstance(data, list):
        return [_decode(item) for item in data]
    if not isinstance(data, Mapping):
        return data
    mark = str(next(iter(data), ""))
    if not mark.startswith("$"):
        return {key: _decode(item) for key, item in data.items()}
    if mark not in _MARKS:
        raise ArgumentError(f"expected one of {list(_MARKS)}, got {short(mark)}")
    try:
        return _MARKS[mark](data[mark], data)
    except MarlvecError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError, ArithmeticError, MemoryError) as error:
        raise ArgumentError(f"expected a result of encode(), got {short(data)}: {error!r:.300}") from error


def _dtype(text: Any) -> np.dtype[Any]:
    """Return the dtype of a name; refuse what only numpy's larger grammar allows, which uses Python's parser."""
    if not isinstance(text, str) or _DTYPE.fullmatch(text) is None:
        raise ValueError(f"expected a dtype such as '<f4', got {short(text)}")
    return np.dtype(text)


def _scalar(kind: Any, data: Mapping[str, Any]) -> Any:
    dtype, value = _dtype(kind), _decode(data["value"])
    if dtype.kind not in "biuf" or not isinstance(value, (bool, int, float)):
        raise ValueError(f"expected a number and a numeric dtype, got {short(value)} and {dtype}")
    with np.errstate(over="raise"):  # a saved number fits its dtype
        return dtype.type(value)


_DTYPE = re.compile(r"[<>|=]?[a-zA-Z?][0-9]{0,10}(\[[0-9]{0,10}[a-zA-Z]{1,2}\])?", re.ASCII)
_FLOATS = {repr(value): value for value in (math.inf, -math.inf, math.nan)}
_MARKS: dict[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "$tuple": lambda items, _: tuple(_decode(item) for item in items),
    "$float": lambda text, _: _FLOATS[text],
    "$scalar": _scalar,
    "$dtype": lambda text, _: _dtype(text),
    "$items": lambda pairs, _: {_decode(key): _decode(item) for key, item in pairs},
    "$function": lambda name, _: FUNCTIONS.find(name),
    "$connector": lambda config, _: CLASSES.find(config["connector"]).from_config(config),
    "$space": lambda kind, data: _make_space(kind, _decode(data["args"])),
}


def outline(data: Any) -> list[str]:
    """Return encoded data as lines of text that can be compared; an array by its dtype, its shape and a digest."""
    return json.dumps(data, indent=1, default=_digest).splitlines()


def _digest(array: NDArray[Any]) -> str:
    return f"{array.dtype} array of {array.shape}, sha256 {hashlib.sha256(array.tobytes()).hexdigest()[:16]}"


def _function_name(function: Any, where: str) -> str:
    name = FUNCTIONS.name_of(function)
    if name is None:
        raise SerialisationError(
            f"{where} is {function!r}, which is not registered: write @register_function over its def, or call "
            f"register_function(function, name=...), also where it is loaded"
        )
    return name


# --- spaces


class _Kind(NamedTuple):
    """Functions that read a space's arguments, and that make a space from them."""

    apart: Callable[[Any], Sequence[Any]]
    together: Callable[..., spaces.Space[Any]]


def _discrete(n: int, start: int, dtype: np.dtype[Any]) -> spaces.Space[Any]:
    if dtype == np.int64:
        return spaces.Discrete(n, start=start)  # older versions of Gymnasium have no dtype argument
    return spaces.Discrete(n, start=start, dtype=dtype.type)


_KINDS: dict[type[spaces.Space[Any]], _Kind] = {
    spaces.Box: _Kind(
        lambda s: [s.low, s.high, s.dtype],
        lambda low, high, dtype: spaces.Box(low, high, np.shape(low), dtype.type),
    ),
    spaces.Discrete: _Kind(lambda s: [int(s.n), int(s.start), s.dtype], _discrete),
    spaces.MultiDiscrete: _Kind(
        lambda s: [s.nvec, s.start, s.dtype],
        lambda nvec, start, dtype: spaces.MultiDiscrete(nvec, dtype.type, start=start),
    ),
    spaces.MultiBinary: _Kind(lambda s: [s.n], spaces.MultiBinary),
    spaces.Text: _Kind(
        lambda s: [s.max_length, s.min_length, "".join(s.character_list)],
        lambda most, least, charset: spaces.Text(most, min_length=least, charset=charset),
    ),
    # An OrderedDict keeps the order of keys; keys of a plain dict would be sorted.
    spaces.Dict: _Kind(
        lambda s: [[[key, sub] for key, sub in s.spaces.items()]], lambda items: spaces.Dict(OrderedDict(items))
    ),
    spaces.Tuple: _Kind(lambda s: [list(s.spaces)], spaces.Tuple),
    spaces.OneOf: _Kind(lambda s: [list(s.spaces)], spaces.OneOf),
    spaces.Sequence: _Kind(
        lambda s: [s.feature_space, s.stack], lambda space, stack: spaces.Sequence(space, stack=stack)
    ),
    spaces.Graph: _Kind(lambda s: [s.node_space, s.edge_space], spaces.Graph),
}
_NAMES = {kind.__name__: kind for kind in _KINDS}


def _space_arguments(space: spaces.Space[Any], where: str) -> list[Any]:
    """Return a space's arguments for `_make_space`; subspaces stay spaces."""
    kind = _KINDS.get(type(space))
    if kind is None:
        raise SerialisationError(f"{where} is a {type(space).__name__}; only Gymnasium's own spaces can be saved")
    arguments = list(kind.apart(space))
    if (difference := describe_difference(space, kind.together(*arguments))) is not None:
        raise SerialisationError(f"{where} would be another space when read back: {difference}")
    return arguments


def _make_space(kind: str, arguments: Sequence[Any]) -> spaces.Space[Any]:
    """Make a space from the name of its class and its arguments; `ArgumentError` if these are invalid."""
    try:
        return _KINDS[_NAMES[kind]].together(*arguments)
    except (LookupError, TypeError, ValueError, AssertionError, AttributeError, ArithmeticError, Error) as error:
        raise ArgumentError(f"cannot make a {short(kind)} from {short(arguments)}: {error!r:.300}") from error


# --- files


def write_value(path: FilePath, name: str, value: Any, what: str) -> None:
    """Write plain data to a file atomically, under a name that `read_value` requires; ``what`` names it in messages."""
    write_archive(path, {name: encode(value, what)})


def read_value(path: FilePath, name: str, what: str) -> Any:
    """Read the value that `write_value` wrote under this name; no code is executed. Errors are `CheckpointError`."""
    found = read_archive(path)
    if found.keys() != {name}:
        raise CheckpointError(path, f"holds no {what}, but {sorted(found)}")
    try:
        return decode(found[name])
    except MarlvecError as error:
        raise CheckpointError(path, f"holds no {what}: {error}") from error

"""Policy weights to bytes and back: trees of numbers, texts and arrays, as in `Policy.state_dict`.

Values that msgpack lacks are dicts with one key that begins with ``$``, which docs/protocol.md lists. No class or
function is named: unpacking yields data only.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from marlvec.errors import ProtocolError, SerialisationError
from marlvec.external.protocol.frames import pack, unpack_tree
from marlvec.external.protocol.values import DTYPES, read_array, write_array

__all__ = ["pack_plain", "unpack_plain"]

MAX_WEIGHTS_DEPTH = 64
MAX_DIGITS = 4000  # int() refuses more than 4300
_WORD = 2**63


def pack_plain(value: Any, where: str) -> bytes:
    """Pack a tree; `SerialisationError` names a value of another type by its path from `where`."""
    return pack(_write(value, where, 0))


def unpack_plain(data: bytes) -> Any:
    """Unpack a tree; arrays are writable copies. `ProtocolError` if malformed."""
    try:
        return _read(unpack_tree(data), 0)
    except (ValueError, TypeError, LookupError, ArithmeticError) as error:
        raise ProtocolError(f"malformed weights: {type(error).__name__}: {str(error)[:200]}") from None


def _write(value: Any, where: str, depth: int) -> Any:
    kind = type(value)
    if depth > MAX_WEIGHTS_DEPTH:
        raise SerialisationError(f"{where} is nested more than {MAX_WEIGHTS_DEPTH} deep")
    if value is None or kind in (bool, float, str, bytes):
        return value
    if kind is int:
        return value if -_WORD <= value < _WORD else {"$int": str(value)}
    if kind is list:
        return [_write(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    if kind is tuple:
        return {"$tuple": [_write(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]}
    if isinstance(value, dict):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _write(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}
        return {
            "$items": [
                [_write(key, where, depth + 1), _write(item, f"{where}[{key!r}]", depth + 1)]
                for key, item in value.items()
            ]
        }
    if kind is np.ndarray and value.dtype.name in DTYPES:
        return {"$array": write_array(value)}
    if isinstance(value, np.generic) and value.dtype.name in DTYPES:
        return {"$scalar": [value.dtype.name, value.item()]}
    raise SerialisationError(
        f"{where} does not go over a socket: expected numbers, texts, bytes, None, bools, numeric arrays, and lists, "
        f"tuples and dicts of these, got {type(value).__name__}"
    )


def _read(data: Any, depth: int) -> Any:
    if depth > MAX_WEIGHTS_DEPTH:
        raise ProtocolError(f"weights are nested more than {MAX_WEIGHTS_DEPTH} deep")
    if isinstance(data, list):
        return [_read(item, depth + 1) for item in data]
    if not isinstance(data, dict):
        return data
    marks = [key for key in data if not isinstance(key, str) or key.startswith("$")]
    if not marks:
        return {key: _read(item, depth + 1) for key, item in data.items()}
    (mark,) = data
    inner = data[mark]
    match mark:
        case "$array":
            return read_array(inner, "an array of the weights").copy()
        case "$tuple":
            return tuple(_read(item, depth + 1) for item in inner)
        case "$scalar":
            name, number = inner
            if type(number) not in (bool, int, float):
                raise TypeError(f"expected a scalar that is a number, got {type(number).__name__}")
            return DTYPES[name].newbyteorder("=").type(number)
        case "$int":
            if type(inner) is not str or len(inner) > MAX_DIGITS:
                raise ValueError(f"expected an int of at most {MAX_DIGITS} digits")
            return int(inner)
        case "$items":
            return {_read(key, depth + 1): _read(item, depth + 1) for key, item in inner}
    raise ProtocolError(f"expected a key such as $array, got {str(mark)[:60]!r}")

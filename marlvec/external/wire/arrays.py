"""Raw numeric arrays: ``[dtype, shape, bytes]``, little-endian, in C order.

    ["float32", [2, 3], <24 bytes>]

The name says how many bytes belong to a number, the shape how many numbers there are, and the bytes must be exactly as
many. Nothing else is an array: no objects, texts, structures or complex numbers.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.errors import ProtocolError

__all__ = ["DTYPES", "MAX_NDIM", "read_array", "short", "write_array"]

MAX_NDIM = 8
MAX_SIDE = 2**31 - 1

DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64"),
    )
}
"""Names that an array's dtype may have."""


def write_array(array: NDArray[Any]) -> list[Any]:
    """An array as it goes over the wire; its dtype must be one of `DTYPES`."""
    name = array.dtype.name
    return [name, list(array.shape), np.ascontiguousarray(array, DTYPES[name]).tobytes()]


def read_array(data: Any, where: str) -> NDArray[Any]:
    """The array that was written; read-only, over the very bytes that came.

    Raises:
        ProtocolError: It is none; says where.
    """
    if type(data) is not list or len(data) != 3:
        raise ProtocolError(f"{where}: expected [dtype, shape, bytes], got {short(data)}")
    name, shape, raw = data
    if type(name) is not str or name not in DTYPES:
        raise ProtocolError(f"{where}: expected a dtype of {', '.join(DTYPES)}, got {short(name)}")
    if (
        type(shape) is not list
        or len(shape) > MAX_NDIM
        or not all(type(n) is int and 0 <= n <= MAX_SIDE for n in shape)
    ):
        raise ProtocolError(f"{where}: expected a shape of at most {MAX_NDIM} lengths, got {short(shape)}")
    dtype = DTYPES[name]
    size = math.prod(shape) * dtype.itemsize  # of Python's ints, which do not overflow
    if type(raw) is not bytes or len(raw) != size:
        got = f"{len(raw)} bytes" if type(raw) is bytes else short(raw)
        raise ProtocolError(f"{where}: expected {size} bytes for {name} of {tuple(shape)}, got {got}")
    if name == "bool" and raw.translate(None, b"\0\1"):
        raise ProtocolError(f"{where}: a bool is a byte 0 or 1")
    array: NDArray[Any] = np.frombuffer(raw, dtype)
    if len(shape) != 1:
        array = array.reshape(shape)
    return array if sys.byteorder == "little" else array.astype(dtype.newbyteorder("="))


def short(value: Any) -> str:
    """A few characters about a value, for a message."""
    if isinstance(value, str):
        return repr(value[:60])[:60]  # of all of it, it could be ten times as long
    return repr(value)[:60] if isinstance(value, (int, float)) else type(value).__name__

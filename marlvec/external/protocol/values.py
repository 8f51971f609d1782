"""Observations and actions to bytes and back, by the declared spaces; docs/protocol.md has their form.

Malformed data is a `ProtocolError`, which ends the connection; a valid array of another shape or dtype than declared is
a `ContractError`, which is sent back and changes nothing.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from marlvec.errors import ContractError, ProtocolError, UnsupportedSpaceError
from marlvec.spaces import Leaf, SpaceTree

__all__ = [
    "DTYPES",
    "MAX_NDIM",
    "read_array",
    "read_shape",
    "short",
    "write_array",
    "ValueReader",
    "read_mask",
    "write_mask",
]

MAX_NDIM = 8
MAX_SIDE = 2**31 - 1
DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64"),
    )
}
"""Supported array dtypes by name."""


def write_array(array: NDArray[Any]) -> list[Any]:
    """Pack an array; its dtype must be one of `DTYPES`."""
    name = array.dtype.name
    return [name, list(array.shape), np.ascontiguousarray(array, DTYPES[name]).tobytes()]


def read_array(data: Any, where: str) -> NDArray[Any]:
    """Unpack an array: a read-only view of the received bytes. `ProtocolError`, with `where`, if malformed."""
    if type(data) is not list or len(data) != 3:
        raise ProtocolError(f"{where}: expected [dtype, shape, bytes], got {short(data)}")
    name, lengths, raw = data
    if type(name) is not str or name not in DTYPES:
        raise ProtocolError(f"{where}: expected a dtype of {', '.join(DTYPES)}, got {short(name)}")
    shape, dtype = read_shape(lengths, where), DTYPES[name]
    size = math.prod(shape) * dtype.itemsize  # Python ints do not overflow
    if type(raw) is not bytes or len(raw) != size:
        got = f"{len(raw)} bytes" if type(raw) is bytes else short(raw)
        raise ProtocolError(f"{where}: expected {size} bytes for {name} of {shape}, got {got}")
    if name == "bool" and raw.translate(None, b"\0\1"):
        raise ProtocolError(f"{where}: expected bools of bytes 0 or 1")
    array: NDArray[Any] = np.frombuffer(raw, dtype)
    if len(shape) != 1:
        array = array.reshape(shape)
    return array if sys.byteorder == "little" else array.astype(dtype.newbyteorder("="))


def read_shape(data: Any, where: str) -> tuple[int, ...]:
    """Unpack the shape of an array or space. `ProtocolError`, with `where`, unless it is a list of a few lengths."""
    if type(data) is not list or len(data) > MAX_NDIM:
        raise ProtocolError(f"{where}: expected a shape, a list of at most {MAX_NDIM} lengths, got {short(data)}")
    for length in data:
        if type(length) is not int or not 0 <= length <= MAX_SIDE:
            raise ProtocolError(f"{where}: expected a shape of lengths 0 to {MAX_SIDE}, got the length {short(length)}")
    return tuple(data)


def short(value: Any) -> str:
    """Shorten a value's repr for an error message."""
    if isinstance(value, str):
        return repr(value[:60])[:60]  # the repr of a long text would be slow
    return repr(value)[:60] if isinstance(value, (int, float)) else type(value).__name__


class ValueReader:
    """Reads and writes values of one space whose leaves are arrays; `UnsupportedSpaceError` names another leaf."""

    def __init__(self, space: spaces.Space[Any]) -> None:
        self.space = space
        self._tree = SpaceTree(space)
        for leaf in self._tree.leaves:
            if leaf.is_object or leaf.dtype.name not in DTYPES or len(leaf.shape) > MAX_NDIM:
                raise UnsupportedSpaceError(
                    f"{leaf} of {leaf.space} does not go over a socket: expected Box, Discrete, MultiDiscrete or "
                    f"MultiBinary of {', '.join(DTYPES)}, in Dicts and Tuples"
                )
        _check_keys(space)
        self._leaves = [_LeafReader(leaf) for leaf in self._tree.leaves]
        self._bare = self._leaves[0] if self._tree.is_leaf else None

    def read(self, data: Any, where: str) -> Any:
        """Unpack a value; bounds are not checked.

        `ProtocolError`: an array is malformed. `ContractError`: not the space's structure, shapes and dtypes.
        """
        if self._bare is not None:
            return self._bare.read(data, where)
        try:
            parts = self._tree.flatten(data)
        except ContractError as error:
            raise ContractError(f"{where}: {error}") from None
        return self._tree.unflatten([leaf.read(part, where) for leaf, part in zip(self._leaves, parts, strict=True)])

    def write(self, value: Any) -> Any:
        """Pack a value; `ContractError` unless it has the space's structure, shapes and dtypes."""
        if self._bare is not None:
            return self._bare.write(value)
        parts = zip(self._leaves, self._tree.flatten(value), strict=True)
        return self._tree.unflatten([leaf.write(part) for leaf, part in parts])


def _check_keys(space: spaces.Space[Any]) -> None:
    if isinstance(space, spaces.Dict):
        for key, sub in space.spaces.items():
            if type(key) is not str:
                raise UnsupportedSpaceError(f"a Dict over a socket: expected keys that are texts, got {key!r}")
            _check_keys(sub)
    elif isinstance(space, spaces.Tuple):
        for sub in space.spaces:
            _check_keys(sub)


class _LeafReader:
    __slots__ = ("_bounds", "_dtype", "_is_box", "_kinds", "_leaf", "_name", "_plain", "_shape", "_shape_list")

    def __init__(self, leaf: Leaf) -> None:
        self._leaf, self._dtype, self._shape = leaf, leaf.dtype, leaf.shape
        self._name, self._shape_list = leaf.dtype.name, list(leaf.shape)
        self._plain = leaf.dtype if sys.byteorder == "little" and leaf.dtype.isnative else None
        self._is_box = isinstance(leaf.space, spaces.Box)
        self._kinds = {"b": (bool,), "f": (int, float)}.get(leaf.dtype.kind, (int,))
        bounds = np.iinfo(leaf.dtype) if leaf.dtype.kind in "iu" else None
        self._bounds = None if bounds is None else (int(bounds.min), int(bounds.max))

    def read(self, data: Any, where: str) -> Any:
        if self._shape == ():
            return self._read_number(data, where)
        if type(data) is not list:
            raise ContractError(
                f"{self._at(where)}: expected an array, {self._name} of {self._shape}, got {type(data).__name__}"
            )
        array = read_array(data, self._at(where) if self._leaf.path else where)
        if array.shape != self._shape or array.dtype != self._dtype:
            raise ContractError(
                f"{self._at(where)}: expected {self._name} of {self._shape}, got {array.dtype.name} of {array.shape}"
            )
        return array

    def _read_number(self, data: Any, where: str) -> Any:
        if type(data) not in self._kinds:
            raise ContractError(f"{self._at(where)}: expected a number of {self._name}, got {type(data).__name__}")
        if self._bounds is not None:
            if not self._bounds[0] <= data <= self._bounds[1]:
                raise ContractError(f"{self._at(where)}: expected a number of {self._name}, got {data}")
            number = self._dtype.type(data)
            return np.array(number) if self._is_box else number  # like the space's samples
        with np.errstate(over="ignore", invalid="ignore"):  # out of range becomes infinite; bounds are checked later
            return np.array(data, self._dtype)

    def write(self, value: Any) -> Any:
        if self._shape and value.__class__ is np.ndarray and value.shape == self._shape and value.dtype is self._plain:
            return [self._name, self._shape_list, value.tobytes()]
        array = np.asarray(value)
        if array.shape != self._shape or not np.can_cast(array.dtype, self._dtype, "same_kind"):
            raise ContractError(
                f"{self._leaf}: expected {self._name} of {self._shape}, got {array.dtype} of {array.shape}"
            )
        if self._shape == ():
            return array.astype(self._dtype).item()
        return write_array(array.astype(self._dtype, copy=False))

    def _at(self, where: str) -> str:
        return f"{where}/{self._leaf.path}" if self._leaf.path else where


def write_mask(mask: Any) -> list[Any]:
    """Pack an action mask, (k,)."""
    return write_array(np.asarray(mask, np.bool_))


def read_mask(data: Any, where: str) -> NDArray[np.bool_]:
    """Unpack an action mask, (k,) bool."""
    mask = read_array(data, where)
    if mask.dtype != np.bool_ or mask.ndim != 1:
        raise ProtocolError(f"{where}: expected bools in one row, got {mask.dtype.name} of {mask.shape}")
    return mask

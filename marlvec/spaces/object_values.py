"""Values of spaces without a fixed shape: copied, and bounded in size."""

from __future__ import annotations

import copyreg
import pickle
from typing import Any

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from marlvec.errors import ContractError
from marlvec.spaces.tree import Leaf

__all__ = ["MAX_BYTES", "check_size", "own_objects", "pack", "snapshot", "unpack"]

MAX_BYTES = 16 * 2**20
"""Bytes that the objects may come to which one env hands out, or is handed, at a time."""

_NUMBERS = frozenset({type(None), bool, int, float, complex})


def snapshot(leaf: Leaf, value: Any, *, by_value: bool = False) -> tuple[Any, int]:
    """Copy a value, so that its owner may change it afterwards.

    The copy is what would arrive at the other end of a pipe, whether or not there is one: all backends see the same.

    Args:
        leaf: The leaf.
        value: A value of it.
        by_value: Whether the pipe leads to a process that does not know the classes of this one's main module.

    Returns:
        The copy, or the value itself where it can never change; and how many bytes it takes, pickled.

    Raises:
        ContractError: It cannot be pickled; names the leaf.
    """
    size = _size_of_constant(value)
    if size is not None:
        return value, size
    if isinstance(value, np.ndarray) and type(value) is not np.ndarray:
        _pickle_attributes(type(value))
    try:
        data = cloudpickle.dumps(value) if by_value else pack(value)
        return unpack(data), len(data)
    except Exception as error:
        raise ContractError(
            f"{leaf}: a {type(value).__name__} that cannot be pickled, so it can neither be copied nor reach another "
            f"process: {type(error).__name__}: {error}"
        ) from error


def check_size(leaf: Leaf, size: int, others: int) -> None:
    """Refuse a value that is too large.

    Args:
        leaf: The leaf.
        size: Bytes that the value takes.
        others: Bytes of the objects that the same env hands out, or is handed, besides.

    Raises:
        ContractError: Together they are more than `MAX_BYTES`; names the leaf.
    """
    if size + others > MAX_BYTES:
        raise ContractError(
            f"{leaf}: a value of {size:,} bytes, pickled, and others of {others:,} bytes in the same env; "
            f"expected at most {MAX_BYTES:,} bytes of objects for an env at a time"
        )


def own_objects(array: NDArray[Any]) -> NDArray[Any]:
    """Copy an array of objects together with the objects; the array itself where none of them can ever change."""
    if all(_size_of_constant(value) is not None for value in array.flat):
        return array
    copied: NDArray[Any] = unpack(pack(array))
    return copied


def pack(value: Any) -> bytes:
    """Pickle objects; those of classes that this process alone knows, by value."""
    try:
        return pickle.dumps(value, protocol=5)
    except Exception:
        data: bytes = cloudpickle.dumps(value)
        return data


def unpack(data: bytes) -> Any:
    """Rebuild what `pack` pickled."""
    return pickle.loads(data)


def _pickle_attributes(kind: type[NDArray[Any]]) -> None:
    """Have arrays of a class of the user's own pickled with their attributes, which numpy forgets.

    A text that stands beside a number is lost otherwise (multigrid's missions). A class that says how it is pickled
    itself is left alone.
    """
    says_itself = any(getattr(kind, name) is not getattr(np.ndarray, name) for name in ("__reduce__", "__reduce_ex__"))
    if not says_itself and kind not in copyreg.dispatch_table:
        copyreg.pickle(kind, _reduce_array)


def _reduce_array(array: NDArray[Any]) -> tuple[Any, tuple[Any, ...]]:
    return _rebuild_array, (type(array), np.asarray(array), getattr(array, "__dict__", {}))


def _rebuild_array(kind: type[NDArray[Any]], array: NDArray[Any], attributes: dict[str, Any]) -> NDArray[Any]:
    _pickle_attributes(kind)  # this process may pickle it again
    out = array.view(kind)
    if attributes:
        vars(out).update(attributes)
    return out


def _size_of_constant(value: Any) -> int | None:
    """Bytes that a value takes which can never change, roughly; None if it can."""
    kind = type(value)
    if kind is str:
        return len(value) if value.isascii() else len(value.encode("utf-8", "surrogatepass"))
    if kind is bytes:
        return len(value)
    if kind in _NUMBERS:
        return 8 if kind is not int else 8 + value.bit_length() // 8
    if isinstance(value, np.generic):
        return None if isinstance(value, np.void) else 32 + value.nbytes  # a structured scalar can be written into
    if kind is not tuple:
        return None
    total = 8
    for part in value:
        size = _size_of_constant(part)
        if size is None:
            return None
        total += size
    return total

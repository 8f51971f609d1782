"""Values of spaces without a fixed shape: copies, pickling and limits of size."""

from __future__ import annotations

import copyreg
import pickle
from typing import Any

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from marlvec.errors import ContractError
from marlvec.spaces.tree import Leaf

MAX_BYTES = 16 * 2**20
"""Maximum total size of the objects that one env returns, or receives, in one call, in bytes."""

_NUMBERS = frozenset({type(None), bool, int, float, complex})


def snapshot(leaf: Leaf, value: Any, *, by_value: bool = False) -> tuple[Any, int]:
    """Return a copy of a leaf's value, or an immutable value itself, and its size in bytes, pickled.

    `by_value`: the receiving process cannot import the classes of this process's main module.
    """
    # Copied by pickling, even without worker processes, so that results are equal in all backends.
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
            f"{leaf}: a {type(value).__name__} that cannot be pickled, so it can neither be copied nor sent to another "
            f"process: {type(error).__name__}: {error}"
        ) from error


def check_size(leaf: Leaf, size: int, others: int) -> None:
    """Raise `ContractError` if a value and the env's other objects of the call exceed `MAX_BYTES`; sizes in bytes."""
    if size + others > MAX_BYTES:
        raise ContractError(
            f"{leaf}: a value of {size:,} bytes, pickled, and others of {others:,} bytes in the same env; "
            f"expected at most {MAX_BYTES:,} bytes of objects for an env at a time"
        )


def own_objects(array: NDArray[Any]) -> NDArray[Any]:
    """Copy an array of objects together with the objects; return the array itself if all are immutable."""
    if all(_size_of_constant(value) is not None for value in array.flat):
        return array
    copied: NDArray[Any] = unpack(pack(array))
    return copied


def pack(value: Any) -> bytes:
    """Pickle objects; by value if their classes cannot be imported."""
    try:
        return pickle.dumps(value, protocol=5)
    except Exception:
        data: bytes = cloudpickle.dumps(value)
        return data


def unpack(data: bytes) -> Any:
    """Unpickle the result of `pack`."""
    return pickle.loads(data)


def _pickle_attributes(kind: type[NDArray[Any]]) -> None:
    """Register a pickling function for a user's array class that keeps attributes, which numpy drops."""
    # Otherwise a text attribute of a number is lost (multigrid's missions). Classes with their own pickling are
    # skipped.
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
    """Return the approximate size in bytes of an immutable value; None if the value is mutable."""
    kind = type(value)
    if kind is str:
        return len(value) if value.isascii() else len(value.encode("utf-8", "surrogatepass"))
    if kind is bytes:
        return len(value)
    if kind in _NUMBERS:
        return 8 if kind is not int else 8 + value.bit_length() // 8
    if isinstance(value, np.generic):
        return None if isinstance(value, np.void) else 32 + value.nbytes  # structured scalars are mutable
    if kind is not tuple:
        return None
    total = 8
    for part in value:
        size = _size_of_constant(part)
        if size is None:
            return None
        total += size
    return total

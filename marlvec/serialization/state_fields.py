"""Validation of a state's fields before it is restored; every check raises `ArgumentError` with the field's name."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from marlvec.errors import ArgumentError

__all__ = [
    "State",
    "array_field",
    "arrays_like",
    "check_array",
    "check_fields",
    "check_value",
    "flag_field",
    "number_field",
]

State = dict[str, Any]
"""A result of ``get_state()``: arrays, numbers and texts, in dicts and lists; later calls do not change it."""


def check_fields(state: Any, names: Collection[str], where: str) -> Mapping[str, Any]:
    """Return a state, after a check that it is a dict with exactly these fields."""
    if not isinstance(state, Mapping):
        raise ArgumentError(f"{where}: expected a state from get_state(), got {state!r:.200}")
    missing = [name for name in names if name not in state]
    unknown = [name for name in state if name not in names]
    if missing or unknown:
        raise ArgumentError(f"{where}: expected other fields; missing {missing}, unknown {unknown}")
    return state


def array_field(
    state: Mapping[Any, Any], name: Any, dtype: DTypeLike, shape: Sequence[int | None], where: str
) -> NDArray[Any]:
    """Return a copy of an array in a state, after `check_array`."""
    return check_array(state, name, dtype, shape, where).copy()


def check_array(
    state: Mapping[Any, Any], name: Any, dtype: DTypeLike, shape: Sequence[int | None], where: str
) -> NDArray[Any]:
    """Return an array of a state, after a check of its dtype and shape; None in ``shape`` is an axis of any length."""
    return check_value(state.get(name), dtype, shape, f"{where}: {name}")


def check_value(value: Any, dtype: DTypeLike, shape: Sequence[int | None], where: str) -> NDArray[Any]:
    """Return a value, after a check that it is an array of this dtype and shape."""
    if (
        isinstance(value, np.ndarray)
        and (value.dtype, value.ndim) == (dtype, len(shape))
        and all(wanted in (None, got) for wanted, got in zip(shape, value.shape, strict=True))
    ):
        return value
    lengths = ", ".join("any" if length is None else str(length) for length in shape)
    got = f"{value.dtype} of {value.shape}" if isinstance(value, np.ndarray) else f"{value!r:.200}"
    raise ArgumentError(f"{where}: expected {np.dtype(dtype)} of ({lengths}), got {got}")


def arrays_like(state: Mapping[Any, Any], own: Mapping[Any, NDArray[Any]], where: str) -> dict[Any, NDArray[Any]]:
    """Return copies of a state's arrays, each with the dtype and shape of the array in ``own`` of the same name."""
    return {name: array_field(state, name, array.dtype, array.shape, where) for name, array in own.items()}


def flag_field(state: Mapping[str, Any], name: str, where: str) -> bool:
    """Return a bool of a state."""
    value = state.get(name)
    if not isinstance(value, bool):
        raise ArgumentError(f"{where}: {name}: expected True or False, got {value!r:.200}")
    return value


def number_field(state: Mapping[str, Any], name: str, where: str, *, least: int = 0) -> int:
    """Return an integer of a state, at least ``least``."""
    value = state.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ArgumentError(f"{where}: {name}: expected an integer of at least {least}, got {value!r:.200}")
    return value

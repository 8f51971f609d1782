"""Fields of a state that is to be set: each is looked at before anything takes it over."""

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
"""What ``get_state()`` returns: arrays, numbers and texts, in dicts and lists; later calls do not change it."""


def check_fields(state: Any, names: Collection[str], where: str) -> Mapping[str, Any]:
    """Make sure that a state is a dict of these fields.

    Raises:
        ArgumentError: It is not; says which are missing and which are too many.
    """
    if not isinstance(state, Mapping):
        raise ArgumentError(f"{where}: expected what get_state() returned, got {state!r:.200}")
    missing = [name for name in names if name not in state]
    unknown = [name for name in state if name not in names]
    if missing or unknown:
        raise ArgumentError(f"{where}: expected other fields; missing {missing}, unknown {unknown}")
    return state


def array_field(
    state: Mapping[Any, Any], name: Any, dtype: DTypeLike, shape: Sequence[int | None], where: str
) -> NDArray[Any]:
    """A copy of an array that `check_array` has looked at.

    Raises:
        ArgumentError: As there.
    """
    return check_array(state, name, dtype, shape, where).copy()


def check_array(
    state: Mapping[Any, Any], name: Any, dtype: DTypeLike, shape: Sequence[int | None], where: str
) -> NDArray[Any]:
    """An array of a state, once it was found to be one of this dtype and shape.

    Args:
        state: Where it is.
        name: Its name there.
        dtype: What it must be of.
        shape: Likewise; None for an axis of any length.
        where: What it belongs to, for messages.

    Raises:
        ArgumentError: It is missing, none, or of another dtype or shape.
    """
    return check_value(state.get(name), dtype, shape, f"{where}: {name}")


def check_value(value: Any, dtype: DTypeLike, shape: Sequence[int | None], where: str) -> NDArray[Any]:
    """Return a value, once it was found to be an array of this dtype and shape.

    Raises:
        ArgumentError: It is none.
    """
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
    """Copies of arrays, each of the dtype and shape of one of these.

    Raises:
        ArgumentError: As `array_field`.
    """
    return {name: array_field(state, name, array.dtype, array.shape, where) for name, array in own.items()}


def flag_field(state: Mapping[str, Any], name: str, where: str) -> bool:
    """A bool.

    Raises:
        ArgumentError: It is missing, or none.
    """
    value = state.get(name)
    if not isinstance(value, bool):
        raise ArgumentError(f"{where}: {name}: expected True or False, got {value!r:.200}")
    return value


def number_field(state: Mapping[str, Any], name: str, where: str, *, least: int = 0) -> int:
    """A whole number.

    Raises:
        ArgumentError: It is missing, none, or too small.
    """
    value = state.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ArgumentError(f"{where}: {name}: expected an integer of at least {least}, got {value!r:.200}")
    return value

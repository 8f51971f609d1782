"""Copies of an env's state, after a check that it can be written to a file."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from marlvec.errors import ArgumentError, SerialisationError
from marlvec.serialization.values import encode

__all__ = ["one_each", "plain_copy"]


def plain_copy(state: Any, name: str) -> Any:
    """Copy a state from ``get_state()``; `SerialisationError` names a part that is not plain data."""
    try:
        encode(state, f"the result of {name}.get_state()")
    except SerialisationError as error:
        raise SerialisationError(f"{error}. A state must be plain data, so that it can be written to a file") from None
    return deepcopy(state)


def one_each(values: Any, n: int, where: str) -> list[Any]:
    """Copy a list in a state, which must have one value for each of n agents; else raise `ArgumentError`."""
    if not isinstance(values, list) or len(values) != n:
        raise ArgumentError(f"{where}: expected {n} values, one for each agent, got {values!r:.200}")
    return list(values)

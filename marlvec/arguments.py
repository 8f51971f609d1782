"""Checks of arguments: whole numbers, and choices among names."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from marlvec.errors import ArgumentError

__all__ = ["whole_number", "check_choice"]


def whole_number(value: Any) -> int | None:
    """An int of any library as Python's; None for all else, bools included."""
    if isinstance(value, (bool, np.bool_)):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise `ArgumentError` unless ``value`` is one of the choices."""
    if value not in choices:
        raise ArgumentError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")

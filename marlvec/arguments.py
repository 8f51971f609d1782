"""Checks of arguments (integers, choices among names), and signatures of functions."""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from marlvec.errors import ArgumentError


def whole_number(value: Any) -> int | None:
    """Convert an integer of any library to int; None for anything else, and for bools."""
    if isinstance(value, (bool, np.bool_)):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def check_int(name: str, value: Any, least: int | None = None) -> int:
    """Return an integer of any library as an int; raise `ArgumentError` for anything else, and below ``least``."""
    number = whole_number(value)
    if number is None or (least is not None and number < least):
        wanted = "an int" if least is None else f"an int of at least {least}"
        raise ArgumentError(f"{name}: expected {wanted}, got {value!r}")
    return number


def count_from(value: object, what: str) -> int:
    """Check that a value is an integer of at least 1, and return it."""
    number = whole_number(value)
    if number is None or number < 1:
        raise ArgumentError(f"{what}: expected an integer of at least 1")
    return number


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise `ArgumentError` unless ``value`` is one of the choices."""
    if value not in choices:
        raise ArgumentError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


signature_of: Callable[..., inspect.Signature] = inspect.signature
"""Returns a function's signature, even if its annotations have names that only type checkers import.

For these, `inspect.signature` raises NameError in Python 3.14, which evaluates annotations.
"""
if sys.version_info >= (3, 14):
    from annotationlib import Format

    signature_of = partial(inspect.signature, annotation_format=Format.FORWARDREF)

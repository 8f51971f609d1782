"""Checks of arguments: whole numbers, and choices among names; and which arguments a function takes."""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from marlvec.errors import ArgumentError

__all__ = ["check_choice", "signature_of", "whole_number"]


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


signature_of: Callable[..., inspect.Signature] = inspect.signature
"""Tells which arguments a function takes, whatever names its annotations have.

Python 3.14 looks annotations up when a signature is asked for, and `inspect.signature` raises NameError there for names
that only type checkers know.
"""
if sys.version_info >= (3, 14):
    from annotationlib import Format

    signature_of = partial(inspect.signature, annotation_format=Format.FORWARDREF)

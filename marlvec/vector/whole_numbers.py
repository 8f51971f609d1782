"""What counts as a whole number in arguments."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

__all__ = ["whole_number"]


def whole_number(value: Any) -> int | None:
    """An int of any library as Python's; None for all else, bools included."""
    if isinstance(value, (bool, np.bool_)):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None

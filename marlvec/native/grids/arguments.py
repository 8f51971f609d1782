"""Arguments of grid envs."""

from __future__ import annotations

from typing import Any

import numpy as np

from marlvec.errors import ArgumentError

__all__ = ["whole"]


def whole(name: str, value: Any, least: int | None) -> int:
    """Return an int of at least ``least`` (None: any), or raise ArgumentError."""
    is_whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_whole or (least is not None and value < least):
        wanted = "an int" if least is None else f"an int of at least {least}"
        raise ArgumentError(f"{name}: expected {wanted}, got {value!r}")
    return int(value)

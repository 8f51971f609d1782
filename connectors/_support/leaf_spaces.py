"""`space_summary`: a space as one short line."""

from __future__ import annotations

from typing import Any

from gymnasium import spaces

__all__ = ["space_summary"]


def space_summary(space: spaces.Space[Any]) -> str:
    """Describe a space in one short line: ``Box (18,) float32 [-10, 10]``."""
    if isinstance(space, spaces.Box):
        low, high = (space.low.min(), space.high.max()) if space.low.size else (0, 0)
        return f"Box {space.shape} {space.dtype} [{low:g}, {high:g}]"
    if isinstance(space, spaces.Dict):
        return "{" + ", ".join(f"{key}: {space_summary(sub)}" for key, sub in space.spaces.items()) + "}"
    if isinstance(space, spaces.Tuple):
        return "(" + ", ".join(space_summary(sub) for sub in space.spaces) + ")"
    return str(space)

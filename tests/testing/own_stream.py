"""A random stream of a module's own: envs that draw by its functions share it, though they do not name it."""

from __future__ import annotations

import numpy as np

__all__ = ["draw", "seed_all"]

stream = np.random.default_rng(0)


def seed_all(seed: int) -> None:
    """Begin it anew, for all."""
    global stream
    stream = np.random.default_rng(seed)


def draw() -> float:
    """The next number."""
    return float(stream.random())

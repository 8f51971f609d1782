"""Rewards in another unit."""

from __future__ import annotations

import math

import numpy as np

from marlvec.connectors.connector import AgentConnector
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError

__all__ = ["ScaleReward"]


class ScaleReward(AgentConnector):
    """Makes the ``reward`` column ``reward * scale + shift``.

    What is scaled is what the agent was paid since its last row, which in a game of turns may be the sum of several
    steps; ``shift`` is added once. An episode's first rows, which have no reward yet, pass unchanged.

    Args:
        scale: The factor.
        shift: What is added after it.

    Raises:
        ArgumentError: Either is NaN or infinite.
    """

    def __init__(self, scale: float, shift: float = 0.0) -> None:
        if not (math.isfinite(scale) and math.isfinite(shift)):
            raise ArgumentError(f"scale and shift must be finite, got scale={scale}, shift={shift}")
        self.scale = scale
        self.shift = shift

    def __call__(self, rows: Rows) -> Rows:
        with np.errstate(over="ignore", invalid="ignore"):  # first rows may hold anything
            scaled = rows.reward * self.scale + self.shift
        if "first" in rows.columns:
            scaled = np.where(rows.first, rows.reward, scaled)
        return rows.replace(reward=scaled)

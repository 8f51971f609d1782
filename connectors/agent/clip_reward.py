"""Rewards of bounded size."""

from __future__ import annotations

from typing import Any

import numpy as np

from marlvec.connectors.connector import AgentConnector
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError

__all__ = ["ClipReward"]


class ClipReward(AgentConnector):
    """Clips the ``reward`` column: to its sign, or to ``[-limit, limit]``.

    What is clipped is what the agent was paid since its last row, which in a game of turns may be the sum of several
    steps. An episode's first rows, which have no reward yet, pass unchanged.

    Args:
        sign: Clip to -1, 0 or 1.
        limit: Clip to ``[-limit, limit]``.

    Raises:
        ArgumentError: Both are given, or neither, or ``limit`` is not above 0.
    """

    def __init__(self, *, sign: bool = False, limit: float | None = None) -> None:
        if sign == (limit is not None):
            raise ArgumentError(f"give sign=True or a limit, and not both; got sign={sign}, limit={limit}")
        if limit is not None and not limit > 0:
            raise ArgumentError(f"limit must be above 0, got {limit}")
        self.sign = sign
        self.limit = limit

    def __call__(self, rows: Rows) -> Rows:
        reward = rows.reward
        clipped: Any = np.sign(reward) if self.limit is None else np.clip(reward, -self.limit, self.limit)
        if "first" in rows.columns:
            clipped = np.where(rows.first, reward, clipped)
        return rows.replace(reward=clipped)

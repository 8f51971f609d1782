"""A mean of wins, and how sure it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from marlvec.errors import ArgumentError

__all__ = ["WinRate"]


@dataclass(frozen=True, slots=True)
class WinRate:
    """Mean score over some games, and the interval it is believed to lie in.

    Attributes:
        mean: Mean score: wins 1, draws 0.5, losses 0; NaN where there were no games.
        low, high: Bounds of Wilson's interval. With draws it is wider than it had to be.
        games: How many.
        wins, draws, losses: How many scores were above, at and below 0.5.
    """

    mean: float
    low: float
    high: float
    games: int
    wins: int
    draws: int
    losses: int

    @classmethod
    def of(cls, scores: Sequence[float], confidence: float = 0.95) -> WinRate:
        """The win rate that these scores, one a game, each from 0 to 1, speak for.

        Raises:
            ArgumentError: ``confidence`` is not between 0 and 1.
        """
        if not 0 < confidence < 1:
            raise ArgumentError(f"confidence must be above 0 and below 1, got {confidence!r}")
        n = len(scores)
        if not n:
            return cls(math.nan, 0.0, 1.0, 0, 0, 0, 0)
        mean = math.fsum(scores) / n
        z2 = NormalDist().inv_cdf(0.5 + confidence / 2) ** 2
        centre = (mean + z2 / (2 * n)) / (1 + z2 / n)
        half = math.sqrt(z2 * (mean * (1 - mean) / n + z2 / (4 * n * n))) / (1 + z2 / n)
        wins, losses = sum(score > 0.5 for score in scores), sum(score < 0.5 for score in scores)
        low, high = max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half))
        return cls(mean, low, high, n, wins, n - wins - losses, losses)

    def __str__(self) -> str:
        if not self.games:
            return "no games"
        return f"{self.mean:.1%} [{self.low:.1%}, {self.high:.1%}] of {self.games}"

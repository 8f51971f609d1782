"""Opponents of equal strength."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from marlvec.errors import ArgumentError
from marlvec.selfplay.matchmaking.matchmaker import Matchmaker, draw
from marlvec.selfplay.opponent import Opponent
from marlvec.selfplay.ratings import Ratings

__all__ = ["ByRating"]


class ByRating(Matchmaker):
    """Opponents whose rating is near the learner's, by a bell curve over the distance.

    Args:
        ratings: Whose ratings.
        spread: The distance at which an opponent is drawn 0.6 times as often as an equal one; in points of the
            ratings.

    Raises:
        ArgumentError: ``spread`` is not positive.
    """

    def __init__(self, ratings: Ratings, spread: float = 200.0) -> None:
        if not spread > 0:
            raise ArgumentError(f"spread must be above 0, got {spread!r}")
        self.ratings, self.spread = ratings, spread

    def choose(self, learner: str, opponents: Sequence[Opponent], rng: np.random.Generator) -> str:
        own = self.ratings.rating(learner)
        away = np.array([self.ratings.rating(one.opponent_id) - own for one in opponents]) / self.spread
        # Against the nearest one, so that a learner who is far above all is not left with weights of 0.
        return draw(opponents, np.exp((np.min(away**2) - away**2) / 2), rng)

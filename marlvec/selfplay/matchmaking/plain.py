"""Matchmakers that look at nobody's results."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from marlvec.errors import ArgumentError
from marlvec.selfplay.matchmaking.matchmaker import Matchmaker
from marlvec.selfplay.opponent import Opponent

__all__ = ["Latest", "Mirror", "Uniform"]


class Mirror(Matchmaker):
    """Itself: the learner plays all sides as it is now, and learns from all of them."""

    def choose(self, learner: str, opponents: Sequence[Opponent], rng: np.random.Generator) -> str:
        return learner


class Latest(Matchmaker):
    """The latest opponents, one as likely as the other.

    Args:
        count: How many.

    Raises:
        ArgumentError: Less than 1.
    """

    def __init__(self, count: int = 1) -> None:
        if count < 1:
            raise ArgumentError(f"count must be at least 1, got {count!r}")
        self.count = count

    def choose(self, learner: str, opponents: Sequence[Opponent], rng: np.random.Generator) -> str:
        last = opponents[-self.count :]
        return last[int(rng.integers(len(last)))].opponent_id


class Uniform(Matchmaker):
    """Any opponent, one as likely as the other: fictitious self-play."""

    def choose(self, learner: str, opponents: Sequence[Opponent], rng: np.random.Generator) -> str:
        return opponents[int(rng.integers(len(opponents)))].opponent_id

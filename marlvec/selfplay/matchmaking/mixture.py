"""Several matchmakers, each with its share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from marlvec.errors import ArgumentError
from marlvec.selfplay.matchmaking.matchmaker import Matchmaker
from marlvec.selfplay.opponent import Opponent

__all__ = ["Mixture"]


class Mixture(Matchmaker):
    """Draws a matchmaker, which then chooses: ``Mixture((0.35, Mirror()), (0.65, Prioritised(table)))``.

    Args:
        parts: Share and matchmaker; shares need not sum to 1.

    Raises:
        ArgumentError: There is none, or a share is not positive.
    """

    def __init__(self, *parts: tuple[float, Matchmaker]) -> None:
        if not parts or not all(share > 0 and math.isfinite(share) for share, _ in parts):
            raise ArgumentError(f"expected pairs of a positive share and a matchmaker, got {parts!r}")
        self.parts = parts
        self._bounds = np.cumsum([share for share, _ in parts])

    def choose(self, learner: str, opponents: Sequence[Opponent], rng: np.random.Generator) -> str:
        k = int(np.searchsorted(self._bounds, rng.random() * self._bounds[-1], side="right"))
        return self.parts[min(k, len(self.parts) - 1)][1].choose(learner, opponents, rng)

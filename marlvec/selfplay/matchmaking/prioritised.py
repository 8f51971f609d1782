"""Opponents that there is something to learn from."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import numpy as np

from marlvec.errors import ArgumentError
from marlvec.selfplay.match_table import MatchTable
from marlvec.selfplay.matchmaking.matchmaker import Matchmaker, draw
from marlvec.selfplay.opponent import Opponent

__all__ = ["Prioritised"]

_WEIGHTINGS: dict[str, Callable[[float], float]] = {
    "hard": lambda rate: (1.0 - rate) ** 2,
    "even": lambda rate: rate * (1.0 - rate),
}


class Prioritised(Matchmaker):
    """Prioritised fictitious self-play: opponents by how the learner fares against them.

    Whom it never met counts as even.

    Args:
        table: Where its win rates are. With a ``decay`` a little below 1 they follow the learner.
        weighting: ``"hard"``: those that beat it, (1 - win rate)²; ``"even"``: those of its own strength, win rate ×
            (1 - win rate); or a function of the win rate.
        of: Of which learners the opponents may be snapshots; None: of all. Where there is none such, all are taken.

    Raises:
        ArgumentError: No such weighting.
    """

    def __init__(
        self,
        table: MatchTable,
        weighting: str | Callable[[float], float] = "hard",
        *,
        of: Collection[str] | None = None,
    ) -> None:
        if not callable(weighting) and weighting not in _WEIGHTINGS:
            raise ArgumentError(f"weighting must be one of {list(_WEIGHTINGS)} or a function, got {weighting!r}")
        self.table, self.of = table, None if of is None else tuple(of)
        self._weight = weighting if callable(weighting) else _WEIGHTINGS[weighting]

    def choose(self, learner: str, opponents: Sequence[Opponent], rng: np.random.Generator) -> str:
        chosen = [one for one in opponents if self.of is None or one.of in self.of] or opponents
        rates = [self.table.win_rate(learner, one.opponent_id) for one in chosen]
        weights = [float(self._weight(0.5 if math.isnan(rate) else rate)) for rate in rates]
        return draw(chosen, np.array(weights), rng)

"""Rules that choose which opponent leaves a full pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from marlvec.selfplay.opponents.opponent import Opponent
from marlvec.selfplay.ratings import Ratings

__all__ = ["EvictionRule", "oldest", "thinned", "weakest"]

EvictionRule = Callable[[Sequence[Opponent]], Opponent]
"""Function of the opponents that may leave, oldest first, to the one that leaves. The newest is included."""


def oldest(opponents: Sequence[Opponent]) -> Opponent:
    """Evict the opponent that joined first.

    Args:
        opponents: Opponents that may leave, oldest first.

    Returns:
        The opponent that leaves.
    """
    return opponents[0]


def thinned(opponents: Sequence[Opponent]) -> Opponent:
    """Evict the snapshot whose removal leaves the smallest gap in training steps; never the first or the newest.

    Args:
        opponents: Opponents that may leave, oldest first.

    Returns:
        The opponent that leaves.
    """
    if len(opponents) < 3:
        return opponents[0]
    steps = [opponent.step for opponent in opponents]
    gaps = [after - before for before, after in pairwise(steps)]
    around = [before + after for before, after in pairwise(gaps)]
    return opponents[1 + around.index(min(around))]


def weakest(ratings: Ratings) -> EvictionRule:
    """Return a rule that evicts the lowest rating; of equal ones the oldest. Never the newest, with few games so far.

    Args:
        ratings: The ratings, read at each eviction.

    Returns:
        The rule, for `OpponentPool`.
    """

    def rule(opponents: Sequence[Opponent]) -> Opponent:
        return min(opponents[:-1] or opponents, key=lambda opponent: ratings.rating(opponent.opponent_id))

    return rule

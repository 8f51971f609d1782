"""Rules for which opponent leaves a full pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from marlvec.selfplay.opponents.opponent import Opponent
from marlvec.selfplay.ratings import Ratings

__all__ = ["EvictionRule", "oldest", "thinned", "weakest"]

EvictionRule = Callable[[Sequence[Opponent]], Opponent]
"""From the opponents that may leave, oldest first, to the one that does. The newest is among them."""


def oldest(opponents: Sequence[Opponent]) -> Opponent:
    """Who came first leaves first.

    Args:
        opponents: Those that may leave, oldest first.

    Returns:
        The one that leaves.
    """
    return opponents[0]


def thinned(opponents: Sequence[Opponent]) -> Opponent:
    """Who leaves the smallest gap, so that those who stay are spread over the whole training; first and last stay.

    Args:
        opponents: Those that may leave, oldest first.

    Returns:
        The one that leaves.
    """
    if len(opponents) < 3:
        return opponents[0]
    steps = [opponent.step for opponent in opponents]
    gaps = [after - before for before, after in pairwise(steps)]
    around = [before + after for before, after in pairwise(gaps)]
    return opponents[1 + around.index(min(around))]


def weakest(ratings: Ratings) -> EvictionRule:
    """Who has the lowest rating, but the newest, which has hardly played; of equals who came first.

    Args:
        ratings: Whose ratings; asked anew each time.

    Returns:
        The rule, for `OpponentPool`.
    """

    def rule(opponents: Sequence[Opponent]) -> Opponent:
        return min(opponents[:-1] or opponents, key=lambda opponent: ratings.rating(opponent.opponent_id))

    return rule

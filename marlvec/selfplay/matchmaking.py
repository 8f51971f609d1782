"""Matchmakers: which opponent a learner meets in the next episode."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from marlvec.errors import ArgumentError
from marlvec.selfplay.opponents.opponent import Opponent
from marlvec.selfplay.ratings import Ratings
from marlvec.selfplay.results.match_table import MatchTable

__all__ = ["ByRating", "Latest", "MainExploiter", "Matchmaker", "Mirror", "Mixture", "Prioritised", "Uniform", "draw"]


class Matchmaker(ABC):
    """Chooses a learner's opponent in one game; keeps nothing of its own."""

    @abstractmethod
    def choose(self, learner: str, opponents: Sequence[Opponent], rng: np.random.Generator) -> str:
        """Choose one opponent for one side of one game.

        Args:
            learner: The learner's policy id.
            opponents: Those that can play that side, oldest first; at least one.
            rng: The game's own random stream; nothing else may be drawn from.

        Returns:
            The id of one of the opponents; or of a learner, itself or another one, who plays as it is now. Where that
            one cannot play the side, the learner does who can.
        """


def draw(opponents: Sequence[Opponent], weights: NDArray[np.float64], rng: np.random.Generator) -> str:
    """Draw an opponent by weights, which need not sum to 1; where all are 0, any of them.

    Raises:
        ArgumentError: A weight is negative, infinite or NaN.
    """
    total = float(weights.sum())
    if not np.isfinite(total) or (weights < 0).any():
        named = {opponent.opponent_id: float(w) for opponent, w in zip(opponents, weights, strict=True)}
        raise ArgumentError(f"weights of opponents must be finite and not negative, got {named}")
    if total == 0:
        return opponents[int(rng.integers(len(opponents)))].opponent_id
    # By the sum and not by rng.choice, which wants probabilities that sum to 1 to the last bit.
    found = int(np.searchsorted(np.cumsum(weights), rng.random() * total, side="right"))
    return opponents[min(found, int(np.flatnonzero(weights)[-1]))].opponent_id


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


_WEIGHTINGS: dict[str, Callable[[float], float]] = {
    "hard": lambda rate: (1.0 - rate) ** 2,
    "even": lambda rate: rate * (1.0 - rate),
}


class Prioritised(Matchmaker):
    """Prioritised fictitious self-play: opponents by how the learner fares against them.

    An opponent it never met counts as even.

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


class MainExploiter(Matchmaker):
    """The main learner as it is now; while that is too strong, its past selves of the exploiter's own strength.

    (An exploiter of the whole league needs no matchmaker of its own: it plays `Prioritised` against all.)

    Args:
        main: The main learner's policy id.
        table: Where win rates are.
        enough: The win rate against the main learner that is enough to learn from.
        games: How many games against it there must be before that is looked at.

    Raises:
        ArgumentError: ``enough`` is not within 0 and 1.
    """

    def __init__(self, main: str, table: MatchTable, *, enough: float = 0.1, games: int = 20) -> None:
        if not 0 <= enough <= 1:
            raise ArgumentError(f"enough must be within 0 and 1, got {enough!r}")
        self.main, self.table, self.enough, self.games = main, table, enough, games
        self._past = Prioritised(table, "even", of=[main])

    def choose(self, learner: str, opponents: Sequence[Opponent], rng: np.random.Generator) -> str:
        met = self.table.win_count(learner, self.main)
        if met.games < self.games or met.win_rate >= self.enough:
            return self.main
        return self._past.choose(learner, opponents, rng)

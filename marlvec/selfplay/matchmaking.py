"""Matchmakers: choose a learner's opponent for the next episode."""

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
    """Chooses a learner's opponent in one game; stateless."""

    @abstractmethod
    def choose(self, learner: str, opponents: Sequence[Opponent], rng: np.random.Generator) -> str:
        """Choose one opponent for one side of one game.

        Args:
            learner: The learner's policy id.
            opponents: Opponents that can play that side, oldest first; at least one.
            rng: The game's random generator; use no other.

        Returns:
            The id of one of the opponents; or of a learner (itself or another one), which plays with its current
            weights. If that learner cannot play the side, a learner that can plays it.
        """


def draw(opponents: Sequence[Opponent], weights: NDArray[np.float64], rng: np.random.Generator) -> str:
    """Draw an opponent by weights, which need not sum to 1; if all are 0, uniformly."""
    total = float(weights.sum())
    if not np.isfinite(total) or (weights < 0).any():
        named = {opponent.opponent_id: float(w) for opponent, w in zip(opponents, weights, strict=True)}
        raise ArgumentError(f"weights of opponents: expected finite numbers of at least 0, got {named}")
    if total == 0:
        return opponents[int(rng.integers(len(opponents)))].opponent_id
    # Not rng.choice, which requires probabilities that sum to 1 exactly.
    found = int(np.searchsorted(np.cumsum(weights), rng.random() * total, side="right"))
    return opponents[min(found, int(np.flatnonzero(weights)[-1]))].opponent_id


class Mirror(Matchmaker):
    """The learner plays all sides itself, with its current weights, and learns from all of them."""

    def choose(self, learner: str, opponents: Sequence[Opponent], rng: np.random.Generator) -> str:
        return learner


class Latest(Matchmaker):
    """The latest opponents, uniformly.

    Args:
        count: How many.

    Raises:
        ArgumentError: ``count`` is less than 1.
    """

    def __init__(self, count: int = 1) -> None:
        if count < 1:
            raise ArgumentError(f"count must be at least 1, got {count!r}")
        self.count = count

    def choose(self, learner: str, opponents: Sequence[Opponent], rng: np.random.Generator) -> str:
        last = opponents[-self.count :]
        return last[int(rng.integers(len(last)))].opponent_id


class Uniform(Matchmaker):
    """All opponents, uniformly: fictitious self-play."""

    def choose(self, learner: str, opponents: Sequence[Opponent], rng: np.random.Generator) -> str:
        return opponents[int(rng.integers(len(opponents)))].opponent_id


class Mixture(Matchmaker):
    """Draws a matchmaker, which chooses: ``Mixture((0.35, Mirror()), (0.65, Prioritised(table)))``.

    Args:
        parts: Pairs of share and matchmaker; shares need not sum to 1.

    Raises:
        ArgumentError: No pair, or a share is not positive.
    """

    def __init__(self, *parts: tuple[float, Matchmaker]) -> None:
        if not parts or not all(share > 0 and math.isfinite(share) for share, _ in parts):
            raise ArgumentError(f"parts: expected pairs of a positive share and a matchmaker, got {parts!r}")
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
    """Prioritised fictitious self-play: opponents weighted by the learner's win rate against them.

    An opponent it never met counts as even.

    Args:
        table: The win rates. With a ``decay`` a little below 1 they follow the learner's progress.
        weighting: ``"hard"``: opponents that beat it, (1 - win rate)²; ``"even"``: opponents of equal strength, win
            rate × (1 - win rate); or a function of the win rate.
        of: Learners whose snapshots are taken; None: all. If there are no such snapshots, all opponents are taken.

    Raises:
        ArgumentError: ``weighting`` is unknown.
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
    """Opponents with a rating near the learner's, with Gaussian weights of the distance.

    Args:
        ratings: The ratings.
        spread: Standard deviation of the Gaussian, in rating points: at this distance the weight is 0.6 of the weight
            of an equal opponent.

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
        # Relative to the nearest opponent, so that a learner far above all does not get only weights of 0.
        return draw(opponents, np.exp((np.min(away**2) - away**2) / 2), rng)


class MainExploiter(Matchmaker):
    """The main learner with its current weights; while it is too strong, its past snapshots of equal strength.

    (An exploiter of the whole league needs no other matchmaker: use `Prioritised` against all.)

    Args:
        main: The main learner's policy id.
        table: The win rates.
        enough: Win rate against the main learner from which it is chosen.
        games: Games against it before the win rate counts.

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

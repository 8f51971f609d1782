"""`Elo`: ratings updated game by game."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from marlvec.errors import ArgumentError
from marlvec.selfplay.ratings.ratings import Ratings, begin_of, expected_score

__all__ = ["Elo"]


class Elo(Ratings):
    """Elo's ratings: after each game, a policy that did better than expected gets points from those that did worse.

    They follow policies that learn, and depend on the order of games: the last ones count most. For policies that don't
    change, `BradleyTerry` gets more out of the same games.

    A game of more than two sides counts as one game of each pair of sides, each worth ``k / (sides - 1)``. A side of
    several policies has their mean rating, and each gets the side's points. The sum of all ratings stays constant,
    unless ``fixed`` policies play.

    Args:
        k: Maximum of points for one game of two sides.
        initial: Rating of new policies; None: the mean of the fixed ratings, or 1000.
        fixed: Policy id to a rating that never changes, e.g. a random policy at 0, so that ratings of several runs can
            be compared.

    Raises:
        ArgumentError: ``k`` is not positive, or a rating is NaN or infinite.

    Attributes:
        k, initial, fixed: As given, or the defaults.
    """

    def __init__(
        self, k: float = 32.0, initial: float | None = None, *, fixed: Mapping[str, float] | None = None
    ) -> None:
        if not k > 0:
            raise ArgumentError(f"k must be above 0, got {k!r}")
        self.k = float(k)
        self.fixed, self.initial = begin_of(fixed, initial)
        self._ratings: dict[str, float] = {}

    def _rate(self, teams: Sequence[tuple[str, ...]], scores: Sequence[float]) -> None:
        before = [sum(map(self.rating, team)) / len(team) for team in teams]
        share = self.k / (len(teams) - 1)
        points = [0.0] * len(teams)
        for i, j in combinations(range(len(teams)), 2):
            result = 0.5 + 0.5 * ((scores[i] > scores[j]) - (scores[i] < scores[j]))
            won = share * (result - expected_score(before[i], before[j]))
            points[i] += won
            points[j] -= won
        for team, won in zip(teams, points, strict=True):
            for player in team:
                self._ratings[player] = self._ratings.get(player, self.initial) + won

    def rating(self, player: str) -> float:
        return self.fixed[player] if player in self.fixed else self._ratings.get(player, self.initial)

    def expected(self, one: str, other: str) -> float:
        return expected_score(self.rating(one), self.rating(other))

    @property
    def players(self) -> tuple[str, ...]:
        return tuple(self._ratings)

    def copy(self, old: str, new: str) -> None:
        self._ratings[new] = self.rating(old)

    def forget(self, player: str) -> None:
        self._ratings.pop(player, None)

    def state_dict(self) -> dict[str, Any]:
        return {"ratings": dict(self._ratings)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        try:
            ratings = {str(name): float(rating) for name, rating in state["ratings"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ArgumentError(f"expected the state of an Elo: {error!r}") from error
        self._ratings = ratings

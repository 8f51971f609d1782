"""`BradleyTerry`: ratings fitted to all games at once, with intervals."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from itertools import groupby
from statistics import NormalDist
from typing import Any

from marlvec.errors import ArgumentError
from marlvec.selfplay.ratings.likelihood import Fit, Likelihood, Result
from marlvec.selfplay.ratings.ratings import Ratings, begin_of, expected_score

__all__ = ["BradleyTerry"]

_POINTS = 400.0 / math.log(10.0)
"""Elo points per unit of log-strength, that is per factor e in the odds."""


class BradleyTerry(Ratings):
    """Maximum-likelihood ratings of all games together, on Elo's scale: 400 points are odds of ten to one.

    All games are fitted at once, so their order makes no difference, and `interval` gives a rating's uncertainty. Each
    policy is assumed to be equally strong in all its games. That is true of snapshots, anchors and players of an arena;
    of a policy that learns it gives a mean over its games, whereas `Elo` follows it.

    The model is that of Bradley and Terry (1952) for two sides, and of Plackett (1975) and Luce (1959) for more: the
    best of some sides is drawn with their strengths as weights, then the next best of the others, as in Hunter, "MM
    algorithms for generalized Bradley-Terry models" (Annals of Statistics 32, 2004). A draw of two sides counts as half
    a win of each, a draw of k sides as 2 / k such draws of each pair, so that it weighs as much as an order of them
    would. A side of several policies has their mean log-strength.

    A policy that won all games, or lost all, would have no finite rating. So each policy gets half a drawn game in
    addition, spread over its opponents in proportion to its games; two policies that met no others get one drawn game,
    as in Coulom's Bayeselo. The effect is small with many games: 75 % of 100 count as 74.75 %.

    Ratings compare only policies that met, directly or through others. A policy linked to a fixed one by such games has
    a rating on the scale of the fixed ratings. All others form groups of policies that met; in each group the mean
    rating is ``initial``, and a rating gives the distance from the mean of its group, and nothing about other groups. A
    policy that never met another has ``initial``.

    Games are counted, not stored. The first query after a game fits again: less than a millisecond of one core for 20
    policies that all met, some ten for 200.

    Args:
        fixed: Policy id to a rating that never changes, e.g. a random policy at 0, so that ratings of several runs can
            be compared.
        initial: Rating of new policies; None: the mean of the fixed ratings, or 1000.

    Raises:
        ArgumentError: A number is NaN or infinite.

    Attributes:
        initial, fixed: As given, or the defaults.
    """

    def __init__(self, *, fixed: Mapping[str, float] | None = None, initial: float | None = None) -> None:
        self.fixed, self.initial = begin_of(fixed, initial)
        self._players: dict[str, None] = {}  # in order of their first game
        self._results: dict[Result, int] = {}
        self._copies: dict[str, str] = {}
        self._likelihood: Likelihood | None = None  # of the current kinds of results; None after a new kind
        self._fit: Fit | None = None

    def _rate(self, teams: Sequence[tuple[str, ...]], scores: Sequence[float]) -> None:
        sides = [tuple(sorted(set(team))) for team in teams]
        if len(set(sides)) == 1:
            return  # a policy against itself carries no information
        self._players |= {name: None for team in teams for name in team}
        ranked = sorted(zip(scores, sides, strict=True), key=lambda pair: pair[0])
        worse: list[tuple[str, ...]] = []
        for _, drawn in groupby(ranked, key=lambda pair: pair[0]):
            level = sorted(side for _, side in drawn)
            self._note((tuple(level), tuple(worse)), 1)
            worse = sorted(worse + level)
        self._fit = None

    def _note(self, result: Result, times: int) -> None:
        if len({side for sides in result for side in sides}) < 2:
            return
        if result not in self._results:
            self._likelihood = None
        self._results[result] = self._results.get(result, 0) + times

    def _fitted(self) -> Fit:
        if (fit := self._fit) is None:
            if self._likelihood is None:
                fixed = {name: (rating - self.initial) / _POINTS for name, rating in self.fixed.items()}
                self._likelihood = Likelihood(self._results, fixed, self._linked())
            counts = [self._results[result] for result in self._likelihood.results]
            fit = self._fit = self._likelihood.fit(counts)
        return fit

    def _linked(self) -> list[tuple[str, str]]:
        """Return copies that have played, with the players that they are copies of."""
        played = {name for drawn, worse in self._results for side in (*drawn, *worse) for name in side}
        pairs = ((name, self._origin(old, played)) for name, old in self._copies.items() if name in played)
        return [(new, old) for new, old in pairs if new != old and (old in played or old in self.fixed)]

    def _origin(self, player: str, played: Container[str]) -> str:
        """Return the player whose rating applies: itself or, while it has not played, the player it is a copy of."""
        seen = set()
        while player not in played and player not in self.fixed and player in self._copies and player not in seen:
            seen.add(player)
            player = self._copies[player]
        return player

    def rating(self, player: str) -> float:
        if player in self.fixed:
            return self.fixed[player]
        strengths = self._fitted().strengths
        name = self._origin(player, strengths)
        return self.fixed[name] if name in self.fixed else self.initial + _POINTS * strengths.get(name, 0.0)

    def interval(self, player: str, confidence: float = 0.95) -> tuple[float, float]:
        """Return a confidence interval of a rating.

        It follows from the observed information, the curvature of the likelihood. For a policy that is not linked to a
        fixed one by games, it is an interval of the distance from the mean of its group. A fixed rating has no
        uncertainty; without games the interval is infinite. With draws it is wider than necessary.

        Args:
            player: Policy id.
            confidence: Probability with which it should contain the true rating.

        Returns:
            The lower and the upper end.

        Raises:
            ArgumentError: ``confidence`` is not between 0 and 1.
        """
        if not 0 < confidence < 1:
            raise ArgumentError(f"confidence must be above 0 and below 1, got {confidence!r}")
        rating = self.rating(player)
        if player in self.fixed:
            return rating, rating
        error = self._fitted().errors.get(player, math.inf)
        half = _POINTS * error * NormalDist().inv_cdf(0.5 + confidence / 2)
        return rating - half, rating + half

    def expected(self, one: str, other: str) -> float:
        return expected_score(self.rating(one), self.rating(other))

    @property
    def players(self) -> tuple[str, ...]:
        return tuple(self._players)

    def copy(self, old: str, new: str) -> None:
        """Let a policy start with another policy's rating, e.g. a snapshot with its learner's.

        It has that rating until it has played; then the two count as having drawn once, and its own games decide the
        rest.
        """
        if old != new:
            self.forget(new)
            self._copies[new] = old
        self._players.setdefault(new)

    def forget(self, player: str) -> None:
        """Reset a policy to the initial rating; its games also no longer count for others."""
        results, self._results = self._results, {}
        for (drawn, worse), times in results.items():
            rest = [tuple(side for side in sides if player not in side) for sides in (drawn, worse)]
            if rest[0]:
                self._note((rest[0], rest[1]), times)
        self._copies = {new: old for new, old in self._copies.items() if player not in (new, old)}
        self._players.pop(player, None)
        self._likelihood = self._fit = None

    def state_dict(self) -> dict[str, Any]:
        return {
            "players": list(self._players),
            "results": [
                [[list(side) for side in drawn], [list(side) for side in worse], times]
                for (drawn, worse), times in self._results.items()
            ],
            "copies": [[new, old] for new, old in self._copies.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        try:
            players = {str(name): None for name in state["players"]}
            results = {(_sides(drawn), _sides(worse)): int(times) for drawn, worse, times in state["results"]}
            if any(times < 1 for times in results.values()):
                raise ValueError("a result with a count below 1")
            copies = {str(new): str(old) for new, old in state["copies"]}
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(f"expected the state of a BradleyTerry: {error!r}") from error
        self._players, self._results, self._copies = players, results, copies
        self._likelihood = self._fit = None


def _sides(data: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(map(str, side)) for side in data)

"""`Ratings`: the base class of all ratings."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from marlvec.errors import ArgumentError
from marlvec.selfplay.game import Game

__all__ = ["Players", "Ratings", "begin_of", "expected_score"]

Players = Sequence[str | Sequence[str]]
"""For each side, one policy id, or several that play it together."""


class Ratings(ABC):
    """One number per policy, from its games.

    Games may have two or more sides, and draws. A policy without games has the initial rating. Equal games in equal
    order give equal ratings.
    """

    def add(self, game: Game) -> None:
        """Add a game."""
        self.rate(game.players, game.scores)

    def rate(self, players: Players, scores: Sequence[float]) -> None:
        """Add the result of a game for all players.

        Args:
            players: For each side, the policies that played it.
            scores: For each side; higher is better, equal scores are a draw.

        Raises:
            ArgumentError: Not one score for each of two or more sides, a score is NaN, or a side has no players.
        """
        teams = [(side,) if isinstance(side, str) else tuple(side) for side in players]
        if len(teams) != len(scores) or len(teams) < 2 or not all(teams):
            raise ArgumentError(f"expected one score for each of two or more sides, got {players!r} and {scores!r}")
        if any(math.isnan(score) for score in scores):
            raise ArgumentError(f"scores must not be NaN, got {scores!r}")
        self._rate(teams, [float(score) for score in scores])

    @abstractmethod
    def _rate(self, teams: Sequence[tuple[str, ...]], scores: Sequence[float]) -> None: ...

    @abstractmethod
    def rating(self, player: str) -> float:
        """Return the rating of a policy (``player``), the initial one if it was never rated; more is better."""

    @abstractmethod
    def expected(self, one: str, other: str) -> float:
        """Return the expected score of policy ``one`` against policy ``other``: 1 a sure win, 0.5 an even game."""

    @property
    @abstractmethod
    def players(self) -> tuple[str, ...]:
        """All rated policies, in order of their first rating."""

    def ranking(self) -> list[tuple[str, float]]:
        """Return all policies with their ratings, the best first."""
        return sorted(((name, self.rating(name)) for name in self.players), key=lambda pair: -pair[1])

    @abstractmethod
    def copy(self, old: str, new: str) -> None:
        """Let policy ``new`` start with the rating of policy ``old``, e.g. a snapshot with its learner's."""

    @abstractmethod
    def forget(self, player: str) -> None:
        """Reset a policy to the initial rating.

        Args:
            player: The policy's id.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the ratings as plain data."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state from `state_dict`.

        Raises:
            ArgumentError: Not such a state; nothing has changed.
        """

    def __repr__(self) -> str:
        best = ", ".join(f"{name} {rating:.1f}" for name, rating in self.ranking()[:3])
        return f"{type(self).__name__}({len(self.players)} players{': ' * bool(best)}{best})"


def begin_of(fixed: Mapping[str, float] | None, initial: float | None) -> tuple[dict[str, float], float]:
    """Return the fixed ratings and the initial one: the given one, the mean of the fixed ones, or 1000."""
    known = {name: float(rating) for name, rating in (fixed or {}).items()}
    begin = float(initial) if initial is not None else math.fsum(known.values()) / len(known) if known else 1000.0
    if not all(map(math.isfinite, (begin, *known.values()))):
        raise ArgumentError(f"ratings must be finite, got fixed={fixed!r} and initial={initial!r}")
    return known, begin


def expected_score(one: float, other: float) -> float:
    """Return the expected score on Elo's scale, where 400 points are odds of ten to one."""
    # Beyond 40 powers of ten the result equals 1 in floats; without the bound it would overflow.
    return 1.0 / (1.0 + math.pow(10.0, min(max((other - one) / 400.0, -40.0), 40.0)))

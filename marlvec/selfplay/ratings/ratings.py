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
"""Who played each side: a policy id, or several that played it together."""


class Ratings(ABC):
    """One number per policy, by its games.

    Games of two sides and of more, with draws. A policy that was never rated stands where all begin. Two runs that see
    the same games in the same order get the same numbers.
    """

    def add(self, game: Game) -> None:
        """Take in a game."""
        self.rate(game.players, game.scores)

    def rate(self, players: Players, scores: Sequence[float]) -> None:
        """Take in the result of a game, for all that took part.

        Args:
            players: Per side, who played it.
            scores: Per side; the higher was better, equal ones drew.

        Raises:
            ArgumentError: Not one score for each of two or more sides, or a NaN, or a side without players.
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
        """How well a policy plays; more is better.

        Args:
            player: The policy's id.

        Returns:
            Its rating; that of a new policy where it was never rated.
        """

    @abstractmethod
    def expected(self, one: str, other: str) -> float:
        """What one policy may expect of a game against another: 1 is a sure win, 0.5 an even game.

        Args:
            one: Its id.
            other: The opponent's.

        Returns:
            From 0 to 1.
        """

    @property
    @abstractmethod
    def players(self) -> tuple[str, ...]:
        """All that have a rating of their own, in the order they came."""

    def ranking(self) -> list[tuple[str, float]]:
        """All and their ratings, the best first."""
        return sorted(((name, self.rating(name)) for name in self.players), key=lambda pair: -pair[1])

    @abstractmethod
    def copy(self, old: str, new: str) -> None:
        """Have a policy begin where another one stands: a snapshot, where its learner is.

        Args:
            old: Id of the policy that has a rating.
            new: Id of the one that begins.
        """

    @abstractmethod
    def forget(self, player: str) -> None:
        """Have a policy stand again where all begin.

        Args:
            player: The policy's id.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything, as plain data."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave.

        Raises:
            ArgumentError: It is something else; nothing has changed.
        """

    def __repr__(self) -> str:
        best = ", ".join(f"{name} {rating:.1f}" for name, rating in self.ranking()[:3])
        return f"{type(self).__name__}({len(self.players)} players{': ' * bool(best)}{best})"


def begin_of(fixed: Mapping[str, float] | None, initial: float | None) -> tuple[dict[str, float], float]:
    """Ratings that are fixed, and where all others begin: on the same scale, so in the middle of those, or at 1000.

    Raises:
        ArgumentError: A number is NaN or infinite.
    """
    known = {name: float(rating) for name, rating in (fixed or {}).items()}
    begin = float(initial) if initial is not None else math.fsum(known.values()) / len(known) if known else 1000.0
    if not all(map(math.isfinite, (begin, *known.values()))):
        raise ArgumentError(f"ratings must be finite, got fixed={fixed!r} and initial={initial!r}")
    return known, begin


def expected_score(one: float, other: float) -> float:
    """What a game brings on Elo's scale, where 400 points make ten to one."""
    # Beyond 40 powers of ten a float cannot distinguish it from 1; without a bound it would overflow.
    return 1.0 / (1.0 + math.pow(10.0, min(max((other - one) / 400.0, -40.0), 40.0)))

"""`MatchResult` and `WinRate`: the score of a match, and win rates with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

from marlvec.errors import ArgumentError
from marlvec.selfplay.game import Game
from marlvec.selfplay.ratings import Ratings
from marlvec.selfplay.results.match_table import MatchTable
from marlvec.selfplay.results.whole_table import Column, WholeTable

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["WinRate", "MatchResult"]


@dataclass(frozen=True, slots=True)
class WinRate:
    """Mean score over some games, with a confidence interval.

    Attributes:
        mean: Mean score: wins 1, draws 0.5, losses 0; NaN without games.
        low, high: Bounds of Wilson's interval. With draws it is wider than necessary.
        games: Number of games.
        wins, draws, losses: Number of scores above, at and below 0.5.
    """

    mean: float
    low: float
    high: float
    games: int
    wins: int
    draws: int
    losses: int

    @classmethod
    def of(cls, scores: Sequence[float], confidence: float = 0.95) -> WinRate:
        """Compute a win rate from scores, one per game, each from 0 to 1.

        Returns:
            The rate with its interval.

        Raises:
            ArgumentError: ``confidence`` is not between 0 and 1.
        """
        if not 0 < confidence < 1:
            raise ArgumentError(f"confidence must be above 0 and below 1, got {confidence!r}")
        n = len(scores)
        if not n:
            return cls(math.nan, 0.0, 1.0, 0, 0, 0, 0)
        mean = math.fsum(scores) / n
        z2 = NormalDist().inv_cdf(0.5 + confidence / 2) ** 2
        centre = (mean + z2 / (2 * n)) / (1 + z2 / n)
        half = math.sqrt(z2 * (mean * (1 - mean) / n + z2 / (4 * n * n))) / (1 + z2 / n)
        wins, losses = sum(score > 0.5 for score in scores), sum(score < 0.5 for score in scores)
        low, high = max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half))
        return cls(mean, low, high, n, wins, n - wins - losses, losses)

    def __str__(self) -> str:
        if not self.games:
            return "no games"
        return f"{self.mean:.1%} [{self.low:.1%}, {self.high:.1%}] of {self.games}"


@dataclass(frozen=True)
class MatchResult:
    """The games of a match, and their statistics.

    Attributes:
        players: Ids of the policies.
        sides: Names of the sides.
        games: All games, in the order of the schedule.
        lost: How often a game was lost to a fault of its env, and repeated.
        unplayed: Games that were not played, because their env was masked after faults.
        confidence: Level of the intervals.
    """

    players: tuple[str, ...]
    sides: tuple[str, ...]
    games: tuple[Game, ...]
    lost: int = 0
    unplayed: int = 0
    confidence: float = 0.95

    @property
    def draws(self) -> int:
        """Games in which all sides had the same score."""
        return sum(game.is_draw for game in self.games)

    @property
    def truncations(self) -> int:
        """Games that were cut short."""
        return sum(game.truncated for game in self.games)

    def unmoved(self, player: str | None = None) -> int:
        """Count games that were over before a ``player``'s (None: any policy's) first move on some side."""
        return sum(
            any(player is None or player in game.players[game.sides.index(side)] for side in game.unmoved)
            for game in self.games
        )

    def win_rate(self, player: str, against: str | None = None, *, side: str | None = None) -> WinRate:
        """Compute a policy's win rate.

        Args:
            player: Its id.
            against: Count only games against this opponent; None: all.
            side: Count only games in which the policy played this side; None: all.

        Returns:
            Games, wins, draws and losses, and the rate with its interval.
        """
        self._check(player, against, side)
        scores = []
        for game in self.games:
            if side is not None and player not in game.players[game.sides.index(side)]:
                continue
            if (score := game.score_of(player, against)) is not None:
                scores.append(score)
        return WinRate.of(scores, self.confidence)

    def _check(self, player: str, against: str | None, side: str | None) -> None:
        for name in (player, against):
            if name is not None and name not in self.players:
                raise KeyError(f"no player {name!r}; the players are {list(self.players)}")
        if side is not None and side not in self.sides:
            raise KeyError(f"no side {side!r}; the sides are {list(self.sides)}")

    @property
    def table(self) -> MatchTable:
        """All games in one table."""
        table = MatchTable()
        for game in self.games:
            table.add(game)
        return table

    def rate(self, ratings: Ratings) -> Ratings:
        """Add all games to ratings, in the order of the schedule; return the ratings."""
        for game in self.games:
            ratings.add(game)
        return ratings

    def __repr__(self) -> str:
        return f"<MatchResult of {self._summary()}>"

    def _summary(self) -> str:
        parts = [f"{len(self.games)} games", f"{self.draws} drawn", f"{self.truncations} truncated"]
        parts += [f"{self.unmoved()} over before a side's first move"] * bool(self.unmoved())
        parts += [f"{self.lost} lost and repeated"] * bool(self.lost)
        parts += [f"{self.unplayed} not played"] * bool(self.unplayed)
        return ", ".join(parts)

    def __rich__(self) -> RenderableType:
        """Render win rates with their intervals, in total and by side, and the table of matches."""
        from rich.console import Group
        from rich.text import Text

        columns: list[Column] = [("policy", "left")]
        names = ("win rate", f"{self.confidence:.0%} interval", "wins", "draws", "losses")
        columns += [(name, "right") for name in (*names, *(f"as {side}" for side in self.sides))]
        rows: list[list[str | Text]] = []
        for player in sorted(self.players, key=lambda name: -self.win_rate(name).mean):
            rate = self.win_rate(player)
            interval = f"{rate.low:.1%} – {rate.high:.1%}"
            counts = (str(rate.wins), str(rate.draws), str(rate.losses))
            sides = (_share(self.win_rate(player, side=side)) for side in self.sides)
            rows.append([Text(player, "bold cyan"), _share(rate), interval, *counts, *sides])
        parts: Sequence[RenderableType] = [Text(self._summary()), WholeTable(columns, rows)]
        return Group(*parts, self.table) if len(self.players) > 2 else Group(*parts)


def _share(rate: WinRate) -> str:
    return f"{rate.mean:.1%}" if rate.games else "–"

"""`MatchTable`: wins, draws and losses of every pair of players."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from marlvec.errors import ArgumentError
from marlvec.selfplay.game import Game
from marlvec.selfplay.results.whole_table import Column, WholeTable

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["MatchTable", "WinCount"]


@dataclass(frozen=True, slots=True)
class WinCount:
    """Wins, draws and losses; whole numbers where nothing decays.

    Attributes:
        wins: How many.
        draws: Likewise.
        losses: Likewise.
    """

    wins: float = 0.0
    draws: float = 0.0
    losses: float = 0.0

    @property
    def games(self) -> float:
        """How many in all."""
        return self.wins + self.draws + self.losses

    @property
    def win_rate(self) -> float:
        """Wins and half the draws, as a share of the games; NaN where there were none."""
        return (self.wins + self.draws / 2) / self.games if self.games else math.nan

    def __sub__(self, other: WinCount) -> WinCount:
        return WinCount(self.wins - other.wins, self.draws - other.draws, self.losses - other.losses)


class MatchTable:
    """Wins, draws and losses of each policy against each other one.

    With more than two sides, each pair of them is a result of its own. A policy against itself is none.

    Args:
        decay: What a result counts after the next one of the same two: 1 keeps all, 0.99 forgets slowly, so that the
            table follows a policy that learns.

    Raises:
        ArgumentError: ``decay`` is not above 0 and at most 1.

    Attributes:
        decay: As given.
    """

    def __init__(self, decay: float = 1.0) -> None:
        if not 0 < decay <= 1:
            raise ArgumentError(f"decay must be above 0 and at most 1, got {decay!r}")
        self.decay = decay
        self._pairs: dict[tuple[str, str], WinCount] = {}  # both ways round
        self._totals: dict[str, WinCount] = {}  # never decay

    def __repr__(self) -> str:
        return f"MatchTable({len(self._totals)} players, {len(self._pairs) // 2} pairings)"

    @property
    def players(self) -> tuple[str, ...]:
        """All that have a result, in the order they came."""
        return tuple(self._totals)

    def add(self, game: Game) -> None:
        """Take in a game."""
        for i, j in combinations(range(len(game.players)), 2):
            for one in game.players[i]:
                for other in game.players[j]:
                    self.add_result(one, other, game.scores[i] - game.scores[j])

    def add_result(self, one: str, other: str, margin: float) -> None:
        """Take in one result.

        Args:
            one: A policy.
            other: Its opponent; a result against itself changes nothing.
            margin: Above 0: ``one`` won; 0: a draw; below 0: ``other`` won.
        """
        if one == other:
            return
        sign = (margin > 0) - (margin < 0)
        for a, b, won in ((one, other, sign), (other, one, -sign)):
            new = WinCount(float(won > 0), float(won == 0), float(won < 0))
            self._pairs[a, b] = _plus(self._pairs.get((a, b), WinCount()), new, self.decay)
            self._totals[a] = _plus(self._totals.get(a, WinCount()), new, 1.0)

    def win_count(self, one: str, other: str) -> WinCount:
        """Results of one policy against another, less what has decayed; of no games where they never met.

        Args:
            one: Its id.
            other: The opponent's.

        Returns:
            Wins, draws and losses; fractions where they have decayed.
        """
        return self._pairs.get((one, other), WinCount())

    def total(self, player: str) -> WinCount:
        """All results of a policy since it came, nothing decayed.

        Args:
            player: The policy's id.

        Returns:
            Wins, draws and losses.
        """
        return self._totals.get(player, WinCount())

    def win_rate(self, one: str, other: str) -> float:
        """Wins and half the draws of one policy against another, as a share; NaN where they never met.

        Args:
            one: Its id.
            other: The opponent's.

        Returns:
            From 0 to 1, or NaN.
        """
        return self.win_count(one, other).win_rate

    def payoffs(self, players: Sequence[str] | None = None, *, unknown: float = math.nan) -> NDArray[np.float64]:
        """Win rates of all against all: (P, P), row against column, 0.5 on the diagonal.

        Args:
            players: Whose; None: all of them.
            unknown: Stands where two never met.

        Returns:
            (P, P) float64.
        """
        names = self.players if players is None else tuple(players)
        rates = np.full((len(names), len(names)), 0.5)
        for i, one in enumerate(names):
            for j, other in enumerate(names):
                if i != j:
                    rate = self.win_rate(one, other)
                    rates[i, j] = unknown if math.isnan(rate) else rate
        return rates

    def forget(self, player: str) -> None:
        """Drop all of a policy's results; others keep their totals.

        Args:
            player: The policy's id.
        """
        self._totals.pop(player, None)
        self._pairs = {pair: count for pair, count in self._pairs.items() if player not in pair}

    # --- to look at, and to keep

    def __rich__(self) -> RenderableType:
        """For the terminal: wins, draws and losses, row against column."""
        from rich.console import Group
        from rich.text import Text

        names = self.players
        columns: list[Column] = [("", "left"), *((name, "right") for name in (*names, "win rate"))]
        rows: list[list[str | Text]] = []
        for one in names:
            cells = [_cell(self.win_count(one, other)) for other in names]
            rows.append([Text(one, "bold cyan"), *cells, _share(self.total(one).win_rate)])
        return Group(Text("wins–draws–losses", "italic"), WholeTable(columns, rows))

    def state_dict(self) -> dict[str, Any]:
        """Everything, as plain data."""
        return {
            "pairs": [[a, b, t.wins, t.draws, t.losses] for (a, b), t in self._pairs.items()],
            "totals": [[a, t.wins, t.draws, t.losses] for a, t in self._totals.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave.

        Raises:
            ArgumentError: It is something else; nothing has changed.
        """
        try:
            pairs = {(a, b): WinCount(*numbers) for a, b, *numbers in state["pairs"]}
            totals = {a: WinCount(*numbers) for a, *numbers in state["totals"]}
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(f"expected the state of a MatchTable: {error!r}") from error
        self._pairs, self._totals = pairs, totals


def _plus(old: WinCount, new: WinCount, decay: float) -> WinCount:
    return WinCount(old.wins * decay + new.wins, old.draws * decay + new.draws, old.losses * decay + new.losses)


def _cell(count: WinCount) -> str:
    return f"{count.wins:.4g}–{count.draws:.4g}–{count.losses:.4g}" if count.games else "·"


def _share(rate: float) -> str:
    return "·" if math.isnan(rate) else f"{rate:.0%}"

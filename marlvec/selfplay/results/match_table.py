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
    """Wins, draws and losses; whole numbers without decay.

    Attributes:
        wins: Number of wins.
        draws: Number of draws.
        losses: Number of losses.
    """

    wins: float = 0.0
    draws: float = 0.0
    losses: float = 0.0

    @property
    def games(self) -> float:
        """Number of games."""
        return self.wins + self.draws + self.losses

    @property
    def win_rate(self) -> float:
        """Wins plus half the draws, as a share of the games; NaN without games."""
        return (self.wins + self.draws / 2) / self.games if self.games else math.nan

    def __sub__(self, other: WinCount) -> WinCount:
        return WinCount(self.wins - other.wins, self.draws - other.draws, self.losses - other.losses)


class MatchTable:
    """Wins, draws and losses of each policy against each other policy.

    With more than two sides, each pair of sides counts as one result. Results of a policy against itself are ignored.

    Args:
        decay: Weight of earlier results of a pair after each new one: 1 keeps all, 0.99 forgets slowly, so that the
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
        self._pairs: dict[tuple[str, str], WinCount] = {}  # in both orders
        self._totals: dict[str, WinCount] = {}  # never decay

    def __repr__(self) -> str:
        return f"MatchTable({len(self._totals)} players, {len(self._pairs) // 2} pairings)"

    @property
    def players(self) -> tuple[str, ...]:
        """All policies with a result, in order of their first one."""
        return tuple(self._totals)

    def add(self, game: Game) -> None:
        """Add a game."""
        for i, j in combinations(range(len(game.players)), 2):
            for one in game.players[i]:
                for other in game.players[j]:
                    self.add_result(one, other, game.scores[i] - game.scores[j])

    def add_result(self, one: str, other: str, margin: float) -> None:
        """Add one result.

        Args:
            one: A policy.
            other: Its opponent; a result of a policy against itself is ignored.
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
        """Return the results of policy ``one`` against ``other``, fractions with decay; zeros if they never met."""
        return self._pairs.get((one, other), WinCount())

    def total(self, player: str) -> WinCount:
        """Return all results of a policy (``player``), without decay."""
        return self._totals.get(player, WinCount())

    def win_rate(self, one: str, other: str) -> float:
        """Return wins plus half the draws of policy ``one`` against ``other``, as a share; NaN if they never met."""
        return self.win_count(one, other).win_rate

    def payoffs(self, players: Sequence[str] | None = None, *, unknown: float = math.nan) -> NDArray[np.float64]:
        """Return the win rates of all against all: (P, P), row against column, 0.5 on the diagonal.

        Args:
            players: Policy ids; None: all.
            unknown: Value for pairs that never met.

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
        """Drop all results of a policy (``player``); the totals of its opponents stay."""
        self._totals.pop(player, None)
        self._pairs = {pair: count for pair, count in self._pairs.items() if player not in pair}

    # --- display and state

    def __rich__(self) -> RenderableType:
        """Render wins, draws and losses, row against column, for the terminal."""
        from rich.console import Group
        from rich.text import Text

        names = self.players
        columns: list[Column] = [("", "left"), *((name, "right") for name in (*names, "win rate"))]
        rows: list[list[str | Text]] = []
        for one in names:
            cells = [_cell(self.win_count(one, other)) for other in names]
            rows.append([Text(one, "bold cyan"), *cells, _share_text(self.total(one).win_rate)])
        return Group(Text("wins–draws–losses", "italic"), WholeTable(columns, rows))

    def state_dict(self) -> dict[str, Any]:
        """Return the table as plain data."""
        return {
            "pairs": [[a, b, t.wins, t.draws, t.losses] for (a, b), t in self._pairs.items()],
            "totals": [[a, t.wins, t.draws, t.losses] for a, t in self._totals.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state from `state_dict`.

        Raises:
            ArgumentError: Not such a state; nothing has changed.
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


def _share_text(rate: float) -> str:
    return "·" if math.isnan(rate) else f"{rate:.0%}"

"""Rules for when a pool takes a snapshot of a learner, and for which opponent leaves a full pool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from marlvec.errors import ArgumentError
from marlvec.selfplay.opponents.opponent import Opponent
from marlvec.selfplay.ratings import Ratings
from marlvec.selfplay.results.match_table import MatchTable, WinCount

__all__ = ["Every", "EvictionRule", "oldest", "OnWinRate", "SnapshotRule", "thinned", "weakest"]


class SnapshotRule(ABC):
    """Decides when to take a snapshot of a learner."""

    @abstractmethod
    def is_due(self, learner: str, step: int) -> bool:
        """Return whether to take a snapshot of a learner at this step of the training, e.g. in env steps."""

    @abstractmethod
    def taken(self, learner: str, step: int) -> None:
        """Note that a snapshot of a learner was taken at this step, because of this rule or another one."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the rule's state as plain data."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state from `state_dict`."""


class Every(SnapshotRule):
    """Due when ``steps`` steps have passed since the last snapshot, or since the beginning.

    Args:
        steps: Number of steps.

    Raises:
        ArgumentError: ``steps`` is less than 1.
    """

    def __init__(self, steps: int) -> None:
        if steps < 1:
            raise ArgumentError(f"steps must be at least 1, got {steps!r}")
        self.steps = steps
        self._last: dict[str, int] = {}

    def is_due(self, learner: str, step: int) -> bool:
        return step - self._last.get(learner, 0) >= self.steps

    def taken(self, learner: str, step: int) -> None:
        self._last[learner] = step

    def state_dict(self) -> dict[str, Any]:
        return {"last": dict(self._last)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._last = dict(state["last"])


class OnWinRate(SnapshotRule):
    """Due when a learner's win rate against others since the last snapshot is high enough.

    Args:
        table: The table that counts its games.
        win_rate: Required share of wins, draws counting half.
        games: Minimum number of games.

    Raises:
        ArgumentError: ``win_rate`` is not between 0 and 1, or ``games`` less than 1.
    """

    def __init__(self, table: MatchTable, win_rate: float = 0.7, games: int = 100) -> None:
        if not 0 < win_rate <= 1 or games < 1:
            raise ArgumentError(
                f"win_rate, games: expected a rate in (0, 1] and at least 1 game, got {win_rate}, {games}"
            )
        self.table, self.win_rate, self.games = table, win_rate, games
        self._before: dict[str, WinCount] = {}

    def is_due(self, learner: str, step: int) -> bool:
        since = self.table.total(learner) - self._before.get(learner, WinCount())
        return since.games >= self.games and since.win_rate >= self.win_rate

    def taken(self, learner: str, step: int) -> None:
        self._before[learner] = self.table.total(learner)

    def state_dict(self) -> dict[str, Any]:
        return {"before": {name: [t.wins, t.draws, t.losses] for name, t in self._before.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._before = {name: WinCount(*numbers) for name, numbers in state["before"].items()}


EvictionRule = Callable[[Sequence[Opponent]], Opponent]
"""Function of the opponents that may leave, oldest first, to the one that leaves. The newest is included."""


def oldest(opponents: Sequence[Opponent]) -> Opponent:
    """Evict the opponent that joined first.

    Args:
        opponents: Opponents that may leave, oldest first.

    Returns:
        The opponent that leaves.
    """
    return opponents[0]


def thinned(opponents: Sequence[Opponent]) -> Opponent:
    """Evict the snapshot whose removal leaves the smallest gap in training steps; never the first or the newest.

    Args:
        opponents: Opponents that may leave, oldest first.

    Returns:
        The opponent that leaves.
    """
    if len(opponents) < 3:
        return opponents[0]
    steps = [opponent.step for opponent in opponents]
    gaps = [after - before for before, after in pairwise(steps)]
    around = [before + after for before, after in pairwise(gaps)]
    return opponents[1 + around.index(min(around))]


def weakest(ratings: Ratings) -> EvictionRule:
    """Return a rule that evicts the lowest rating; of equal ones the oldest. Never the newest, with few games so far.

    Args:
        ratings: The ratings, read at each eviction.

    Returns:
        The rule, for `OpponentPool`.
    """

    def rule(opponents: Sequence[Opponent]) -> Opponent:
        return min(opponents[:-1] or opponents, key=lambda opponent: ratings.rating(opponent.opponent_id))

    return rule

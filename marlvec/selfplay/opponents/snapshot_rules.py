"""Rules for when a learner's snapshot is added to a pool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from marlvec.errors import ArgumentError
from marlvec.selfplay.results.match_table import MatchTable, WinCount

__all__ = ["Every", "OnWinRate", "SnapshotRule"]


class SnapshotRule(ABC):
    """Says when it is time for a snapshot of a learner."""

    @abstractmethod
    def is_due(self, learner: str, step: int) -> bool:
        """Whether it is time.

        Args:
            learner: The learner's policy id.
            step: How far training is, e.g. in env steps.

        Returns:
            True where a snapshot is to be taken now.
        """

    @abstractmethod
    def taken(self, learner: str, step: int) -> None:
        """A snapshot was taken, on this rule's account or another's.

        Args:
            learner: The learner's policy id.
            step: How far training was.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What it remembers, as plain data."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""


class Every(SnapshotRule):
    """A snapshot whenever so many steps have gone by since the last one, or since the beginning.

    Args:
        steps: How many.

    Raises:
        ArgumentError: Less than 1.
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
    """A snapshot when a learner has won so much of its games against others since the last one.

    Args:
        table: Where its games are counted.
        win_rate: The share of wins, draws being half, that is enough.
        games: How many games there must be for it.

    Raises:
        ArgumentError: ``win_rate`` is not between 0 and 1, or ``games`` less than 1.
    """

    def __init__(self, table: MatchTable, win_rate: float = 0.7, games: int = 100) -> None:
        if not 0 < win_rate <= 1 or games < 1:
            raise ArgumentError(f"expected a win_rate within (0, 1] and games of at least 1, got {win_rate}, {games}")
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

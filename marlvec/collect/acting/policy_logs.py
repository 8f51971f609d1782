"""`PolicyLogs`: the logs of all policies of a collector, and transitions of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.acting.policy_runner import PolicyRunner
from marlvec.collect.storage.row_log import RowLog, RowNumbers

__all__ = ["EVERYTHING", "Chosen", "PolicyLogs"]

IntArray = NDArray[np.int64]
Chosen: TypeAlias = Mapping[PolicyRunner | None, RowNumbers]
"""Row numbers of some transitions, per runner that keeps rows; None: of those that are not read."""
EVERYTHING = (np.iinfo(np.int64).max, 0)
"""The (round, lane) of which all transitions are closed before."""


class PolicyLogs:
    """Counts and drops transitions of all policies. ``runners`` may change; ``unread``: rows counted alone."""

    def __init__(self, runners: Mapping[int, PolicyRunner], unread: RowLog) -> None:
        self._runners, self.unread = runners, unread

    def all(self) -> dict[PolicyRunner | None, RowLog]:
        """The logs of all runners that keep rows, and under None that of the others."""
        runners = [runner for runner in self._runners.values() if runner.keeps_rows]
        return {**{runner: runner.log for runner in runners}, None: self.unread}

    # --- looking

    def closed(self) -> Chosen:
        """Return all closed transitions."""
        return {runner: log.closed() for runner, log in self.all().items()}

    def of_episodes(self, eps_ids: Sequence[int]) -> Chosen:
        """Closed transitions of these episodes."""
        wanted = np.array(eps_ids, np.int64)
        return {runner: log.closed(wanted) for runner, log in self.all().items()}

    def closed_until(self, last: tuple[int, int]) -> Chosen:
        """Transitions that were closed up to this (round, lane)."""
        if last is EVERYTHING:
            return self.closed()
        return {runner: log.closed_until(last) for runner, log in self.all().items()}

    def last_of_first(self, amount: int) -> tuple[int, int]:
        """Round and lane of the last of the ``amount`` transitions that were closed first: by round, env and agent."""
        orders = [log.closing_order(log.closed()) for log in self.all().values()]
        rounds, lanes = (np.concatenate(part) for part in zip(*orders, strict=True))
        last = np.lexsort((lanes, rounds))[amount - 1]
        return int(rounds[last]), int(lanes[last])

    def holds(self, eps_id: int) -> bool:
        """Whether rows of an episode are stored."""
        wanted = np.array([eps_id])
        return any(len(log.of_episodes(wanted)) for log in self.all().values())

    @property
    def open_lanes(self) -> IntArray:
        """Lanes that wait for an action, or for its outcome."""
        return np.concatenate([log.open_lanes for log in self.all().values()])

    # --- dropping

    def forget(self, chosen: Chosen) -> None:
        """Drop these transitions. After an interrupt, call again with the transitions that are still stored."""
        logs = self.all()
        for runner, numbers in chosen.items():
            logs[runner].forget(numbers)

    def lose(self, eps_ids: IntArray) -> int:
        """Drop all rows of some episodes; return how many transitions of them were closed."""
        closed = 0
        for log in self.all().values():
            closed += len(log.closed(eps_ids))
            log.forget(log.of_episodes(eps_ids))
        return closed

    def keep_ended(self, ended_N: IntArray) -> int:
        """Drop all rows but those of episodes with ids below their env's, (N,); return how many transitions stay."""
        for runner in self._runners.values():
            runner.keep_ended(ended_N)
        self.unread.keep_ended(ended_N)
        return sum(len(log.closed()) for log in self.all().values())

    def clear(self) -> None:
        """Drop all rows."""
        for runner in self._runners.values():
            runner.clear()
        self.unread.clear()

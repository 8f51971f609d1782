"""Where a collector's time goes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TIMERS", "Timer"]

TIMERS = ("inference", "action_connectors", "env_wait", "agent_connectors", "ingest", "batch", "callbacks")
"""Policies; both sides' connectors; waiting for envs; book-keeping; batches, with their connectors; callbacks."""


@dataclass(slots=True)
class Timer:
    """Seconds spent in one place, over the life of a collector.

    Attributes:
        seconds: Together.
        calls: Number of times.
    """

    seconds: float = 0.0
    calls: int = 0

    def add(self, seconds: float) -> None:
        """Count one call."""
        self.seconds += seconds
        self.calls += 1

    @property
    def mean(self) -> float:
        """Seconds a call; 0 before the first."""
        return self.seconds / self.calls if self.calls else 0.0

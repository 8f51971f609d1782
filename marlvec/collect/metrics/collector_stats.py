"""`CollectorStats`: counts of one of many collectors."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CollectorStats"]


@dataclass(frozen=True, slots=True)
class CollectorStats:
    """Counts of one of many collectors, up to the last delivered batch.

    Attributes:
        index: Its number.
        restarts: How often it was restarted.
        lag: Versions of the weights that its oldest fragment in its last batch was behind.
        env_steps: Env steps in batches, over all restarts.
        seconds_waiting: Seconds it waited for a request.
        seconds_working: Seconds it worked on requests.
    """

    index: int
    restarts: int = 0
    lag: int = 0
    env_steps: int = 0
    seconds_waiting: float = 0.0
    seconds_working: float = 0.0

    @property
    def waiting(self) -> float:
        """Share of its time that it waited for requests, between 0 and 1."""
        total = self.seconds_waiting + self.seconds_working
        return self.seconds_waiting / total if total else 0.0

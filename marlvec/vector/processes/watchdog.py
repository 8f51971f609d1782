"""`Watchdog`: how long each worker has been busy with which env, to notice hung envs.

Every worker writes into one number which of its envs it is at work on, before it begins and when it is done. That costs
it nothing to speak of, shows which env a worker died in, and lets the parent see from outside that it makes no progress
where nothing inside could: in an env that holds the interpreter lock, ignores signals, or was stopped.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["PROGRESS_BYTES", "Watchdog", "progress_of"]

PROGRESS_BYTES = 64
"""A cache line for each worker, at the head of the shared memory."""

_LOOK = 0.2  # seconds between two looks, at most


def progress_of(memory: Any, num_workers: int) -> NDArray[np.int64]:
    """(W,) view of each worker's number at the head of the shared memory."""
    head = np.frombuffer(memory, np.int64, num_workers * PROGRESS_BYTES // 8)
    return head.reshape(num_workers, PROGRESS_BYTES // 8)[:, 0]


class Watchdog:
    """Notices workers that make no progress.

    Args:
        timeout: Seconds that one env may take.

    Attributes:
        timeout: As given.
        pause: Seconds until the next look.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.pause = min(_LOOK, timeout / 4)
        self._next_look = 0.0
        self._seen: dict[int, tuple[int, int]] = {}
        self._since: dict[int, float] = {}

    def is_due(self) -> bool:
        """Whether it is time to look."""
        return time.monotonic() >= self._next_look

    def look(self, busy: Iterable[tuple[int, int, int]]) -> list[int]:
        """Look at all workers that have something to do.

        Args:
            busy: Each one's index, the number of the request that it must answer next, and its progress.

        Returns:
            Those that have made no progress for too long. They may have answered meanwhile.
        """
        now = time.monotonic()
        hung = []
        due = now + self.pause
        seen = {}
        for w, number, progress in busy:
            seen[w] = (number, progress)
            if self._seen.get(w) != seen[w]:
                self._since[w] = now
            elif now - self._since[w] >= self.timeout:
                hung.append(w)
            due = min(due, max(now + 0.001, self._since[w] + self.timeout))
        self._seen = seen
        self._next_look = due
        return hung

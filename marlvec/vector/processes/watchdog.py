"""`Watchdog`: finds hung envs by how long each worker has been busy with the same env.

Every worker writes the index of the env it runs into shared memory, before and after each env. This costs almost
nothing, shows in which env a worker died, and finds an env that holds the interpreter lock, ignores signals, or was
stopped.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["PROGRESS_BYTES", "Watchdog", "progress_of"]

PROGRESS_BYTES = 64
"""One cache line per worker, at the head of the shared memory."""

_LOOK = 0.2  # maximum seconds between two checks


def progress_of(memory: Any, num_workers: int) -> NDArray[np.int64]:
    """Return a (W,) view of each worker's progress number at the head of the shared memory."""
    head = np.frombuffer(memory, np.int64, num_workers * PROGRESS_BYTES // 8)
    return head.reshape(num_workers, PROGRESS_BYTES // 8)[:, 0]


class Watchdog:
    """Finds workers that make no progress for ``timeout`` seconds; ``pause`` is the time until the next check."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.pause = min(_LOOK, timeout / 4)
        self._next_look = 0.0
        self._seen: dict[int, tuple[int, int]] = {}
        self._since: dict[int, float] = {}

    def is_due(self) -> bool:
        return time.monotonic() >= self._next_look

    def look(self, busy: Iterable[tuple[int, int, int]]) -> list[int]:
        """Return workers without progress for ``timeout`` seconds; they may have replied in the meantime."""
        # `busy`: per busy worker its index, the number of the request that it must answer next, and its progress.
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

"""`ThreadTeam`: threads that share one call's work; handing over costs some ten microseconds."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["ThreadTeam"]

_Results = list[tuple[BaseException, ...] | None]
_Request = tuple[Callable[[], None], int, _Results] | None


class ThreadTeam:
    """Helping threads; the caller does a share of its own.

    Args:
        num_threads: How many helpers.
    """

    def __init__(self, num_threads: int) -> None:
        self._replies: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._requests: list[queue.SimpleQueue[_Request]] = [queue.SimpleQueue() for _ in range(num_threads)]
        self._threads = [
            threading.Thread(target=_run_thread, args=(own, self._replies), name=f"marlvec-native-{w}", daemon=True)
            for w, own in enumerate(self._requests)
        ]
        for thread in self._threads:
            thread.start()
        # They know the queues alone, so that a team that was not closed leaves no thread behind for good.
        self._finalizer = weakref.finalize(self, _stop_threads, self._requests)

    def run(self, shares: Sequence[Callable[[], None]]) -> None:
        """Do all of these at once, the first one here; returns when all are done, whatever happens in one.

        Args:
            shares: At most one more than there are helpers.

        Raises:
            BaseException: What the first of them raised, or an interrupt that came meanwhile.
        """
        own, *others = shares
        results: _Results = [None] * len(others)
        for w, work in enumerate(others):
            self._requests[w].put((work, w, results))
        errors: list[BaseException] = []
        try:
            own()
        except BaseException as error:
            errors.append(error)
        while None in results:
            try:
                self._replies.get(timeout=1.0)  # a token that an interrupt lost costs no more than that
            except queue.Empty:
                continue
            except BaseException as error:  # Ctrl-C: they write into rows that the caller is about to read
                errors.append(error)
        errors += [error for result in results for error in result or ()]
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Let the threads end, and wait for that."""
        self._finalizer()
        for thread in self._threads:
            thread.join()


def _run_thread(requests: queue.SimpleQueue[_Request], replies: queue.SimpleQueue[None]) -> None:
    """What a helper does until it is stopped."""
    while (request := requests.get()) is not None:
        work, w, results = request
        try:
            work()
        except BaseException as error:
            results[w] = (error,)
        else:
            results[w] = ()
        del request, work, results  # nothing of the last call is kept alive while there is none
        replies.put(None)


def _stop_threads(requests: list[queue.SimpleQueue[Any]]) -> None:
    for own in requests:
        own.put(None)

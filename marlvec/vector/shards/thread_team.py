"""`ThreadTeam`: threads that share one call's work; passing work to a thread takes about ten microseconds."""

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
    """Helper threads; the calling thread takes a share of the work, too.

    Args:
        num_threads: Number of helpers.
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
        # The threads refer to the queues only, so that they end with a team that was not closed.
        self._finalizer = weakref.finalize(self, _stop_threads, self._requests)

    def run(self, shares: Sequence[Callable[[], None]]) -> None:
        """Run all functions in parallel, the first in this thread; return when all have ended, even if one raises.

        Args:
            shares: The functions: at most one more than there are helpers.

        Raises:
            BaseException: The first exception of a function, or an interrupt that came meanwhile.
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
                self._replies.get(timeout=1.0)  # if an interrupt loses a token, this costs one second
            except queue.Empty:
                continue
            except BaseException as error:  # Ctrl-C: still wait, since helpers write into rows that the caller reads
                errors.append(error)
        errors += [error for result in results for error in result or ()]
        if errors:
            raise errors[0]

    def close(self) -> None:
        """End the threads, and wait for them."""
        self._finalizer()
        for thread in self._threads:
            thread.join()


def _run_thread(requests: queue.SimpleQueue[_Request], replies: queue.SimpleQueue[None]) -> None:
    """Run a helper's loop until it is stopped."""
    while (request := requests.get()) is not None:
        work, w, results = request
        try:
            work()
        except BaseException as error:
            results[w] = (error,)
        else:
            results[w] = ()
        del request, work, results  # so that an idle helper keeps no object of the last call alive
        replies.put(None)


def _stop_threads(requests: list[queue.SimpleQueue[Any]]) -> None:
    for own in requests:
        own.put(None)

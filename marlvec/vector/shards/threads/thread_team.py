"""`ThreadTeam`: threads that share one call's work."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence

from marlvec.vector.shards.partition import usable_cores
from marlvec.vector.shards.threads.helper import Helper, Share, find_watch

__all__ = ["ThreadTeam"]


class ThreadTeam:
    """Helper threads; the calling thread takes a share of the work, too. One usable core: no helpers.

    A helper watches for its next share for up to 2 ms before it sleeps: waking a thread takes longer than many a share.
    It sleeps at once after two longer waits in a row, and if there are more threads than cores. After its own share the
    caller runs those that no helper has begun: a call never waits for a thread that does not run.
    """

    def __init__(self, num_helpers: int) -> None:
        cores = usable_cores()
        self.size = 1 + num_helpers if cores > 1 else 1
        self._watch = find_watch() if 1 < self.size <= cores else None
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._shares: list[Share] = []
        self._helpers = [Helper(self._watch) for _ in range(self.size - 1)]
        self._threads = [
            threading.Thread(target=helper.serve, name=f"marlvec-native-{w}", daemon=True)
            for w, helper in enumerate(self._helpers)
        ]
        # The threads refer to their helpers only, so that they end with a team that was not closed.
        self._finalizer = weakref.finalize(self, _stop, self._helpers)
        for thread in self._threads:
            thread.start()

    def run(self, works: Sequence[Callable[[], None]]) -> None:
        """Run all functions in parallel, the first in this thread; return when none is running, even if one raises."""
        # If one raises in this thread, those that no thread has begun are not run.
        if self._pid != os.getpid():
            self._start()  # a forked process has no threads but the one that forked
        self._wait()  # for shares of a call that was interrupted while it waited
        own, *others = works
        self._shares = shares = [Share(work) for work in others]
        try:
            try:
                for helper, share in zip(self._helpers, shares, strict=False):
                    helper.ask(share)
                own()
                for share in shares:
                    if share.claim("caller"):
                        share.run()
            finally:
                self._wait()
        finally:
            self._wait()  # if an interrupt ended the first
        for share in shares:
            if share.error is not None:
                raise share.error

    def _wait(self) -> None:
        """Let helpers begin no more shares, and wait for those that they have begun."""
        for share, helper in zip(self._shares, self._helpers, strict=False):
            if not share.claim("caller"):
                helper.watch_end()
                share.wait()
        self._shares = []

    def close(self) -> None:
        """End the threads, and wait for them."""
        self._finalizer()
        if self._pid == os.getpid():
            for thread in self._threads:
                thread.join()


def _stop(helpers: list[Helper]) -> None:
    for helper in helpers:
        helper.stop()

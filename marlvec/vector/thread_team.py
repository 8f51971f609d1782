"""`ThreadTeam`: threads that share one call's work; each looks for its next share for a while before it sleeps."""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from marlvec.vector.cores import usable_cores

_LOOKING = 2_000_000  # ns that a thread looks for its next share, or for the end of another's, before it sleeps
_IN_VAIN = 2  # waits in a row that were longer, after which a helper sleeps at once until a wait is short
_HANDING = 5_000  # ns that the caller leaves the interpreter lock to a helper that begins its share
_ASKED, _ENDED = 0, 16  # places in a helper's cells, on cache lines of their own
_ALL = 1 << 62  # more shares than there will be

Watch = Callable[[NDArray[np.int64], int, int, int, int, int], None]
"""The type of `marlvec.vector.watch.store_and_watch`."""


class Share:
    """One function of a call, run by the thread that claims it first, which keeps its exception in ``error``."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        self._work = work
        self._owner: dict[str, str] = {}
        self._is_over = False
        self._end = threading.Lock()
        self._end.acquire()

    def claim(self, who: Literal["caller", "helper"]) -> bool:
        """Return whether this thread is the one that may run the function; the answer never changes."""
        return self._owner.setdefault("owner", who) == who

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.error = error
        finally:
            self._is_over = True
            self._end.release()

    def wait(self) -> None:
        while not self._is_over:
            self._end.acquire(timeout=1.0)  # an interrupt can lose what was acquired: this costs one second


class Helper:
    """State that a helper thread shares with its team; without ``watch``, the thread sleeps between shares."""

    def __init__(self, watch: Watch | None) -> None:
        self._watch = watch
        self._requests: queue.SimpleQueue[tuple[int, Share] | None] = queue.SimpleQueue()
        # Numbers of the last share that was asked for and of the last that ended. They only save waiting: what there is
        # to do comes through the queue, and that a share is over is read from the share.
        self._cells: NDArray[np.int64] = np.zeros(32, np.int64)
        self._asked = 0
        self._is_awake = False

    def ask(self, share: Share) -> None:
        """Offer a share to the thread."""
        # A thread that is awake begins at once: the caller leaves it the interpreter lock for that moment, since a
        # thread that waits for the lock sleeps.
        self._asked += 1
        self._requests.put((self._asked, share))
        if self._watch is not None and self._is_awake:
            self._watch(self._cells, _ASKED, self._asked, _ENDED, self._asked, _HANDING)

    def watch_end(self) -> None:
        """Watch for the end of the share for a while."""
        if self._watch is not None:
            self._watch(self._cells, _ASKED, self._asked, _ENDED, self._asked, _LOOKING)

    def stop(self) -> None:
        """End the thread after the shares that it was offered."""
        self._requests.put(None)
        self._cells[_ASKED] = _ALL

    def serve(self) -> None:
        """Run shares until `stop`: the main function of the thread."""
        number = long_waits = 0
        while True:
            begin = time.perf_counter_ns()
            if self._watch is not None:
                self._is_awake = long_waits < _IN_VAIN
                limit = _LOOKING if self._is_awake else 0
                self._watch(self._cells, _ENDED, number, _ASKED, number + 1, limit)
                self._is_awake = bool(self._cells[_ASKED] > number)
            request = self._requests.get()
            long_waits = long_waits + 1 if time.perf_counter_ns() - begin > _LOOKING else 0
            if request is None:
                return
            number, share = request
            if share.claim("helper"):
                share.run()
            del request, share  # so that an idle thread keeps no object of the last call alive


@cache
def find_watch() -> Watch | None:
    """Return `store_and_watch`, compiled; None where numba or the calls of the system that it needs are missing."""
    if not hasattr(os, "sched_yield") or not hasattr(time, "CLOCK_MONOTONIC"):
        return None
    try:
        from numba.extending import is_jitted

        from marlvec.vector.watch import store_and_watch
    except ImportError:
        return None
    if not is_jitted(store_and_watch):  # NUMBA_DISABLE_JIT
        return None
    store_and_watch(np.zeros(1, np.int64), 0, 0, 0, 0, 0)  # compile it now, not in the first step
    return store_and_watch


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

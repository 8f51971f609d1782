"""`Background`: a thread collects the next batches while the caller learns from the last one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from marlvec.collect.batch import MultiAgentBatch
from marlvec.collect.sample_target import BatchSchedule, SampleTarget
from marlvec.errors import StateError

__all__ = ["UpdateLock", "Background"]

_LOOK_AGAIN = 1.0  # seconds; who ended by Ctrl-C may have told nobody, and one just before a wait does not end it


class UpdateLock:
    """Steps and updates never at a time; where both are wanted they take turns, and neither waits for more than one.

    Used as ``with turns:`` around each step, by the one thread that collects, and as ``with turns.updating():``. Ctrl-C
    may come at any line: whose turn it is is said by the id of a thread, which is then told so again, and what it has
    left is taken back by stores alone, or by itself when it comes back.

    Attributes:
        stepping: The thread that is in a step; may be set to None by that thread, in a ``finally`` around its steps.
    """

    def __init__(self) -> None:
        # The lock itself is entered and left in C, where no interrupt comes between. Condition's own `with` is Python.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self.stepping: int | None = None
        self._updating: int | None = None  # the thread that changes something
        self._waiting: set[int] = set()  # those that want to
        self._step_waits = False
        self._was_step = False  # whose turn it was last

    def __enter__(self) -> None:
        me = threading.get_ident()
        try:
            with self._lock:
                if self._updating == me:
                    raise StateError(
                        "collecting inside `with collector.updating()`: it waits for itself; leave it first"
                    )
                self._step_waits = True
                while self._updating is not None or (self._waiting and self._was_step):
                    self._changed.wait(_LOOK_AGAIN)
                self._step_waits, self.stepping, self._was_step = False, me, True
        except BaseException:
            self._step_waits, self.stepping = False, None
            raise

    def __exit__(self, *_: object) -> None:
        self.stepping = None
        if self._waiting:
            with self._lock:
                self._changed.notify_all()

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Wait until no step is under way, and let none begin.

        Raises:
            StateError: This thread is in the middle of a step, as callbacks are: it would wait for itself.
        """
        me = threading.get_ident()
        if self._updating == me:  # inside of another one
            yield
            return
        if self.stepping == me:
            raise StateError("updating() in the middle of a step, which waits for its end: do it in on_sample_end")
        try:
            with self._lock:
                self._waiting.add(me)
                while (
                    self.stepping is not None or self._updating is not None or (self._step_waits and not self._was_step)
                ):
                    self._changed.wait(_LOOK_AGAIN)
                self._updating, self._was_step = me, False
                self._waiting.discard(me)
                self._changed.notify_all()
            yield
        finally:
            self._waiting.discard(me)
            if self._updating == me:
                self._updating = None
            with self._lock:
                self._changed.notify_all()


Fill = Callable[[SampleTarget, Callable[[], bool]], MultiAgentBatch | None]
"""Collects a batch; None where it was told to stop before there was enough, and what there is stays."""


class Background:
    """Iterates over batches that a thread collects. Made by `Collector.background`; used in a ``with`` block.

    The thread begins a batch when fewer than ``ahead`` wait to be taken: a slow consumer makes it wait, and memory is
    bounded. What it raises comes out of the next ``next()``, before the batches that wait; none of them is lost, and
    asking again goes on from there, as calling `Collector.collect` again does.

    Leaving the block, or `close`, stops the thread between two steps of the envs and waits for it. Batches that are
    whole by then stay here, to be taken by iterating on; rows of one that is not are the beginning of the collector's
    next batch.

    Args:
        fill: Collects.
        settle: Called once the thread has ended: takes in what is still on the way.
        leave: Called once it is closed.
        course: What to collect.
        ahead: How many batches may wait or be in the making.
    """

    def __init__(
        self, fill: Fill, settle: Callable[[], None], leave: Callable[[], None], course: BatchSchedule, ahead: int
    ) -> None:
        self._fill, self._settle, self._leave, self._course, self._ahead = fill, settle, leave, course, ahead
        self._changed = threading.Condition()
        self._batches: deque[MultiAgentBatch] = deque()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None  # the last one, which may have done all and still be there
        self._collecting = False
        self._stopping = False
        self._closed = False

    def __len__(self) -> int:
        """How many whole batches wait to be taken."""
        return len(self._batches)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "collecting" if self._collecting else "waiting to be asked"
        return f"<Background, {state}: {len(self)} batches wait, {self._ahead} ahead at most>"

    def __enter__(self) -> Self:
        with self._changed:
            self._start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
        unseen, self._error = self._error, None
        if unseen is not None and error is None:
            raise unseen

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> MultiAgentBatch:
        """Wait for the next batch and take it.

        Raises:
            StopIteration: The total is there; or it was closed, and all whole batches were taken.
            BaseException: What collecting has raised, see `Collector.collect`.
        """
        with self._changed:
            while True:
                if self._error is not None:
                    error, self._error = self._error, None
                    raise error
                if self._batches:
                    batch = self._batches.popleft()
                    if not self._closed:
                        self._start()  # there is room again
                    self._changed.notify_all()
                    return batch
                if self._closed or (not self._collecting and self._course.next_goal is None):
                    raise StopIteration
                self._start()
                self._changed.wait(_LOOK_AGAIN)

    def close(self) -> None:
        """Stop collecting, and wait until it has stopped. May be called again."""
        with self._changed:
            if self._closed:
                return
            self._closed = self._stopping = True
            self._changed.notify_all()
            thread = self._thread
        if thread is threading.current_thread():
            self._closed = False
            raise StateError("a callback cannot close the background collection it is called from")
        if thread is not None:
            thread.join()
        self._leave()

    def _start(self) -> None:
        if not self._collecting and self._error is None and self._course.next_goal is not None:
            if self._thread is not None:
                self._thread.join()  # it has nothing left to do
            self._collecting = True
            self._thread = threading.Thread(target=self._run, name="marlvec-collector", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            while (goal := self._wait_for_room()) is not None:
                batch = self._fill(goal, lambda: self._stopping)
                if batch is None:
                    break
                with self._changed:
                    self._course.note(goal, batch)
                    self._batches.append(batch)
                    self._changed.notify_all()
            if self._stopping:
                self._settle()
        except BaseException as raised:  # whatever it is, it is the consumer's
            error = raised
        with self._changed:
            self._error, self._collecting = error, False
            self._changed.notify_all()

    def _wait_for_room(self) -> SampleTarget | None:
        """What to collect next, once there is room for it; None where there is nothing more to do."""
        with self._changed:
            while len(self._batches) >= self._ahead and not self._stopping:
                self._changed.wait()
            return None if self._stopping else self._course.next_goal

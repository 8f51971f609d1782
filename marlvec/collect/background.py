"""`Background`: a thread collects the next batches while the caller learns from the last one.

`SampleTarget` and `BatchSchedule` are the size of one batch, and of a series of batches.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, TracebackType
from typing import ClassVar, Literal, Self, TypeAlias

from marlvec.arguments import count_from
from marlvec.collect.batch import MultiAgentBatch
from marlvec.errors import ArgumentError, BusyError, StateError
from marlvec.serialization.saved import ProcessBound

# A thread that Ctrl-C ended may have notified none, and Ctrl-C just before a wait does not end it.
_LOOK_AGAIN = 1.0  # seconds


class UpdateLock:
    """Lock between steps and updates: never both at once. They alternate, so that neither waits for more than one.

    Used as ``with turns:`` around each step, by the collecting thread, and as ``with turns.updating():``. Ctrl-C may
    come at any line: the lock is held by the id of a thread, and released by single stores.
    """

    def __init__(self) -> None:
        # The lock itself is entered and left in C, where no interrupt comes between. Condition's own `with` is Python.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self.stepping: int | None = None  # the thread in a step; that thread may set it to None, in a `finally`
        self._updating: int | None = None  # the thread that changes something
        self._waiting: set[int] = set()  # those that want to
        self._step_waits = False
        self._was_step = False  # whose turn it was last

    def __enter__(self) -> None:
        me = threading.get_ident()
        self.stepping = me  # who wants to change something says so before it looks at this: one of both sees the other
        if not self._waiting and self._updating is None:
            self._was_step = True
            return
        self.stepping = None
        try:
            with self._lock:
                self._changed.notify_all()  # of those who have seen it
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
        """Wait for the end of the running step, and let no other begin; refused inside a step, e.g. in a callback."""
        me = threading.get_ident()
        if self._updating == me:  # inside of another one
            yield
            return
        if self.stepping == me:
            raise StateError("updating() in the middle of a step, which waits for its end: do it in on_sample_end")
        try:
            try:
                with self._lock:
                    self._waiting.add(me)
                    while (
                        self.stepping is not None
                        or self._updating is not None
                        or (self._step_waits and not self._was_step)
                    ):
                        self._changed.wait(_LOOK_AGAIN)
                    self._updating, self._was_step = me, False
                    self._waiting.discard(me)
                    self._changed.notify_all()
                yield
            finally:
                self._leave(me)
        except BaseException:
            self._leave(me)  # once more: Ctrl-C may have come before it was done
            raise

    def _leave(self, me: int) -> None:
        self._waiting.discard(me)
        if self._updating == me:
            self._updating = None
        with self._lock:
            self._changed.notify_all()


class CollectingThread:
    """Records the thread that collects with a collector, so that no second call collects at the same time.

    Ctrl-C may come before a thread is recorded as done, so the recorded thread's stack is inspected for ``methods``,
    the code of the collector's methods that collect.
    """

    methods: ClassVar[set[CodeType]] = set()

    def __init__(self) -> None:
        self.thread: int | None = None  # set to None by it when it is done
        self._lock = threading.Lock()

    def claim(self, collector: object, call: str, hook: str) -> None:
        """Check that no thread is collecting (`BusyError`), and record this one; called by one of ``methods``.

        A call from a callback (``hook``), policy or connector during a call of the collector is a `StateError`.
        """
        me = threading.get_ident()
        with self._lock:
            if self.thread is not None:
                frame = sys._getframe(2) if self.thread == me else sys._current_frames().get(self.thread)
                while frame is not None:
                    if frame.f_code in self.methods and frame.f_locals.get("self") is collector:
                        break
                    frame = frame.f_back
                if frame is not None and self.thread != me:
                    raise BusyError(f"{call}() while another thread collects with this collector")
                if frame is not None and hook:
                    raise StateError(f"a callback may not {call} its collector in {hook}(): the step is not finished")
                if frame is not None:
                    raise StateError(f"{call}() in a policy, connector or env that this collector is asking")
            self.thread = me


class BatchSchedule:
    """A series of batches of size ``goal``, up to a total in the same unit (None: no end); the last has the rest."""

    def __init__(self, goal: SampleTarget, total: int | None) -> None:
        self._goal, self.total, self.done = goal, total, 0

    @property
    def next_goal(self) -> SampleTarget | None:
        """Return the size of the next batch; None if the total is reached."""
        if self.total is None:
            return self._goal
        left = min(self._goal.amount, self.total - self.done)
        return SampleTarget(self._goal.unit, left) if left > 0 else None

    def done_with(self, goal: SampleTarget, batch: MultiAgentBatch) -> int:
        """Return the amount delivered after this batch, which was collected for ``goal``."""
        amounts = {"env_steps": batch.env_steps, "agent_steps": batch.agent_steps, "episodes": goal.amount}
        return self.done + amounts[goal.unit]


Fill = Callable[[BatchSchedule, Callable[[], bool]], MultiAgentBatch]
"""Collects the next batch of a schedule; raises `CollectingStopped` where the function says so between two steps."""


class CollectingStopped(Exception):
    """Collecting was stopped before the batch was full; collected rows are kept."""


@dataclass(slots=True)
class _Made:
    """Entry of a linked list of finished batches."""

    batch: MultiAgentBatch | None
    number: int = 0
    next: _Made | None = None


class Background(ProcessBound):
    """Iterates over batches that a thread collects. Made by `Collector.background`; used in a ``with`` block.

    The thread begins a batch while fewer than ``ahead`` wait to be taken, so memory is bounded. The next ``next()``
    raises the thread's error, before the waiting batches; none of them is lost, and the following ``next()`` continues,
    like another call of `Collector.collect`.

    Leaving the block, or `close`, stops the thread between two steps of the envs and waits for it. Finished batches can
    still be taken by iterating; rows of an unfinished batch begin the collector's next batch.

    ``receive_pending`` is called once the thread has ended; ``made`` are finished batches that already wait.
    """

    def __init__(
        self,
        fill: Fill,
        receive_pending: Callable[[], None],
        course: BatchSchedule,
        ahead: int,
        made: Iterable[MultiAgentBatch] = (),
    ) -> None:
        self._fill, self._receive_pending, self._course, self._ahead = fill, receive_pending, course, ahead
        # The lock itself is entered and left in C, where no interrupt comes between. Condition's own `with` is Python.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._made = self._taken = _Made(None)  # the last one made, and the last one taken
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None  # that collects, or did so last
        self._done: threading.Thread | None = None  # the last one that has nothing left to do
        self._stopping = False
        for batch in made:
            self._made.next = _Made(batch, self._made.number + 1)
            self._made = self._made.next

    def __len__(self) -> int:
        """Number of finished batches that wait to be taken."""
        return self._made.number - self._taken.number

    def __repr__(self) -> str:
        state = "closed" if self._stopping else "collecting" if self._is_collecting else "waiting to be asked"
        return f"<Background, {state}: {len(self)} batches wait, {self._ahead} ahead at most>"

    @property
    def is_in_use(self) -> bool:
        """Whether a thread collects and is not stopping."""
        return self._thread is not None and not self._stopping

    @property
    def _is_collecting(self) -> bool:
        thread = self._thread
        return thread is not None and thread is not self._done and thread.is_alive()

    def __enter__(self) -> Self:
        self._check_process("with background()")
        try:
            with self._lock:
                self._start()
            return self
        except BaseException:  # the block is not entered, so it is not left either
            self.close()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
        unseen, self._error = self._error, None
        if unseen is not None and error is None:
            raise unseen

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> MultiAgentBatch:
        """Wait for the next batch and take it, or raise an error of collecting; stop at the total or when closed."""
        self._check_process("next()")
        self._taken.batch = None  # the caller that took it has it
        with self._lock:
            while self._error is not None or (made := self._taken.next) is None:
                if self._error is not None:
                    error, self._error = self._error, None
                    raise error
                if not self._start():
                    raise StopIteration
                self._changed.wait(_LOOK_AGAIN)
            self._start()
            self._changed.notify_all()
        batch = made.batch
        assert batch is not None  # it was not taken
        # One store takes it. Behind it nothing is called, so that Python does not look whether Ctrl-C has come.
        self._taken = made
        return batch

    def close(self) -> None:
        """Stop collecting, and wait until it has stopped. May be called again."""
        thread = self._thread
        if self._is_forked:  # the thread, and perhaps the lock, are the parent's
            self._stopping = True
            return
        if thread is threading.current_thread():
            raise StateError("a callback cannot close the background collection it is called from")
        self._stopping = True
        with self._lock:
            self._changed.notify_all()
        if thread is not None and thread.is_alive():
            thread.join()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called or the block was left."""
        return self._stopping

    @contextmanager
    def paused(self) -> Iterator[list[MultiAgentBatch]]:
        """Pause collecting for a ``with`` block; yield the finished batches that wait.

        The thread stops between two steps of the envs; rows of an unfinished batch begin the next batch.
        """
        is_in_use = self.is_in_use
        try:
            self.close()
            found, made = [], self._taken
            while made.next is not None:
                made = made.next
                assert made.batch is not None  # it was not taken
                found.append(made.batch)
            yield found
        finally:
            self._stopping = False
            if is_in_use:
                with self._lock:
                    self._start()

    def _start(self) -> bool:
        """Start a collecting thread if batches are left to collect; return whether a thread collects. Hold the lock."""
        if self._is_collecting:
            return True
        if self._stopping or self._error is not None or self._course.next_goal is None:
            return False
        before = self._thread
        if before is not None and before.is_alive():
            before.join()  # it has nothing left to do
        # Where Ctrl-C comes before it runs another one will be there, and it finds that it is not the one.
        self._thread = threading.Thread(target=self._run, name="marlvec-collector", daemon=True)
        self._thread.start()
        return True

    def _run(self) -> None:
        me, error = threading.current_thread(), None
        with self._lock:
            if self._thread is not me:
                return
        try:
            while self._wait_for_room():
                self._note(self._fill(self._course, lambda: self._stopping))
        except CollectingStopped:
            pass
        except BaseException as raised:  # whatever it is, it is the consumer's
            error = raised
        try:
            if self._stopping and error is None:
                self._receive_pending()
        except BaseException as raised:
            error = raised
        with self._lock:
            self._error, self._done = error, me
            self._changed.notify_all()

    def _note(self, batch: MultiAgentBatch) -> None:
        """Add a finished batch."""
        made = _Made(batch, self._made.number + 1)
        self._made.next, self._made = made, made
        with self._lock:
            self._changed.notify_all()

    def _wait_for_room(self) -> bool:
        """Wait until there is room for another batch; return False to stop."""
        with self._lock:
            while len(self) >= self._ahead and not self._stopping:
                self._changed.wait(_LOOK_AGAIN)
            return not self._stopping and self._course.next_goal is not None


Unit: TypeAlias = Literal["env_steps", "agent_steps", "episodes"]


@dataclass(frozen=True, slots=True)
class SampleTarget:
    """The amount of one batch, at least 1 unit."""

    unit: Unit
    amount: int


def sample_target(
    amounts: Mapping[Unit, int | None], steps: int | None, count_by: Unit, call: str = "collect"
) -> SampleTarget:
    """Return the size of a batch from a call's arguments, of which exactly one is given; ``steps`` are ``count_by``."""
    given = [(unit, amount) for unit, amount in amounts.items() if amount is not None]
    if steps is not None:
        given.append((count_by, steps))
    if len(given) != 1:
        names = [unit for unit, _ in given] if steps is None else ["steps", *(unit for unit, _ in given[:-1])]
        raise ArgumentError(
            f"{call}(): expected exactly one of steps, env_steps, agent_steps, episodes, got {names or 'none'}; write "
            f"{call}(env_steps=4096)"
        )
    unit, amount = given[0]
    return SampleTarget(unit, count_from(amount, f"{call}({unit}={amount!r})"))

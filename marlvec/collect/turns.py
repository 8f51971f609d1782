"""Who may touch what a collector uses: its steps, or those who change something between two of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from marlvec.errors import StateError

__all__ = ["Turns"]

_LOOK_AGAIN = 1.0  # seconds; who ended by Ctrl-C may have told nobody


class Turns:
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

"""Who may touch what a collector uses: its steps, or those who change something between two of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from marlvec.errors import StateError

__all__ = ["Turns"]


class Turns:
    """Steps and updates never at a time; where both are wanted they take turns, and neither waits for more than one.

    Used as ``with turns:`` around each step, by the one thread that collects, and as ``with turns.updating():``.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._stepping: int | None = None  # the thread that is in a step
        self._updating: int | None = None  # the thread that changes something
        self._depth = 0
        self._waiting = 0  # how many want to
        self._step_waits = False
        self._was_step = False  # whose turn it was last

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._changed:
            if self._updating == me:
                raise StateError("collecting inside `with collector.updating()`: it waits for itself; leave it first")
            self._step_waits = True
            try:
                while self._updating is not None or (self._waiting and self._was_step):
                    self._changed.wait()
            finally:
                self._step_waits = False
            self._stepping, self._was_step = me, True

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._stepping = None
            if self._waiting:
                self._changed.notify_all()

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Wait until no step is under way, and let none begin.

        Raises:
            StateError: This thread is in the middle of a step, as callbacks are: it would wait for itself.
        """
        me = threading.get_ident()
        with self._changed:
            if self._stepping == me:
                raise StateError("updating() in the middle of a step, which waits for its end: do it in on_sample_end")
            if self._updating != me:
                self._waiting += 1
                try:
                    while (
                        self._stepping is not None
                        or self._updating is not None
                        or (self._step_waits and not self._was_step)
                    ):
                        self._changed.wait()
                    self._updating, self._was_step = me, False
                finally:
                    self._waiting -= 1
                    self._changed.notify_all()
            self._depth += 1
        try:
            yield
        finally:
            with self._changed:
                self._depth -= 1
                if not self._depth:
                    self._updating = None
                    self._changed.notify_all()

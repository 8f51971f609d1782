"""Forks of this process, by whichever thread, kept away from moments in which a child would inherit too much.

A child with a copy of a worker's end of a channel keeps its parent from hearing of the worker's death; one with a copy
of the parent's end keeps the worker from hearing of the parent's.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_fork"]

_lock = threading.RLock()


@contextmanager
def no_fork() -> Iterator[None]:
    """In here no other thread forks by `os.fork`. Not for waiting in: they wait, too."""
    with _lock:
        yield


def _before() -> None:
    _lock.acquire()


def _after_in_parent() -> None:
    _lock.release()


def _after_in_child() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)

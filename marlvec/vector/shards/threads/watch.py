"""`store_and_watch`: two threads pass numbers to each other without the interpreter lock and without sleeping."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from marlvec.native.jit import kernel

__all__ = ["store_and_watch"]

_sched_yield: Any = types.ExternalFunction("sched_yield", types.int32())
_clock_gettime: Any = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.uintp))
_MONOTONIC = time.CLOCK_MONOTONIC
_SECOND = 1_000_000_000  # ns
_POLITE_AFTER = 20_000  # ns


@kernel
def store_and_watch(cells: NDArray[np.int64], own: int, number: int, at: int, least: int, limit: int) -> None:
    """Store a number; return once another number is large enough, or after ``limit`` ns.

    After 20 µs each look ends with ``sched_yield()``: a thread that has work goes first. The calls into the C library
    also keep the compiler from reading ``cells`` only once, and from storing ``number`` later.

    Args:
        cells: Numbers that each are written by one thread and read by another.
        own: Where ``number`` is stored.
        number: The number for the other thread.
        at: Where the other thread stores its number.
        least: The number to wait for; what is larger will do, too.
        limit: The longest wait, in ns.
    """
    cells[own] = number
    now = np.empty(2, np.int64)
    _clock_gettime(_MONOTONIC, now.ctypes.data)
    begin = now[0] * _SECOND + now[1]
    waited = 0
    while cells[at] < least and waited < limit:
        if waited > _POLITE_AFTER:
            _sched_yield()
        _clock_gettime(_MONOTONIC, now.ctypes.data)
        waited = now[0] * _SECOND + now[1] - begin

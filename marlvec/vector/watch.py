"""`store_and_watch`: two threads pass numbers to each other without the interpreter lock and without sleeping."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from marlvec.native.kernels import kernel

_sched_yield: Any = types.ExternalFunction("sched_yield", types.int32())
_clock_gettime: Any = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.uintp))
_MONOTONIC = time.CLOCK_MONOTONIC
_SECOND = 1_000_000_000  # ns
_POLITE_AFTER = 20_000  # ns


@kernel
def store_and_watch(cells: NDArray[np.int64], own: int, number: int, at: int, least: int, limit: int) -> None:
    """Store ``number`` in ``cells[own]``; return once ``cells[at]`` is at least ``least``, or after ``limit`` ns."""
    # After 20 µs each look ends with sched_yield(): a thread that has work goes first. The calls into the C library
    # also keep the compiler from reading `cells` only once, and from storing `number` later.
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

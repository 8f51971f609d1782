"""Random streams of envs as plain numbers: the state of numpy's PCG64, one row per env.

A row is six uint64: state (high, low), increment (high, low), whether a 32-bit half is left over, and that half, which
numpy's ``Generator`` keeps for its next 32-bit draw; it continues across episodes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Streams = NDArray[np.uint64]
"""(N, 6) uint64."""

_LOW_64 = (1 << 64) - 1


def fresh_streams(num_envs: int) -> Streams:
    """Return streams with fresh entropy, like a ``Generator`` without a seed."""
    words = np.random.default_rng().integers(0, 2**64, (num_envs, 6), np.uint64, endpoint=False)
    words[:, 3] |= np.uint64(1)  # the increment is odd
    words[:, 4:] = 0
    return words


def row_of(generator: np.random.Generator) -> NDArray[np.uint64]:
    """Return the state of numpy's own generator as a row, (6,) uint64."""
    found: Any = generator.bit_generator.state
    state, inc = found["state"]["state"], found["state"]["inc"]
    words = [state >> 64, state & _LOW_64, inc >> 64, inc & _LOW_64, found["has_uint32"], found["uinteger"]]
    return np.array(words, np.uint64)


def as_generator(row: NDArray[np.uint64]) -> np.random.Generator:
    """Build numpy's generator from a row, (6,) uint64."""
    high, low, inc_high, inc_low, has_half, half = (int(word) for word in row)
    generator = np.random.Generator(np.random.PCG64(0))
    generator.bit_generator.state = {
        "bit_generator": "PCG64",
        "state": {"state": (high << 64) | low, "inc": (inc_high << 64) | inc_low},
        "has_uint32": has_half,
        "uinteger": half,
    }
    return generator

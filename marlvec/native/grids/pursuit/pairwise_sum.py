"""numpy's sum of float64s: eight accumulators, whose order determines the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.native.jit import kernel

__all__ = ["MOST", "pairwise_sum"]

MOST = 128
"""How many numbers are added this way. numpy halves longer arrays, and adds the sums of their halves."""


@kernel
def pairwise_sum(values: NDArray[np.float64]) -> Any:
    """Return ``numpy.sum`` of at most `MOST` contiguous float64s, bit for bit. ``numpy.mean`` divides it by n."""
    n = len(values)
    if n < 8:
        total = 0.0
        for k in range(n):
            total += values[k]
        return total
    parts = values[:8].copy()
    whole = n - n % 8
    for k in range(8, whole):
        parts[k % 8] += values[k]
    total = ((parts[0] + parts[1]) + (parts[2] + parts[3])) + ((parts[4] + parts[5]) + (parts[6] + parts[7]))
    for k in range(whole, n):
        total += values[k]
    return total

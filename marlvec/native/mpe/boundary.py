"""The penalty of good agents for leaving the screen, in simple_tag and simple_world_comm.

``np.exp`` is not the C library's ``exp``: depending on the processor, a twentieth of the values differ in the last
place. So numpy computes them, for the whole batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.env_ids import rows_of
from marlvec.native.jit import kernel
from marlvec.native.mpe.physics import nearer
from marlvec.native.native_env import Ids

__all__ = ["boundary", "exponentials"]


def exponentials(ids: Ids, pos: NDArray[np.float64], first: int, out: NDArray[np.float64]) -> None:
    """Write ``np.exp(2 * x - 2)`` of distances x from the middle on each axis, for agents from ``first`` on."""
    rows = rows_of(ids)
    x = np.abs(pos[rows, first : first + out.shape[1]])
    with np.errstate(over="ignore"):  # the penalty is at most 10
        out[rows] = np.exp(2 * x - 2)


@kernel
def boundary(x: Any, exp: Any) -> Any:
    """Return the penalty on one axis for the distance ``x`` from the middle, with ``exp = np.exp(2 * x - 2)``."""
    if x < 0.9:
        return 0.0
    if x < 1.0:
        return (x - 0.9) * 10
    return nearer(10.0, exp)

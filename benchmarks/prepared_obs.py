"""`NormalizeObs` and `FrameStack` as one writes them into a loop of one's own; what `collect()` is measured beside."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["FRAMES", "PreparedObs"]

FRAMES = 4


class PreparedObs:
    """Running mean and deviation of all rows (Chan et al. 1979), then the last four rows of each lane.

    Args:
        lanes: How many histories there are.
        size: Numbers in an observation.
    """

    def __init__(self, lanes: int, size: int) -> None:
        self.count, self.mean, self.m2 = 0, np.zeros(size), np.zeros(size)
        self.frames = np.zeros((lanes, FRAMES, size), np.float32)

    def __call__(self, lanes: NDArray[Any], obs: NDArray[Any], first: NDArray[Any]) -> NDArray[Any]:
        """Prepare (n, size) observations; ``first`` says where an episode begins."""
        wide = obs.astype(np.float64)
        total = self.count + len(wide)
        mean = wide.mean(axis=0)
        delta = mean - self.mean
        self.m2 += ((wide - mean) ** 2).sum(axis=0) + delta**2 * (self.count * len(wide) / total)
        self.mean += delta * (len(wide) / total)
        self.count = total
        scaled = np.clip((wide - self.mean) / np.sqrt(self.m2 / total + 1e-8), -10, 10)
        stack = np.empty((len(wide), *self.frames.shape[1:]), np.float32)
        stack[:, :-1] = self.frames[lanes, 1:]
        stack[first, :-1] = 0
        stack[:, -1] = scaled
        self.frames[lanes] = stack
        return stack.reshape(len(stack), -1)

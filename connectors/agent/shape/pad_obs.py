"""`PadObs`: observations padded with zeros to a larger shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray

from marlvec.connectors.agent._support.leafwise_obs import LeafPlan, LeafwiseObs
from marlvec.errors import ArgumentError, UnsupportedSpaceError
from marlvec.spaces import Leaf

__all__ = ["PadObs"]


class PadObs(LeafwiseObs):
    """Puts every Box leaf of the right rank into the first corner of a larger one of zeros; others pass unchanged.

    For networks that are made for one size. What agents of one env lack against each other, ``make(..., pad=True)``
    fills up already.

    Args:
        shape: The new shape, or one number for vectors.
        keys: Paths of the leaves to work on; all Boxes of ``len(shape)`` axes where None.

    Raises:
        ArgumentError: Where a space is first seen: a path is not in it.
        UnsupportedSpaceError: Where a space is first seen: no Box has so many axes, or one is larger already.
    """

    def __init__(self, shape: int | Sequence[int], *, keys: Sequence[str] | None = None) -> None:
        super().__init__(keys)
        self.shape = (shape,) if isinstance(shape, int) else tuple(int(length) for length in shape)
        if min(self.shape, default=0) < 0:
            raise ArgumentError(f"shape must be lengths of at least 0, got {self.shape}")
        self._kind = f"Boxes of {len(self.shape)} axes"

    def _plan(self, leaf: Leaf) -> LeafPlan | None:
        space = leaf.space
        if not isinstance(space, Box) or len(leaf.shape) != len(self.shape):
            return None
        if any(have > want for have, want in zip(leaf.shape, self.shape, strict=True)):
            raise UnsupportedSpaceError(
                f"{self!r}: {leaf} of shape {leaf.shape} is larger already; name the leaves to work on in keys=[…]"
            )
        pad = _Pad(leaf.shape, self.shape)
        low, high = pad(space.low[None])[0], pad(space.high[None])[0]
        return LeafPlan(Box(low, high, self.shape, leaf.dtype.type), pad)


class _Pad:
    """Pads the values of one leaf."""

    def __init__(self, before: tuple[int, ...], after: tuple[int, ...]) -> None:
        self.corner = (slice(None), *map(slice, before))
        self.shape = after

    def __call__(self, values_n: NDArray[Any]) -> NDArray[Any]:
        out = np.zeros((len(values_n), *self.shape), values_n.dtype)
        out[self.corner] = values_n
        return out

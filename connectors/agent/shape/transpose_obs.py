"""`TransposeObs`: the axes of an observation in another order, such as channels first."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from gymnasium.spaces import Box

from marlvec.connectors.agent._support.leafwise_obs import LeafPlan, LeafwiseObs
from marlvec.errors import ArgumentError
from marlvec.spaces import Leaf

__all__ = ["TransposeObs"]


class TransposeObs(LeafwiseObs):
    """Puts the axes of every Box leaf of the right rank in another order; other leaves pass unchanged.

    What comes out are views: no number is moved.

    Args:
        axes: The present axes in their new order, as for `numpy.transpose`; None for ``(2, 0, 1)``, which turns images
            ``(H, W, C)`` into ``(C, H, W)``.
        keys: Paths of the leaves to work on; all Boxes of ``len(axes)`` axes where None.

    Raises:
        ArgumentError: ``axes`` does not name each axis once; or, where a space is first seen, a path is not in it.
        UnsupportedSpaceError: Where a space is first seen: no Box has so many axes.
    """

    def __init__(self, axes: Sequence[int] | None = None, *, keys: Sequence[str] | None = None) -> None:
        super().__init__(keys)
        self.axes = None if axes is None else tuple(int(axis) for axis in axes)
        self._order = (2, 0, 1) if self.axes is None else self.axes
        if sorted(self._order) != list(range(len(self._order))):
            raise ArgumentError(f"axes must name each of 0 to {len(self._order) - 1} once, got {self.axes}")
        self._kind = f"Boxes of {len(self._order)} axes"

    def _plan(self, leaf: Leaf) -> LeafPlan | None:
        space = leaf.space
        if not isinstance(space, Box) or len(leaf.shape) != len(self._order):
            return None
        low, high = (bound.transpose(self._order) for bound in (space.low, space.high))
        batched = (0, *(axis + 1 for axis in self._order))
        return LeafPlan(Box(low, high, dtype=leaf.dtype.type), partial(np.transpose, axes=batched))

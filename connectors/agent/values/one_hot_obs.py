"""`OneHotObs`: Discrete and MultiDiscrete leaves as one-hot vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from numpy.typing import NDArray

from marlvec.connectors.agent._support.leafwise_obs import LeafPlan, LeafwiseObs, OneHot
from marlvec.spaces import Leaf

__all__ = ["OneHotObs"]


class OneHotObs(LeafwiseObs):
    """Turns every Discrete and MultiDiscrete leaf into a float32 vector; the structure and other leaves stay.

    ``Discrete(n)`` becomes a one-hot ``(n,)``; the one-hots of a MultiDiscrete's entries stand side by side in one
    vector, as `FlattenObs` has them.

    Args:
        keys: Paths of the leaves to work on; all of these two kinds where None.

    Raises:
        ArgumentError: Where a space is first seen: a path is not in it.
        UnsupportedSpaceError: Where a space is first seen: there is no such leaf.
    """

    _kind = "Discrete and MultiDiscrete leaves"

    def __init__(self, *, keys: Sequence[str] | None = None) -> None:
        super().__init__(keys)

    def _plan(self, leaf: Leaf) -> LeafPlan | None:
        if not isinstance(leaf.space, (Discrete, MultiDiscrete)):
            return None
        one_hot = OneHot(leaf)
        return LeafPlan(Box(0, 1, (one_hot.width,), np.float32), _Vector(one_hot))


class _Vector:
    """A one-hot as floats."""

    def __init__(self, one_hot: OneHot) -> None:
        self.one_hot = one_hot

    def __call__(self, values_n: NDArray[Any]) -> NDArray[Any]:
        return self.one_hot(values_n).astype(np.float32)

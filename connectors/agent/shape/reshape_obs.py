"""`ReshapeObs`: observations of another shape with the same number of entries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gymnasium.spaces import Box
from numpy.typing import NDArray

from marlvec.connectors.agent._support.leafwise_obs import LeafPlan, LeafwiseObs
from marlvec.errors import ArgumentError, UnsupportedSpaceError
from marlvec.spaces import Leaf

__all__ = ["ReshapeObs"]


class ReshapeObs(LeafwiseObs):
    """Gives every Box leaf another shape, its numbers in the same order; other leaves pass unchanged.

    Args:
        shape: The new shape. One entry may be -1, for what is left over.
        keys: Paths of the leaves to work on; all Boxes where None.

    Raises:
        ArgumentError: ``shape`` has a negative entry besides one -1; or, where a space is first seen, a path is not in
            it.
        UnsupportedSpaceError: Where a space is first seen: there is no Box, or one has another number of entries.
    """

    _kind = "Boxes"

    def __init__(self, shape: Sequence[int], *, keys: Sequence[str] | None = None) -> None:
        super().__init__(keys)
        self.shape = tuple(int(length) for length in shape)
        if min(self.shape, default=0) < -1 or self.shape.count(-1) > 1:
            raise ArgumentError(f"shape must be lengths, of which one may be -1; got {self.shape}")

    def _plan(self, leaf: Leaf) -> LeafPlan | None:
        space = leaf.space
        if not isinstance(space, Box):
            return None
        try:
            low, high = space.low.reshape(self.shape), space.high.reshape(self.shape)
        except ValueError:
            raise UnsupportedSpaceError(
                f"{self!r} cannot give {leaf} of shape {leaf.shape} that shape; name the leaves to work on in keys=[…]"
            ) from None
        return LeafPlan(Box(low, high, dtype=leaf.dtype.type), _Reshape(low.shape))


class _Reshape:
    """Reshapes the values of one leaf."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def __call__(self, values_n: NDArray[Any]) -> NDArray[Any]:
        return values_n.reshape(len(values_n), *self.shape)

"""Batched spaces with an object array for leaves that have no fixed shape (Text, Graph, Sequence)."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import utils
from numpy.typing import NDArray

from marlvec.spaces.equality import describe_difference
from marlvec.spaces.tree import SpaceTree, map_space


class ObjectArray(spaces.Space[NDArray[Any]]):
    """Arrays of dtype object with a member of one space in every cell: for values without a fixed-size array form.

    A cell may be None if its agent is absent. Samples have a value in every cell, drawn from `space`, a copy.
    """

    def __init__(self, space: spaces.Space[Any], shape: tuple[int, ...], seed: int | None = None) -> None:
        self.space = deepcopy(space)
        self._lead = tuple(shape)
        super().__init__(shape, np.object_, seed)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._lead

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def seed(self, seed: int | None = None) -> int:
        used: int = super().seed(seed)
        self.space.seed(int(self.np_random.integers(np.iinfo(np.int32).max)))
        return used

    def sample(self, mask: Any = None, probability: Any = None) -> NDArray[Any]:
        """Draw a member for every cell; ``mask`` and ``probability`` are passed to the space for each cell."""
        if self._np_random is None:
            self.seed()
        options = {name: value for name, value in (("mask", mask), ("probability", probability)) if value is not None}
        out = np.full(self._lead, None, np.object_)
        for where in np.ndindex(self._lead):
            out[where] = self.space.sample(**options)
        return out

    def contains(self, x: Any) -> bool:
        if not isinstance(x, np.ndarray) or x.dtype != np.object_ or x.shape != self._lead:
            return False
        return all(value is None or self.space.contains(value) for value in x.flat)

    def __repr__(self) -> str:
        return f"ObjectArray({self.space}, {self.shape})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ObjectArray) or self.shape != other.shape:
            return False
        return describe_difference(self.space, other.space) is None

    __hash__ = None  # type: ignore[assignment]  # like Gymnasium's spaces: seeding changes it


def batch_space(space: spaces.Space[Any], n: int) -> spaces.Space[Any]:
    """Return a space with one more leading axis of length n, as `gymnasium.vector.utils.batch_space` does."""
    # Gymnasium makes a tuple of n spaces of a leaf without a fixed-size array form; an ObjectArray has the same leading
    # axes as other leaves.

    def batch(leaf: spaces.Space[Any]) -> spaces.Space[Any]:
        if isinstance(leaf, ObjectArray):
            return ObjectArray(leaf.space, (n, *leaf.shape))
        return ObjectArray(leaf, (n,)) if SpaceTree(leaf).leaves[0].is_object else utils.batch_space(leaf, n)

    return map_space(batch, space)  # Gymnasium's own loses the order of a Dict's keys

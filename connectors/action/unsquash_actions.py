"""Actions from [-1, 1] to the bounds of the env."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Space
from numpy.typing import NDArray

from marlvec.connectors.connector import ActionConnector
from marlvec.connectors.leaf_spaces import map_space
from marlvec.connectors.rows import Rows
from marlvec.spaces import SpaceTree

__all__ = ["UnsquashActions"]


class UnsquashActions(ActionConnector):
    """Stretches actions in [-1, 1] to the bounds of every bounded float Box; other leaves pass unchanged.

    Exact at the ends: -1 becomes low and 1 becomes high. What is between stays between; what is beyond goes as far
    beyond, for `ClipActions` to see to. The policy then acts in ``Box(-1, 1)`` of the leaf's shape and dtype.
    """

    def __init__(self) -> None:
        self._tree: SpaceTree | None = None
        self._boxes: list[tuple[int, _Stretch]] = []

    def __call__(self, rows: Rows) -> Rows:
        if self._tree is None:
            raise self._not_set_up()
        if not self._boxes:
            return rows
        leaves = self._tree.flatten(rows.actions_for_env)
        for i, stretch in self._boxes:
            leaves[i] = stretch(leaves[i])
        return rows.replace(actions_for_env=self._tree.unflatten(leaves))

    def setup(self, space: Space[Any]) -> None:
        self._tree = SpaceTree(space)
        self._boxes = [(i, _Stretch(s)) for i, s in enumerate(leaf.space for leaf in self._tree.leaves) if _bounded(s)]

    def policy_space(self, space: Space[Any]) -> Space[Any]:
        return map_space(lambda s: Box(-1, 1, s.shape, _float(s)) if _bounded(s) else s, space)


class _Stretch:
    """Linear from [-1, 1] to a Box's bounds, worked out from the nearer end so that both ends are exact."""

    def __init__(self, space: Space[Any]) -> None:
        assert isinstance(space, Box)
        self.low, self.high = space.low, space.high
        self.half = self.high / 2 - self.low / 2  # halved first: high - low may overflow
        self.dtype = space.low.dtype

    def __call__(self, action_n: Any) -> NDArray[Any]:
        action = np.asarray(action_n)
        upper = action > 0
        with np.errstate(over="ignore"):  # an action far beyond may become infinite; ClipActions brings it back
            step = (1 - np.abs(action)) * self.half
            out: NDArray[Any] = np.where(upper, self.high, self.low) + np.where(upper, -step, step)
            return out.astype(self.dtype, copy=False)


def _bounded(space: Space[Any]) -> bool:
    return isinstance(space, Box) and np.issubdtype(space.low.dtype, np.floating) and space.is_bounded("both")


def _float(space: Space[Any]) -> Any:
    assert isinstance(space, Box)
    return space.low.dtype.type

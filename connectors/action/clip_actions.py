"""Actions inside the bounds of the env."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Space

from marlvec.connectors.connector import ActionConnector
from marlvec.connectors.rows import Rows
from marlvec.errors import ContractError
from marlvec.spaces import Leaf, SpaceTree

__all__ = ["ClipActions"]


class ClipActions(ActionConnector):
    """Clips the actions of every Box that has a bound, and casts them to its dtype; other leaves pass unchanged.

    A NaN has no nearest bound and raises ContractError. Float actions for a Box of ints keep their dtype: they are not
    rounded here.
    """

    def __init__(self) -> None:
        self._tree: SpaceTree | None = None
        self._boxes: list[tuple[int, Leaf, Any, Any]] = []

    def __call__(self, rows: Rows) -> Rows:
        if self._tree is None:
            raise self._not_set_up()
        if not self._boxes:
            return rows
        leaves = self._tree.flatten(rows.actions_for_env)
        for i, leaf, low, high in self._boxes:
            clipped = np.minimum(np.maximum(leaves[i], low), high)
            if np.isnan(clipped).any():
                row = int(np.argwhere(np.isnan(clipped))[0, 0])
                raise ContractError(f"the policy gave NaN for {leaf} in row {row}")
            if np.can_cast(clipped.dtype, leaf.dtype, "same_kind"):
                clipped = clipped.astype(leaf.dtype, copy=False)
            leaves[i] = clipped
        return rows.replace(actions_for_env=self._tree.unflatten(leaves))

    def setup(self, space: Space[Any]) -> None:
        self._tree = SpaceTree(space)
        self._boxes = []
        for i, leaf in enumerate(self._tree.leaves):
            if isinstance(leaf.space, Box) and (leaf.space.bounded_below.any() or leaf.space.bounded_above.any()):
                self._boxes.append((i, leaf, leaf.space.low, leaf.space.high))

"""Whatever a policy returns, as numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Space

from marlvec.connectors.connector import ActionConnector
from marlvec.connectors.rows import Rows
from marlvec.spaces import SpaceTree
from marlvec.trees import _typed, map_tree, to_array

__all__ = ["ToNumpy"]


class ToNumpy(ActionConnector):
    """Turns every column that is not numpy yet into arrays, leaf by leaf.

    Takes torch tensors on any device, also those that need a gradient, all that has ``__array__``, and lists. The
    numbers stay as they are. A list has no dtype of its own: in ``actions_for_env`` it takes that of the action space.
    No library of tensors is imported.
    """

    def __init__(self) -> None:
        self._tree: SpaceTree | None = None

    def __call__(self, rows: Rows) -> Rows:
        if self._tree is None:
            raise self._not_set_up()
        done: dict[str, Any] = {}
        for name, column in rows.columns.items():
            if type(column) is np.ndarray:
                continue
            if name == "actions_for_env":
                pairs = zip(self._tree.flatten(column), self._tree.leaves, strict=True)
                done[name] = self._tree.unflatten([_typed(to_array(value), value, leaf.dtype) for value, leaf in pairs])
            else:
                done[name] = map_tree(to_array, column)
        return rows.replace(**done) if done else rows

    def setup(self, space: Space[Any]) -> None:
        self._tree = SpaceTree(space)

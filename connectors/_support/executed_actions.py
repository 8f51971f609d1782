"""`ExecutedActions`: the column ``actions_executed``, the executed action, in the policy's space."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Space
from numpy.typing import NDArray

from marlvec.connectors.rows import Rows
from marlvec.spaces import SpaceTree
from marlvec.trees import Tree, to_array

__all__ = ["EXECUTED", "ExecutedActions", "is_given"]

EXECUTED = "actions_executed"


def is_given(rows: Rows) -> NDArray[np.bool_]:
    """Return the rows whose action the policy did not choose (``off_policy``): exploration leaves these unchanged."""
    return np.asarray(rows["off_policy"], np.bool_) if "off_policy" in rows else np.zeros(len(rows), np.bool_)


class ExecutedActions:
    """Writes a connector's output actions, and the column ``actions_executed``, in the policy's space and its dtypes.

    After a connector that changes the space (`DiscretizeActions`, `UnsquashActions`), connectors leave the column
    unchanged.
    """

    def __init__(self, space: Space[Any], policy_space: Space[Any] | None) -> None:
        self._tree = SpaceTree(space)
        self._is_policys = policy_space is not None and policy_space == space

    def send(self, rows: Rows, actions: Tree, *, explores: bool = False) -> Rows:
        """Return rows with ``actions_for_env`` replaced; exploring connectors add the column, others update it."""
        if self._is_policys and (explores or EXECUTED in rows):
            return rows.replace(actions_for_env=actions, **{EXECUTED: self._cast(actions)})
        return rows if actions is rows.actions_for_env else rows.replace(actions_for_env=actions)

    def _cast(self, actions: Tree) -> Tree:
        """Return actions in the dtypes of the space, so that the column's dtypes never depend on the draws."""
        leaves = self._tree.flatten(actions)
        for i, leaf in enumerate(self._tree.leaves):
            if not leaf.is_object:
                array = to_array(leaves[i])
                fits = np.can_cast(array.dtype, leaf.dtype, "same_kind")
                leaves[i] = array.astype(leaf.dtype, copy=False) if fits else array
        return self._tree.unflatten(leaves)

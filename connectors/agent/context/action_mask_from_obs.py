"""`ActionMaskFromObs`: the action mask is one entry of a Dict observation."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiBinary, Space

from marlvec.connectors.agent.shape.drop_keys import drop_from_space, drop_from_value
from marlvec.connectors.connector import AgentConnector
from marlvec.connectors.rows import Rows
from marlvec.errors import ContractError, UnsupportedSpaceError
from marlvec.spaces import SpaceTree

__all__ = ["ActionMaskFromObs"]


class ActionMaskFromObs(AgentConnector):
    """Moves a leaf of a Dict observation to column ``action_mask``, (n, k) bool: True where it is not 0.

    Where rows have such a column already, an action must be allowed by both. A Dict that is left with one key stays a
    Dict.

    Args:
        key: The leaf's path, e.g. ``"action_mask"`` or ``"game/legal"``: a MultiBinary or Box of shape (k,).

    Raises:
        ArgumentError: Where a space is first seen: there is no such path, or nothing else in the Dict.
        UnsupportedSpaceError: Where a space is first seen: it is no Dict, the leaf is no vector of numbers, or the
            action space is known and has another number of actions.
        ContractError: In a call: the rows have a mask already, of another width.
    """

    def __init__(self, key: str = "action_mask") -> None:
        self.key = key
        self._tree: SpaceTree | None = None
        self._leaf = -1

    def __call__(self, rows: Rows) -> Rows:
        if self._tree is None:
            raise self._not_set_up()
        mask = np.asarray(self._tree.flatten(rows.obs)[self._leaf]) != 0
        if "action_mask" in rows:
            if rows.action_mask.shape != mask.shape:
                raise ContractError(
                    f"the rows have an action_mask of shape {rows.action_mask.shape} already, and {self.key!r} of the "
                    f"observation gives one of {mask.shape}"
                )
            mask &= rows.action_mask
        return rows.replace(obs=drop_from_value(rows.obs, (self.key,)), action_mask=mask)

    def setup(self, space: Space[Any]) -> None:
        self.output_space(space)
        tree = SpaceTree(space)
        self._leaf = [leaf.path for leaf in tree.leaves].index(self.key)
        self._tree = tree

    def output_space(self, space: Space[Any]) -> Space[Any]:
        after = drop_from_space(space, (self.key,), repr(self))
        leaf = {leaf.path: leaf.space for leaf in SpaceTree(space).leaves}.get(self.key)
        if not isinstance(leaf, (Box, MultiBinary)) or len(leaf.shape) != 1:
            raise UnsupportedSpaceError(f"{self!r} needs a MultiBinary or Box of shape (k,), got {leaf}")
        if isinstance(self.action_space, Discrete) and int(self.action_space.n) != leaf.shape[0]:
            raise UnsupportedSpaceError(f"{self!r} found a mask of {leaf.shape[0]} actions for {self.action_space}")
        return after

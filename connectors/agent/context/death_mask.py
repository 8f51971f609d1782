"""`DeathMask`: zeros as the observation of agents that are not alive."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Space

from marlvec.connectors.agent._support.history import blank_obs, fixed_size_tree, including_blank
from marlvec.connectors.agent._support.leafwise_obs import append_to_obs, appended_space
from marlvec.connectors.connector import AgentConnector
from marlvec.connectors.rows import Rows
from marlvec.errors import ContractError
from marlvec.spaces import SpaceTree
from marlvec.spaces.tree import map_space

__all__ = ["DeathMask"]


class DeathMask(AgentConnector):
    """Blanks the last observation of an agent that terminated: zeros, for a value function to see as such.

    That is how SuperSuit's ``black_death`` shows the dead. A truncated agent's last observation stays, as its value is
    still asked for. The zero of a Discrete that does not start at 0 is its start.

    Args:
        append: Whether to append a number to an observation vector, 1 while alive and 0 when dead, which sets the dead
            apart from those who see zeros: ``(d,)`` becomes ``(d + 1,)``.

    Raises:
        UnsupportedSpaceError: Where a space is first seen: a leaf has no fixed size; or, with ``append``, it is no
            vector.
        ContractError: In a call: the rows have no column ``terminated``.
    """

    def __init__(self, *, append: bool = False) -> None:
        self.append = append
        self._tree: SpaceTree | None = None
        self._blanks: list[Any] = []
        self._dtype: np.dtype[Any] = np.dtype(np.float32)

    def __call__(self, rows: Rows) -> Rows:
        if self._tree is None:
            raise self._not_set_up()
        if "terminated" not in rows:
            raise ContractError(f"{self.name} needs column 'terminated', got {list(rows.keys())}")
        dead = rows.terminated
        if dead.any():
            leaves = []
            for leaf, blank in zip(self._tree.flatten(rows.obs), self._blanks, strict=True):
                leaf = np.array(leaf)
                leaf[dead] = blank
                leaves.append(leaf)
            rows = rows.replace(obs=self._tree.unflatten(leaves))
        return append_to_obs(rows, ~dead[:, None], self._dtype) if self.append else rows

    def setup(self, space: Space[Any]) -> None:
        tree = fixed_size_tree(space, self.name)
        self._blanks = [blank_obs(leaf) for leaf in tree.leaves]
        if self.append:
            self._dtype = np.dtype(self.output_space(space).dtype)
        self._tree = tree

    def output_space(self, space: Space[Any]) -> Space[Any]:
        fixed_size_tree(space, self.name)
        after = map_space(including_blank, space)
        if not self.append:
            return after
        alive = Box(0, 1, (1,), after.low.dtype.type if isinstance(after, Box) else np.float32)
        return appended_space(after, alive, 1, self.name)

"""`MaxObs`: the pixelwise maximum of the last observations (against flicker in Atari)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.spaces import Box, MultiBinary, Space

from marlvec.connectors.agent._support.history import History, blank_obs
from marlvec.connectors.connector import AgentConnector, EnvIds, State
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, UnsupportedSpaceError
from marlvec.spaces import SpaceTree

__all__ = ["MaxObs"]


class MaxObs(AgentConnector):
    """Takes the elementwise maximum over an agent's last k observations: against sprites that flicker.

    Of the Box and MultiBinary leaves, each on its own; other leaves pass unchanged. Before an episode's k-th row it is
    the maximum over what there is.

    Args:
        k: How many, at least 1.

    Raises:
        ArgumentError: ``k`` is below 1.
        UnsupportedSpaceError: Where a space is first seen: there is no Box or MultiBinary in it.
    """

    def __init__(self, k: int = 2) -> None:
        if k < 1:
            raise ArgumentError(f"k must be at least 1, got {k}")
        self.k = k
        self._tree: SpaceTree | None = None
        self._ordered: tuple[int, ...] = ()
        self._history = History(k, (), repeat=True)

    def __call__(self, rows: Rows) -> Rows:
        if self._tree is None:
            raise self._not_set_up()
        leaves = self._tree.flatten(rows.obs)
        self._history.begin(rows)
        self._history.push(rows, [leaves[i] for i in self._ordered], "obs")
        last = self._history.look(rows, np.arange(1 - self.k, 1))
        for i, values in zip(self._ordered, last, strict=True):
            leaves[i] = np.max(values, axis=1)
        return rows.replace(obs=self._tree.unflatten(leaves))

    def reset(self, env_ids: EnvIds | None = None) -> None:
        self._history.reset(env_ids)

    def setup(self, space: Space[Any]) -> None:
        tree = SpaceTree(space)
        ordered = self._find_ordered(tree)
        if self._tree is None or tree.space != self._tree.space:
            self._history = History(self.k, [blank_obs(tree.leaves[i]) for i in ordered], repeat=True)
        self._tree, self._ordered = tree, ordered

    def output_space(self, space: Space[Any]) -> Space[Any]:
        self._find_ordered(SpaceTree(space))
        return space

    def state_dict(self) -> State:
        return {} if self._tree is None else self._history.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._tree is None:
            raise self._not_set_up()
        self._history.load_state_dict(state)

    def _find_ordered(self, tree: SpaceTree) -> tuple[int, ...]:
        """Positions of the leaves whose numbers are more or less, and not names of categories."""
        found = tuple(i for i, leaf in enumerate(tree.leaves) if isinstance(leaf.space, (Box, MultiBinary)))
        if not found:
            raise UnsupportedSpaceError(f"{self.name} found no Box or MultiBinary in {tree.space}")
        return found

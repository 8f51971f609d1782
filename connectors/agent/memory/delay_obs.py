"""`DelayObs`: each agent sees what it would have seen k rows ago."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.spaces import Space

from marlvec.connectors.agent._support.history import History, blank_obs, fixed_size_tree
from marlvec.connectors.connector import AgentConnector, EnvIds, State
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError
from marlvec.spaces import SpaceTree

__all__ = ["DelayObs"]


class DelayObs(AgentConnector):
    """Shows each agent what it observed k rows ago; its episode's first observation until there is such a row.

    Only the observation is late. ``action_mask`` says what is allowed now, and stays.

    Args:
        k: How many rows, at least 0.

    Raises:
        ArgumentError: ``k`` is below 0.
        UnsupportedSpaceError: Where a space is first seen: a leaf has no fixed size.
    """

    def __init__(self, k: int) -> None:
        if k < 0:
            raise ArgumentError(f"k must be at least 0, got {k}")
        self.k = k
        self._tree: SpaceTree | None = None
        self._history = History(k + 1, (), repeat=True)

    def __call__(self, rows: Rows) -> Rows:
        if self._tree is None:
            raise self._not_set_up()
        self._history.begin(rows)
        self._history.push(rows, self._tree.flatten(rows.obs), "obs")
        late = [leaf[:, 0] for leaf in self._history.look(rows, np.array([-self.k]))]
        return rows.replace(obs=self._tree.unflatten(late))

    def reset(self, env_ids: EnvIds | None = None) -> None:
        self._history.reset(env_ids)

    def setup(self, space: Space[Any]) -> None:
        tree = fixed_size_tree(space, self.name)
        if self._tree is None or tree.space != self._tree.space:
            self._history = History(self.k + 1, [blank_obs(leaf) for leaf in tree.leaves], repeat=True)
        self._tree = tree

    def output_space(self, space: Space[Any]) -> Space[Any]:
        fixed_size_tree(space, self.name)
        return space

    def state_dict(self) -> State:
        return {} if self._tree is None else self._history.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._tree is None:
            raise self._not_set_up()
        self._history.load_state_dict(state)

"""`PrevActions`: shows the policy the agent's last actions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Space

from marlvec.connectors.agent._support.history import History, action_tree, blank_action, check_column_is_new
from marlvec.connectors.agent._support.leafwise_obs import append_to_obs, appended_space
from marlvec.connectors.agent.shape.flatten_obs import FlattenObs
from marlvec.connectors.connector import AgentConnector, EnvIds, State
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, ContractError
from marlvec.spaces import SpaceTree
from marlvec.trees import map_tree

__all__ = ["PrevActions"]

COLUMN = "prev_actions"


class PrevActions(AgentConnector):
    """Shows the policy the actions it chose in the agent's last n decisions.

    They come as a column ``prev_actions``, a tree in the shape of the action space: ``(n_rows, …)`` where n is 1, else
    ``(n_rows, n, …)``, oldest first. What stands there before an episode's first decisions is a valid action that
    stands for none: the start of a Discrete, of a Box the member nearest 0.

    It is the policy's own action that is shown, as it was before the action connectors. With ``PrevRewards(n)`` beside
    it, entry i of one is the reward for entry i of the other.

    Args:
        n: How many, at least 1.
        into_obs: Append them to the observation, a vector, instead of adding a column: flattened and one-hot, as
            `FlattenObs` does it.

    Raises:
        ArgumentError: ``n`` is below 1; or, where a space is first seen, the action space is not known.
        UnsupportedSpaceError: Where a space is first seen, with ``into_obs``: the observation is not a vector, or part
            of an action has no fixed size.
    """

    def __init__(self, n: int = 1, into_obs: bool = False) -> None:
        if n < 1:
            raise ArgumentError(f"n must be at least 1, got {n}")
        self.n = n
        self.into_obs = into_obs
        self._tree: SpaceTree | None = None
        self._flat = FlattenObs()
        self._history = History(n, ())
        self._dtype: np.dtype[Any] = np.dtype(np.float32)

    def __call__(self, rows: Rows) -> Rows:
        tree = self._known()
        self._history.begin(rows)
        leaves = self._history.look(rows, np.arange(1 - self.n, 1))
        if self.into_obs:
            # Each of the n actions of a row is flattened as if it had a row of its own.
            each = [leaf.reshape(-1, *leaf.shape[2:]) for leaf in leaves]
            flat = self._flat(Rows(obs=tree.unflatten(each))).obs
            return append_to_obs(rows, flat.reshape(len(rows), self.n * flat.shape[1]), self._dtype)
        check_column_is_new(rows, COLUMN, self.name)
        actions = tree.unflatten(leaves)
        return rows.replace(**{COLUMN: actions if self.n > 1 else map_tree(lambda leaf: leaf[:, 0], actions)})

    def on_policy_output(self, rows: Rows) -> None:
        tree = self._known()
        if "actions" not in rows:
            raise ContractError(
                f"{self.name} needs the column 'actions' of the policy's output, got {list(rows.keys())}"
            )
        self._history.push(rows, tree.flatten(rows["actions"]), "actions")

    def reset(self, env_ids: EnvIds | None = None) -> None:
        self._history.reset(env_ids)

    def setup(self, space: Space[Any]) -> None:
        actions = action_tree(self.action_space, self.name)
        if self._tree is None or actions.space != self._tree.space:
            self._history = History(self.n, [blank_action(leaf) for leaf in actions.leaves])
        self._tree = actions
        if self.into_obs:
            self._flat.setup(actions.space)
            self._dtype = np.dtype(self.output_space(space).dtype)

    def output_space(self, space: Space[Any]) -> Space[Any]:
        actions = action_tree(self.action_space, self.name)
        if not self.into_obs:
            return space
        flat = FlattenObs().output_space(actions.space)
        assert isinstance(flat, Box)
        return appended_space(space, flat, self.n, self.name)

    def state_dict(self) -> State:
        return {} if self._tree is None else self._history.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._known()
        self._history.load_state_dict(state)

    def _known(self) -> SpaceTree:
        if self._tree is None:
            raise self._not_set_up()
        return self._tree

"""`PrevRewards`: shows the policy the agent's last rewards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Space

from marlvec.connectors.agent._support.history import History, check_column_is_new
from marlvec.connectors.agent._support.leafwise_obs import append_to_obs, appended_space
from marlvec.connectors.connector import AgentConnector, EnvIds, State
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError

__all__ = ["PrevRewards"]

COLUMN = "prev_rewards"
_ANY = Box(-np.inf, np.inf, (1,), np.float32)


class PrevRewards(AgentConnector):
    """Shows the policy its agent's rewards for the last n decisions.

    They come as a column ``prev_rewards`` of float64: ``(n_rows,)`` where n is 1, else ``(n_rows, n)``, oldest first.
    The last one is the row's own ``rewards``, as the connectors before this one have left it. What stands there before
    an episode's first decisions, its first row included, is 0.

    Args:
        n: How many, at least 1.
        into_obs: Append them to the observation, a vector, instead of adding a column. They take its dtype, or float32
            beside integers; what is too large for that becomes infinite.

    Raises:
        ArgumentError: ``n`` is below 1.
        UnsupportedSpaceError: Where a space is first seen, with ``into_obs``: the observation is not a vector.
    """

    def __init__(self, n: int = 1, into_obs: bool = False) -> None:
        if n < 1:
            raise ArgumentError(f"n must be at least 1, got {n}")
        self.n = n
        self.into_obs = into_obs
        self._history = History(n, [np.zeros(())])
        self._dtype: np.dtype[Any] | None = None

    def __call__(self, rows: Rows) -> Rows:
        self._history.begin(rows)
        reward = rows.rewards
        if "first" in rows and rows.first.any():
            reward = np.where(rows.first, 0.0, reward)  # an episode's first rows have no reward yet
        self._history.push(rows, [reward], "rewards")
        (rewards,) = self._history.look(rows, np.arange(1 - self.n, 1))
        if self.into_obs:
            if self._dtype is None:
                raise self._not_set_up()
            return append_to_obs(rows, rewards, self._dtype)
        check_column_is_new(rows, COLUMN, self.name)
        return rows.replace(**{COLUMN: rewards if self.n > 1 else rewards[:, 0]})

    def reset(self, env_ids: EnvIds | None = None) -> None:
        self._history.reset(env_ids)

    def setup(self, space: Space[Any]) -> None:
        if self.into_obs:
            self._dtype = appended_space(space, _ANY, self.n, self.name).low.dtype

    def output_space(self, space: Space[Any]) -> Space[Any]:
        return appended_space(space, _ANY, self.n, self.name) if self.into_obs else space

    def state_dict(self) -> State:
        return self._history.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._history.load_state_dict(state)

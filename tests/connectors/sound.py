"""Connectors that keep to their contract; each of the broken ones is one of these with one thing wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Space

from marlvec import connectors as c
from marlvec.errors import ArgumentError

VECTOR = Box(-np.inf, np.inf, (3,), np.float32)
UNIT = Box(-1.0, 1.0, (3,), np.float32)


class Change(c.AgentConnector):
    """Sound: puts an observation's change since the agent's last one in its place."""

    def __init__(self) -> None:
        self._last = c.AgentTable((3,), np.float32)

    def __call__(self, rows: c.Rows) -> c.Rows:
        return rows.replace(obs=rows.obs - self._turn(rows))

    def _turn(self, rows: c.Rows) -> Any:
        last = self._last.get(rows.env_id, rows.agent_index)
        last[rows.first] = 0
        self._last.set(rows.env_id, rows.agent_index, rows.obs)
        return last

    def reset(self, env_ids: Any = None) -> None:
        self._last.reset(env_ids)

    def state_dict(self) -> dict[str, Any]:
        return self._last.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.keys() != {"values"}:
            raise ArgumentError(f"expected values, got {list(state)}")
        self._last.load_state_dict(state)


class Centre(c.AgentConnector):
    """Sound: subtracts the mean of all observations that it saw in training.

    Its parts are sums and a count: learnt since the last `hand_over`, handed over, and merged.
    """

    def __init__(self) -> None:
        self._parts = np.zeros((3, 4))

    def __call__(self, rows: c.Rows) -> c.Rows:
        if self.training:
            self._learn(rows)
        total = self._parts.sum(axis=0)
        mean = total[:3] / max(total[3], 1)
        return rows.replace(obs=(rows.obs - mean).astype(np.float32))

    def _learn(self, rows: c.Rows) -> None:
        self._parts[0] += [*rows.obs.sum(axis=0, dtype=np.float64), len(rows)]

    def state_dict(self) -> dict[str, Any]:
        return {"sum": self._parts.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.keys() != {"sum"}:
            raise ArgumentError(f"expected sum, got {list(state)}")
        self._parts = state["sum"].copy()

    def merge_states(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        own = sum(state["sum"][:2].sum(axis=0) for state in states)
        return {"sum": np.stack([np.zeros(4), np.zeros(4), states[0]["sum"][2] + own])}

    def hand_over(self) -> dict[str, Any]:
        self._parts[1] += self._parts[0]
        self._parts[0] = 0
        return self.state_dict()

    def take_merged(self, state: Mapping[str, Any]) -> None:
        if state:
            self._parts[1:] = [np.zeros(4), state["sum"].sum(axis=0)]


class Team(c.AgentConnector):
    """Sound: subtracts the mean over the agents of the env that are in the call."""

    across_agents = True

    def __call__(self, rows: c.Rows) -> c.Rows:
        same = rows.env_id[:, None] == rows.env_id
        mean = np.stack([rows.obs[mates].mean(axis=0) for mates in same]) if len(rows) else rows.obs
        return rows.replace(obs=(rows.obs - mean).astype(np.float32))


class Noise(c.AgentConnector):
    """Sound: noise that belongs to its row."""

    def __init__(self) -> None:
        self._random = c.RowRandom(0, "noise")

    def __call__(self, rows: c.Rows) -> c.Rows:
        return rows.replace(obs=(rows.obs + self._random.normal(rows, 3)).astype(np.float32))


class Halve(c.ActionConnector):
    """Sound: halves actions; the policy's space is twice the env's."""

    def __call__(self, rows: c.Rows) -> c.Rows:
        return rows.replace(actions_for_env=rows.actions_for_env / np.float32(2))

    def policy_space(self, space: Space[Any]) -> Space[Any]:
        assert isinstance(space, Box)
        return Box(space.low * 2, space.high * 2, dtype=np.float32)


class Awake(c.AgentConnector):
    """Sound: removes the rows of agents whose first number is below 0; they do nothing."""

    changes_length = True
    noop = 0

    def __call__(self, rows: c.Rows) -> c.Rows:
        return rows.take((rows.obs[:, 0] >= 0) | rows.last)


class Later(c.LearnerConnector):
    """Sound: adds the reward of a fragment's next row."""

    def __call__(self, rows: c.Rows) -> c.Rows:
        return rows.replace(later=self._later(rows))

    def _later(self, rows: c.Rows) -> Any:
        goes_on = rows.unroll_id[1:] == rows.unroll_id[:-1]
        return np.append(np.where(goes_on, rows.rewards[1:], 0.0), np.zeros(min(1, len(rows))))

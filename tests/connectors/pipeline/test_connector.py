from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Space

from marlvec import connectors as c
from marlvec.connectors.connector import EnvIds, State
from marlvec.errors import ArgumentError
from tests.connectors.helpers.samples import pairs_of, rows_of, same_tree, vectors


class LastAction(c.AgentConnector):
    """Appends the agent's last action to its observation, and learns how many rows there were for each policy."""

    def __init__(self) -> None:
        self.table = c.AgentTable((1,), np.float32)
        self.seen = np.zeros(4, np.int64)

    def __call__(self, rows: c.Rows) -> c.Rows:
        if self.training:
            np.add.at(self.seen, rows.policy_index, 1)
        return rows.replace(obs=np.concatenate([rows.obs, self.table.get(rows.env_id, rows.agent_index)], axis=1))

    def output_space(self, space: Space[Any]) -> Space[Any]:
        assert isinstance(space, Box)
        return vectors(space.shape[0] + 1)

    def reset(self, env_ids: EnvIds | None = None) -> None:
        self.table.reset(env_ids)

    def on_policy_output(self, rows: c.Rows) -> None:
        self.table.set(rows.env_id, rows.agent_index, rows.actions[:, None])

    def state_dict(self) -> State:
        return {"table": self.table.state_dict(), "seen": self.seen.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.table.load_state_dict(state["table"])
        self.seen = np.array(state["seen"])

    def merge_states(self, states: Sequence[Mapping[str, Any]]) -> State:
        return {"table": self.table.state_dict(), "seen": np.sum([s["seen"] for s in states], axis=0)}


def rows_at(pairs: list[tuple[int, int]], policy: int = 0) -> c.Rows:
    ids = np.array(pairs)
    return rows_of(pairs, ids.astype(np.float32), policy_index=np.full(len(pairs), policy))


@pytest.mark.checklist(79)
def test_a_connector_has_a_batched_call_with_ids_reset_policy_output_mode_state_and_a_space_rule() -> None:
    """A user's connector uses each hook through a pipeline, and each one reaches it as the contract says."""
    piece = LastAction()
    pipeline = c.AgentPipeline([piece])
    pipeline.bind(vectors(2))
    assert pipeline.output_space_ == vectors(3)

    everyone = pairs_of(3, 2)
    out = pipeline(rows_at(everyone))
    assert out.obs.shape == (6, 3)
    assert out.obs[:, 2].tolist() == [0] * 6
    pipeline.on_policy_output(out.replace(actions=np.arange(1.0, 7.0)))
    some = [(2, 1), (0, 0), (1, 1)]
    out = pipeline(rows_at(some, policy=3))
    assert out.obs.tolist() == [[2, 1, 6], [0, 0, 1], [1, 1, 4]]

    pipeline.reset([1])
    assert pipeline(rows_at(everyone)).obs[:, 2].tolist() == [1, 2, 0, 0, 5, 6]
    assert piece.seen.tolist() == [12, 0, 0, 3]

    pipeline.eval()
    assert not piece.training
    pipeline(rows_at(everyone))
    assert piece.seen.tolist() == [12, 0, 0, 3]
    pipeline.train()
    assert piece.training

    other = c.AgentPipeline([LastAction()])
    other.bind(vectors(2))
    other.load_state_dict(pipeline.state_dict())
    same_tree(other.state_dict(), pipeline.state_dict())
    assert other(rows_at(some)).obs.tolist() == pipeline(rows_at(some)).obs.tolist()
    merged = pipeline.merge_states([pipeline.state_dict(), other.state_dict()])
    assert merged["LastAction"]["seen"].tolist() == [30, 0, 0, 6]
    pipeline.load_state_dict(merged)
    assert piece.seen.tolist() == [30, 0, 0, 6]


def test_the_defaults_of_a_connector() -> None:
    class Plain(c.AgentConnector):
        def __call__(self, rows: c.Rows) -> c.Rows:
            return rows

    piece = Plain()
    piece.setup(vectors())
    piece.reset([0])
    piece.on_policy_output(c.Rows())
    assert piece.state_dict() == piece.merge_states([{}, {}]) == {}
    piece.load_state_dict({})
    with pytest.raises(ArgumentError, match=r"Plain has no state, got \['x'\]"):
        piece.load_state_dict({"x": 1})
    assert piece.output_space(vectors()) == vectors()
    assert piece.name == "Plain"
    assert repr(piece) == "Plain()"
    assert piece.eval().training is False
    assert piece.train().training is True
    with pytest.raises(TypeError):
        c.AgentConnector()  # type: ignore[abstract]  # that it cannot be made is the point


def test_a_function_is_a_connector() -> None:
    @c.agent_connector
    def double(rows: c.Rows) -> c.Rows:
        return rows.replace(obs=rows.obs * 2)

    @c.agent_connector(name="wider", output_space=lambda space: vectors(4))
    def widen(rows: c.Rows) -> c.Rows:
        return rows.replace(obs=np.concatenate([rows.obs, rows.obs[:, :1]], axis=1))

    assert isinstance(double, c.AgentConnector)
    assert (double.name, widen.name, repr(double)) == ("double", "wider", "double")
    pipeline = c.AgentPipeline([double, widen, double])
    pipeline.bind(vectors(3))
    assert pipeline.names == ("double", "wider", "double_2")
    assert pipeline.output_space_ == vectors(4)
    assert pipeline(c.Rows(obs=np.ones((2, 3), np.float32))).obs.tolist() == [[4, 4, 4, 4]] * 2


def test_a_function_is_an_action_connector() -> None:
    @c.action_connector(policy_space=lambda space: Box(0, 1, (2,)))
    def halve(rows: c.Rows) -> c.Rows:
        return rows.replace(actions_for_env=rows.actions_for_env / 2)

    @c.action_connector
    def same(rows: c.Rows) -> c.Rows:
        return rows

    assert isinstance(same, c.ActionConnector)
    assert (same.name, repr(halve)) == ("same", "halve")
    pipeline = c.ActionPipeline([halve, same])
    pipeline.bind(Box(0, 0.5, (2,)))
    assert pipeline.policy_space_ == Box(0, 1, (2,))
    assert pipeline.env_space == Box(0, 0.5, (2,))
    out = pipeline(c.Rows(actions=np.ones((1, 2))))
    assert out.actions_for_env.tolist() == [[0.5, 0.5]]
    assert out.actions.tolist() == [[1, 1]]


def test_only_functions_can_be_decorated() -> None:
    with pytest.raises(ArgumentError, match="expected a function"):
        c.agent_connector(3)  # type: ignore[call-overload]  # a wrong argument is the point

"""What pipelines tell their pieces: spaces, agents, the policy's actions, and which envs are over."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete, Space
from hypothesis import given
from hypothesis import strategies as st

from marlvec import connectors as c
from marlvec.errors import ArgumentError, ContractError
from tests.connectors.helpers.lives import AGENTS, action_pipelines, agent_pipelines, live, story
from tests.connectors.helpers.samples import same_tree, vectors


class Notes(c.AgentConnector):
    """Writes down what it knew each time it was set up."""

    def __init__(self, *, refuse: Any = None) -> None:
        self.refuse = refuse
        self.known: list[Any] = []

    def __call__(self, rows: c.Rows) -> c.Rows:
        return rows

    def setup(self, space: Space[Any]) -> None:
        self.known.append((self.agents, self.action_space))
        if self.refuse is not None and self.refuse == self.action_space:
            raise ArgumentError("not these actions")


class ActionNotes(c.ActionConnector):
    def __init__(self) -> None:
        self.known: list[Any] = []

    def __call__(self, rows: c.Rows) -> c.Rows:
        return rows

    def setup(self, space: Space[Any]) -> None:
        self.known.append((self.action_space, space))


def test_every_piece_is_told_the_policys_actions_before_it_is_set_up() -> None:
    """At any depth, and those that come later; a new bind tells all of them anew."""
    deep, late, inner_late = Notes(), Notes(), Notes()
    inner = c.AgentPipeline([deep])
    pipeline = c.AgentPipeline([c.FlattenObs(), inner])
    assert pipeline.action_space is None
    pipeline.bind(vectors(), ["a", "b"], Discrete(3))
    pipeline.append(late)
    inner.append(inner_late)
    assert deep.known[0] == late.known[0] == inner_late.known[0] == (("a", "b"), Discrete(3))
    assert pipeline.action_space == inner.action_space == Discrete(3)
    pipeline.bind(vectors(), ["a"], Discrete(4))
    pipeline.bind(vectors())
    for piece in (deep, late, inner_late):
        assert piece.known[-2:] == [(("a",), Discrete(4)), ((), None)]


def test_a_bind_that_fails_leaves_all_that_was_known() -> None:
    picky = Notes(refuse=Discrete(4))
    inner = c.AgentPipeline([picky])
    pipeline = c.AgentPipeline([inner])
    pipeline.bind(vectors(), ["a"], Discrete(3))
    with pytest.raises(ArgumentError, match="not these actions"):
        pipeline.bind(vectors(2), ["b"], Discrete(4))
    for piece in (pipeline, inner, picky):
        assert (piece.agents, piece.action_space) == (("a",), Discrete(3))
    assert pipeline.input_space == vectors()


def test_a_piece_that_is_refused_forgets_what_it_was_told() -> None:
    pipeline = c.AgentPipeline([c.FlattenObs()])
    pipeline.bind(vectors(), ["a"], Discrete(3))
    picky = Notes(refuse=Discrete(3))
    for piece in (picky, c.AgentPipeline([picky])):
        with pytest.raises(ArgumentError, match="not these actions"):
            pipeline.append(piece)
        assert (picky.agents, picky.action_space) == (piece.agents, piece.action_space) == ((), None)
    assert pipeline.names == ("FlattenObs",)


def test_the_action_side_works_out_the_policys_space_and_tells_it_after_each_edit() -> None:
    """All pieces, wherever they stand, hear of the one space the policy acts in; `setup` gives each its own."""
    first, last = ActionNotes(), ActionNotes()
    inner = c.ActionPipeline([c.UnsquashActions(), last])
    pipeline = c.ActionPipeline([first, inner, c.ClipActions()])
    env, unit = Box(-2, 3, (2,)), Box(-1, 1, (2,))
    pipeline.bind(env)
    assert first.known[-1] == (unit, unit)
    assert last.known[-1] == (unit, env)
    assert pipeline.action_space == inner.action_space == pipeline.policy_space_ == unit
    assert pipeline.env_space == env
    inner.remove(c.UnsquashActions)
    assert first.known[-1] == last.known[-1] == (env, env)
    inner.prepend(c.UnsquashActions())
    assert first.known[-1] == (unit, unit)
    pipeline.bind(env, action_space=unit)
    with pytest.raises(ArgumentError, match=r"through ActionPipeline the policy acts in Box\(-1.*not in Discrete\(3\)"):
        pipeline.bind(env, action_space=Discrete(3))
    assert pipeline.action_space == unit


def test_a_pipeline_is_across_agents_where_a_piece_is() -> None:
    class Team(Notes):
        across_agents = True

    inner = c.AgentPipeline([c.FlattenObs()])
    pipeline = c.AgentPipeline([inner])
    assert not pipeline.across_agents
    inner.append(Team())
    assert pipeline.across_agents
    assert inner.across_agents
    inner.remove(Team)
    assert not pipeline.across_agents
    inner.append(Team())
    pipeline.remove(inner)
    assert not pipeline.across_agents
    assert inner.across_agents


# --- the learner side


class Double(c.LearnerConnector):
    def __call__(self, rows: c.Rows) -> c.Rows:
        return rows.replace(obs=rows.obs * 2)


def test_a_learner_pipeline_runs_unbound_and_says_its_pieces_without_spaces() -> None:
    @c.learner_connector
    def add_one(rows: c.Rows) -> c.Rows:
        return rows.replace(obs=rows.obs + 1)

    pipeline = c.LearnerPipeline([Double(), c.LearnerPipeline([add_one])])
    assert pipeline(c.Rows(obs=np.array([1.0]))).obs.tolist() == [3.0]
    lines = ["LearnerPipeline (training)", "  0. Double()", "  1. LearnerPipeline", "     0. add_one"]
    assert pipeline.describe().splitlines() == lines
    pipeline.bind(vectors(), ["a"])
    assert pipeline.describe().splitlines() == lines
    assert pipeline(c.Rows(obs=np.array([1.0]))).obs.tolist() == [3.0]
    assert pipeline.timings["Double"].calls == 2
    with pytest.raises(ArgumentError, match="takes LearnerConnectors, got FlattenObs"):
        pipeline.append(c.FlattenObs())  # type: ignore[arg-type]  # the wrong side is the point


def test_a_learner_function_may_change_the_number_of_rows_where_it_says_so() -> None:
    def half(rows: c.Rows) -> c.Rows:
        return rows.take(slice(0, len(rows) // 2))

    rows = c.Rows(obs=np.arange(4.0))
    assert len(c.LearnerPipeline([c.learner_connector(name="half", changes_length=True)(half)])(rows)) == 2
    with pytest.raises(ContractError, match="connector 'half' of LearnerPipeline got 4 rows and returned 2"):
        c.LearnerPipeline([c.learner_connector(half)])(rows)


# --- resets


@pytest.mark.slow("draws many batches")
@pytest.mark.checklist(93)
@given(pipeline=st.one_of(agent_pipelines(), action_pipelines()), gone=st.sampled_from([(0,), (1, 2), None]))
def test_a_reset_reaches_all_pieces_and_takes_exactly_the_named_envs(pipeline: Any, gone: Any) -> None:
    """A chain that was reset goes on like one that never saw those envs. No policy is asked, so none need be there."""
    other = type(pipeline).from_config(pipeline.to_config())
    if isinstance(pipeline, c.AgentPipeline):
        other.bind(pipeline.input_space, AGENTS, pipeline.action_space)
    else:
        other.bind(pipeline.env_space, AGENTS)
    moments = story(4, 14)
    stay = tuple({0, 1, 2} - set(gone or (0, 1, 2)))
    live(pipeline.eval(), moments[:7])
    live(other.eval(), [moment.of_envs(stay) for moment in moments[:7]])
    pipeline.reset(gone)
    for expected, got in zip(live(other, moments[7:]), live(pipeline, moments[7:]), strict=True):
        same_tree(got, expected)


# --- edits


@pytest.mark.fault("E9")
def test_a_name_that_is_taken_gets_a_number_and_never_two_pieces() -> None:
    pipeline = c.AgentPipeline()
    for _ in range(3):
        piece = Notes()
        piece.name = "notes"
        pipeline.append(piece)
    twin = Notes()
    twin.name = "notes_2"
    pipeline.prepend(twin)
    assert pipeline.names == ("notes_2_2", "notes", "notes_2", "notes_3")
    assert pipeline["notes_2_2"] is twin

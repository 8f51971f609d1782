"""Pipelines that live through a story, of pieces of all kinds; and a life that is cut by a kill.

As a command, ``python -m tests.connectors.helpers.lives begin FILE`` lives the first half, saves and kills itself, and
``... go-on FILE OUT`` loads that and lives the second half.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Box
from hypothesis import strategies as st

from marlvec.connectors import (
    ActionConnector,
    ActionPipeline,
    AgentConnector,
    AgentIndicator,
    AgentPipeline,
    AgentTable,
    ClipReward,
    FlattenObs,
    FrameStack,
    NormalizeObs,
    Rows,
    action_connector,
    agent_connector,
)
from marlvec.connectors.action.held_actions import RepeatActions, StickyActions
from marlvec.connectors.action.noise import GaussianNoise, OrnsteinUhlenbeckNoise
from marlvec.connectors.agent.context.time_feature import TimeFeature
from marlvec.connectors.agent.filtering.filter_rows import FilterRows
from marlvec.connectors.agent.filtering.frame_skip import FrameSkip
from marlvec.connectors.agent.images.max_obs import MaxObs
from marlvec.connectors.agent.memory.delay_obs import DelayObs
from marlvec.connectors.agent.memory.prev_actions import PrevActions
from marlvec.connectors.agent.memory.prev_rewards import PrevRewards
from marlvec.connectors.agent.memory.rnn_state import RnnState
from marlvec.connectors.agent.memory.view import View
from marlvec.connectors.agent.rewards.normalize_reward import NormalizeReward
from marlvec.connectors.connector import EnvIds, State
from marlvec.connectors.registry import register_connector, register_function
from marlvec.testing.connector_checks._support.story import Moment, SampledRows

OBS = Box(-np.inf, np.inf, (3,), np.float32)
ACTION = Box(-1.0, 1.0, (2,), np.float32)
AGENTS = ("wolf_0", "wolf_1", "hare")


@register_connector(name="tests/LastObs")
class LastObs(AgentConnector):
    """A user's own: appends the agent's observation before, times a factor."""

    def __init__(self, factor: Any) -> None:
        self.factor = factor
        self.table = AgentTable((1,), np.float32)
        self.seen = 0

    def __call__(self, rows: Rows) -> Rows:
        before = np.where(rows.first[:, None], 0, self.table.get(rows.env_id, rows.agent_index))
        self.table.set(rows.env_id, rows.agent_index, rows.obs[:, :1])
        self.seen += len(rows)
        return rows.replace(obs=np.concatenate([rows.obs, before * np.float32(self.factor)], axis=1))

    def output_space(self, space: Any) -> Any:
        return Box(-np.inf, np.inf, (space.shape[0] + 1,), np.float32)

    def reset(self, env_ids: EnvIds | None = None) -> None:
        self.table.reset(env_ids)

    def state_dict(self) -> State:
        return {"table": self.table.state_dict(), "seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.table.load_state_dict(state["table"])
        self.seen = state["seen"]


@agent_connector
@register_function(name="tests/halve")
def halve(rows: Rows) -> Rows:
    return rows.replace(obs=rows.obs * np.float32(0.5))


@action_connector
@register_function(name="tests/turn")
def turn(rows: Rows) -> Rows:
    return rows.replace(actions_for_env=-rows.actions_for_env)


@register_function(name="tests/keep")
def keep(rows: Rows) -> Any:
    return rows.first | rows.last | (rows.rewards > -0.5)


def agent_pieces() -> st.SearchStrategy[AgentConnector]:
    """Pieces that go together in any order; nearly all of them remember something."""
    flag = st.booleans()
    return st.one_of(
        st.builds(FrameStack, st.integers(1, 3), pad=st.sampled_from(["zero", "repeat"])),
        st.builds(NormalizeObs, per_agent=flag, clip=st.sampled_from([None, 5.0])),
        st.builds(LastObs, st.sampled_from([2, 0.5, np.float32(3), np.array([1.5])])),
        st.builds(PrevActions, st.integers(1, 2), into_obs=flag),
        st.builds(PrevRewards, st.integers(1, 2), into_obs=flag),
        st.builds(NormalizeReward, per_agent=flag),
        st.builds(DelayObs, st.integers(1, 3)),
        st.builds(MaxObs, st.integers(1, 3)),
        st.builds(FrameSkip, st.integers(1, 3)),
        st.sampled_from(["-3:-1", -1, [-2, 0]]).map(lambda shift: View("past", "obs", shift)),
        st.just(None).map(lambda _: View("odds", "logp", "-2:-1", fill=np.float32(0))),
        st.just(None).map(lambda _: RnnState({"h": np.ones((2,), np.float32)})),
        st.just(None).map(lambda _: FilterRows(keep)),
        st.just(None).map(lambda _: TimeFeature(20)),
        st.just(None).map(lambda _: AgentIndicator()),
        st.just(None).map(lambda _: ClipReward(limit=0.7)),
        st.just(None).map(lambda _: FlattenObs()),
        st.just(None).map(lambda _: halve),
    )


@st.composite
def agent_pipelines(draw: st.DrawFn) -> AgentPipeline:
    """A chain, bound to the story's spaces, whose last pieces stand in a chain of their own."""
    pieces = draw(st.lists(agent_pieces(), min_size=1, max_size=5, unique_by=_column))
    at = draw(st.integers(0, len(pieces)))
    pipeline = AgentPipeline([*pieces[:at], AgentPipeline(pieces[at:])])
    pipeline.bind(OBS, AGENTS, ACTION)
    return pipeline


def _column(piece: AgentConnector) -> Any:
    """The column it adds, which no other may add."""
    return type(piece) if isinstance(piece, (PrevActions, PrevRewards)) else getattr(piece, "column", id(piece))


def action_pipelines() -> st.SearchStrategy[ActionPipeline]:
    pieces: st.SearchStrategy[ActionConnector] = st.one_of(
        st.builds(StickyActions, st.sampled_from([0.3, 0.8])),
        st.builds(RepeatActions, st.integers(1, 3)),
        st.builds(GaussianNoise, st.just(0.3), final=st.just(0.1), decay_steps=st.just(7)),
        st.just(None).map(lambda _: OrnsteinUhlenbeckNoise()),
        st.just(None).map(lambda _: turn),
    )
    return st.lists(pieces, min_size=1, max_size=4).map(ActionPipeline).map(_bound)


def _bound(pipeline: ActionPipeline) -> ActionPipeline:
    pipeline.bind(ACTION, AGENTS)
    return pipeline


def story(seed: int, count: int) -> list[Moment]:
    columns = {"h": Box(-1, 1, (2,), np.float32)}
    return SampledRows(OBS, ACTION, ACTION, columns, 3, len(AGENTS), seed).moments(count)


def live(pipeline: AgentPipeline | ActionPipeline, moments: Sequence[Moment]) -> list[dict[str, Any]]:
    """Play the moments to a pipeline as a collector would; all columns that came out, moment by moment."""
    outs = []
    for moment in moments:
        if isinstance(pipeline, ActionPipeline):
            acting = ~moment.rows.last
            outs.append(pipeline(moment.rows.replace(**moment.answer).take(acting)))
        else:
            out = pipeline(moment.rows)
            outs.append(out)
            place = {key: i for i, key in enumerate(_keys(moment.rows))}
            came = np.array([place[key] for key in _keys(out)], np.int64)
            answered = out.replace(**moment.answer.take(came)).take(~moment.rows.last[came])
            pipeline.on_policy_output(answered.replace(state_out={"h": answered["h"]}))
        if moment.over:
            pipeline.reset(moment.over)
    return outs


def _keys(rows: Rows) -> list[tuple[int, int]]:
    return list(zip(rows.env_id.tolist(), rows.agent_index.tolist(), strict=True))


def whole() -> AgentPipeline:
    """Pieces of every kind: nested, named, a user's own, and of functions."""
    inner = AgentPipeline([NormalizeObs(clip=None, per_agent=True), NormalizeObs()])
    inner.name = "norm"
    view = View("past", "obs", "-3:-1")
    pieces = [LastObs(np.float32(1.5)), halve, inner, FrameStack(3), PrevActions(into_obs=True), view, FilterRows(keep)]
    pipeline = AgentPipeline(pieces)
    inner.remove(0)
    pipeline.bind(OBS, AGENTS, ACTION)
    inner[0].eval()
    return pipeline


HALF = 12


def main(way: str, file: str, out: str = "") -> None:
    """Live one half."""
    moments = story(5, 2 * HALF)
    if way == "begin":
        pipeline = whole()
        live(pipeline, moments[:HALF])
        pipeline.save(file)
        os.kill(os.getpid(), signal.SIGKILL)
    pipeline = AgentPipeline.load(file)
    columns = live(pipeline, moments[HALF:])
    np.savez(out, **{f"{i}/{name}": value for i, row in enumerate(columns) for name, value in row.items()})
    pipeline.save(file)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Pipelines that live through sampled steps, of pieces of all kinds; and a life that is cut by a kill.

As a command, ``python -m tests.connectors.lives begin FILE`` lives the first half, saves and kills itself, and
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

from marlvec import connectors as c
from marlvec.connectors.connector import EnvIds, State
from marlvec.testing.connector_trial import SampledRows, TrialStep

OBS = Box(-np.inf, np.inf, (3,), np.float32)
ACTION = Box(-1.0, 1.0, (2,), np.float32)
AGENTS = ("wolf_0", "wolf_1", "hare")


@c.register_connector(name="tests/LastObs")
class LastObs(c.AgentConnector):
    """A user's own: appends the agent's observation before, times a factor."""

    def __init__(self, factor: Any) -> None:
        self.factor = factor
        self.table = c.AgentTable((1,), np.float32)
        self.seen = 0

    def __call__(self, rows: c.Rows) -> c.Rows:
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


@c.agent_connector
@c.register_function(name="tests/halve")
def halve(rows: c.Rows) -> c.Rows:
    return rows.replace(obs=rows.obs * np.float32(0.5))


@c.action_connector
@c.register_function(name="tests/turn")
def turn(rows: c.Rows) -> c.Rows:
    return rows.replace(actions_for_env=-rows.actions_for_env)


@c.register_function(name="tests/keep")
def keep(rows: c.Rows) -> Any:
    return rows.first | rows.last | (rows.rewards > -0.5)


def agent_pieces() -> st.SearchStrategy[c.AgentConnector]:
    """Pieces that go together in any order; nearly all of them remember something."""
    flag = st.booleans()
    return st.one_of(
        st.builds(c.FrameStack, st.integers(1, 3), pad=st.sampled_from(["zero", "repeat"])),
        st.builds(c.NormalizeObs, per_agent=flag, clip=st.sampled_from([None, 5.0])),
        st.builds(LastObs, st.sampled_from([2, 0.5, np.float32(3), np.array([1.5])])),
        st.builds(c.PrevActions, st.integers(1, 2), into_obs=flag),
        st.builds(c.PrevRewards, st.integers(1, 2), into_obs=flag),
        st.builds(c.NormalizeReward, per_agent=flag),
        st.builds(c.DelayObs, st.integers(1, 3)),
        st.builds(c.MaxObs, st.integers(1, 3)),
        st.builds(c.FrameSkip, st.integers(1, 3)),
        st.sampled_from(["-3:-1", -1, [-2, 0]]).map(lambda shift: c.View("past", "obs", shift)),
        st.just(None).map(lambda _: c.View("odds", "logp", "-2:-1", fill=np.float32(0))),
        st.just(None).map(lambda _: c.RnnState({"h": np.ones((2,), np.float32)})),
        st.just(None).map(lambda _: c.FilterRows(keep)),
        st.just(None).map(lambda _: c.TimeFeature(20)),
        st.just(None).map(lambda _: c.AgentIndicator()),
        st.just(None).map(lambda _: c.ClipReward(limit=0.7)),
        st.just(None).map(lambda _: c.FlattenObs()),
        st.just(None).map(lambda _: halve),
    )


@st.composite
def agent_pipelines(draw: st.DrawFn) -> c.AgentPipeline:
    """A chain, bound to the spaces of the sampled steps, whose last pieces stand in a chain of their own."""
    pieces = draw(st.lists(agent_pieces(), min_size=1, max_size=5, unique_by=_column))
    at = draw(st.integers(0, len(pieces)))
    pipeline = c.AgentPipeline([*pieces[:at], c.AgentPipeline(pieces[at:])])
    pipeline.bind(OBS, AGENTS, ACTION)
    return pipeline


def _column(piece: c.AgentConnector) -> Any:
    """The column it adds, which no other may add."""
    return type(piece) if isinstance(piece, (c.PrevActions, c.PrevRewards)) else getattr(piece, "column", id(piece))


def action_pipelines() -> st.SearchStrategy[c.ActionPipeline]:
    pieces: st.SearchStrategy[c.ActionConnector] = st.one_of(
        st.builds(c.StickyActions, st.sampled_from([0.3, 0.8])),
        st.builds(c.RepeatActions, st.integers(1, 3)),
        st.builds(c.GaussianNoise, st.just(0.3), final=st.just(0.1), decay_steps=st.just(7)),
        st.just(None).map(lambda _: c.OrnsteinUhlenbeckNoise()),
        st.just(None).map(lambda _: turn),
    )
    return st.lists(pieces, min_size=1, max_size=4).map(c.ActionPipeline).map(_bound)


def _bound(pipeline: c.ActionPipeline) -> c.ActionPipeline:
    pipeline.bind(ACTION, AGENTS)
    return pipeline


def sampled_steps(seed: int, count: int) -> list[TrialStep]:
    columns = {"h": Box(-1, 1, (2,), np.float32)}
    return SampledRows(OBS, ACTION, ACTION, columns, 3, len(AGENTS), seed).steps(count)


def live(pipeline: c.AgentPipeline | c.ActionPipeline, steps: Sequence[TrialStep]) -> list[dict[str, Any]]:
    """Play the steps to a pipeline as a collector would; all columns that came out, step by step."""
    outs = []
    for step in steps:
        if isinstance(pipeline, c.ActionPipeline):
            acting = ~step.rows.last
            outs.append(pipeline(step.rows.replace(**step.answer).take(acting)))
        else:
            out = pipeline(step.rows)
            outs.append(out)
            place = {key: i for i, key in enumerate(_keys(step.rows))}
            came = np.array([place[key] for key in _keys(out)], np.int64)
            answered = out.replace(**step.answer.take(came)).take(~step.rows.last[came])
            pipeline.on_policy_output(answered.replace(state_out={"h": answered["h"]}))
        if step.over:
            pipeline.reset(step.over)
    return outs


def _keys(rows: c.Rows) -> list[tuple[int, int]]:
    return list(zip(rows.env_id.tolist(), rows.agent_index.tolist(), strict=True))


def whole() -> c.AgentPipeline:
    """Pieces of every kind: nested, named, a user's own, and of functions."""
    inner = c.AgentPipeline([c.NormalizeObs(clip=None, per_agent=True), c.NormalizeObs()])
    inner.name = "norm"
    view = c.View("past", "obs", "-3:-1")
    pieces = [
        LastObs(np.float32(1.5)),
        halve,
        inner,
        c.FrameStack(3),
        c.PrevActions(into_obs=True),
        view,
        c.FilterRows(keep),
    ]
    pipeline = c.AgentPipeline(pieces)
    inner.remove(0)
    pipeline.bind(OBS, AGENTS, ACTION)
    inner[0].eval()
    return pipeline


HALF = 12


def main(way: str, file: str, out: str = "") -> None:
    """Live one half."""
    steps = sampled_steps(5, 2 * HALF)
    if way == "begin":
        pipeline = whole()
        live(pipeline, steps[:HALF])
        pipeline.save(file)
        os.kill(os.getpid(), signal.SIGKILL)
    pipeline = c.AgentPipeline.load(file)
    columns = live(pipeline, steps[HALF:])
    np.savez(out, **{f"{i}/{name}": value for i, row in enumerate(columns) for name, value in row.items()})
    pipeline.save(file)


if __name__ == "__main__":
    main(*sys.argv[1:])

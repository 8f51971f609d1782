"""Observation connectors in batches: the same numbers whatever stands in one call; and `check_connector` for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from marlvec.connectors import AgentPipeline, Connector, Rows
from marlvec.connectors.agent.context.action_mask_from_obs import ActionMaskFromObs
from marlvec.connectors.agent.context.death_mask import DeathMask
from marlvec.connectors.agent.context.state_in_obs import StateInObs
from marlvec.connectors.agent.context.team_obs import TeamObs
from marlvec.connectors.agent.context.time_feature import TimeFeature
from marlvec.connectors.agent.images.grayscale_obs import GrayscaleObs
from marlvec.connectors.agent.images.resize_obs import ResizeObs
from marlvec.connectors.agent.shape.drop_keys import DropKeys
from marlvec.connectors.agent.shape.pad_obs import PadObs
from marlvec.connectors.agent.shape.reshape_obs import ReshapeObs
from marlvec.connectors.agent.shape.transpose_obs import TransposeObs
from marlvec.connectors.agent.values.cast_obs import CastObs
from marlvec.connectors.agent.values.clip_obs import ClipObs
from marlvec.connectors.agent.values.map_obs import MapObs
from marlvec.connectors.agent.values.one_hot_obs import OneHotObs
from marlvec.connectors.agent.values.per_agent import PerAgent
from marlvec.connectors.agent.values.scale_obs import ScaleObs
from marlvec.testing.check_connector import check_connector
from tests.connectors.helpers.samples import batch, pairs_of, rows_of, same_tree

AGENTS = ("wolf_0", "wolf_1", "hare")
VECTOR = spaces.Box(-5, 5, (3,))
STATE = spaces.Box(-5, 5, (4,), np.float64)
NESTED = spaces.Dict(
    {
        "eye": spaces.Box(0, 255, (5, 4, 3), np.uint8),
        "heat": spaces.Box(-1, 1, (5, 4, 3)),
        "place": spaces.Box(-9, 9, (2,), np.float64),
        "rest": spaces.Tuple([spaces.Discrete(4, start=1), spaces.MultiBinary(2)]),
    }
)
MASKED = spaces.Dict({"place": VECTOR, "mask": spaces.MultiBinary(4)})


def _double(obs: Any) -> Any:
    return obs * 2


def _mine(obs: Any, agent: Any) -> Any:
    return obs * (1 + AGENTS.index(agent) if isinstance(agent, str) else agent)


def _mean(team_obs_nA: Any, team_mask_nA: Any, rows: Rows) -> Any:
    return team_obs_nA.sum(1) / team_mask_nA.sum(1, keepdims=True) - rows.obs


Maker = tuple[Callable[[], Connector], spaces.Space[Any]]

OBS_MAKERS: list[Maker] = [
    (lambda: MapObs(_double, spaces.Box(-10, 10, (3,))), VECTOR),
    (lambda: PerAgent(_mine, spaces.Box(-20, 20, (3,))), VECTOR),
    (lambda: CastObs("float32"), NESTED),
    (lambda: CastObs("int16", keys=["place", "eye"]), NESTED),
    (lambda: ScaleObs(-1, 1), NESTED),
    (lambda: ClipObs(-0.5, 200), NESTED),
    (lambda: ResizeObs((3, 3)), NESTED),
    (lambda: ResizeObs((7, 2), "linear"), NESTED),
    (lambda: ResizeObs((7, 2), "nearest"), NESTED),
    (GrayscaleObs, NESTED),
    (TransposeObs, NESTED),
    (lambda: ReshapeObs((-1, 3), keys=["eye", "heat"]), NESTED),
    (OneHotObs, NESTED),
    (lambda: DropKeys("heat", "place"), NESTED),
    (lambda: PadObs((5, 6, 3)), NESTED),
    (DeathMask, NESTED),
    (lambda: DeathMask(append=True), VECTOR),
    (TeamObs, NESTED),
    (lambda: TeamObs(_mean, spaces.Box(-10, 10, (3,))), VECTOR),
    (lambda: ActionMaskFromObs("mask"), MASKED),
    (lambda: TimeFeature(5), VECTOR),
    (lambda: StateInObs(STATE), NESTED),
    (lambda: StateInObs(STATE, "append"), VECTOR),
]
every_maker = pytest.mark.parametrize(
    ("make", "space"), OBS_MAKERS, ids=lambda value: repr(value()) if callable(value) else ""
)


def connect(make: Callable[[], Connector], space: spaces.Space[Any]) -> AgentPipeline:
    pipeline = AgentPipeline([make()])  # type: ignore[list-item]  # they are all agent connectors
    pipeline.bind(space, AGENTS)
    return pipeline


def rows_at(space: spaces.Space[Any], pairs: list[tuple[int, int]], tick: int) -> Rows:
    """Rows whose numbers are each pair's own, whatever the batch."""
    everyone, rng = pairs_of(4, 3), np.random.default_rng(tick)
    last = rng.random(12) < 0.3
    rows = rows_of(
        everyone,
        batch(space, 12, tick),
        t=np.full(12, tick),
        eps_id=np.repeat([7, 5, 6, 9], 3),
        first=rng.random(12) < 0.2,
        last=last,
        terminated=last & (rng.random(12) < 0.5),
        state=rng.random((12, 4)),
    )
    return rows.take(np.array([everyone.index(pair) for pair in pairs], np.int64))


@pytest.mark.mostly_slow("draws many batches", quick=8)
@every_maker
@settings(max_examples=25)
@given(data=st.data())
def test_a_batch_is_its_rows_one_by_one(
    make: Callable[[], Connector], space: spaces.Space[Any], data: st.DataObject
) -> None:
    """Any subset of 4 envs × 3 agents in any order, in one call, against calls of one row each, to the bit.

    Where a row depends on its team the single calls are those of one env. Episodes of some envs are lost in between.
    """
    whole, single = connect(make, space), connect(make, space)
    across = whole[0].across_agents
    for tick in range(data.draw(st.integers(1, 3))):
        pairs = data.draw(st.lists(st.sampled_from(pairs_of(4, 3)), unique=True, max_size=12))
        rows = rows_at(space, pairs, tick)
        before = rows.take(np.arange(len(rows)))
        together = whole(rows)
        same_tree(rows, before)  # nothing was written to
        parts = [rows.env_id == env for env in range(4)] if across else list(np.eye(len(rows), dtype=bool))
        for part in data.draw(st.permutations(parts)):
            if part.any():
                same_tree(single(rows.take(part)), together.take(part))
        ended = sorted(data.draw(st.sets(st.integers(0, 3))))
        whole.reset(ended)
        single.reset(ended)


@pytest.mark.mostly_slow("draws many batches", quick=8)
@every_maker
def test_each_keeps_the_contract(make: Callable[[], Connector], space: spaces.Space[Any]) -> None:
    check_connector(make, space, agents=AGENTS, columns={"state": STATE})


def test_every_observation_connector_was_tried() -> None:
    assert len({type(make()) for make, _ in OBS_MAKERS}) == 17

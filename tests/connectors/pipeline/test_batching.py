"""Batched or one env at a time, any subset, any order: the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from marlvec.connectors import (
    ActionPipeline,
    AgentConnector,
    AgentIndicator,
    AgentPipeline,
    ClipActions,
    ClipReward,
    Connector,
    FlattenObs,
    FrameStack,
    NormalizeObs,
    Pipeline,
    ReadOnlyActions,
    Rows,
    ToNumpy,
    UnsquashActions,
)
from marlvec.connectors.function import FunctionActionConnector, FunctionAgentConnector
from marlvec.trees import map_tree
from tests.connectors.helpers.samples import batch, pairs_of, rows_of, same_tree

AGENTS = ("wolf_0", "wolf_1", "hare")
VECTOR = spaces.Box(-5, 5, (3,))
NESTED = spaces.Dict(
    {
        "place": spaces.Box(-9, 9, (2, 2), np.float64),
        "rest": spaces.Tuple([spaces.Discrete(4, start=1), spaces.MultiBinary(2)]),
    }
)
ARM = spaces.Dict({"arm": spaces.Box(-2, 3, (2,)), "gear": spaces.Discrete(3)})


def _double(rows: Rows) -> Rows:
    return rows.replace(obs=rows.obs * 2)


def _halve(rows: Rows) -> Rows:
    return rows.replace(actions_for_env=map_tree(lambda leaf: leaf / 2, rows.actions_for_env))


def _road() -> AgentPipeline:
    return AgentPipeline([FlattenObs(), NormalizeObs(), FrameStack(4), AgentIndicator()])


MAKERS: list[tuple[Callable[[], Connector], spaces.Space[Any]]] = [
    (FlattenObs, NESTED),
    (lambda: FlattenObs(drop=["place"]), NESTED),
    (NormalizeObs, VECTOR),
    (NormalizeObs, NESTED),
    (lambda: NormalizeObs(per_agent=True, clip=None), NESTED),
    (lambda: FrameStack(3), VECTOR),
    (lambda: FrameStack(3, new_axis=True, axis=0, pad="repeat"), NESTED),
    (AgentIndicator, VECTOR),
    (lambda: AgentIndicator(mode="type"), VECTOR),
    (lambda: ClipReward(sign=True), VECTOR),
    (lambda: ClipReward(limit=0.5), VECTOR),
    (lambda: FunctionAgentConnector(_double), VECTOR),
    (_road, NESTED),
    (ToNumpy, ARM),
    (UnsquashActions, ARM),
    (ClipActions, ARM),
    (ReadOnlyActions, ARM),
    (lambda: FunctionActionConnector(_halve), ARM),
    (ActionPipeline.default, ARM),
]


def connect(make: Callable[[], Connector], space: spaces.Space[Any], *, training: bool) -> Pipeline[Any]:
    piece = make()
    pipeline: Pipeline[Any] = AgentPipeline() if isinstance(piece, AgentConnector) else ActionPipeline()
    pipeline.append(piece)
    pipeline.bind(space, AGENTS)
    return pipeline.train() if training else pipeline.eval()


def learnt(make: Callable[[], Connector], space: spaces.Space[Any]) -> Any:
    """The state of one that has learnt something, without a history."""
    pipeline = connect(make, space, training=True)
    pipeline(_rows(space, pairs_of(4, 3), 99))
    pipeline.reset()
    return pipeline.state_dict()


def _rows(space: spaces.Space[Any], pairs: list[tuple[int, int]], seed: int) -> Rows:
    """Rows whose numbers are each pair's own, whatever the batch."""
    everyone = pairs_of(4, 3)
    rng = np.random.default_rng(seed)
    values = batch(space, 12, seed)
    rows = rows_of(
        everyone,
        values,
        actions=values,
        rewards=rng.normal(size=12),
        first=rng.random(12) < 0.2,
        last=np.zeros(12, bool),
    )
    return rows.take(np.array([everyone.index(pair) for pair in pairs], np.int64))


@pytest.mark.slow("draws many batches")
@pytest.mark.checklist(94)
@pytest.mark.parametrize(("make", "space"), MAKERS, ids=lambda value: repr(value()) if callable(value) else "")
@given(data=st.data())
def test_a_batch_is_its_envs_one_by_one(
    make: Callable[[], Connector], space: spaces.Space[Any], data: st.DataObject
) -> None:
    """Several ticks of any subset of 4 envs × 3 agents in any order, in one call, against calls of one env each.

    With frozen statistics every output is equal to the bit, whether the single calls go to one connector or to one per
    env. Statistics that are learnt are the same in the end. And each connector's calls are in its own timer.
    """
    state = learnt(make, space)
    whole, single = (connect(make, space, training=False) for _ in range(2))
    apart = {env: connect(make, space, training=False) for env in range(4)}
    for pipeline in (whole, single, *apart.values()):
        pipeline.load_state_dict(state)
    learning = connect(make, space, training=True), connect(make, space, training=True)
    name, calls = whole.names[0], 0
    for tick in range(data.draw(st.integers(1, 4))):
        pairs = data.draw(st.lists(st.sampled_from(pairs_of(4, 3)), unique=True, max_size=12))
        rows = _rows(space, pairs, tick)
        together = whole(rows)
        learning[0](rows)
        for env in data.draw(st.permutations(range(4))):
            mine = rows.env_id == env
            if mine.any():
                for pipeline in (single, apart[env]):
                    same_tree(pipeline(rows.take(mine)), together.take(mine))
                learning[1](rows.take(mine))
                calls += 1
        ended = data.draw(st.sets(st.integers(0, 3)))
        for pipeline in (whole, single, *learning):
            pipeline.reset(sorted(ended))
        for env in ended:
            apart[env].reset([env])
    statistics = [_statistics(pipeline.state_dict()) for pipeline in learning]
    assert bool(statistics[0]) == ("NormalizeObs" in repr(whole))
    _nearly_equal(*statistics)
    assert single.timings[name].calls == calls
    assert single.timings[name].seconds > 0 or not calls


def _statistics(state: Any) -> dict[str, Any]:
    """Moments at any depth of a pipeline's state, by path."""
    found: dict[str, Any] = {}
    for key, value in state.items() if isinstance(state, dict) else ():
        if key == "moments":
            found |= value
        else:
            found |= {f"{key}.{path}": part for path, part in _statistics(value).items()}
    return found


def _nearly_equal(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert one.keys() == two.keys()
    for path in one:
        assert one[path]["count"].tolist() == two[path]["count"].tolist()
        for key in ("mean", "m2"):
            np.testing.assert_allclose(one[path][key], two[path][key], rtol=1e-12, atol=1e-11)

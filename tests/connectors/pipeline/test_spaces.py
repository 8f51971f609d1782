"""What spaces a pipeline declares, and that what comes out of it lies in them."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from marlvec import connectors as c
from marlvec.connectors.leafwise import space_summary
from marlvec.errors import UnsupportedSpaceError
from marlvec.spaces.tree import map_space
from marlvec.trees import tree_leaves
from tests.connectors.helpers.samples import Space, all_inside, any_spaces, batch, pairs_of, rows_of

AGENTS = ("wolf_0", "wolf_1", "hare")
PAIRS = pairs_of(3, 3)


@c.agent_connector(output_space=lambda space: space)
def unchanged(rows: c.Rows) -> c.Rows:
    return rows


def pieces() -> st.SearchStrategy[c.AgentConnector]:
    stacks = st.builds(
        c.FrameStack,
        st.integers(1, 3),
        axis=st.sampled_from([0, -1]),
        new_axis=st.booleans(),
        pad=st.sampled_from(["zero", "repeat"]),
    )
    norms = st.builds(c.NormalizeObs, per_agent=st.booleans(), clip=st.sampled_from([10.0, 0.1, None]))
    indicators = st.builds(c.AgentIndicator, mode=st.sampled_from(["one_hot", "type"]))
    nested = st.builds(lambda piece: c.AgentPipeline([piece]), norms)
    others = st.builds(c.FlattenObs), st.builds(c.ClipReward, sign=st.just(True)), st.just(unchanged)
    return st.one_of(stacks, norms, indicators, nested, *others)


@pytest.mark.slow("draws many batches")
@pytest.mark.checklist(81)
@given(space=any_spaces(), data=st.data())
def test_spaces_follow_every_edit_and_hold_what_comes_out(space: Space, data: st.DataObject) -> None:
    """Random edits of a pipeline on a random space: those that fit and those that are refused."""
    pipeline = c.AgentPipeline()
    pipeline.bind(space, AGENTS)
    for edit in range(data.draw(st.integers(1, 5))):
        before = list(pipeline), pipeline.output_space_
        try:
            if len(pipeline) and data.draw(st.booleans()):
                at = data.draw(st.integers(0, len(pipeline) - 1))
                way = data.draw(st.sampled_from(["remove", "replace", "insert_before", "insert_after"]))
                getattr(pipeline, way)(*([at] if way == "remove" else [at, data.draw(pieces())]))
            else:
                pipeline.append(data.draw(pieces()))
        except UnsupportedSpaceError:
            assert (list(pipeline), pipeline.output_space_) == before
        declared = space
        for piece in pipeline:
            declared = piece.output_space(declared)
        assert pipeline.output_space_ == declared
        assert pipeline.input_space == space
        for tick in range(2):
            rows = rows_of(
                PAIRS, batch(space, len(PAIRS), 10 * edit + tick), rewards=np.zeros(9), first=np.zeros(9, bool)
            )
            assert all_inside(declared, pipeline(rows).obs, len(PAIRS))
        last = data.draw(st.booleans())
        pipeline.reset([1])
        if last:
            pipeline.eval()
        assert all_inside(declared, pipeline(rows).obs, len(PAIRS))
        assert len(pipeline(rows.take([])).obs) == 0 if isinstance(declared, spaces.Box) else True


def test_a_dict_keeps_the_order_of_its_keys() -> None:
    space = spaces.Dict(OrderedDict([("z", spaces.Discrete(2)), ("a", spaces.Box(0, 1, (2,)))]))
    mapped = map_space(lambda leaf: leaf, space)
    assert isinstance(mapped, spaces.Dict)
    assert list(mapped.spaces) == ["z", "a"]


def test_spaces_in_a_few_words() -> None:
    space = spaces.Dict(
        {"a": spaces.Box(-1, 1, (2, 3)), "b": spaces.Tuple([spaces.Discrete(3), spaces.Box(0, 1, (0,))])}
    )
    assert space_summary(space) == "{a: Box (2, 3) float32 [-1, 1], b: (Discrete(3), Box (0,) float32 [0, 0])}"


@pytest.mark.parametrize(
    "piece", [c.FrameStack(3), c.MaxObs(3), c.DelayObs(2), c.View("before", "obs", "-2:-1"), c.TeamObs()], ids=repr
)
def test_what_was_seen_before_an_edit_is_not_shown_where_it_does_not_belong(piece: c.AgentConnector) -> None:
    """In mid-episode the observations get other bounds: those from before are not in the new space."""
    pipeline = c.AgentPipeline([c.ScaleObs(5, 9), piece])
    pipeline.bind(spaces.Box(0, 1, (2,)), ("a", "b"))
    rows = rows_of([(0, 0), (0, 1)], np.full((2, 2), 0.5, np.float32))
    pipeline(rows)
    pipeline.remove(0)
    out = pipeline(rows)
    assert all_inside(pipeline.output_space_, out.obs, 2)
    shown = [out.obs, out.get("before", np.zeros(2))]
    assert max(float(np.max(leaf)) for _, leaf in tree_leaves(tuple(shown))) <= 1

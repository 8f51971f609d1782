"""Observations that are told more, or less: TimeFeature, StateInObs and DeathMask."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from marlvec.connectors import AgentPipeline, Rows
from marlvec.connectors.agent.context.death_mask import DeathMask
from marlvec.connectors.agent.context.state_in_obs import StateInObs
from marlvec.connectors.agent.context.time_feature import TimeFeature
from marlvec.errors import ArgumentError, ContractError, StateError, UnsupportedSpaceError
from marlvec.spaces import SpaceTree
from tests.connectors.helpers.samples import Space, all_inside, any_spaces, batch, vectors

STATE = spaces.Box(-9, 9, (3,))


def bound(piece: Any, space: Space) -> AgentPipeline:
    pipeline = AgentPipeline([piece])
    pipeline.bind(space)
    return pipeline


@pytest.mark.parametrize(
    ("dtype", "after"),
    [(np.float32, np.float32), (np.float64, np.float64), (np.uint8, np.float32), (np.int64, np.float64)],
)
def test_time_goes_from_0_to_1(dtype: Any, after: Any) -> None:
    pipeline = bound(TimeFeature(4), spaces.Box(0, 9, (2,), dtype))
    t = np.array([0, 1, 3, 4, 9])
    obs = np.arange(10).reshape(5, 2).astype(dtype)
    out = pipeline(Rows(obs=obs, t=t)).obs
    assert out.dtype == after
    assert out[:, :2].tolist() == obs.tolist()
    assert out[:, 2].tolist() == [0, 0.25, 0.75, 1, 1]
    assert pipeline.output_space_ == spaces.Box(np.zeros(3, after), np.array([9, 9, 1], after), dtype=after)
    assert all_inside(pipeline.output_space_, out, 5)


def test_time_refuses() -> None:
    for horizon in (0, -1, np.nan):
        with pytest.raises(ArgumentError, match="horizon must be above 0"):
            TimeFeature(horizon)
    with pytest.raises(UnsupportedSpaceError, match="put FlattenObs before it"):
        bound(TimeFeature(4), spaces.Discrete(3))
    with pytest.raises(ContractError, match=r"needs column 't', the number of the decision; got \['obs'\]"):
        bound(TimeFeature(4), vectors())(Rows(obs=np.zeros((1, 3), np.float32)))
    with pytest.raises(StateError, match="does not know its space"):
        TimeFeature(4)(Rows(t=np.zeros(1)))


@pytest.mark.slow("draws many batches")
@given(space=any_spaces(), state_space=any_spaces(), n=st.integers(0, 3))
def test_the_state_stands_beside_any_observation(space: Space, state_space: Space, n: int) -> None:
    pipeline = bound(StateInObs(state_space), space)
    obs, state = batch(space, n), batch(state_space, n)
    out = pipeline(Rows(obs=obs, state=state)).obs
    assert list(out) == ["obs", "state"]
    assert out["obs"] is obs
    for got, want in zip(
        SpaceTree(state_space).flatten(out["state"]), SpaceTree(state_space).flatten(state), strict=True
    ):
        assert got is want
    assert all_inside(pipeline.output_space_, out, n)


def test_the_state_stands_behind_a_vector() -> None:
    pipeline = bound(StateInObs(STATE, "append"), vectors(2, -1, 1))
    obs, state = np.array([[0, 1]], np.float32), np.array([[7, 8, 9]], np.float32)
    out = pipeline(Rows(obs=obs, state=state)).obs
    assert out.tolist() == [[0, 1, 7, 8, 9]]
    ends = np.array([1, 1, 9, 9, 9], np.float32)
    assert pipeline.output_space_ == spaces.Box(-ends, ends)
    wide = bound(StateInObs(spaces.Box(-9, 9, (3,), np.float64), "append"), vectors(2))
    assert wide(Rows(obs=obs, state=state.astype(np.float64))).obs.dtype == np.float64 == wide.output_space_.dtype


def test_the_state_refuses() -> None:
    with pytest.raises(ArgumentError, match="mode must be"):
        StateInObs(STATE, "front")  # type: ignore[arg-type]  # a wrong value is the point
    with pytest.raises(ArgumentError, match="state_space must be a space"):
        StateInObs(3)  # type: ignore[arg-type]  # a wrong value is the point
    with pytest.raises(UnsupportedSpaceError, match='use mode="dict", then FlattenObs'):
        bound(StateInObs(spaces.Discrete(3), "append"), vectors())
    with pytest.raises(UnsupportedSpaceError, match="put FlattenObs before it"):
        bound(StateInObs(STATE, "append"), spaces.Discrete(3))
    pipeline = bound(StateInObs(STATE), vectors())
    obs = np.zeros((1, 3), np.float32)
    with pytest.raises(ContractError, match=r"needs column 'state', got \['obs'\]: make the envs with make"):
        pipeline(Rows(obs=obs))
    for state in (np.zeros((1, 2), np.float32), np.zeros((1, 3))):
        with pytest.raises(ContractError, match=r"expects float32 of shape \(3,\) for the value of the state, and got"):
            pipeline(Rows(obs=obs, state=state))


@pytest.mark.slow("draws many batches")
@given(space=any_spaces(), data=st.data())
def test_the_dead_see_nothing(space: Space, data: st.DataObject) -> None:
    """Any space, any rows: the terminated are blank, all others untouched, and the blank is a member of the space."""
    dead = np.array(data.draw(st.lists(st.booleans(), max_size=4)), bool)
    n = len(dead)
    pipeline, obs = bound(DeathMask(), space), batch(space, n)
    rows = Rows(obs=obs, terminated=dead, truncated=~dead, last=np.ones(n, bool))
    out = pipeline(rows).obs
    assert all_inside(pipeline.output_space_, out, n)
    leaves = SpaceTree(space).leaves
    for leaf, before, after in zip(leaves, SpaceTree(space).flatten(obs), SpaceTree(space).flatten(out), strict=True):
        blank = np.broadcast_to(getattr(leaf.space, "start", 0), leaf.shape)
        assert after.dtype == leaf.dtype
        for i in range(n):
            np.testing.assert_array_equal(after[i], blank if dead[i] else before[i])
    if not dead.any():
        assert pipeline(rows) is rows


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8])
def test_a_number_tells_the_dead_from_those_who_see_zeros(dtype: Any) -> None:
    pipeline = bound(DeathMask(append=True), spaces.Box(1, 9, (2,), dtype))
    obs, dead = np.array([[1, 2], [3, 4], [5, 6]], dtype), np.array([False, True, False])
    out = pipeline(Rows(obs=obs, terminated=dead)).obs
    assert out.tolist() == [[1, 2, 1], [0, 0, 0], [5, 6, 1]]
    assert out.dtype == dtype
    assert obs[1].tolist() == [3, 4]
    assert pipeline.output_space_ == spaces.Box(np.zeros(3, dtype), np.array([9, 9, 1], dtype), dtype=dtype)


def test_death_refuses() -> None:
    with pytest.raises(UnsupportedSpaceError, match="put FlattenObs before it"):
        bound(DeathMask(append=True), spaces.Discrete(2))
    with pytest.raises(UnsupportedSpaceError, match="no fixed size"):
        bound(DeathMask(), spaces.Text(3))
    with pytest.raises(ContractError, match="needs column 'terminated'"):
        bound(DeathMask(), vectors())(Rows(obs=np.zeros((1, 3), np.float32)))

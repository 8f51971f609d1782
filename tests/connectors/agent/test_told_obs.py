"""Observations that are told more, or less: TimeFeature, StateInObs and DeathMask."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from marlvec import connectors as c
from marlvec.errors import ContractError
from marlvec.spaces import SpaceTree
from tests.connectors.helpers.samples import Space, all_inside, any_spaces, batch, bound, vectors

STATE = spaces.Box(-9, 9, (3,))


@pytest.mark.slow("draws many batches")
@given(space=any_spaces(), state_space=any_spaces(), n=st.integers(0, 3))
def test_the_state_stands_beside_any_observation(space: Space, state_space: Space, n: int) -> None:
    pipeline = bound(c.StateInObs(state_space), space)
    obs, state = batch(space, n), batch(state_space, n)
    out = pipeline(c.Rows(obs=obs, state=state)).obs
    assert list(out) == ["obs", "state"]
    assert out["obs"] is obs
    for got, want in zip(
        SpaceTree(state_space).flatten(out["state"]), SpaceTree(state_space).flatten(state), strict=True
    ):
        assert got is want
    assert all_inside(pipeline.output_space_, out, n)


@pytest.mark.slow("draws many batches")
@given(space=any_spaces(), data=st.data())
def test_the_dead_see_nothing(space: Space, data: st.DataObject) -> None:
    """Any space, any rows: the terminated are blank, all others untouched, and the blank is a member of the space."""
    dead = np.array(data.draw(st.lists(st.booleans(), max_size=4)), bool)
    n = len(dead)
    pipeline, obs = bound(c.DeathMask(), space), batch(space, n)
    rows = c.Rows(obs=obs, terminated=dead, truncated=~dead, last=np.ones(n, bool))
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


@pytest.mark.parametrize(
    ("piece", "columns", "text"),
    [
        (c.TimeFeature(4), {}, r"needs column 't', the number of the decision; got \['obs'\]"),
        (c.StateInObs(STATE), {}, r"needs column 'state', got \['obs'\]: make the envs with make"),
        (
            c.StateInObs(STATE),
            {"state": np.zeros((1, 2), np.float32)},
            r"expects float32 of shape \(3,\) for the value",
        ),
        (c.StateInObs(STATE), {"state": np.zeros((1, 3))}, r"for the value of the state, and got"),
        (c.DeathMask(), {}, "needs column 'terminated'"),
    ],
)
def test_a_column_that_is_missing_or_does_not_fit(piece: Any, columns: Any, text: str) -> None:
    with pytest.raises(ContractError, match=text):
        bound(piece, vectors())(c.Rows(obs=np.zeros((1, 3), np.float32), **columns))

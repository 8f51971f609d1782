from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from marlvec.connectors.action.conversions import DiscretizeActions
from marlvec.errors import ContractError, UnsupportedSpaceError
from tests.connectors.helpers.action_samples import bind, decisions
from tests.connectors.helpers.samples import Space

ARM = spaces.Box(np.array([-2.0, 0.1], np.float32), np.array([3.0, 0.3], np.float32))


def sent(piece: DiscretizeActions, space: Space, actions: Any) -> Any:
    actions = np.asarray(actions)
    return bind(piece, space)(decisions(actions, envs=len(actions))).actions_for_env


def test_each_element_has_a_number_of_choices_of_its_own() -> None:
    piece = DiscretizeActions([2, 5])
    assert bind(piece, ARM).policy_space_ == spaces.MultiDiscrete([2, 5])
    out = sent(piece, ARM, [[0, 0], [1, 4], [1, 2]])
    np.testing.assert_array_equal(out[:2], [ARM.low, ARM.high])
    np.testing.assert_allclose(out[2], [3, 0.2], rtol=1e-6)
    assert piece.bins == (2, 5)
    assert repr(piece) == "DiscretizeActions(bins=(2, 5))"


def test_shapes_of_any_rank_and_leaves_of_other_kinds() -> None:
    assert bind(DiscretizeActions(4), spaces.Box(0, 1, ())).policy_space_ == spaces.Discrete(4)
    assert sent(DiscretizeActions(5), spaces.Box(0, 1, ()), [0, 1, 4]).tolist() == [0, 0.25, 1]
    space = spaces.Box(0, 1, (2, 3))
    assert bind(DiscretizeActions(4), space).policy_space_ == spaces.MultiDiscrete(np.full((2, 3), 4))
    assert sent(DiscretizeActions(2), space, np.eye(3, dtype=int)[None, :2]).tolist() == [[[1, 0, 0], [0, 1, 0]]]
    robot = spaces.Dict({"arm": ARM, "gear": spaces.Discrete(3), "say": spaces.Text(3)})
    pipeline = bind(DiscretizeActions(9, joint=True), robot)
    assert pipeline.policy_space_ == spaces.Dict({**robot.spaces, "arm": spaces.Discrete(81)})
    actions = {"arm": np.array([80, 0]), "gear": np.array([2, 1]), "say": np.array(["a", "b"], object)}
    out = pipeline(decisions(actions, envs=2)).actions_for_env
    np.testing.assert_array_equal(out["arm"], [ARM.high, ARM.low])
    assert out["gear"] is actions["gear"]
    assert out["say"] is actions["say"]


def test_a_box_of_ints_gets_ints() -> None:
    space = spaces.Box(-3, 3, (1,), np.int8)
    out = sent(DiscretizeActions(4), space, [[0], [1], [2], [3]])
    assert out.tolist() == [[-3], [-1], [1], [3]]
    assert out.dtype == np.int8
    assert sent(DiscretizeActions(7), space, np.arange(7)[:, None]).ravel().tolist() == list(range(-3, 4))
    assert sent(DiscretizeActions(2), spaces.Box(0, 1, (1,), np.bool_), [[0], [1]]).tolist() == [[False], [True]]
    with pytest.raises(UnsupportedSpaceError, match="8 bins are more than the 7 ints from -3 to 3"):
        bind(DiscretizeActions(8), space)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(data=st.data())
def test_ends_are_exact_and_values_ascend_between_them(dtype: Any, data: st.DataObject) -> None:
    """For any bounds, up to those whose difference overflows."""
    top = float(np.finfo(dtype).max)
    ends = st.floats(-top, top, width=32 if dtype is np.float32 else 64)
    low, high = sorted([data.draw(ends), data.draw(ends)])
    bins = data.draw(st.integers(2, 9))
    space = spaces.Box(np.array([low], dtype), np.array([high], dtype), dtype=dtype)
    out = sent(DiscretizeActions(bins), space, np.arange(bins)[:, None]).ravel()
    assert out.dtype == dtype
    assert (out[0], out[-1]) == (space.low[0], space.high[0])
    assert (out[1:] >= out[:-1]).all()
    even = [low * (1 - i / (bins - 1)) + high * (i / (bins - 1)) for i in range(bins)]
    np.testing.assert_allclose(out, even, rtol=1e-5, atol=1e-6 * max(abs(low), abs(high)) + 1e-30)


@given(sizes=st.lists(st.integers(2, 4), min_size=1, max_size=4), joint=st.booleans())
def test_no_two_choices_are_the_same_action(sizes: list[int], joint: bool) -> None:
    space = spaces.Box(-1, 1, (len(sizes),))
    choices = np.array(list(itertools.product(*map(range, sizes))))
    actions = np.arange(len(choices)) if joint else choices
    out = sent(DiscretizeActions(sizes, joint=joint), space, actions)
    policy_space = bind(DiscretizeActions(sizes, joint=joint), space).policy_space_
    assert policy_space == (spaces.Discrete(len(choices)) if joint else spaces.MultiDiscrete(sizes))
    assert out.dtype == np.float32
    assert len({tuple(row) for row in out.tolist()}) == len(choices)
    np.testing.assert_allclose(out, choices / (np.array(sizes) - 1) * 2 - 1, atol=1e-6)


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([[0, 1], [3, 0]], r"expected an action of MultiDiscrete\(\[3 3\]\), got \[3 0\] for env 1, agent 0"),
        ([[0, -1]], "for env 0, agent 0"),
        ([[0.0, 1.0]], r"ints of shape \(1, 2\), got float64 of shape \(1, 2\)"),
        ([0], r"ints of shape \(1, 2\), got int64 of shape \(1,\)"),
    ],
)
def test_invalid_choice_raises(actions: Any, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        sent(DiscretizeActions(3), spaces.Box(-1, 1, (2,)), actions)

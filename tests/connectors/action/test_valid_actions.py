"""MaskInvalid and ReplaceNaN: what makes actions that an env would refuse into some that it takes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from marlvec.connectors import ActionPipeline, ClipActions, Rows, UnsquashActions
from marlvec.connectors.action.valid_actions import MaskInvalid, ReplaceNaN
from marlvec.errors import ContractError
from tests.connectors.helpers.action_samples import bind, decisions
from tests.connectors.helpers.samples import Space, all_inside, discretes, multi_discretes

GEAR = spaces.Discrete(4, start=10)
DIALS = spaces.MultiDiscrete([2, 3], start=[0, 5])


def sent(piece: MaskInvalid, space: Space, actions: Any, mask: Any, **columns: Any) -> Rows:
    actions = np.asarray(actions)
    return bind(piece, space)(decisions(actions, envs=len(actions), action_mask=np.array(mask, bool), **columns))


@given(space=st.one_of(discretes(), multi_discretes()), fallback=st.sampled_from(["first", "random"]), data=st.data())
def test_only_forbidden_actions_are_replaced(space: Any, fallback: Any, data: st.DataObject) -> None:
    """Against a loop over rows and dimensions."""
    sizes = np.ravel(space.n if isinstance(space, spaces.Discrete) else space.nvec)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**20)))
    masks = [[rng.random(size) < 0.5 for size in sizes] for _ in range(7)]
    for row in masks:
        for part in row:
            part[rng.integers(len(part))] = True
    chosen = np.array([[rng.integers(size) for size in sizes] for _ in range(7)])
    actions = (chosen.reshape(7, *space.shape) + space.start).astype(space.dtype)
    piece = MaskInvalid(fallback, seed=data.draw(st.integers(0, 9)))
    out = sent(piece, space, actions, [np.concatenate(row) for row in masks]).actions_for_env
    assert out.dtype == space.dtype
    got = (out - space.start).reshape(7, len(sizes))
    for i in range(7):
        for d in range(len(sizes)):
            if masks[i][d][chosen[i, d]]:
                assert got[i, d] == chosen[i, d]
            elif fallback == "first":
                assert got[i, d] == np.flatnonzero(masks[i][d])[0]
            else:
                assert masks[i][d][got[i, d]]


def test_random_ones_are_drawn_evenly_from_what_is_allowed() -> None:
    n = 6000
    mask = np.tile(np.array([0, 1, 0, 1]) > 0, (n, 1))
    mask[::2, 2] = True
    out = sent(MaskInvalid("random"), GEAR, np.full(n, 10), mask).actions_for_env - 10
    for allowed, part in (([1, 2, 3], out[::2]), ([1, 3], out[1::2])):
        counts = np.bincount(part, minlength=4)
        expected = n / 2 / len(allowed)
        assert counts.sum() == counts[allowed].sum()
        assert (np.abs(counts[allowed] - expected) < 5 * np.sqrt(expected)).all()
    other = sent(MaskInvalid("random", seed=1), GEAR, np.full(n, 10), mask).actions_for_env - 10
    assert (other != out).any()


def test_or_it_is_an_error() -> None:
    piece = MaskInvalid("raise")
    assert sent(piece, GEAR, [12], [[0, 0, 1, 0]]).actions_for_env.tolist() == [12]
    with pytest.raises(ContractError, match=r"the action 11 of env 1, agent 0 is forbidden by its action mask"):
        sent(piece, GEAR, [12, 11], [[0, 0, 1, 0], [1, 0, 1, 1]])


@pytest.mark.parametrize("fallback", ["first", "random"])
def test_where_nothing_is_allowed_there_is_nothing_to_send(fallback: Any) -> None:
    with pytest.raises(ContractError, match="the action mask of env 1, agent 0 allows nothing"):
        sent(MaskInvalid(fallback), GEAR, [10, 10], [[1, 1, 1, 1], [0, 0, 0, 0]])
    with pytest.raises(ContractError, match="the action mask of env 0, agent 0 allows nothing"):
        sent(MaskInvalid(fallback), DIALS, [[0, 5]], [[1, 1, 0, 0, 0]])


@pytest.mark.parametrize("actions", [[14], [9], [10.0]])
def test_invalid_action_raises_and_is_not_replaced(actions: Any) -> None:
    with pytest.raises(ContractError, match="expected (an action|actions) of Discrete"):
        sent(MaskInvalid(), GEAR, actions, [[1, 1, 1, 1]])


@pytest.mark.parametrize("mask", [[[1, 1, 1]], [[1, 1, 1, 1, 1]], [1]])
def test_a_mask_of_another_length_is_an_error(mask: Any) -> None:
    with pytest.raises(ContractError, match="expected action masks of 4 entries"):
        sent(MaskInvalid(), GEAR, [10], mask)


def test_without_masks_there_is_nothing_to_do() -> None:
    rows = decisions(np.array([3]))
    assert bind(MaskInvalid(), spaces.Discrete(4))(rows).actions_for_env is rows.actions
    boxes = decisions(np.ones((1, 2)), action_mask=np.zeros((1, 2), bool))
    assert bind(MaskInvalid(), spaces.Box(0, 1, (2,)))(boxes).actions_for_env is boxes.actions


def test_in_evaluation_too_and_rows_without_ids() -> None:
    pipeline = bind(MaskInvalid(), GEAR, training=False)
    rows = Rows(actions=np.array([10, 11], np.int8), action_mask=np.array([[0, 0, 0, 1]] * 2, bool))
    assert pipeline(rows).actions_for_env.tolist() == [13, 13]
    with pytest.raises(ContractError, match="of row 1 allows nothing"):
        pipeline(rows.replace(action_mask=np.array([[0, 0, 0, 1], [0] * 4], bool)))
    with pytest.raises(ContractError, match="no 'env_id'"):
        bind(MaskInvalid("random"), GEAR)(rows)


# --- NaN

NAN = np.nan
# Bounds on both sides, below, above, and none; the first two leave out 0.
MIXED = spaces.Box(np.array([2, 3, -np.inf, -np.inf], np.float32), np.array([5, np.inf, -4, np.inf], np.float32))


def filled(piece: ReplaceNaN, space: Any, actions: Any) -> Any:
    return bind(piece, space)(decisions(actions, envs=len(actions))).actions_for_env


def test_zeros_or_the_bound_next_to_0() -> None:
    given = np.array([[NAN] * 4, [2.5, 4, -5, 7], [NAN, 4, NAN, 7]], np.float32)
    out = filled(ReplaceNaN(), MIXED, given)
    assert out.tolist() == [[2, 3, -4, 0], [2.5, 4, -5, 7], [2, 4, -4, 7]]
    assert out.dtype == np.float32
    assert all_inside(MIXED, out, 3)


def test_random_members_drawn_as_the_box_does() -> None:
    n = 20_000
    out = filled(ReplaceNaN("random"), MIXED, np.full((n, 4), NAN, np.float32))
    assert all_inside(MIXED, out[:500], 500)
    # Means and variances of U(2, 5), 3 + Exp(1), -4 - Exp(1), N(0, 1).
    moments = [(3.5, 9 / 12, 1.8), (4.0, 1.0, 9.0), (-5.0, 1.0, 9.0), (0.0, 1.0, 3.0)]
    for element, (mean, variance, kurtosis) in zip(out.T.astype(np.float64), moments, strict=True):
        assert abs(element.mean() - mean) < 5 * math.sqrt(variance / n)
        assert abs(element.var() / variance - 1) < 5 * math.sqrt((kurtosis - 1) / n)
    own = MIXED.sample  # gymnasium's own draws have the same moments
    MIXED.seed(0)
    theirs = np.stack([own() for _ in range(4000)]).astype(np.float64)
    np.testing.assert_allclose(theirs.mean(axis=0), out.mean(axis=0), atol=0.1)


def test_only_the_elements_that_are_nan() -> None:
    out = filled(ReplaceNaN("random"), spaces.Box(-1, 1, (2, 2)), np.array([[[0.5, NAN], [9, -9]]]))
    assert out[0, 0, 0] == 0.5
    assert abs(out[0, 0, 1]) <= 1
    assert out[0, 1].tolist() == [9, -9]  # out of bounds, but numbers: not for this piece


def test_leaves_draw_their_own_numbers_and_others_stay() -> None:
    space = spaces.Dict({"a": spaces.Box(0, 1, (1,)), "b": spaces.Box(0, 1, ()), "gear": spaces.Discrete(3)})
    actions = {"a": np.full((50, 1), NAN), "b": np.full(50, NAN), "gear": np.zeros(50, int)}
    out = filled_rows(ReplaceNaN("random"), space, actions)
    assert out["gear"] is actions["gear"]
    assert len(np.unique(np.concatenate([out["a"].ravel(), out["b"]]))) == 100
    assert np.isnan(actions["a"]).all()


def filled_rows(piece: ReplaceNaN, space: Any, actions: Any) -> Any:
    return bind(piece, space)(decisions(actions, envs=50)).actions_for_env


def test_or_it_is_an_error_that_says_whose() -> None:
    space = spaces.Dict({"arm": spaces.Box(0, 1, (2,))})
    rows = decisions({"arm": np.array([[0, 0], [0, 1], [1, NAN], [NAN, 0]])}, envs=2, agents=2)
    with pytest.raises(ContractError, match="the policy gave NaN for leaf 'arm' of env 1, agent 0"):
        bind(ReplaceNaN("raise"), space)(rows)


def test_without_nan_nothing_happens() -> None:
    rows = decisions(np.array([[0.5, np.inf]]))
    for fill in ("zeros", "random", "raise"):
        pipeline = bind(ReplaceNaN(fill), spaces.Box(0, 1, (2,)), training=False)
        assert pipeline(rows).actions_for_env is rows.actions
    ints = decisions(np.array([2]))
    assert bind(ReplaceNaN("raise"), spaces.Discrete(3))(ints).actions_for_env is ints.actions


def test_before_clip_it_saves_what_clip_would_refuse() -> None:
    space = spaces.Box(-10, 10, (1,))
    rows = decisions(np.array([[NAN]], np.float32))
    bare = ActionPipeline([UnsquashActions(), ClipActions()])
    bare.bind(space)
    with pytest.raises(ContractError, match="NaN"):
        bare(rows)
    bare.prepend(ReplaceNaN())
    assert bare(rows).actions_for_env.tolist() == [[0]]

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from marlvec.connectors import ActionPipeline, ClipActions, UnsquashActions
from marlvec.connectors.action.valid_actions import ReplaceNaN
from marlvec.errors import ArgumentError, ContractError
from tests.connectors.helpers.action_samples import bind, decisions
from tests.connectors.helpers.samples import all_inside

NAN = np.nan
# Bounds on both sides, below, above, and none; the first two leave out 0.
MIXED = spaces.Box(np.array([2, 3, -np.inf, -np.inf], np.float32), np.array([5, np.inf, -4, np.inf], np.float32))


def sent(piece: ReplaceNaN, space: Any, actions: Any) -> Any:
    return bind(piece, space)(decisions(actions, envs=len(actions))).actions_for_env


def test_zeros_or_the_bound_next_to_0() -> None:
    given = np.array([[NAN] * 4, [2.5, 4, -5, 7], [NAN, 4, NAN, 7]], np.float32)
    out = sent(ReplaceNaN(), MIXED, given)
    assert out.tolist() == [[2, 3, -4, 0], [2.5, 4, -5, 7], [2, 4, -4, 7]]
    assert out.dtype == np.float32
    assert all_inside(MIXED, out, 3)


def test_random_members_drawn_as_the_box_does() -> None:
    n = 20_000
    out = sent(ReplaceNaN("random"), MIXED, np.full((n, 4), NAN, np.float32))
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
    out = sent(ReplaceNaN("random"), spaces.Box(-1, 1, (2, 2)), np.array([[[0.5, NAN], [9, -9]]]))
    assert out[0, 0, 0] == 0.5
    assert abs(out[0, 0, 1]) <= 1
    assert out[0, 1].tolist() == [9, -9]  # out of bounds, but numbers: not for this piece


def test_leaves_draw_their_own_numbers_and_others_stay() -> None:
    space = spaces.Dict({"a": spaces.Box(0, 1, (1,)), "b": spaces.Box(0, 1, ()), "gear": spaces.Discrete(3)})
    actions = {"a": np.full((50, 1), NAN), "b": np.full(50, NAN), "gear": np.zeros(50, int)}
    out = sent_tree(ReplaceNaN("random"), space, actions)
    assert out["gear"] is actions["gear"]
    assert len(np.unique(np.concatenate([out["a"].ravel(), out["b"]]))) == 100
    assert np.isnan(actions["a"]).all()


def sent_tree(piece: ReplaceNaN, space: Any, actions: Any) -> Any:
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


def test_the_fill_is_one_of_three() -> None:
    with pytest.raises(ArgumentError, match='fill must be "zeros", "random" or "raise", got 0'):
        ReplaceNaN(0)  # type: ignore[arg-type]  # a wrong value is the point

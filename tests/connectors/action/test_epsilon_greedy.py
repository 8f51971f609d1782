from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from marlvec.connectors.action.exploration import EpsilonGreedy
from marlvec.errors import ContractError
from tests.connectors.helpers.action_samples import bind, decisions
from tests.connectors.helpers.samples import all_inside, discretes, multi_discretes

GEAR = spaces.Discrete(4, start=-1)
DIALS = spaces.MultiDiscrete([2, 5], start=[0, 3])
N = 20_000


def near(share: float, expected: float, n: int) -> bool:
    """Whether a share of n is what it should be, up to 5 standard deviations."""
    return abs(share - expected) <= 5 * math.sqrt(expected * (1 - expected) / n)


def test_it_explores_as_often_as_asked_and_evenly() -> None:
    out = bind(EpsilonGreedy(0.3), GEAR)(decisions(np.full(N, 2), envs=N)).actions_for_env
    for action in (-1, 0, 1):
        assert near((out == action).mean(), 0.3 / 4, N)
    assert near((out == 2).mean(), 0.7 + 0.3 / 4, N)


def test_all_dimensions_of_an_action_are_drawn_together() -> None:
    out = bind(EpsilonGreedy(0.5), DIALS)(decisions(np.tile([1, 3], (N, 1)), envs=N)).actions_for_env
    assert out.dtype == DIALS.dtype
    for first in (0, 1):
        for second in range(3, 8):
            share = ((out[:, 0] == first) & (out[:, 1] == second)).mean()
            assert near(share, 0.05 + 0.5 * (first == 1 and second == 3), N)


def test_only_what_is_allowed_is_drawn() -> None:
    mask = np.tile([True, False, True, True], (N, 1))
    mask[: N // 2, 3] = False
    rows = decisions(np.zeros(N, int), envs=N, action_mask=mask)
    out = bind(EpsilonGreedy(1.0), GEAR)(rows).actions_for_env
    for part, allowed in ((out[: N // 2], [-1, 1]), (out[N // 2 :], [-1, 1, 2])):
        assert np.isin(part, allowed).all()
        for action in allowed:
            assert near((part == action).mean(), 1 / len(allowed), N // 2)


@given(space=st.one_of(discretes(), multi_discretes()), seed=st.integers(0, 99), epsilon=st.sampled_from([0, 0.5, 1]))
def test_an_action_is_the_policys_or_an_allowed_one(space: Any, seed: int, epsilon: float) -> None:
    sizes = np.ravel(space.n if isinstance(space, spaces.Discrete) else space.nvec)
    rng = np.random.default_rng(seed)
    mask = rng.random((9, sizes.sum())) < 0.4
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    mask[:, bounds[1:] - 1] = True
    chosen = np.stack([rng.integers(size, size=9) for size in sizes], axis=1)
    rows = decisions((chosen.reshape(9, *space.shape) + space.start), envs=3, agents=3, action_mask=mask)
    out = bind(EpsilonGreedy(epsilon, seed=seed), space)(rows).actions_for_env
    assert all_inside(space, out, 9)
    got = (out - space.start).reshape(9, len(sizes))
    for i in range(9):
        stays = (got[i] == chosen[i]).all()
        assert stays or epsilon > 0
        assert (stays and epsilon < 1) or all(mask[i, bounds[d] + got[i, d]] for d in range(len(sizes)))


def test_the_discrete_leaves_of_a_tree_are_drawn_and_the_others_stay() -> None:
    space = spaces.Dict({"arm": spaces.Box(0, 1, (2,)), "gear": GEAR, "head": spaces.Tuple([DIALS])})
    actions = {"arm": np.zeros((N, 2), np.float32), "gear": np.zeros(N, int), "head": (np.tile([1, 7], (N, 1)),)}
    rows = decisions(actions, envs=N, action_mask=np.zeros((N, 3), bool))  # masks are of whole actions: not of this
    out = bind(EpsilonGreedy(1.0), space)(rows).actions_for_env
    assert out["arm"] is actions["arm"]
    assert near((out["gear"] == 0).mean(), 0.25, N)
    assert near((out["head"][0] == [1, 7]).all(axis=1).mean(), 0.1, N)
    both = (out["gear"] == 1) & (out["head"][0][:, 1] == 5)
    assert near(both.mean(), 0.05, N)  # the leaves' draws are independent


def test_the_probability_may_be_set_from_outside() -> None:
    piece = EpsilonGreedy(1.0)
    pipeline = bind(piece, GEAR)
    rows = decisions(np.full(N, 9), envs=N)
    assert (pipeline(rows).actions_for_env != 9).all()
    piece.epsilon = 0.1
    assert near((pipeline(rows).actions_for_env != 9).mean(), 0.1, N)


def test_only_while_training() -> None:
    rows = decisions(np.array([1, 2]), envs=2)
    pipeline = bind(EpsilonGreedy(1.0, final=0.0, decay_steps=1), GEAR, training=False)
    assert pipeline(rows).actions_for_env is rows.actions
    pipeline.train()
    state = pipeline.state_dict()["EpsilonGreedy"]["count"]["values"]
    assert not state.size  # what was decided in evaluation does not count


def test_the_policys_dtype_grows_where_it_has_no_room() -> None:
    wide = spaces.Discrete(1000)
    out = bind(EpsilonGreedy(1.0), wide)(decisions(np.zeros(100, np.int8), envs=100)).actions_for_env
    assert out.dtype == np.int64
    assert out.max() > 127


def test_masks_that_make_no_sense() -> None:
    pipeline = bind(EpsilonGreedy(1.0), GEAR)
    with pytest.raises(ContractError, match="expected action masks of 4 entries"):
        pipeline(decisions(np.array([0]), action_mask=np.ones((1, 3), bool)))
    mask = np.ones((2, 4), bool)
    mask[1] = False
    with pytest.raises(ContractError, match="the action mask of env 1, agent 0 allows nothing"):
        pipeline(decisions(np.array([0, 0]), envs=2, action_mask=mask))

"""Policies on their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple
from hypothesis import given
from hypothesis import strategies as st

from marlvec.connectors import Rows
from marlvec.errors import ArgumentError, ContractError, StateError
from marlvec.policies import FunctionPolicy, Policy, RandomPolicy

OBS = Box(-1, 1, (2,), np.float32)


def rows(n: int, **columns: Any) -> Rows:
    return Rows(env_id=np.arange(n) // 2, agent_index=np.arange(n) % 2, obs=np.zeros((n, 2), np.float32), **columns)


def made(space: Space[Any], seed: int = 0) -> RandomPolicy:
    policy = RandomPolicy()
    policy.setup(OBS, space, seed=seed)
    return policy


def leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in leaves(value)]
    if isinstance(tree, tuple):
        return [leaf for value in tree for leaf in leaves(value)]
    return [tree]


def row(space: Space[Any], tree: Any, i: int) -> Any:
    if isinstance(space, Dict):
        return {key: row(sub, tree[key], i) for key, sub in space.spaces.items()}
    if isinstance(space, Tuple):
        return tuple(row(sub, part, i) for sub, part in zip(space.spaces, tree, strict=True))
    return tree[i] if isinstance(space, Discrete) else np.asarray(tree[i])


boxes = st.sampled_from(
    [
        Box(-1, 1, (), np.float32),
        Box(-3, 5, (2, 3), np.float64),
        Box(-np.inf, np.inf, (2,), np.float32),
        Box(0, np.inf, (2,), np.float64),
        Box(-np.inf, 7, (2,), np.float16),
        Box(np.float32([-np.inf, 0, -1]), np.float32([1, np.inf, 1]), dtype=np.float32),
        Box(-np.finfo(np.float32).max, np.finfo(np.float32).max, (3,), np.float32),
        Box(-np.finfo(np.float64).max, np.finfo(np.float64).max, (3,), np.float64),
        Box(0, 255, (2, 2), np.uint8),
        Box(-128, 127, (4,), np.int8),
        Box(0, 1, (3,), np.bool_),
        Box(np.iinfo(np.int64).min, np.iinfo(np.int64).max, (2,), np.int64),
        Box(-1, 1, (0,), np.float32),
        Box(2, 2, (2,), np.float32),
    ]
)
discrete = st.builds(
    lambda n, start, dtype: Discrete(n, start=dtype(start)),
    st.integers(1, 7),
    st.integers(-3, 3),
    st.sampled_from([np.int64, np.int32]),
)
simple = st.one_of(
    boxes,
    discrete,
    st.lists(st.integers(1, 5), min_size=1, max_size=4).map(MultiDiscrete),
    st.sampled_from([MultiDiscrete([[2, 3], [4, 1]]), MultiDiscrete([3, 2], start=[-1, 5]), MultiBinary([2, 2])]),
)
nested = st.recursive(
    simple,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=2).map(Dict),
        st.lists(inner, min_size=1, max_size=2).map(Tuple),
    ),
    max_leaves=4,
)


@given(space=nested, n=st.integers(0, 9), seed=st.integers(0, 2**64 - 1))
def test_random_actions_are_in_any_space_and_a_seed_fixes_them(space: Space[Any], n: int, seed: int) -> None:
    drawn, again = made(space, seed).act(rows(n)), made(space, seed).act(rows(n))
    for a, b in zip(leaves(drawn), leaves(again), strict=True):
        assert len(a) == n
        np.testing.assert_array_equal(a, b, strict=True)
    for i in range(n):
        assert space.contains(row(space, drawn, i)), (space, row(space, drawn, i))


@pytest.mark.parametrize(
    ("space", "choices"),
    [
        (Discrete(4, start=-1), 4),
        (MultiDiscrete([4, 4]), 4),
        (MultiBinary(3), 2),
        (Box(3, 6, (2,), np.int16), 4),
        (Box(0, 1, (2,), np.bool_), 2),
    ],
)
def test_every_choice_is_as_likely(space: Any, choices: int) -> None:
    drawn = np.asarray(made(space).act(rows(8000))).reshape(8000, -1)
    for column in drawn.T:
        _, counts = np.unique(column, return_counts=True)
        assert len(counts) == choices
        assert np.abs(counts - 8000 / choices).max() < 5 * np.sqrt(8000 / choices)


def test_boxes_are_drawn_as_gymnasium_draws_them() -> None:
    """Not from the same stream, but from the same distribution, whatever bounds an element has."""
    low, high = np.float64([-2, -np.inf, 1, -np.inf]), np.float64([3, 1, np.inf, np.inf])
    space = Box(low, high, dtype=np.float64, seed=0)
    ours = made(space).act(rows(4000))
    theirs = np.stack([space.sample() for _ in range(4000)])
    assert ours.dtype == theirs.dtype
    for q in (0.02, 0.25, 0.5, 0.75, 0.98):
        np.testing.assert_allclose(np.quantile(ours, q, axis=0), np.quantile(theirs, q, axis=0), atol=0.3)


def test_half_bounded_integers_are_rounded_down_within_their_bounds() -> None:
    space = Box(0, 10, (3,), np.int32)
    space.bounded_below, space.bounded_above = np.array([True, False, True]), np.array([True, True, False])
    drawn = made(space).act(rows(2000))
    assert drawn.dtype == np.int32
    assert set(np.unique(drawn[:, 0])) == set(range(11))
    assert drawn[:, 1].max() <= 10
    assert drawn[:, 2].min() >= 0
    assert len(np.unique(drawn[:, 1])) > 3


masks = st.lists(st.lists(st.booleans(), min_size=5, max_size=5).filter(any), min_size=1, max_size=6)


@given(mask=masks, seed=st.integers(0, 1000), start=st.integers(-2, 2))
def test_a_masked_choice_is_always_allowed(mask: list[list[bool]], seed: int, start: int) -> None:
    allowed = np.array(mask)
    actions = made(Discrete(5, start=start), seed).act(rows(len(mask), action_mask=allowed))
    assert allowed[np.arange(len(mask)), actions - start].all()


@pytest.mark.slow("collects whole runs with many policies")
@given(mask=masks, seed=st.integers(0, 1000))
def test_masks_of_a_multidiscrete_stand_one_after_the_other(mask: list[list[bool]], seed: int) -> None:
    allowed = np.array([[*row[:3], any(row[3:]) or True, row[4]] if any(row[:3]) else [True] * 5 for row in mask])
    actions = made(MultiDiscrete([3, 2], start=[0, 7]), seed).act(rows(len(mask), action_mask=allowed))
    n = np.arange(len(mask))
    assert allowed[n, actions[:, 0]].all()
    assert allowed[n, 3 + actions[:, 1] - 7].all()


def test_allowed_choices_are_equally_likely() -> None:
    mask = np.tile([True, False, True, False, True], (6000, 1))
    _, counts = np.unique(made(Discrete(5)).act(rows(6000, action_mask=mask)), return_counts=True)
    assert len(counts) == 3
    assert np.abs(counts - 2000).max() < 250


def test_a_mask_that_allows_nothing_or_does_not_fit_is_an_error() -> None:
    mask = np.ones((4, 5), np.bool_)
    mask[3] = False
    with pytest.raises(ContractError, match="env 1, agent 1 allows nothing"):
        made(Discrete(5)).act(rows(4, action_mask=mask))
    with pytest.raises(ContractError, match="5 entries.* 4 choices"):
        made(Discrete(4)).act(rows(4, action_mask=mask))
    with pytest.raises(ContractError, match="5 entries.* 6 choices"):
        made(MultiDiscrete([4, 2])).act(rows(4, action_mask=mask))
    mask = np.ones((4, 5), np.bool_)
    mask[2, :2] = False
    with pytest.raises(ContractError, match="env 1, agent 0"):
        made(MultiDiscrete([2, 3])).act(rows(4, action_mask=mask))


def test_a_seed_of_its_own_beats_the_collectors() -> None:
    space = Discrete(1000)

    def draw(policy: RandomPolicy, seed: int) -> list[int]:
        policy.setup(OBS, space, seed=seed)
        policy.reseed(seed)
        return list(policy.act(rows(5)))

    assert draw(RandomPolicy(), 1) != draw(RandomPolicy(), 2)
    assert draw(RandomPolicy(seed=7), 1) == draw(RandomPolicy(seed=7), 2)
    assert (repr(RandomPolicy()), repr(RandomPolicy(seed=7))) == ("RandomPolicy()", "RandomPolicy(seed=7)")


def test_setup_comes_first_and_stores_the_spaces() -> None:
    policy = RandomPolicy()
    assert policy.action_space is None
    with pytest.raises(StateError, match=r"setup\(\)"):
        policy.act(rows(2))
    policy.setup(OBS, Discrete(3), seed=0)
    assert (policy.observation_space, policy.action_space, policy.version) == (OBS, Discrete(3), 0)


def test_a_function_is_a_policy() -> None:
    def still(given: Rows) -> Any:
        return np.zeros(len(given), int), {"logp": np.zeros(len(given))}

    policy = FunctionPolicy(still)
    policy.setup(OBS, Discrete(3), seed=0)
    actions, columns = policy.act(rows(3), explore=False)
    assert actions.tolist() == [0, 0, 0]
    assert list(columns) == ["logp"]
    assert isinstance(policy, Policy)
    assert repr(policy) == "FunctionPolicy(still)"
    with pytest.raises(ArgumentError, match="expected a function"):
        FunctionPolicy(3)  # type: ignore[arg-type]  # on purpose

"""Random members of spaces: of any space, for any mask, from one stream."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import (
    Box,
    Dict,
    Discrete,
    Graph,
    MultiBinary,
    MultiDiscrete,
    OneOf,
    Sequence,
    Space,
    Text,
    Tuple,
)
from hypothesis import given
from hypothesis import strategies as st

from marlvec.errors import ContractError
from marlvec.sampling import SpaceSampler
from marlvec.spaces import SpaceTree
from tests.checklist import stable_id


class Simplex(Box):
    """A space of a user's own: a Box of which most is no member."""

    def __init__(self) -> None:
        super().__init__(0, 1, (3,), np.float64)

    def sample(self, mask: Any = None, probability: Any = None) -> Any:
        return self.np_random.dirichlet(np.ones(3))

    def contains(self, value: Any) -> bool:
        return bool(super().contains(value) and abs(value.sum() - 1) < 1e-9)


class Words(Space[str]):
    """A space of a user's own, of no kind that Gymnasium has."""

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        return str(self.np_random.choice(["yes", "no", "perhaps"]))

    def contains(self, value: Any) -> bool:
        return value in ("yes", "no", "perhaps")


LEAVES: list[Space[Any]] = [
    Box(-1, 1, (2,)),
    Box(-np.inf, np.inf, (), np.float64),
    Box(np.float32([-np.inf, 0, -1]), np.float32([1, np.inf, 1])),
    Box(0, 255, (2, 2), np.uint8),
    Box(0, 1, (3,), np.bool_),
    Box(-1, 1, (0,)),
    Discrete(4, start=-1),
    MultiDiscrete([[2, 3], [4, 1]], start=[[0, 1], [-2, 5]]),
    MultiBinary([2, 2]),
    Simplex(),
    Text(8, min_length=0),
    Sequence(Discrete(3)),
    Sequence(Box(0, 1, (2,)), stack=True),
    Graph(Box(-1, 1, (2,)), Discrete(3)),
    OneOf([Discrete(3), Box(0, 1, (2,))]),
    Words(),
]
spaces = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3).map(Dict),
        st.lists(inner, min_size=1, max_size=3).map(Tuple),
    ),
    max_leaves=5,
)


def drawn(space: Space[Any], seed: int, n: int, **options: Any) -> Any:
    return SpaceSampler(SpaceTree(space)).sample(np.random.default_rng(seed), n, **options)


def member(space: Space[Any], batch: Any, i: int) -> Any:
    if isinstance(space, Dict):
        return {key: member(sub, batch[key], i) for key, sub in space.spaces.items()}
    if isinstance(space, Tuple):
        return tuple(member(sub, part, i) for sub, part in zip(space.spaces, batch, strict=True))
    return batch[i] if isinstance(space, Discrete) or batch.dtype == object else batch[i, ...]


@given(space=spaces, n=st.integers(0, 6), seed=st.integers(0, 2**32 - 1))
def test_members_of_any_space(space: Space[Any], n: int, seed: int) -> None:
    batch, again = drawn(space, seed, n), drawn(space, seed, n)
    for i in range(n):
        assert space.contains(member(space, batch, i))
        assert repr(member(space, batch, i)) == repr(member(space, again, i))


@pytest.mark.parametrize("space", LEAVES, ids=lambda space: stable_id(repr(space)))
def test_the_callers_space_is_never_drawn_from(space: Space[Any]) -> None:
    space.seed(3)
    untouched = deepcopy(space)
    first, second = (drawn(space, seed, 4) for seed in (0, 1))
    assert repr(untouched.sample()) == repr(space.sample())
    assert space.shape == (0,) or repr(first) != repr(second)


@pytest.mark.parametrize("space", [Discrete(3, start=5), MultiDiscrete([2, 1], start=[5, 0])], ids=repr)
def test_a_mask_that_cannot_be_kept_names_the_row(space: Any) -> None:
    mask = np.ones((4, 3), np.bool_)
    mask[2, :2] = False
    mask[2, 2] = isinstance(space, MultiDiscrete)
    with pytest.raises(ContractError, match="mask of row 2 allows nothing"):
        drawn(space, 0, 4, mask=mask)
    with pytest.raises(ContractError, match="mask of the third allows nothing"):
        drawn(space, 0, 4, mask=mask, where=lambda i: ("the first", "the second", "the third")[i])
    with pytest.raises(ContractError, match="4 entries.* 3 choices"):
        drawn(space, 0, 4, mask=np.ones((4, 4), np.bool_))


@given(
    allowed=st.lists(st.lists(st.booleans(), min_size=3, max_size=3).filter(any), max_size=6), seed=st.integers(0, 99)
)
def test_masked_members_are_allowed(allowed: list[list[bool]], seed: int) -> None:
    mask = np.array(allowed, np.bool_).reshape(-1, 3)
    chosen = drawn(Discrete(3, start=5), seed, len(mask), mask=mask)
    assert chosen.shape == (len(mask),)
    assert mask[np.arange(len(mask)), chosen - 5].all()


@pytest.mark.parametrize("space", [Box(-1, 1, (3,)), MultiBinary(3), Dict(a=Discrete(3))], ids=repr)
def test_other_spaces_take_no_notice_of_a_mask(space: Space[Any]) -> None:
    mask = np.zeros((4, 3), np.bool_)
    assert repr(drawn(space, 0, 4, mask=mask)) == repr(drawn(space, 0, 4))

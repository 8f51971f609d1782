"""Spaces taken apart into leaves and put together again, compared, batched, and the objects in their leaves copied."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Graph, MultiBinary, MultiDiscrete, OneOf, Sequence, Space, Text, Tuple
from hypothesis import given, settings
from hypothesis import strategies as st

from marlvec.errors import ContractError
from marlvec.spaces import (
    MAX_BYTES,
    ObjectArray,
    SpaceTree,
    batch_space,
    check_size,
    describe_difference,
    own_objects,
    snapshot,
)
from tests.checklist import stable_id
from tests.vector.support.reference import assert_trees_equal

# Gymnasium draws numpy scalars from 0-d Boxes of ints and bools, and then warns of them.
pytestmark = pytest.mark.filterwarnings("ignore:.*Casting input x to numpy array")

DTYPES = ("bool", "uint8", "int64", "float16", "float32", "float64")


class Coins(Space[frozenset[str]]):
    """Sets of coins: a space of a user's own, without an ``==``."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def sample(self, mask: Any = None, probability: Any = None) -> frozenset[str]:
        return frozenset(f"coin {i}" for i in range(self.most) if self.np_random.random() < 0.5)

    def contains(self, x: Any) -> bool:
        return isinstance(x, frozenset) and x <= {f"coin {i}" for i in range(self.most)}


def box(dtype: str, shape: tuple[int, ...]) -> Box:
    high = {"bool": 1, "uint8": 255, "int64": 2**62}.get(dtype, 8.5)
    return Box(0 if dtype in ("bool", "uint8") else -high, high, shape, np.dtype(dtype).type)


def array_spaces() -> st.SearchStrategy[Space[Any]]:
    shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
    sizes = st.lists(st.lists(st.integers(1, 6), min_size=2, max_size=2), min_size=1, max_size=3)
    return st.one_of(
        st.builds(box, st.sampled_from(DTYPES), shapes),
        st.builds(lambda n, start: Discrete(n, start=start), st.integers(1, 9), st.integers(-5, 5)),
        sizes.map(lambda nvec: MultiDiscrete(np.array(nvec))),
        st.one_of(st.integers(1, 4), st.tuples(st.integers(1, 3), st.integers(1, 3))).map(MultiBinary),
    )


def object_spaces() -> st.SearchStrategy[Space[Any]]:
    inner = st.one_of(array_spaces(), st.just(Text(4, min_length=0)), st.builds(Coins, st.integers(1, 3)))
    return st.one_of(
        st.builds(lambda low, more: Text(low + more, min_length=low), st.integers(0, 3), st.integers(1, 5)),
        inner.map(Sequence),
        st.builds(Graph, array_spaces(), st.one_of(st.none(), st.just(Discrete(3)))),
        st.lists(inner, min_size=1, max_size=3).map(OneOf),
        st.builds(Coins, st.integers(1, 4)),
    )


def any_space(leaves: st.SearchStrategy[Space[Any]]) -> st.SearchStrategy[Space[Any]]:
    def deeper(inner: st.SearchStrategy[Space[Any]]) -> st.SearchStrategy[Space[Any]]:
        names = st.one_of(st.sampled_from(["a", "b", "c", "obs", "x/y"]), st.integers(0, 3))
        return st.one_of(
            st.dictionaries(names, inner, max_size=3).map(lambda found: Dict(OrderedDict(found))),
            st.lists(inner, max_size=3).map(Tuple),
        )

    return st.recursive(leaves, deeper, max_leaves=8)


def all_spaces() -> st.SearchStrategy[Space[Any]]:
    return any_space(st.one_of(array_spaces(), object_spaces()))


@pytest.mark.slow("starts programs of its own")
@pytest.mark.checklist(64)
@settings(max_examples=200)
@given(space=all_spaces(), seed=st.integers(0, 2**31 - 1))
def test_flatten_and_unflatten_are_each_others_inverse(space: Space[Any], seed: int) -> None:
    """Of single values, and of batches; to and fro, nothing is copied, converted or put elsewhere."""
    tree = SpaceTree(space)
    space.seed(seed)
    value = space.sample()
    leaves = tree.flatten(value)
    assert len(leaves) == len(tree.leaves)
    assert all(leaf.space.contains(part) for leaf, part in zip(tree.leaves, leaves, strict=True))
    back = tree.unflatten(leaves)
    assert_trees_equal(back, value, "value")
    assert all(a is b for a, b in zip(tree.flatten(back), leaves, strict=True))
    batches = tree.zeros(3, 2)
    assert [batch.dtype for batch in batches] == [leaf.dtype for leaf in tree.leaves]
    assert [batch.shape for batch in batches] == [(3, 2, *leaf.shape) for leaf in tree.leaves]
    assert all(batch.tolist() == [[None] * 2] * 3 for batch in batches if batch.dtype == object)
    again = tree.flatten(tree.unflatten(batches))
    assert all(a is b for a, b in zip(again, batches, strict=True))


@pytest.mark.slow("starts programs of its own")
@settings(max_examples=100)
@given(space=all_spaces(), seed=st.integers(0, 2**31 - 1))
def test_a_batched_space_is_one_of_arrays_and_its_samples_are_seeded_members(space: Space[Any], seed: int) -> None:
    before = pickle.dumps(space)
    batched = batch_space(batch_space(space, 2), 3)
    tree, rows = SpaceTree(space), SpaceTree(batched)
    assert [leaf.path for leaf in rows.leaves] == [leaf.path for leaf in tree.leaves]
    samples = []
    for _ in range(2):
        batched.seed(seed)
        samples.append([batched.sample(), batched.sample()])
    assert_trees_equal(samples[0], samples[1], "samples")
    for sample in samples[0]:
        assert batched.contains(sample)
        for leaf, array in zip(tree.leaves, tree.flatten(sample), strict=True):
            assert (array.dtype, array.shape) == (leaf.dtype, (3, 2, *leaf.shape))
            if leaf.is_object:
                assert all(leaf.space.contains(one) for one in array.flat)
    assert SpaceTree(deepcopy(batched)).leaves != () or not tree.leaves
    assert describe_difference(batched, batch_space(batch_space(pickle.loads(before), 2), 3)) is None
    objects = [leaf for leaf in rows.leaves if leaf.is_object]
    assert all(isinstance(leaf.space, ObjectArray) for leaf in objects)


def test_an_array_of_objects_and_what_is_none() -> None:
    space = ObjectArray(Text(3), (2, 2))
    good = np.array([["a", None], ["abc", "b"]], object)
    assert space.contains(good)
    for wrong in (good.tolist(), good[0], np.array([["a", "abcd"]] * 2, object), good.astype("U3"), None):
        assert not space.contains(wrong)
    assert space.shape == (2, 2)
    assert space != ObjectArray(Text(3), (2, 1))
    assert space != ObjectArray(Text(4), (2, 2))
    assert ObjectArray(Coins(2), (2,)) == ObjectArray(Coins(2), (2,))
    assert repr(ObjectArray(Coins(2), (2,))).startswith("ObjectArray(")
    assert not space.is_np_flattenable
    given = Text(3, seed=1)
    drawn = deepcopy(given)
    ObjectArray(given, (5,)).sample()
    assert given.sample() == drawn.sample(), "the space that was given is not drawn from"
    masked = ObjectArray(Text(3, charset="ab"), (4,)).sample(mask=(2, np.array([1, 0], np.int8)))
    assert masked.tolist() == ["aa"] * 4


@pytest.mark.slow("starts programs of its own")
@settings(max_examples=150)
@given(space=all_spaces())
def test_a_space_differs_from_its_copy_in_nothing(space: Space[Any]) -> None:
    """Each env builds its own, and those of other processes come pickled; what was drawn does not count."""
    copy = pickle.loads(pickle.dumps(space))
    copy.seed(5)
    copy.sample()
    assert describe_difference(space, copy) is None


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (Text(3), Text(4)),
        (Text(3), Text(3, charset="ab")),
        (Sequence(Discrete(2)), Sequence(Discrete(3))),
        (Sequence(Discrete(2)), Sequence(Discrete(2), stack=True)),
        (Sequence(Coins(2)), Sequence(Coins(3))),
        (Graph(Box(0, 1, (2,)), None), Graph(Box(0, 1, (2,)), Discrete(2))),
        (Graph(Box(0, 1, (2,)), None), Graph(Box(0, 1, (3,)), None)),
        (OneOf([Discrete(2)]), OneOf([Discrete(2), Discrete(2)])),
        (OneOf([Coins(2)]), OneOf([Coins(3)])),
        (Coins(2), Coins(3)),
        (Text(3), Discrete(3)),
    ],
    ids=lambda space: stable_id(str(space)),
)
def test_where_spaces_differ(a: Space[Any], b: Space[Any]) -> None:
    for wrap, where in ((lambda s: s, "/"), (lambda s: Dict({"x": Tuple([Discrete(2), s])}), "/x/1")):
        assert describe_difference(wrap(a), wrap(deepcopy(a))) is None
        assert describe_difference(wrap(a), wrap(b)).startswith(f"at {where}: expected ")
        assert describe_difference(wrap(b), wrap(a)).startswith(f"at {where}: expected ")
    assert (
        describe_difference(Dict({1: Discrete(2)}), Dict({"b": Discrete(2)})) == "at /: expected keys ['1'], got ['b']"
    )


class Named:
    """Without an ``==``: its copies are told by name."""

    def __init__(self, name: str) -> None:
        self.name = name


def test_what_can_change_is_copied_and_what_cannot_is_not() -> None:
    (leaf,) = SpaceTree(Text(3)).leaves
    constants: list[Any] = ["a", b"a", 1, 2**80, 1.5, True, None, np.int64(3), ("a", (1, np.float32(2))), (), "é\ud800"]
    for value in constants:
        copy, size = snapshot(leaf, value)
        assert copy is value
        assert abs(size - len(pickle.dumps(value, protocol=5))) < 100
    changing: list[Any] = [[1], {"a": 1}, np.ones(2), np.array(3), ([1],), np.zeros(1, "i4,i4")[0], {1}, bytearray(2)]
    for value in changing:
        for by_value in (False, True):
            copy, size = snapshot(leaf, value, by_value=by_value)
            assert copy is not value
            assert size >= 10
            assert_trees_equal(copy, value, "copy")
    copy, _ = snapshot(leaf, Named("x"))
    assert (type(copy), copy.name) == (Named, "x")
    with pytest.raises(ContractError, match="the value: a generator that cannot be pickled"):
        snapshot(leaf, (i for i in range(3)))
    array = np.array(["a", None, ("b", 1)], object)
    assert own_objects(array) is array
    array[1] = [1, 2]
    mine = own_objects(array)
    mine[1].append(3)
    assert array[1] == [1, 2]
    check_size(leaf, 5, MAX_BYTES - 5)
    with pytest.raises(ContractError, match=r"the value: a value of 6 bytes.*others of 16,777,211 bytes.*16,777,216"):
        check_size(leaf, 6, MAX_BYTES - 5)

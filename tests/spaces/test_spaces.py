"""Spaces: leaves and trees, equality, members, texts, spaces of users' own, and bounds made wider."""

from __future__ import annotations

import pickle
import re
import tempfile
from collections import OrderedDict
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Graph, MultiBinary, MultiDiscrete, OneOf, Sequence, Space, Text, Tuple
from hypothesis import given, settings
from hypothesis import strategies as st

import marlvec
from marlvec import RandomPolicy, Recorder, SampleBatch, load_dataset
from marlvec.connectors.rows import Rows
from marlvec.envs import EnvSpec, ParallelAdapter
from marlvec.errors import ArgumentError, CheckpointError, ContractError, SerialisationError
from marlvec.serialization.values import decode, encode
from marlvec.spaces import (
    MAX_BYTES,
    AnyText,
    Leaf,
    ObjectArray,
    SpaceTree,
    batch_space,
    check_size,
    describe_difference,
    membership,
    own_objects,
    snapshot,
)
from marlvec.spaces.action_masks import count_choices
from marlvec.spaces.equality import difference
from marlvec.spaces.padding import describe_incompatibility, widen
from marlvec.testing import SampledEnv
from tests.checklist import stable_id
from tests.vector.support.reference import assert_trees_equal, refused

# --- Spaces: leaves and trees, equality, members, spaces of users' own, and bounds made wider


# Spaces taken apart into leaves and put together again, compared, batched, and the objects in their leaves copied.


# Gymnasium draws numpy scalars from 0-d Boxes of ints and bools, and then warns of them.

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


@pytest.mark.filterwarnings("ignore:.*Casting input x to numpy array")
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


@pytest.mark.filterwarnings("ignore:.*Casting input x to numpy array")
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


@pytest.mark.filterwarnings("ignore:.*Casting input x to numpy array")
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


@pytest.mark.filterwarnings("ignore:.*Casting input x to numpy array")
@pytest.mark.slow("starts programs of its own")
@settings(max_examples=150)
@given(space=all_spaces())
def test_a_space_differs_from_its_copy_in_nothing(space: Space[Any]) -> None:
    """Each env builds its own, and those of other processes come pickled; what was drawn does not count."""
    copy = pickle.loads(pickle.dumps(space))
    copy.seed(5)
    copy.sample()
    assert describe_difference(space, copy) is None


@pytest.mark.filterwarnings("ignore:.*Casting input x to numpy array")
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


@pytest.mark.filterwarnings("ignore:.*Casting input x to numpy array")
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
    refused(ContractError, "the value: a generator that cannot be pickled", snapshot, leaf, (i for i in range(3)))
    array = np.array(["a", None, ("b", 1)], object)
    assert own_objects(array) is array
    array[1] = [1, 2]
    mine = own_objects(array)
    mine[1].append(3)
    assert array[1] == [1, 2]
    check_size(leaf, 5, MAX_BYTES - 5)
    with pytest.raises(ContractError, match=r"the value: a value of 6 bytes.*others of 16,777,211 bytes.*16,777,216"):
        check_size(leaf, 6, MAX_BYTES - 5)


# `difference`: what counts as equal, and how the first difference is named.


NAN = float("nan")
BYTES = np.arange(3, dtype=np.uint8)


class Odd:
    """Compares by identity."""

    def __repr__(self) -> str:
        return "Odd()"  # ids of tests must not have addresses in them


def objects(*cells: Any) -> np.ndarray[Any, Any]:
    out = np.empty(len(cells), np.object_)
    out[:] = cells
    return out


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"x": 1, "y": (2.0, NAN)}, {"y": (2.0, NAN), "x": 1}),
        (np.array([1.0, NAN]), np.array([1.0, NAN])),
        (np.array(["NaT", "2026-01-01"], "M8[D]"), np.array(["NaT", "2026-01-01"], "M8[D]")),
        (objects(BYTES, None, {"k": NAN}), objects(BYTES.copy(), None, {"k": NAN})),
        (np.float32(NAN), np.float32(NAN)),
        (Rows(obs=BYTES), Rows(obs=BYTES.copy())),
        ({"x": BYTES}, Rows(x=BYTES)),
        (Discrete(3), Discrete(3, seed=1)),
    ],
    ids=repr,
)
def test_equal_values_have_no_difference(a: Any, b: Any) -> None:
    assert difference(a, b) is None
    assert difference(b, a) is None


@pytest.mark.parametrize(
    ("a", "b", "path", "at"),
    [
        ({"x": {"y": [0, BYTES]}}, {"x": {"y": [0, BYTES + np.uint8(1)]}}, "x/y/1", (0,)),
        ({"x": 1}, {"y": 1}, "", ()),
        ({"0": 1}, [1], "", ()),
        ([1], (1,), "", ()),
        ([1], [1, 2], "", ()),
        (1, True, "", ()),
        (1.0, NAN, "", ()),
        (np.float32(1), np.float64(1), "", ()),
        (BYTES, BYTES.astype(np.int8), "", ()),
        (BYTES, BYTES[:2], "", ()),
        (np.array([1.0, NAN]), np.array([1.0, 2.0]), "", (1,)),
        (objects(1, BYTES), objects(1, BYTES * 2), "", (1,)),
        (Discrete(3), Discrete(4), "", ()),
        (Odd(), Odd(), "", ()),
    ],
    ids=repr,
)
def test_first_difference_is_named(a: Any, b: Any, path: str, at: tuple[int, ...]) -> None:
    for found in (difference(a, b), difference(b, a)):
        assert found is not None
        assert (found.path, found.at) == (path, at)
        assert found.expected != found.got or isinstance(a, Odd)


def test_opaque_objects_count_as_equal_and_known_ones_do_not() -> None:
    assert difference({"x": Odd()}, {"x": Odd()}, opaque=True) is None
    assert difference({"x": Odd()}, {"x": 1}, opaque=True) is not None
    assert difference({"x": b"1"}, {"x": b"2"}, opaque=True) is not None


def test_numbers_of_other_types_are_equal_where_types_do_not_count() -> None:
    assert difference([1, np.float32(2)], (1.0, 2), typed=False) is None
    assert difference([1], (2.0,), typed=False) is not None
    assert difference(BYTES, BYTES + 1e-9, typed=False, close=lambda a, b: np.isclose(a, b)) is None


def test_spaces_of_a_class_without_equality_are_equal_where_their_attributes_are() -> None:
    class Temperature(Space[float]):
        def __init__(self, lowest: float, names: dict[str, Any]) -> None:
            super().__init__((), np.float64)
            self.lowest, self.names = lowest, names

    inner = {"unit": "K", "scale": [np.zeros(2)], "of": Discrete(2)}
    assert describe_difference(Temperature(NAN, inner), Temperature(NAN, {**inner, "of": Discrete(2)})) is None
    assert describe_difference(Temperature(0.0, inner), Temperature(NAN, inner)) is not None
    assert describe_difference(Temperature(0.0, inner), Temperature(0.0, {**inner, "of": Discrete(3)})) is not None


# `membership`: which rows are members of a space, whatever dtype they come in, and what is said of others.


INF = np.inf
HERE = np.ones((1, 2), np.bool_)


class Even(Discrete):
    """Contains even numbers, and raises on numbers that it does not know."""

    def contains(self, x: Any) -> bool:
        if x > 100:
            raise LookupError("too large")
        return super().contains(x) and int(x) % 2 == 0


def leaf_of(space: Space[Any]) -> Leaf:
    (leaf,) = SpaceTree(space).leaves
    return leaf


@pytest.mark.parametrize(
    ("space", "good", "bad", "words"),
    [
        (Box(-128, 127, (2,), np.int8), [1, -128], [1, 128], r"\[-128, 127\], got 128 at index \(1,\); wrong: 1 of 2"),
        (Box(0, 255, (), np.uint8), 255, -1, r"expected values in \[0, 255\], got -1"),
        (Box(0, 1, (), np.bool_), 1, 2, r"expected values in \[False, True\], got 2"),
        (Box(-INF, INF, (2,), np.float32), [1e300, -INF], [0.0, NAN], r"\[-inf, inf\], got nan at index \(1,\)"),
        (Box(np.float32([0, -INF]), np.float32([1, 5]), (2,)), [1, -9], [1.5, 0], r"\[0.0, 1.0\], got 1.5"),
        (Discrete(3, start=-1), 1, 2, r"\[-1, 1\], got 2"),
        (Discrete(3, dtype=np.uint64), np.int64(2), np.int64(-1), r"\[0, 2\], got -1"),
        (MultiDiscrete([2, 3]), [1, 2], [1, 3], r"\[0, 2\], got 3 at index \(1,\)"),
        (MultiBinary(2), [0, 1], [2, 0], r"\[0, 1\], got 2"),
        (Even(9), 8, 7, r"expected a member of Discrete\(9\), got (np\.int64\()?7"),
        (Even(9), 8, 101, r"contains\(\) raised LookupError: too large"),
        (Text(3), "abc", "abcd", "expected a member of Text.*got 'abcd'"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_rows_outside_of_a_space_are_found_in_any_dtype(space: Space[Any], good: Any, bad: Any, words: str) -> None:
    leaf = leaf_of(space)
    members = membership(leaf, in_buffer=False)
    assert members is not None
    if leaf.is_object:
        rows = np.empty((1, 2), np.object_)
        rows[0] = good, bad
    else:
        rows = np.stack([good, bad])[None]
    assert not members.are_all(rows)
    assert members.rows(rows, HERE).tolist() == [[True, False]]
    assert members.rows(rows[:, :1], HERE[:, :1]).all()
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(members.describe(rows[0, 1, ...]))


def test_rows_that_nobody_asks_for_are_not_shown_to_a_space_of_ones_own() -> None:
    members = membership(leaf_of(Even(9)), in_buffer=False)
    assert members is not None
    assert members.rows(np.array([[101, 2]]), np.array([[False, True]])).tolist() == [[True, True]]


@pytest.mark.parametrize("space", [Box(0, 1, (0,)), MultiDiscrete(np.zeros((0,), np.int64))], ids=str)
def test_values_without_numbers_are_members(space: Space[Any]) -> None:
    assert membership(leaf_of(space), in_buffer=False) is None


# Spaces that derive from Gymnasium's: those that hold what theirs hold are arrays, all others objects.


class Mission(np.ndarray[Any, Any]):
    """A text with a number, as multigrid has it."""

    text: str

    @classmethod
    def of(cls, text: str, number: int) -> Mission:
        mission = np.array(number).view(cls)
        mission.text = text
        return mission


class Missions(MultiDiscrete):
    """Members are texts, not vectors."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts
        super().__init__([len(texts)])

    def sample(self, mask: Any = None, probability: Any = None) -> Any:
        number = int(super().sample()[0])
        return Mission.of(self.texts[number], number)

    def contains(self, x: Any) -> bool:
        return getattr(x, "text", None) in self.texts


class Tolerant(Box):
    """Members are those of a Box, and it says so itself."""

    def contains(self, x: Any) -> bool:
        return isinstance(x, np.ndarray) and x.shape == self.shape


class NamedDiscrete(Discrete):
    """It has a name, and nothing else is different."""


class Ragged(MultiBinary):
    """Members are of any length."""

    def sample(self, mask: Any = None, probability: Any = None) -> Any:
        return super().sample()[:-1]

    def contains(self, x: Any) -> bool:
        return True


class Unsampled(Box):
    def sample(self, mask: Any = None, probability: Any = None) -> Any:
        raise NotImplementedError

    def contains(self, x: Any) -> bool:
        return True


@pytest.mark.parametrize(
    ("space", "is_object"),
    [
        (Missions(["go", "stop"]), True),
        (Tolerant(0, 1, (2,)), False),
        (NamedDiscrete(3), False),
        (Ragged(4), True),
        (Unsampled(0, 1, (2,)), True),
        (Box(0, 1, (2,)), False),
    ],
)
def test_what_a_space_holds_decides(space: Space[Any], is_object: bool) -> None:
    space.seed(5)
    before = str(space.np_random.bit_generator.state)
    (leaf,) = SpaceTree(space).leaves
    assert leaf.is_object is is_object
    assert (leaf.dtype == object) is is_object
    assert (count_choices(space) is not None) is (isinstance(space, NamedDiscrete))
    assert str(space.np_random.bit_generator.state) == before  # nobody drew from the user's own stream
    batched = batch_space(space, 3)
    assert (batched.dtype == object) is is_object


def test_arrays_of_ones_own_class_keep_their_attributes() -> None:
    space = Missions(["go", "stop"])
    (leaf,) = SpaceTree(space).leaves
    copy, _ = snapshot(leaf, Mission.of("stop", 1))
    assert (type(copy), copy.text, int(copy)) == (Mission, "stop", 1)
    assert pickle.loads(pickle.dumps(copy)).text == "stop"

    class Knows(np.ndarray[Any, Any]):
        def __reduce__(self) -> Any:
            return int, (7,)

    assert snapshot(leaf, np.zeros(()).view(Knows))[0] == 7  # it says itself how it is pickled


class MissionEnv(gymnasium.Env[Any, Any]):
    def __init__(self) -> None:
        self.observation_space = Dict(mission=Missions(["go", "stop"]), place=Discrete(3))
        self.action_space = Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self._obs(), 0.0, self.t == 4, False, {}

    def _obs(self) -> dict[str, Any]:
        number = int(self.np_random.integers(2))
        return {"mission": Mission.of(["go", "stop"][number], number), "place": self.t % 3}


@pytest.mark.parametrize("backend", ["sync", "thread", "async"])
def test_texts_by_number_come_through_every_backend(backend: str) -> None:
    plain = [MissionEnv(), MissionEnv()]
    with marlvec.make(MissionEnv, 2, backend=backend) as envs:
        obs, _ = envs.reset(seed=[1, 2])
        expected = [env.reset(seed=seed)[0] for env, seed in zip(plain, [1, 2], strict=True)]
        for _ in range(12):
            assert [str(m.text) for m in obs["mission"][:, 0]] == [str(e["mission"].text) for e in expected]
            assert [int(m) for m in obs["mission"][:, 0]] == [int(e["mission"]) for e in expected]
            assert obs["place"][:, 0].tolist() == [e["place"] for e in expected]
            obs, *_ = envs.step(np.zeros((2, 1), int))
            steps = [env.step(0) for env in plain]
            expected = [env.reset()[0] if s[2] else s[0] for env, s in zip(plain, steps, strict=True)]


# `spaces="compatible"`: envs whose spaces differ in nothing but their bounds.


@st.composite
def pairs(draw: Any) -> tuple[Box, Box]:
    """Two Boxes that differ in their bounds, element by element."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3).map(tuple))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    found = []
    for _ in range(2):
        ends = np.sort(rng.integers(0, 2 if dtype == "bool" else 100, (2, *shape)), axis=0).astype(dtype)
        found.append(Box(ends[0, ...], ends[1, ...], shape, np.dtype(dtype).type))
    return found[0], found[1]


@pytest.mark.slow("starts programs of its own")
@given(pair=pairs())
def test_the_wider_space_holds_the_members_of_both(pair: tuple[Box, Box]) -> None:
    for wrap in (lambda box: box, lambda box: Dict({"a": Tuple([box]), "b": Discrete(3)})):
        one, other = map(wrap, pair)
        assert describe_incompatibility(one, other) is None
        wide = widen(one, other)
        assert wide == widen(other, one)
    for space in pair:
        assert all(widen(*pair).contains(np.asarray(space.sample())) for _ in range(3))
    box = widen(*pair)
    assert (box.shape, box.dtype) == (pair[0].shape, pair[0].dtype)
    assert box.low.tobytes() == np.minimum(pair[0].low, pair[1].low).tobytes()
    assert box.high.tobytes() == np.maximum(pair[0].high, pair[1].high).tobytes()


def test_equal_spaces_stay_as_they_are() -> None:
    space = Dict({"a": Box(0, 1, (2,))})
    assert widen(space, Dict({"a": Box(0, 1, (2,))})) is space


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (Box(0, 1, (2,)), Box(0, 1, (3,)), "(2,)"),
        (Box(0, 1, (2,)), Box(0, 1, (2,), np.float64), "float64"),
        (Box(0, 9, (2,), np.uint8), Box(0, 9, (2,), np.int64), "int64"),
        (Discrete(2), Discrete(3), "expected Discrete(2), got Discrete(3)"),
        (MultiDiscrete([2]), MultiDiscrete([3]), "at /"),
        (Dict({"a": Box(0, 1)}), Dict({"b": Box(0, 1)}), "expected keys ['a'], got ['b']"),
        (Dict({"a": Box(0, 1), "b": Discrete(2)}), Dict({"a": Box(0, 5), "b": Discrete(3)}), "at /b"),
        (Tuple([Box(0, 1)]), Tuple([Box(0, 1)] * 2), "expected length 1, got 2"),
    ],
)
def test_what_differs_in_more_than_bounds_is_named(one: Space[Any], other: Space[Any], words: str) -> None:
    assert words in (describe_incompatibility(one, other) or "")
    specs = [ParallelAdapter(SampledEnv(space, Discrete(2))).spec() for space in (one, other)]
    assert "observation space of agent 'agent_0'" in (specs[0].difference(specs[1], "compatible") or "")


def spec_of(high: float, **fields: Any) -> EnvSpec:
    spaces = [Box(0, high, (2,)), Box(0, 1, (2,))]
    return replace(ParallelAdapter(SampledEnv(spaces, Box(-high, 0, (1,)))).spec(), **fields)


def test_specs_are_widened_field_by_field() -> None:
    one, other = spec_of(1, state_space=Box(0, 1, (3,))), spec_of(4, state_space=Box(-1, 0, (3,)))
    assert one.difference(other) == (
        "observation space of agent 'agent_0' at /: expected Box(0.0, 1.0, (2,), float32), "
        "got Box(0.0, 4.0, (2,), float32)"
    )
    assert one.difference(other, "compatible") is None
    wide = one.widened(other)
    assert wide.observation_spaces == (Box(0, 4, (2,)), Box(0, 1, (2,)))
    assert wide.action_spaces == (Box(-4, 0, (1,)),) * 2
    assert wide.state_space == Box(-1, 1, (3,))
    assert [group.agents for group in one.groups] == [(0, 1)]
    assert [group.agents for group in wide.groups] == [(0,), (1,)]  # so all workers must go by the common spec
    assert wide.difference(other, "compatible") is None
    assert "state space" in (one.difference(spec_of(4), "compatible") or "")
    assert "action mask sizes" in (one.difference(replace(other, mask_sizes=(3, 3)), "compatible") or "")
    assert "agents" in (one.difference(replace(other, agents=("a", "b")), "compatible") or "")


def test_what_was_padded_is_widened_too() -> None:
    builds = [
        partial(SampledEnv, [Box(0, high, (2,)), Box(0, high, (3,))], [Discrete(2), Discrete(3)]) for high in (1, 2)
    ]
    specs = []
    for build in builds:
        with marlvec.make(build, 1, backend="sync", pad=True) as envs:
            specs.append(envs.spec)
    assert specs[0].difference(specs[1], "compatible") is None
    wide = specs[0].widened(specs[1])
    assert wide.own_observation_spaces == (Box(0, 2, (2,)), Box(0, 2, (3,)))
    assert wide.observation_spaces == (Box(0, 2, (3,)),) * 2
    assert [None if mask is None else mask.tolist() for mask in wide.allowed] == [[True, True, False], None]


@pytest.mark.checklist(61)
@pytest.mark.parametrize("backend", ["sync", "thread", "async"])
def test_bounds_may_differ_where_that_was_asked_for(backend: str) -> None:
    def factories(*boxes: Any) -> list[Any]:
        return [partial(SampledEnv, box, Box(-1, 1, (1,)), length=3) for box in boxes]

    settings: dict[str, Any] = {"backend": backend} | ({} if backend == "sync" else {"num_workers": 2})
    bounds = [Box(0, 1, (2,)), Box(0, 1, (2,)), Box(-3, 0, (2,)), Box(0, 7, (2,))]
    # Two workers look at two envs each, so it may be env 2 that differs from env 0, or env 3 from env 2.
    words = "env [23].*observation space of agent 'agent_0' at /: expected Box.* got Box"
    refused(ContractError, words, marlvec.make, factories(*bounds), **settings)
    for others in (Box(0, 1, (3,)), Box(0, 1, (2,), np.float64)):
        with pytest.raises(
            ContractError, match=r"env 3.*observation space of agent 'agent_0'.*" + re.escape(str(others.shape))
        ):
            marlvec.make(factories(*bounds[:3], others), **settings, spaces="compatible")
    with marlvec.make(factories(*bounds), **settings, spaces="compatible") as envs:
        assert envs.single_observation_space == Box(-3, 7, (2, 2))
        assert envs.agent_observation_space("agent_1") == Box(-3, 7, (2,))
        found = envs.exec_func(lambda env: env.observation_space("agent_0"))
        assert list(found) == bounds
        obs, _ = envs.reset(seed=0)
        for _ in range(8):
            for i, box in enumerate(bounds):
                assert all(box.contains(row) for row in obs[i])
            assert envs.observation_space.contains(obs)
            obs, *_ = envs.step(envs.random_action(seed=1))


@pytest.mark.parametrize("backend", ["sync", "thread", "async"])
def test_agents_that_are_alike_in_one_env_only_are_in_groups_of_their_own(backend: str) -> None:
    one = partial(SampledEnv, Box(0, 1, (2,)), Discrete(2), length=3)
    other = partial(SampledEnv, [Box(0, 1, (2,)), Box(0, 5, (2,))], Discrete(2), length=3)
    settings: dict[str, Any] = {"backend": backend} | ({} if backend == "sync" else {"num_workers": 2})
    for factories in ([one, other], [other, one]):
        with marlvec.make(factories, **settings, spaces="compatible") as envs:
            assert envs.groups == {"agent_0": (0,), "agent_1": (1,)}
            twins = [factory() for factory in factories]
            found = [twin.reset(seed=3)[0] for twin in twins]
            obs, _ = envs.reset(seed=[3, 3])
            for _ in range(3):
                for i, own in enumerate(found):
                    for agent, row in own.items():
                        assert obs[agent][i, 0].tobytes() == row.tobytes()
                found = [twin.step(dict.fromkeys(twin.agents, 1))[0] for twin in twins]
                obs, *_, infos = envs.step({agent: np.ones((2, 1), np.int64) for agent in envs.groups})
            final = infos["final_observation"]
            assert all(final[agent][i, 0].tolist() == row.tolist() for i in (0, 1) for agent, row in found[i].items())


# --- `AnyText`, and columns of texts in files: nothing is cut, padded or pickled


HARD = ["", "x", "two words\nand a line", "quotes \" ' \\ \x00 end", "ünïcödé ☃ 😀", None, "long " * 2_000]


def column(texts: list[str | None]) -> Any:
    array = np.empty(len(texts), object)
    array[:] = texts
    return array


class Chat(gymnasium.Env[Any, Any]):
    """Answers with a text of the last action and the step; ends after five steps."""

    observation_space = Dict({"heard": AnyText(100), "step": gymnasium.spaces.Discrete(10)})
    action_space = AnyText(40, examples=["hello there", "two\nlines", "", "☃"])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return {"heard": "begin, please", "step": 0}, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return (
            {"heard": f"step {self.steps}: {action}", "step": self.steps},
            float(len(action)),
            self.steps == 5,
            False,
            {},
        )


@pytest.mark.parametrize("value", HARD[:5])
def test_any_text_looks_at_type_and_length_alone(value: str) -> None:
    assert value in AnyText()
    assert value in AnyText(len(value))
    assert (value in AnyText(max(0, len(value) - 1))) == (not value)
    assert value.encode() not in AnyText()


def test_any_text_compares_prints_and_is_saved() -> None:
    space = AnyText(9, examples=["a b", "c"])
    assert repr(space) == "AnyText(9)"
    assert space == AnyText(9)
    assert space != AnyText(8)
    again = decode(encode(space, "it"))
    assert again == space
    assert again.examples == space.examples
    space.seed(3), again.seed(3)
    assert [space.sample() for _ in range(20)] == [again.sample() for _ in range(20)]
    assert all(len(AnyText(3, seed=seed).sample()) <= 3 for seed in range(40))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: AnyText(-1), r"max_length: expected an int of at least 0, got -1"),
        (lambda: AnyText(1.5), r"max_length: expected an int"),  # type: ignore[arg-type]
        (lambda: AnyText(2, examples=["abc"]), r"expected texts of at most 2 characters, got 'abc'"),
        (lambda: AnyText().sample(mask=1), r"neither a mask nor probabilities"),
    ],
)
def test_wrong_arguments_are_refused(call: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        call()


texts = st.lists(st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=30), max_size=12)


@settings(deadline=None, max_examples=30)
@given(texts)
def test_a_column_of_texts_comes_back_from_both_files(values: list[str | None]) -> None:
    pytest.importorskip("pyarrow")
    batch = SampleBatch({"obs": {"said": column(values)}, "t": np.arange(len(values))})
    with tempfile.TemporaryDirectory() as folder:
        for name in ("x.npz", "x.parquet"):
            batch.save(Path(folder) / name)
            back = SampleBatch.load(Path(folder) / name)
            assert back["obs"]["said"].dtype == object
            assert back["obs"]["said"].tolist() == values
            assert back["t"].tolist() == list(range(len(values)))


def test_a_file_holds_little_more_than_the_characters(tmp_path: Path) -> None:
    values = [f"{i} " + "word " * (i % 400) for i in range(2_000)]
    SampleBatch({"obs": column(values)}).save(tmp_path / "x.npz")
    assert (tmp_path / "x.npz").stat().st_size < 1.1 * sum(map(len, values))
    batch = SampleBatch({"obs": column(HARD)})
    assert batch.size_bytes == 8 * len(HARD) + sum(len(text) for text in HARD if text)


def test_half_a_surrogate_pair_is_in_npz_and_refused_by_parquet(tmp_path: Path) -> None:
    batch = SampleBatch({"obs": column(["\ud800", "x"])})
    batch.save(tmp_path / "x.npz")
    assert SampleBatch.load(tmp_path / "x.npz")["obs"].tolist() == ["\ud800", "x"]
    pytest.importorskip("pyarrow")
    with pytest.raises(SerialisationError, match="obs"):
        batch.save(tmp_path / "x.parquet")


@pytest.mark.parametrize("name", ["x.npz", "x.parquet"])
def test_other_objects_are_refused_by_name(name: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    with pytest.raises(SerialisationError, match="obs"):
        SampleBatch({"obs": column(["x", {"a": 1}])}).save(tmp_path / name)  # type: ignore[list-item]


def test_lengths_that_are_not_those_of_the_bytes_are_refused() -> None:
    from marlvec.collect.batch_files import _unpacked_texts

    data = np.frombuffer(b"abc", np.uint8)
    assert _unpacked_texts(data, np.array([1, -1, 2])).tolist() == ["a", None, "bc"]
    for lengths in ([1, 1], [4], [-2, 5], [3.0]):
        with pytest.raises(ValueError, match="lengths of texts"):
            _unpacked_texts(data, np.array(lengths))


def test_strings_of_numpy_become_texts(tmp_path: Path) -> None:
    if not hasattr(np.dtypes, "StringDType"):
        pytest.skip("numpy has no StringDType")
    batch = SampleBatch({"obs": np.array(["a", "bc\n"], np.dtypes.StringDType())})
    batch.save(tmp_path / "x.npz")
    assert SampleBatch.load(tmp_path / "x.npz")["obs"].tolist() == ["a", "bc\n"]


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_whole_games_in_text_are_recorded_and_read(format: str, tmp_path: Path) -> None:
    """As the collector gave them, in order, mixed, and by episode; and again by an appended recording."""
    pytest.importorskip("pyarrow")
    kept = []
    with marlvec.make(Chat, num_envs=3, backend="sync") as envs:
        recorder = Recorder(tmp_path / "d", format=format)
        collector = marlvec.Collector(envs, RandomPolicy(), callbacks=[recorder], seed=1)
        with recorder:
            for _ in range(3):
                batch = collector.collect(env_steps=24)["main"]
                kept.append((batch["obs"]["heard"].tolist(), batch["actions"].tolist()))
    dataset = load_dataset(tmp_path / "d")
    rows = dataset["main"]
    read = rows.read()
    heard, actions = ([text for one in kept for text in one[i]] for i in (0, 1))
    assert read["obs"]["heard"].tolist() == heard
    assert rows.take(range(len(rows)))["actions"].tolist() == actions
    assert any("\n" in text for text in actions)
    again = list(rows.minibatches(16, seed=4))
    assert sorted(text for one in again for text in one["actions"].tolist()) == sorted(actions)
    assert all(one["actions"].dtype == object for one in again)


def test_a_checkpoint_of_a_collector_of_texts_goes_on(tmp_path: Path) -> None:
    def collected(n: int, load: bool) -> Any:
        with marlvec.make(Chat, num_envs=2, backend="sync") as envs:
            collector = marlvec.Collector(envs, RandomPolicy(), seed=1)
            if load:
                marlvec.load_checkpoint(tmp_path, collector=collector)
            found = [collector.collect(env_steps=10)["main"] for _ in range(n)]
            if not load:
                marlvec.save_checkpoint(tmp_path, collector=collector)
            return found

    assert len(collected(1, load=False)[0]["actions"]) == 10
    more = collected(1, load=True)[0]
    assert more["env_t"].tolist() != [0] * 10


def test_a_file_with_another_form_of_text_is_refused(tmp_path: Path) -> None:
    from marlvec.serialization.archive import write_archive

    path = tmp_path / "x.npz"
    write_archive(path, {"kind": "SampleBatch", "batches": [["", [["obs", {"text": [1, 2]}]]]]})
    with pytest.raises(CheckpointError, match="holds no batch"):
        SampleBatch.load(path)

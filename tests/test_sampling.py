"""Random members of spaces, and trees, which are flattened and mapped as plain recursion does it."""

from __future__ import annotations

import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Graph, MultiBinary, MultiDiscrete, OneOf, Sequence, Space, Text, Tuple
from hypothesis import given
from hypothesis import strategies as st

from marlvec.errors import ArgumentError, ContractError
from marlvec.sampling import SpaceSampler
from marlvec.spaces import SpaceTree
from marlvec.trees import Tree, map_tree, tree_leaves, zip_trees
from tests.checklist import stable_id

# --- Random members of spaces: of any space, for any mask, from one stream


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


# --- Trees: whichever way one goes, by its own lines or by dm-tree, the answer is that of plain recursion


ROOT = Path(__file__).resolve().parent.parent


def nests(inner: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
    dicts = (st.dictionaries(keys, inner, max_size=3) for keys in (st.sampled_from("bca"), st.integers(0, 3)))
    return st.one_of(*dicts, st.lists(inner, max_size=3).map(tuple))


ARRAYS = st.integers(0, 9).map(lambda number: np.array([number]))
TREES = st.recursive(ARRAYS, nests, max_leaves=8)
TREES |= st.dictionaries(st.sampled_from("ba") | st.integers(0, 2) | st.none(), TREES, max_size=3)


def plainly(function: Any, *trees: Tree) -> Tree:
    first = trees[0]
    if isinstance(first, dict):
        return {key: plainly(function, *(tree[key] for tree in trees)) for key in first}
    if isinstance(first, tuple):
        return tuple(plainly(function, *parts) for parts in zip(*trees, strict=True))
    return function(*trees)


def paths(tree: Tree, path: str = "") -> dict[str, Any]:
    if not isinstance(tree, (dict, tuple)):
        return {path: tree}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return {at: leaf for key, part in items for at, leaf in paths(part, f"{path}/{key}" if path else str(key)).items()}


def turned(tree: Tree) -> Tree:
    """The same with the keys of every dict in the other order."""
    if isinstance(tree, dict):
        return {key: turned(tree[key]) for key in reversed(tree)}
    return tuple(map(turned, tree)) if isinstance(tree, tuple) else tree


@given(TREES)
def test_a_function_of_every_leaf(tree: Tree) -> None:
    made = map_tree(lambda leaf: leaf + 1, tree)
    assert repr(made) == repr(plainly(lambda leaf: leaf + 1, tree))  # order of keys included


@given(TREES)
def test_leaves_and_their_paths(tree: Tree) -> None:
    found = list(tree_leaves(tree))
    assert len(found) == len(dict(found))
    assert {path: id(leaf) for path, leaf in found} == {path: id(leaf) for path, leaf in paths(tree).items()}
    if isinstance(tree, dict):
        assert list(dict.fromkeys(path.split("/")[0] for path, _ in found)) == [
            str(key) for key, part in tree.items() if paths(part)
        ]  # on the outside keys keep their order


@given(TREES)
def test_leaves_come_in_the_order_in_which_they_are_mapped(tree: Tree) -> None:
    seen: list[int] = []
    map_tree(lambda leaf: seen.append(id(leaf)), tree)
    assert seen == [id(leaf) for _, leaf in tree_leaves(tree)]


@given(TREES)
def test_trees_are_joined_by_key(tree: Tree) -> None:
    joined = zip_trees(np.concatenate, [tree, turned(tree), map_tree(np.negative, tree)])
    assert repr(joined) == repr(plainly(lambda leaf: np.concatenate([leaf, leaf, -leaf]), tree))


@given(TREES, TREES)
def test_other_structures_are_refused(one: Tree, other: Tree) -> None:
    def form(tree: Tree) -> Any:
        if isinstance(tree, dict):
            return {key: form(part) for key, part in tree.items()}
        return tuple(map(form, tree)) if isinstance(tree, tuple) else None

    if form(one) == form(other):
        zip_trees(len, [one, other])
    elif paths(one).keys() != paths(other).keys():
        with pytest.raises(ArgumentError, match="expected"):
            zip_trees(len, [one, other])


@pytest.mark.parametrize(
    "tree", [[1, 2], {"a": [1, 2]}, ([1, 2],), {"a": {"b": [1, 2]}}, ({"a": ([1, 2], np.zeros(2))},)], ids=repr
)
def test_a_list_is_a_leaf_at_any_depth(tree: Tree) -> None:
    assert all(len(leaf) == 2 for _, leaf in tree_leaves(tree))
    doubled = [leaf.tolist()[:1] for _, leaf in tree_leaves(map_tree(lambda leaf: np.asarray(leaf) * 2, tree))]
    assert doubled[0] == [2]


def test_keys_inside_a_tree_are_of_one_kind() -> None:
    tree = {"a": {"b": np.zeros(1), 3: np.zeros(1)}}
    for call in (lambda: map_tree(len, tree), lambda: list(tree_leaves(tree)), lambda: zip_trees(len, [tree, tree])):
        with pytest.raises(ArgumentError, match="keys of a dict inside another tree must be of one kind"):
            call()


def test_an_error_of_the_function_comes_out() -> None:
    with pytest.raises(TypeError, match="has no len"):
        map_tree(len, {"a": {"b": 1}})


def test_a_users_own_tree_py_is_told_apart_from_dm_tree(tmp_path: Path) -> None:
    (tmp_path / "tree.py").write_text("mine = 1")
    code = f"import sys; sys.path.append({str(ROOT)!r}); from marlvec.trees import map_tree; map_tree(len, (('',),))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert "ImportError: marlvec needs dm-tree, but `import tree` found" in done.stderr

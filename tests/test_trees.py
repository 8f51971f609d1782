"""Trees: whichever way one goes, by its own lines or by dm-tree, the answer is that of plain recursion."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marlvec.errors import ArgumentError
from marlvec.trees import Tree, map_tree, tree_leaves, zip_trees

ROOT = Path(__file__).resolve().parent.parent


def nests(inner: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
    dicts = (st.dictionaries(keys, inner, max_size=3) for keys in (st.sampled_from("bca"), st.integers(0, 3)))
    return st.one_of(*dicts, st.lists(inner, max_size=3).map(tuple))


LEAVES = st.integers(0, 9).map(lambda number: np.array([number]))
TREES = st.recursive(LEAVES, nests, max_leaves=8)
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

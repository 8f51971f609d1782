"""Trees of arrays: a bare array, or dicts and tuples of trees.

They are processed by dm-tree. A bare array, and one dict or tuple of arrays, which nearly every space has, are handled
here, in a tenth of the time; such a dict may have keys of any kind, and keeps their order. Inside of that, dm-tree
visits the keys of a dict in sorted order, so they must be of one kind.

A list is a leaf, which becomes an array, never a tree.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.errors import ArgumentError, ContractError

Tree = Any
"""An array, or a dict or tuple of trees. No narrower type covers all results of policies."""

_NESTS = (dict, tuple)


def map_tree(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """Apply ``function`` to every leaf; the structure stays. Keys of inner dicts must be sortable (`ArgumentError`)."""
    if isinstance(tree, dict):
        return {
            key: _map_deep(function, part) if isinstance(part, _NESTS) else function(part) for key, part in tree.items()
        }
    if isinstance(tree, tuple):
        return tuple([_map_deep(function, part) if isinstance(part, _NESTS) else function(part) for part in tree])
    return function(tree)


def tree_leaves(tree: Tree) -> Iterator[tuple[str, Any]]:
    """Yield every leaf with its path, e.g. ``("camera/left", array)``; a bare array's path is ``""``."""
    if not isinstance(tree, _NESTS):
        yield "", tree
        return
    for key, part in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if not isinstance(part, _NESTS):
            yield str(key), part
            continue
        for path, leaf in _deep(lambda dm, inner: dm.flatten_with_path(inner), part):
            yield "/".join(map(str, (key, *path))), leaf


def zip_trees(function: Callable[[list[Any]], Any], trees: Sequence[Tree]) -> Tree:
    """Apply ``function`` to each list of corresponding leaves of trees of one structure, else raise `ArgumentError`."""
    first = trees[0]
    if _are_leaves(trees):
        return function(list(trees))
    for other in trees:
        if _outside(other) != _outside(first):
            raise ArgumentError(f"at /: expected {_kind(first)}, got {_kind(other)}")
    keys = first if isinstance(first, dict) else range(len(first))
    made = [_zip_parts(function, [tree[key] for tree in trees], str(key)) for key in keys]
    return dict(zip(first, made, strict=True)) if isinstance(first, dict) else tuple(made)


def _zip_parts(function: Callable[[list[Any]], Any], parts: list[Tree], path: str) -> Tree:
    if _are_leaves(parts):
        return function(parts)
    first, *others = (sorted(at for at, _ in tree_leaves(part)) for part in parts)
    for other in others:
        if other != first:
            raise ArgumentError(f"at /{path}: expected arrays at {first}, got arrays at {other}")
    return _map_deep(lambda *leaves: function(list(leaves)), *parts)


def _are_leaves(trees: Sequence[Tree]) -> bool:
    for tree in trees:  # noqa: SIM110  # a third of the time of all()
        if isinstance(tree, _NESTS):
            return False
    return True


def _outside(tree: Tree) -> Any:
    """Return the part of a tree's structure that must be equal: the keys, in any order, or the length."""
    return tree.keys() if isinstance(tree, dict) else len(tree) if isinstance(tree, tuple) else None


def _kind(tree: Tree) -> str:
    if isinstance(tree, dict):
        return f"a dict with keys {list(tree)}"
    return f"a tuple of length {len(tree)}" if isinstance(tree, tuple) else "an array"


# --- trees inside trees


def _map_deep(function: Callable[..., Any], *parts: Tree) -> Tree:
    return _deep(lambda dm, *inner: dm.map_structure(function, *inner, check_types=False), *parts)


def _deep(call: Callable[..., Any], *parts: Tree) -> Any:
    """Return the result of ``call`` with dm-tree and these trees, in which lists have become arrays."""
    dm = _dm_tree()
    try:
        if any(map(_has_list, parts)):
            parts = tuple(dm.traverse(lambda x: list_to_array(x) if isinstance(x, list) else None, p) for p in parts)
        return call(dm, *parts)
    except TypeError as error:
        try:
            dm.flatten(parts)
        except TypeError:
            raise ArgumentError(f"keys of a dict inside another tree must be of one kind: {error}") from None
        raise


@functools.cache
def _dm_tree() -> Any:
    """Import dm-tree on first use: this takes half as long as the import of marlvec."""
    import tree

    if not hasattr(tree, "map_structure"):
        raise ImportError(f"marlvec needs dm-tree, but `import tree` found {tree.__file__}: rename that file")
    return tree


def _has_list(tree: Tree) -> bool:
    if isinstance(tree, _NESTS):
        return any(map(_has_list, tree.values() if isinstance(tree, dict) else tree))
    return isinstance(tree, list)


# --- leaves


def list_to_array(values: list[Any]) -> NDArray[Any]:
    """Convert a list to an array; of dtype object, one entry per item, if no other dtype is possible."""
    try:
        array = np.asarray(values)
    except ValueError:  # items of unequal lengths
        array = np.empty(0, object)
    if array.dtype != object:
        return array
    objects = np.empty(len(values), object)
    for i, item in enumerate(values):
        objects[i] = item
    return objects


def to_array(value: Any) -> NDArray[Any]:
    """Convert one leaf to an array; an array is returned unchanged. `ContractError`: no regular array of numbers."""
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "detach"):  # torch: __array__ refuses a tensor on another device or with a gradient
        return np.asarray(value.detach().cpu().numpy())
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ContractError(f"expected numbers in a regular shape, got {type(value).__name__}: {error}") from error
    if array.dtype == object:
        raise ContractError(f"expected numbers, got {type(value).__name__} of {type(array.flat[0]).__name__}")
    return array


def column_array(value: Any) -> NDArray[Any]:
    """Convert one leaf of a column to an array, as `to_array`; texts in numpy's own kinds become objects, each a str.

    An array of ``<U6`` would cut longer texts, and files have no StringDType.
    """
    array = to_array(value)
    return array if array.dtype.kind not in "UT" else array.astype(np.object_)


def ragged_array(values: Any, dtype: Any, name: str = "column") -> NDArray[Any]:
    """Return rows of unlike length as an array of objects, (n,): each a 1-D array of this dtype; empty for None."""
    kind, column = np.dtype(dtype), np.empty(len(values), object)
    for i, value in enumerate(values):
        row = np.empty(0, kind) if value is None else np.asarray(value)
        if row.ndim != 1 or (len(row) and not np.can_cast(row.dtype, kind, "same_kind")):
            raise ContractError(
                f"{name!r}, row {i}: expected a list or 1-D array of {kind}, got {row.dtype} of {row.shape}"
            )
        column[i] = row.astype(kind)
    return column


def ragged_dtype(array: NDArray[Any]) -> np.dtype[Any] | None:
    """Return the dtype of the numbers in an array of 1-D arrays, (n,); None: it is another array, or has no rows."""
    if array.dtype != object or array.ndim != 1 or not len(array) or array[0].__class__ is not np.ndarray:
        return None
    dtype: np.dtype[Any] = array[0].dtype
    if dtype.kind not in "biuf":
        return None
    fits = all(row.__class__ is np.ndarray and row.ndim == 1 and row.dtype == dtype for row in array.tolist())
    return dtype if fits else None


def blank_object(array: NDArray[Any]) -> Any:
    """Return what stands for a missing object in such an array (n, …): None, or an empty array among arrays."""
    first = array.flat[0] if array.size else None
    return np.empty(0, first.dtype) if isinstance(first, np.ndarray) else None


def fill_objects(array: NDArray[Any], item: Any) -> None:
    """Put one object into each place of an array of objects."""
    for i in range(array.size):
        array.flat[i] = item


def _typed(array: NDArray[Any], value: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    # Never from float to int: that would cut 0.7 down to action 0.
    if isinstance(value, (list, tuple)) and np.can_cast(array.dtype, dtype, "same_kind"):
        return array.astype(dtype)
    return array

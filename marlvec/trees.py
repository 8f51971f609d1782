"""Functions on trees of arrays: a bare array, or dicts and tuples of trees.

These few lines stand where `tree.map_structure` could: that one sorts dict keys, and so fails on keys of mixed types.
Here keys keep their order. A list is an array still to be made, never structure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.errors import ArgumentError, ContractError

__all__ = ["Tree", "map_tree", "tree_leaves", "zip_trees"]

Tree = Any
"""An array, or a dict or tuple of trees. No narrower type would be true of what policies return."""


def map_tree(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """Apply ``function`` to every leaf; the structure stays."""
    if isinstance(tree, dict):
        return {key: map_tree(function, item) for key, item in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map_tree(function, item) for item in tree)
    return function(tree)


def tree_leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf with its path, e.g. ``("camera/left", array)``; a bare array's path is ``""``."""
    if isinstance(tree, dict):
        for key, item in tree.items():
            yield from tree_leaves(item, f"{path}/{key}" if path else str(key))
    elif isinstance(tree, tuple):
        for i, item in enumerate(tree):
            yield from tree_leaves(item, f"{path}/{i}" if path else str(i))
    else:
        yield path, tree


def zip_trees(function: Callable[[list[Any]], Any], trees: Sequence[Tree], path: str = "") -> Tree:
    """Apply ``function`` to each list of corresponding leaves of trees of one structure.

    Raises:
        ArgumentError: The structures differ; says where.
    """
    first = trees[0]
    if isinstance(first, dict):
        for other in trees:
            if not isinstance(other, dict) or other.keys() != first.keys():
                raise ArgumentError(f"at {path or '/'}: expected a dict with keys {list(first)}, got {_kind(other)}")
        return {key: zip_trees(function, [t[key] for t in trees], f"{path}/{key}") for key in first}
    if isinstance(first, tuple):
        for other in trees:
            if not isinstance(other, tuple) or len(other) != len(first):
                raise ArgumentError(f"at {path or '/'}: expected a tuple of length {len(first)}, got {_kind(other)}")
        return tuple(zip_trees(function, [t[i] for t in trees], f"{path}/{i}") for i in range(len(first)))
    for other in trees:
        if isinstance(other, (dict, tuple)):
            raise ArgumentError(f"at {path or '/'}: expected an array, got {_kind(other)}")
    return function(list(trees))


def _kind(tree: Tree) -> str:
    if isinstance(tree, dict):
        return f"a dict with keys {list(tree)}"
    if isinstance(tree, tuple):
        return f"a tuple of length {len(tree)}"
    return "an array"


def to_array(value: Any) -> NDArray[Any]:
    """Turn one leaf into an array; an array is returned as it is.

    Raises:
        ContractError: It is no rectangle of numbers.
    """
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


def _typed(array: NDArray[Any], value: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    # Never from float to int: that would cut 0.7 down to action 0.
    if isinstance(value, (list, tuple)) and np.can_cast(array.dtype, dtype, "same_kind"):
        return array.astype(dtype)
    return array

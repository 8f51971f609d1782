"""The arrays in a batch's columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from marlvec.errors import ArgumentError
from marlvec.trees import Tree, map_tree, tree_leaves

__all__ = ["checked", "named_leaves"]


def named_leaves(columns: Mapping[str, Tree]) -> Iterator[tuple[str, Any]]:
    """Yield every array with its name: the column's, and its path in the column's tree, e.g. ``"obs/camera"``."""
    for name, column in columns.items():
        for path, leaf in tree_leaves(column):
            yield f"{name}/{path}" if path else name, leaf


def checked(columns: Mapping[str, Tree]) -> tuple[dict[str, Tree], int]:
    """Columns of a batch, lists in them made arrays, and their common length.

    Raises:
        ArgumentError: There is no array, one has no rows, or their lengths differ; names it.
    """
    found: dict[str, Tree] = {}
    for name, column in columns.items():
        plain = all(hasattr(leaf, "shape") for _, leaf in tree_leaves(column))
        found[name] = column if plain else map_tree(_as_array, column)
    length = -1
    for name, leaf in named_leaves(found):
        if not leaf.shape:
            raise ArgumentError(f"column {name!r} must be an array with the rows on its first axis, got {leaf!r}")
        if len(leaf) != length >= 0:
            raise ArgumentError(f"column {name!r} has {len(leaf)} rows, the columns before it have {length}")
        length = len(leaf)
    if length < 0:
        raise ArgumentError("a SampleBatch needs at least one column")
    return found, length


def _as_array(leaf: Any) -> Any:
    if not isinstance(leaf, list):
        return leaf if hasattr(leaf, "shape") else np.asarray(leaf)
    try:
        array = np.asarray(leaf)
    except ValueError:  # of unequal lengths
        array = np.empty(0, object)
    if array.dtype != object:
        return array
    objects = np.empty(len(leaf), object)
    for i, item in enumerate(leaf):
        objects[i] = item
    return objects

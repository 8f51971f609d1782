"""Columns of a batch: names of their arrays, and conversion of lists to arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from marlvec.trees import Tree, list_to_array, map_tree, tree_leaves

__all__ = ["named_leaves", "with_arrays"]


def named_leaves(columns: Mapping[str, Tree]) -> Iterator[tuple[str, Any]]:
    """Yield every array with its name: the column's, and its path in the column's tree, e.g. ``"obs/camera"``."""
    for name, column in columns.items():
        for path, leaf in tree_leaves(column):
            yield f"{name}/{path}" if path else name, leaf


def with_arrays(columns: Mapping[str, Tree]) -> dict[str, Tree]:
    """Convert lists and bare numbers in columns to arrays; arrays of objects if no other dtype fits."""
    found = {}
    for name, column in columns.items():
        plain = all(hasattr(leaf, "shape") for _, leaf in tree_leaves(column))
        found[name] = column if plain else map_tree(_as_array, column)
    return found


def _as_array(leaf: Any) -> Any:
    if isinstance(leaf, list):
        return list_to_array(leaf)
    return leaf if hasattr(leaf, "shape") else np.asarray(leaf)

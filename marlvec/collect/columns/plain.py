"""Converts columns of rows to plain data for saved states, and back."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from marlvec.connectors import Rows
from marlvec.errors import ArgumentError
from marlvec.serialization.plain_objects import array_from, plain_array
from marlvec.trees import Tree, map_tree, tree_leaves

__all__ = ["columns_from", "plain_columns", "plain_rows", "rows_from"]


def plain_columns(columns: Mapping[str, Tree], where: str) -> dict[str, Tree]:
    """Return copies of columns, trees of arrays; columns of objects (one axis only), such as strings, become lists."""
    return {name: map_tree(partial(plain_array, where=f"{where}: column {name!r}"), columns[name]) for name in columns}


def plain_rows(rows: Rows, where: str) -> dict[str, Any]:
    """Convert rows to plain data."""
    return {"length": len(rows), "columns": plain_columns(dict(rows.items()), where)}


def rows_from(state: Any, where: str) -> Rows:
    """Rebuild rows from a result of `plain_rows`, in new arrays."""
    if not isinstance(state, Mapping) or state.keys() != {"length", "columns"}:
        raise ArgumentError(f"{where}: expected rows, got {state!r:.200}")
    n, columns = state["length"], columns_from(state["columns"], state["length"], where)
    return Rows.of_length(columns, n)


def columns_from(columns: Any, length: int, where: str) -> dict[str, Tree]:
    """Rebuild columns, each of this length, in new arrays."""
    if not isinstance(columns, Mapping):
        raise ArgumentError(f"{where}: expected a dict of columns, got {columns!r:.200}")
    for name, column in columns.items():
        for path, leaf in tree_leaves(column):
            is_array = isinstance(leaf, np.ndarray) and leaf.ndim > 0
            if not (is_array or isinstance(leaf, list)) or len(leaf) != length:
                raise ArgumentError(f"{where}: column {name!r} {path}: expected an array of {length} rows")
    return {name: map_tree(array_from, column) for name, column in columns.items()}

"""Columns of rows as plain data, for states that are saved."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.connectors import Rows
from marlvec.errors import ArgumentError, SerialisationError
from marlvec.serialization.plain_objects import object_from, plain_object
from marlvec.trees import Tree, map_tree, to_array, tree_leaves

__all__ = ["columns_from", "leaf_from", "plain_columns", "plain_leaf", "plain_rows", "rows_from"]


def plain_columns(columns: Mapping[str, Tree], where: str) -> dict[str, Tree]:
    """Copies of columns, trees of arrays; in place of one of objects, such as texts, stands a list.

    Raises:
        SerialisationError: One holds objects along more axes than one.
    """
    return {name: map_tree(partial(plain_leaf, where=f"{where}: column {name!r}"), columns[name]) for name in columns}


def plain_leaf(leaf: Any, where: str) -> Any:
    """A copy of an array; of one of objects, a list of those.

    Raises:
        SerialisationError: It holds objects along more axes than one.
    """
    array = to_array(leaf)
    if not array.dtype.hasobject:
        return array.copy()
    if array.dtype != object or array.ndim != 1:
        raise SerialisationError(f"{where} holds Python objects in {array.dtype} of {array.shape}")
    return [plain_object(value) for value in array.tolist()]


def leaf_from(leaf: Any) -> NDArray[Any]:
    """The array that `plain_leaf` was given, in new memory."""
    if not isinstance(leaf, list):
        return np.array(leaf)
    array = np.empty(len(leaf), object)
    for i, value in enumerate(leaf):
        array[i] = object_from(value)
    return array


def plain_rows(rows: Rows, where: str) -> dict[str, Any]:
    """Rows as plain data."""
    return {"length": len(rows), "columns": plain_columns(dict(rows.items()), where)}


def rows_from(state: Any, where: str) -> Rows:
    """The rows that `plain_rows` was given, in new arrays.

    Raises:
        ArgumentError: There are none in this.
    """
    if not isinstance(state, Mapping) or state.keys() != {"length", "columns"}:
        raise ArgumentError(f"{where}: expected rows, got {state!r:.200}")
    n, columns = state["length"], columns_from(state["columns"], state["length"], where)
    return Rows.of_length(columns, n)


def columns_from(columns: Any, length: int, where: str) -> dict[str, Tree]:
    """Copies of columns, each of this length.

    Raises:
        ArgumentError: One is none, or of another length.
    """
    if not isinstance(columns, Mapping):
        raise ArgumentError(f"{where}: expected a dict of columns, got {columns!r:.200}")
    for name, column in columns.items():
        for path, leaf in tree_leaves(column):
            is_array = isinstance(leaf, np.ndarray) and leaf.ndim > 0
            if not (is_array or isinstance(leaf, list)) or len(leaf) != length:
                raise ArgumentError(f"{where}: column {name!r} {path}: expected an array of {length} rows")
    return {name: map_tree(leaf_from, column) for name, column in columns.items()}

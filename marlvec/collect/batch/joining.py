"""Columns on top of each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.errors import ArgumentError
from marlvec.trees import Tree, to_array, zip_trees

__all__ = ["join_columns"]


def join_columns(parts: Sequence[Mapping[str, Tree]]) -> dict[str, Tree]:
    """Concatenate columns; no value changes, so no dtype may.

    Raises:
        ArgumentError: There is no part, or the parts differ in columns, structure, dtypes or shapes per row; names the
            columns.
    """
    if not parts:
        raise ArgumentError("concat() needs at least one batch")
    first = parts[0]
    for i, part in enumerate(parts):
        if part.keys() != first.keys():
            missing = [name for name in first if name not in part]
            more = [name for name in part if name not in first]
            raise ArgumentError(
                f"batch {i} differs from batch 0: columns {missing} are missing, columns {more} are not in batch 0; "
                f"drop() or replace() columns until all batches have the same"
            )
    return {name: _joined(name, [part[name] for part in parts]) for name in first}


def _joined(name: str, columns: list[Tree]) -> Tree:
    def join(leaves: list[Any]) -> NDArray[Any]:
        arrays = [to_array(leaf) for leaf in leaves]
        first = arrays[0]
        for i, array in enumerate(arrays):
            if array.shape[1:] != first.shape[1:] or not _same_dtype(array.dtype, first.dtype):
                raise ArgumentError(
                    f"batch {i} has {array.dtype} of shape {array.shape}, batch 0 has {first.dtype} of {first.shape}"
                )
        return np.concatenate(arrays)

    try:
        return zip_trees(join, columns)
    except ArgumentError as error:
        raise ArgumentError(f"column {name!r} cannot be concatenated: {error}") from error


def _same_dtype(one: np.dtype[Any], other: np.dtype[Any]) -> bool:
    # Texts of another width hold the same texts; any other promotion could change a number.
    return one == other or (one.kind == other.kind and one.kind in "US")

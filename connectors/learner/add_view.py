"""Earlier and later values of a column, beside the row's own."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.connectors.connector import LearnerConnector
from marlvec.connectors.learner.columns import column as column_of
from marlvec.connectors.learner.fragments import Fragments
from marlvec.connectors.rows import Rows
from marlvec.connectors.shifts import Shift, parse_shifts
from marlvec.errors import ArgumentError, ContractError
from marlvec.trees import Tree, map_tree, to_array, zip_trees

__all__ = ["AddView"]


class AddView(LearnerConnector):
    """Adds a column with the values that another one has in earlier or later rows of the same fragment.

    For one shift it is ``(n, …)``, for a list or range of k shifts ``(n, k, …)``, earliest row first; tree for tree.
    Rows before and after the fragment are in no batch, or in another one, and count as not there. A phantom row is
    part of its fragment.

    Args:
        column: Name of the column to add.
        source: Name of the column to look at, any one of the rows.
        shift: ``-1``, ``2``, ``[-4, 0, 4]``, ``"-3:-1"``, ``"0:8:2"``; see `parse_shifts`.
        fill: What stands for rows that are not there: None for zeros, ``"repeat"`` for the nearest row that is there,
            or one row's value, a number standing for an array full of it.

    Raises:
        ArgumentError: ``shift`` is no such thing; when called: ``fill`` does not fit the source.
        ContractError: When called: the source is missing, or the column is there already.
    """

    def __init__(self, column: str, source: str, shift: Shift, fill: Tree = None) -> None:
        if isinstance(fill, str) and fill != "repeat":
            raise ArgumentError(f'fill must be None, "repeat" or one row\'s value, got {fill!r}')
        self._shifts = np.array(parse_shifts(shift), np.int64)
        self._single = not isinstance(shift, str) and np.ndim(shift) == 0
        self.column = column
        self.source = source
        self.shift = shift
        self.fill = fill

    def __call__(self, rows: Rows) -> Rows:
        source = column_of(rows, self.source)
        if self.column in rows.columns:
            raise ContractError(f"there is a column {self.column!r} already; choose another name")
        fragments = Fragments(rows)
        at = fragments.fragment_n
        first, last = fragments.first_F[at][:, None], fragments.stop_F[at][:, None] - 1
        wanted = np.arange(len(rows))[:, None] + self._shifts
        index = np.clip(wanted, first, last)
        outside = index != wanted

        def look(pair: list[Any]) -> NDArray[Any]:
            leaf, fill = pair
            seen: NDArray[Any] = to_array(leaf)[index]
            if not isinstance(fill, str):
                seen[outside] = fill
            return seen[:, 0] if self._single else seen

        return rows.replace(**{self.column: zip_trees(look, [source, self._fills(source)])})

    def _fills(self, source: Tree) -> Tree:
        """For each leaf, one row's value, or ``"repeat"``."""
        if isinstance(self.fill, str):
            return map_tree(lambda _: self.fill, source)
        if self.fill is None:
            return map_tree(_zeros, source)
        if not isinstance(self.fill, (dict, tuple)):
            return map_tree(lambda leaf: self._fitted([leaf, self.fill]), source)
        return zip_trees(self._fitted, [source, self.fill])

    def _fitted(self, pair: list[Any]) -> NDArray[Any]:
        leaf, fill = to_array(pair[0]), to_array(pair[1])
        try:
            with np.errstate(invalid="ignore"):
                full = np.broadcast_to(fill, leaf.shape[1:]).astype(leaf.dtype)
        except ValueError:
            raise ArgumentError(
                f"fill of shape {fill.shape} does not fit {self.source!r} of shape {leaf.shape[1:]}"
            ) from None
        # Floats round; a number that an integer cannot hold is a mistake.
        if leaf.dtype.kind not in "fO" and not np.array_equal(full, np.broadcast_to(fill, leaf.shape[1:])):
            raise ArgumentError(f"fill {self.fill!r} does not fit {leaf.dtype}, the dtype of {self.source!r}")
        return full


def _zeros(leaf: Any) -> Any:
    array = to_array(leaf)
    return np.full(array.shape[1:], None if array.dtype == object else 0, array.dtype)

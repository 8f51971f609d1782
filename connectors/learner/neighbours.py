"""`AddLastObs` and `AddView`: earlier and later values of a column, added to the row."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.connectors._support.shifts import Shift, parse_shifts
from marlvec.connectors.connector import LearnerConnector
from marlvec.connectors.learner.advantages import following
from marlvec.connectors.learner.fragments import Fragments, column
from marlvec.connectors.learner.fragments import column as column_of
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, ContractError
from marlvec.trees import Tree, map_tree, to_array, zip_trees

__all__ = ["AddLastObs", "AddView"]


class AddLastObs(LearnerConnector):
    """Puts one phantom row after each fragment, so that one pass over all rows also values its last ``next_obs``.

    In a phantom row ``obs`` is the ``next_obs`` of the row before, as is every column with a ``next_`` one beside it;
    ``state_in`` is its ``state_out``, ``t`` one more, ``rewards`` 0. The other columns repeat the row before, flags
    and ids included: ``terminated`` and ``truncated`` say how the last true step ended. ``values``, unless there is a
    ``next_values``, is NaN until it is computed. All rows get

    * ``phantom`` (n,) bool, True for the new ones,
    * ``loss_mask`` (n,) bool, False for them; the one that was there, or True, for the others.

    `GeneralAdvantageEstimation`, `ReturnsToGo` and `VTrace` take the value after a fragment from its phantom row, and
    like `NStep` and `Standardize` leave phantom rows out of everything else.

    Raises:
        ContractError: When called: a column is missing, the rows have phantom ones already, or they have the envs'
            ``state`` and not ``next_state``, so that a critic would see the wrong one.
    """

    changes_length = True

    def __call__(self, rows: Rows) -> Rows:
        if "phantom" in rows:
            raise ContractError("these rows have phantom rows already; use AddLastObs once")
        if "state" in rows and "next_state" not in rows:
            raise ContractError(
                "expected a column 'next_state' beside 'state', because a phantom row has the state of its own moment; "
                "add it, or drop 'state' before AddLastObs"
            )
        column(rows, "next_obs")
        fragments, n = Fragments(rows), len(rows)
        stops = fragments.stop_F
        after = following(rows, fragments.last_F)
        if "rewards" in rows:
            after = after.replace(rewards=np.zeros_like(after["rewards"]))
        if "values" in rows and "next_values" not in rows:
            # As floats even where V was given as ints: those have no NaN.
            values = np.asarray(after["values"])
            after = after.replace(values=np.full(values.shape, np.nan, np.result_type(values.dtype, np.float32)))
        where = np.arange(n) + fragments.fragment_n
        where_new = stops + np.arange(len(fragments))

        def merged(parts: list[Any]) -> NDArray[Any]:
            old, new = (np.asarray(part) for part in parts)
            out = np.empty((n + len(fragments), *old.shape[1:]), np.result_type(old.dtype, new.dtype))
            out[where], out[where_new] = old, new
            return out

        mask = rows["loss_mask"] if "loss_mask" in rows else np.ones(n, np.bool_)
        columns = {name: zip_trees(merged, [column, after[name]]) for name, column in rows.items()}
        no, yes = np.zeros(n, np.bool_), np.ones(len(fragments), np.bool_)
        columns["loss_mask"] = merged([np.asarray(mask, np.bool_), ~yes])
        columns["phantom"] = merged([no, yes])
        return Rows(columns)


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
        if self.column in rows:
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

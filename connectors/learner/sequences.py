"""Views of other rows of a fragment, phantom rows, and (sequence, time) arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.connectors.agent_tables import Shift, cast_row_leaf, parse_shifts
from marlvec.connectors.connector import LearnerConnector, PositiveInt
from marlvec.connectors.learner.fragments import Fragments, numbers
from marlvec.connectors.learner.fragments import column as column_of
from marlvec.connectors.learner.returns import following
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, ContractError
from marlvec.trees import Tree, map_tree, to_array, tree_leaves, zip_trees


class AddLastObs(LearnerConnector):
    """Puts one phantom row after each fragment, so that one pass over all rows also values its last ``next_obs``.

    In a phantom row ``obs`` is the ``next_obs`` of the row before, and so for every column with a ``next_…`` column;
    ``state_in`` is its ``state_out``, ``t`` is one more, ``rewards`` is 0. Other columns repeat the row before, with
    its flags and ids. ``values`` is ``next_values`` if that column exists, else NaN until computed. All rows get

    * ``phantom`` (n,) bool, True for phantom rows,
    * ``loss_mask`` (n,) bool, False for phantom rows; else the old ``loss_mask``, or True.

    `GeneralAdvantageEstimation`, `ReturnsToGo` and `VTrace` take the value after a fragment from its phantom row, and
    like `NStep` and `Standardize` leave phantom rows out of everything else.

    Raises:
        ContractError: When called: a column is missing, the rows have phantom rows already, or they have the envs'
            ``state`` without ``next_state``, so that a critic would see the wrong state.
    """

    changes_length = True

    def __call__(self, rows: Rows) -> Rows:
        if "phantom" in rows:
            raise ContractError("AddLastObs: expected rows without phantom rows, got some; use AddLastObs once")
        if "state" in rows and "next_state" not in rows:
            raise ContractError(
                "expected a column 'next_state' beside 'state', because a phantom row has the state of its own moment; "
                "add it, or drop 'state' before AddLastObs"
            )
        column_of(rows, "next_obs")
        fragments, n = Fragments(rows), len(rows)
        stops = fragments.stop_F
        after = following(rows, fragments.last_F)
        if "rewards" in rows:
            after = after.replace(rewards=np.zeros_like(after["rewards"]))
        if "values" in rows and "next_values" not in rows:
            # As floats even if V is ints, which have no NaN.
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


@dataclass(eq=False, repr=False)
class AddView(LearnerConnector):
    """Adds a column with another column's values in earlier or later rows of the same fragment.

    For one shift it is ``(n, …)``, for a list or range of k shifts ``(n, k, …)``, earliest row first; tree for tree.
    Rows before and after the fragment count as missing. A phantom row is part of its fragment.

    Args:
        column: Name of the column to add.
        source: Name of the source column, any column of the rows.
        shift: ``-1``, ``2``, ``[-4, 0, 4]``, ``"-3:-1"``, ``"0:8:2"``; see `parse_shifts`.
        fill: Value for missing rows: None: zeros; ``"repeat"``: the nearest row; or one row's value, where a number
            fills the array.

    Raises:
        ArgumentError: ``shift`` is invalid; when called: ``fill`` does not fit the source.
        ContractError: When called: the source is missing, or the column exists already.
    """

    column: str
    source: str
    shift: Shift
    fill: Tree = None

    def __post_init__(self) -> None:
        if isinstance(self.fill, str) and self.fill != "repeat":
            raise ArgumentError(f'fill must be None, "repeat" or one row\'s value, got {self.fill!r}')
        self._shifts = np.array(parse_shifts(self.shift), np.int64)
        self._single = not isinstance(self.shift, str) and np.ndim(self.shift) == 0

    def __call__(self, rows: Rows) -> Rows:
        source = column_of(rows, self.source)
        if self.column in rows:
            raise ContractError(f"AddView: expected a new column name, got {self.column!r}, which exists already")
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
        """Return one row's value for each leaf, or ``"repeat"``."""
        if isinstance(self.fill, str):
            return map_tree(lambda _: self.fill, source)
        blanks = map_tree(_zeros, source)
        if self.fill is None:
            return blanks

        def fit(pair: list[Any]) -> NDArray[Any]:
            return cast_row_leaf(pair[1], pair[0], f"fill for {self.source!r}")

        if not isinstance(self.fill, (dict, tuple)):
            return map_tree(lambda blank: fit([blank, self.fill]), blanks)
        return zip_trees(fit, [blanks, self.fill])


def _zeros(leaf: Any) -> Any:
    array = to_array(leaf)
    return np.full(array.shape[1:], None if array.dtype == object else 0, array.dtype)


def kept_name(name: str) -> str:
    """Return the name under which `PadSequences` keeps a column that it replaces."""
    return f"{name}_rows"


@dataclass(eq=False, repr=False)
class PadSequences(LearnerConnector):
    """Cuts n rows into B sequences of T = ``max_len`` rows: every column becomes (B, T, …).

    A new sequence begins with each fragment and after each ``max_len`` rows; short ones are filled up with zeros at
    their end (None in columns of objects). Added are

    * ``seq_lens`` (B,) int64, the number of rows in each sequence, without padding,
    * ``loss_mask`` (B, T) bool, False for padding, and where the rows' ``loss_mask`` is False,
    * the state column as (B, …): the state at each sequence's start.

    The rows' own columns of these names move to ``loss_mask_rows`` and ``state_in_rows``, so that `UnpadSequences`
    restores the rows exactly.

    Args:
        max_len: T, at least 1.
        state_column: Column of the policy's state before each decision, a tree of (n, …), if the rows have it; None:
            no column.

    Raises:
        ArgumentError: ``max_len`` is not a whole number above 0.
        ContractError: When called: the rows are sequences already, or out of order.
    """

    max_len: PositiveInt
    state_column: str | None = "state_in"

    changes_length = True

    def __call__(self, rows: Rows) -> Rows:
        fragments, n, size = Fragments(rows), len(rows), self.max_len
        since = np.arange(n) - fragments.first_F[fragments.fragment_n]
        starts = np.flatnonzero(since % size == 0)
        lengths = np.diff(starts, append=n)
        count = len(starts)
        place = np.repeat(np.arange(count) * size - starts, lengths) + np.arange(n)

        def padded(leaf: Any) -> NDArray[Any]:
            array = to_array(leaf)
            out = np.zeros((count * size, *array.shape[1:]), array.dtype)
            if array.dtype == object:
                out[...] = None
            out[place] = array
            return out.reshape(count, size, *array.shape[1:])

        own = {"loss_mask", self.state_column}
        if taken := [name for name, _ in rows.items() if name in own and kept_name(name) in rows]:
            raise ContractError(f"columns {[kept_name(name) for name in taken]} have names that PadSequences needs")
        columns = {kept_name(name) if name in own else name: map_tree(padded, column) for name, column in rows.items()}
        mask = rows["loss_mask"] if "loss_mask" in rows else np.ones(n, np.bool_)
        columns |= {"seq_lens": lengths, "loss_mask": padded(np.asarray(mask, np.bool_))}
        if self.state_column is not None and self.state_column in rows:
            columns[self.state_column] = map_tree(lambda leaf: to_array(leaf)[starts], rows[self.state_column])
        return Rows(columns)


@dataclass(eq=False, repr=False)
class UnpadSequences(LearnerConnector):
    """Undoes `PadSequences`: columns (B, T, …) become (n, …), without the padding, in the rows' old order.

    It restores the rows exactly, with columns that were added to the sequences in between. ``seq_lens`` is removed;
    ``loss_mask`` and the state column are again the rows' own, if any.

    Args:
        state_column: The value given to `PadSequences`.

    Raises:
        ContractError: When called: there is no ``seq_lens``, or a column is not (B, T, …).
    """

    state_column: str | None = "state_in"

    changes_length = True

    def __call__(self, rows: Rows) -> Rows:
        if "seq_lens" not in rows or "loss_mask" not in rows:
            raise ContractError(
                f"expected the columns 'seq_lens' and 'loss_mask' that PadSequences adds, got {list(rows.keys())}"
            )
        lengths, mask = numbers(rows, "seq_lens"), rows["loss_mask"]
        here = np.arange(mask.shape[1]) < lengths[:, None]
        dropped = {"seq_lens", "loss_mask", self.state_column}
        old_names = {kept_name(name): name for name in dropped if name is not None}
        columns = {}
        for name, column in rows.items():
            if name not in dropped:
                _check_axes(name, column, here)
                columns[old_names.get(name, name)] = map_tree(lambda leaf: to_array(leaf)[here], column)
        return Rows(columns)


def _check_axes(name: str, column: Any, here: NDArray[np.bool_]) -> None:
    for path, leaf in tree_leaves(column):
        if to_array(leaf).shape[:2] != here.shape:
            where = f"column {name!r}" + (f" at {path}" if path else "")
            raise ContractError(
                f"{where} must begin with the axes (B, T) = {here.shape}, got {to_array(leaf).shape}; drop columns "
                f"with one value a sequence before UnpadSequences"
            )

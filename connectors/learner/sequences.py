"""`PadSequences` and `UnpadSequences`: rows as (sequence, time) arrays for recurrent policies."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.connectors.connector import LearnerConnector
from marlvec.connectors.learner.fragments import Fragments, numbers
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, ContractError
from marlvec.trees import map_tree, to_array, tree_leaves

__all__ = ["PadSequences", "kept_name", "UnpadSequences"]


def kept_name(name: str) -> str:
    """Under what name `PadSequences` keeps a column whose place one of its own takes."""
    return f"{name}_rows"


class PadSequences(LearnerConnector):
    """Cuts n rows into B sequences of T = ``max_len`` rows: every column becomes (B, T, …).

    A new sequence begins with each fragment and after each ``max_len`` rows; short ones are filled up with zeros at
    their end (None in columns of objects). Added are

    * ``seq_lens`` (B,) int64, how many rows of each sequence are true ones,
    * ``loss_mask`` (B, T) bool, True for those; False also where a ``loss_mask`` of the rows is False,
    * the state column as (B, …): the state at each sequence's start.

    What the rows themselves had in a column of these names moves to ``loss_mask_rows`` and ``state_in_rows``, so that
    `UnpadSequences` gives back exactly what came in.

    Args:
        max_len: T, at least 1.
        state_column: Column of the policy's state before each decision, a tree of (n, …), where there is one; None
            for no such column.

    Raises:
        ArgumentError: ``max_len`` is not a whole number above 0.
        ContractError: When called: the rows are sequences already, or out of order.
    """

    changes_length = True

    def __init__(self, max_len: int, state_column: str | None = "state_in") -> None:
        if isinstance(max_len, bool) or not isinstance(max_len, int) or max_len < 1:
            raise ArgumentError(f"max_len must be a whole number of at least 1, got {max_len!r}")
        self.max_len = max_len
        self.state_column = state_column

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


class UnpadSequences(LearnerConnector):
    """Undoes `PadSequences`: columns (B, T, …) become (n, …), without the padding, in the rows' old order.

    The rows come back exactly, with the columns that were added to the sequences in between. ``seq_lens`` goes, and
    ``loss_mask`` and the state column are again what the rows had in them, if anything.

    Args:
        state_column: As it was given to `PadSequences`.

    Raises:
        ContractError: When called: there is no ``seq_lens``, or a column is not (B, T, …).
    """

    changes_length = True

    def __init__(self, state_column: str | None = "state_in") -> None:
        self.state_column = state_column

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
                _check(name, column, here)
                columns[old_names.get(name, name)] = map_tree(lambda leaf: to_array(leaf)[here], column)
        return Rows(columns)


def _check(name: str, column: Any, here: NDArray[np.bool_]) -> None:
    for path, leaf in tree_leaves(column):
        if to_array(leaf).shape[:2] != here.shape:
            where = f"column {name!r}" + (f" at {path}" if path else "")
            raise ContractError(
                f"{where} must begin with the axes (B, T) = {here.shape}, got {to_array(leaf).shape}; drop what is one "
                f"value a sequence before UnpadSequences"
            )

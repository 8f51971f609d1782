"""Sequences as rows again."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.connectors.connector import LearnerConnector
from marlvec.connectors.learner.columns import numbers
from marlvec.connectors.learner.pad_sequences import kept_name
from marlvec.connectors.rows import Rows
from marlvec.errors import ContractError
from marlvec.trees import map_tree, to_array, tree_leaves

__all__ = ["UnpadSequences"]


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
        if "seq_lens" not in rows.columns or "loss_mask" not in rows.columns:
            raise ContractError(
                f"expected the columns 'seq_lens' and 'loss_mask' that PadSequences adds, got {list(rows.columns)}"
            )
        lengths, mask = numbers(rows, "seq_lens"), rows["loss_mask"]
        here = np.arange(mask.shape[1]) < lengths[:, None]
        dropped = {"seq_lens", "loss_mask", self.state_column}
        old_names = {kept_name(name): name for name in dropped if name is not None}
        columns = {}
        for name, column in rows.columns.items():
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

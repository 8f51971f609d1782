"""`Block`: memory for steps in which all agents of a policy act, laid out as their batch will be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import is_
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.columns.forms import ROW_COLUMNS, ColumnForm, ColumnForms, Leaves
from marlvec.collect.columns.table import BOOL, COLUMNS
from marlvec.collect.storage.batch_memory import BatchMemory
from marlvec.connectors import Rows
from marlvec.trees import Tree

__all__ = ["Block", "items"]

IntArray = NDArray[np.int64]
AnyArray = NDArray[Any]

_LANE_COLUMNS = ("env_id", "agent_index")  # the same in each step
# Nearly always False: written where they are not.
_FLAGS = tuple(name for name in ROW_COLUMNS if COLUMNS[name].kinds == BOOL and not COLUMNS[name].is_wide)
_LARGE = 1 << 16  # bytes


class Block:
    """Tables (L, T, …) of a policy's columns; step t is written to ``[:, t]``, where the batch has it.

    Nothing that was written is read before its step counts, so an interrupt may come at any line.

    Args:
        forms: The columns' forms.
        lanes: (L,) all lanes that the policy plays.
        rows: Their rows at the first step, by column, which `write` is still to be called with.
        length: T.
        memory: Where arrays come from.

    Attributes:
        forms, lanes, length: As given.
        rows: Tables by column.
        width: How many columns rows have.
        answers: Likewise, of the columns of answers; empty before the first answer.
        fixed: Columns (L, …) that are the same at each step.
    """

    def __init__(
        self, forms: ColumnForms, lanes: IntArray, rows: Mapping[str, Tree], length: int, memory: BatchMemory
    ) -> None:
        self.forms, self.lanes, self.length, self._memory = forms, lanes, length, memory
        self.fixed: dict[str, AnyArray] = {name: np.array(rows[name]) for name in _LANE_COLUMNS}
        self.rows: dict[str, Leaves] = {}
        self.answers: dict[str, Leaves] = {}
        # Of columns that are one array: the table, also with large rows as items, and the form.
        self._arrays: list[tuple[str, AnyArray, AnyArray | None, np.dtype[Any], tuple[int, ...]]] = []
        for name, form in forms.rows.items():
            if name in _LANE_COLUMNS:
                continue
            self.rows[name] = tables = self._table(form)
            if name in _FLAGS:
                for table in tables:
                    table[...] = 0
            if form.dtype is not None and form.shape is not None:
                [table] = tables
                is_large = table.nbytes >= max(1, length) * _LARGE and table.flags.c_contiguous
                wide = items(table, 2) if is_large and not form.dtype.hasobject else None
                self._arrays.append((name, table, wide, form.dtype, form.shape))
        self.width = len(self.rows) + len(self.fixed)
        self._trees = [name for name in self.rows if forms.rows[name].dtype is None]

    def write(self, rows: Mapping[str, Tree], t: int) -> None:
        """Write the rows of step ``t``.

        Raises:
            ContractError: A column has changed its form.
        """
        never = rows["last"]  # which is False in all rows that an agent acts on
        for name, table, wide, dtype, shape in self._arrays:
            value = rows[name]
            if value is never:
                continue
            if value.__class__ is not np.ndarray or value.dtype != dtype or value.shape[1:] != shape:
                [value] = self.forms.rows[name].fit(value)
            if wide is not None and value.flags.c_contiguous:
                wide[:, t] = items(value, 1)
            else:
                table[:, t] = value
        for name in self._trees:
            for table, leaf in zip(self.rows[name], self.forms.rows[name].fit(rows[name]), strict=True):
                table[:, t] = leaf

    def read_rows(self, t: int) -> Rows:
        """The rows of step ``t``, as views."""
        forms = self.forms.rows
        columns = {
            name: self.fixed[name] if name in self.fixed else form.tree([table[:, t] for table in self.rows[name]])
            for name, form in forms.items()
            if name in self.fixed or name in self.rows
        }
        return Rows.of_length(columns, len(self.lanes))

    def write_answer(self, columns: Mapping[str, Leaves], t: int) -> bool:
        """Write what was decided at step ``t``.

        Returns:
            False where there is no room for it: where columns have come that step 0 did not have, or
            ``actions_for_env`` is no longer what the policy itself said.
        """
        if not t:
            said = columns["actions"]
            for name, leaves in columns.items():
                is_said = name != "actions" and _are_same(leaves, said)
                form = self.forms.answers[name]
                self.answers[name] = self.answers["actions"] if is_said else self._table(form)
        if columns.keys() != self.answers.keys():
            return False
        for name, tables in self.answers.items():
            leaves = columns[name]
            if name != "actions" and tables is self.answers["actions"]:
                if not _are_same(leaves, columns["actions"]):
                    return False
                continue
            for table, leaf in zip(tables, leaves, strict=True):
                table[:, t] = leaf
        return True

    def _table(self, form: ColumnForm) -> Leaves:
        return form.table(len(self.lanes), self.length, self._memory.empty)


def items(array: AnyArray, axes: int) -> AnyArray:
    """View all that lies behind the first axes as items of one kind, which numpy copies in half the time of numbers."""
    size = array.itemsize * math.prod(array.shape[axes:])
    found: AnyArray = array.reshape(*array.shape[:axes], -1).view(np.dtype((np.void, size)))[..., 0]
    return found


def _are_same(leaves: Leaves, others: Leaves) -> bool:
    return len(leaves) == len(others) and all(map(is_, leaves, others))

"""`Block`: memory for steps in which all agents of a policy act, laid out as their batch will be."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.columns.forms import ROW_COLUMNS, ColumnForm, ColumnForms, Leaves
from marlvec.collect.columns.table import BOOL, COLUMNS, VERSION
from marlvec.collect.storage.batch_memory import BatchMemory
from marlvec.collect.storage.policy_rows import part_of
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

    Nothing that was written is read before its step counts, so an interrupt may come at any line. ``lanes`` (L,) are
    all that the policy plays; ``rows`` their columns at the first step, which `write` is still to be called with.
    """

    def __init__(
        self, forms: ColumnForms, lanes: IntArray, rows: Mapping[str, Tree], length: int, memory: BatchMemory
    ) -> None:
        self.forms, self.lanes, self.length, self._memory = forms, lanes, length, memory
        # (L, …), the same at each step
        self.fixed: dict[str, AnyArray] = {name: np.array(rows[name]) for name in _LANE_COLUMNS}
        self.rows: dict[str, Leaves] = {}  # tables by column
        self.answers: dict[str, Leaves] = {}  # empty before the first answer
        self._said: list[Leaves | None] = []  # tables in the order of their forms; None: those of the actions
        self._at = 0  # where the actions are among them
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
        self.width = len(self.rows) + len(self.fixed)  # how many columns rows have
        self._trees = [name for name in self.rows if forms.rows[name].dtype is None]

    def write(self, rows: Mapping[str, Tree], t: int, part: slice | None = None) -> None:
        """Write the rows of step ``t``, or a part of the columns' rows; refuse a column that has changed its form."""
        never = rows["last"]  # which is False in all rows that an agent acts on
        for name, table, wide, dtype, shape in self._arrays:
            value = rows[name]
            if value is never:
                continue
            if part is not None:
                value = value[part]
            if value.__class__ is not np.ndarray or value.dtype != dtype or value.shape[1:] != shape:
                [value] = self.forms.rows[name].fit(value)
            if wide is not None and value.flags.c_contiguous:
                wide[:, t] = items(value, 1)
            else:
                table[:, t] = value
        for name in self._trees:
            leaves = self.forms.rows[name].fit(part_of(rows[name], part))
            for table, leaf in zip(self.rows[name], leaves, strict=True):
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

    def write_answer(self, parts: Sequence[Leaves], t: int) -> bool:
        """Write what was decided at step ``t``: a part for each form of answers, of which the version's stays out.

        Returns False where there is no room for it: where columns have come that step 0 did not have, or
        ``actions_for_env`` is no longer what the policy itself said.
        """
        if not t:
            self._make_room(parts)
        if len(parts) != len(self._said):
            return False
        said = parts[self._at]
        for tables, leaves in zip(self._said, parts, strict=True):
            if tables is None:  # the same as what was said
                if leaves is not said and not _are_same(leaves, said):
                    return False
            else:
                for table, leaf in zip(tables, leaves, strict=False):  # the version has no table
                    table[:, t] = leaf
        return True

    def _make_room(self, parts: Sequence[Leaves]) -> None:
        forms = self.forms.answers
        self._at = list(forms).index("actions")
        said, own = parts[self._at], self._table(forms["actions"])
        for (name, form), leaves in zip(forms.items(), parts, strict=True):
            is_said = name != "actions" and _are_same(leaves, said)
            if name == VERSION:
                self._said.append([])
            else:
                tables = own if is_said or name == "actions" else self._table(form)
                self.answers[name] = tables
                self._said.append(None if is_said else tables)

    def _table(self, form: ColumnForm) -> Leaves:
        return form.table(len(self.lanes), self.length, self._memory.empty)


def items(array: AnyArray, axes: int) -> AnyArray:
    """View all that lies behind the first axes as items of one kind, which numpy copies in half the time of numbers."""
    size = array.itemsize * math.prod(array.shape[axes:])
    found: AnyArray = array.reshape(*array.shape[:axes], -1).view(np.dtype((np.void, size)))[..., 0]
    return found


def _are_same(leaves: Leaves, others: Leaves) -> bool:
    return len(leaves) == len(others) and all(map(is_, leaves, others))

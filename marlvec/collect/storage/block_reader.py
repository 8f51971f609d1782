"""`read_block`: the batch of a full block, in the block's own arrays wherever a batch has the same."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.columns.table import VERSION, Source, names
from marlvec.collect.storage.batch_memory import BatchMemory
from marlvec.collect.storage.block import Block
from marlvec.collect.storage.moment import Answers, Moment
from marlvec.trees import Tree

__all__ = ["read_block"]

IntArray = NDArray[np.int64]
AnyArray = NDArray[Any]
_OUTCOME, _UNREAD = names(Source.OUTCOME), names(Source.NONE)


class _Ends(NamedTuple):
    """Last rows: the step after which they came, their lanes' places in the block, and the rows."""

    step: int
    places: IntArray
    moment: Moment


def read_block(
    block: Block, moments: Sequence[Moment], answers: Sequence[Answers], memory: BatchMemory
) -> dict[str, Tree]:
    """Return the columns of all closed transitions of a full block, ordered by env, agent and time.

    ``moments``: those of its T steps, last rows between them, and the rows that came behind the last step.
    """
    lanes, steps, forms = block.lanes, block.length, block.forms
    decisions = [moment for moment in moments if moment.missing is None]
    behind = decisions[-1]
    counts = accumulate(int(moment.missing is None) for moment in moments)
    ends = [
        _Ends(count - 1, np.searchsorted(lanes, moment.lanes), moment)
        for count, moment in zip(counts, moments, strict=True)
        if moment.missing is not None
    ]

    def spread(plane: AnyArray) -> AnyArray:
        """Broadcast to (T, L), and return it as an array (L, T)."""
        out = memory.empty((len(lanes), steps), plane.dtype)
        out[...] = plane.T
        return out

    columns: dict[str, Tree] = {name: np.repeat(values, steps) for name, values in block.fixed.items()}
    for name, tables in block.rows.items():
        if name in _OUTCOME:
            columns[name] = _following(block, name, behind, ends, memory)
        elif name not in _UNREAD:
            columns[name] = forms.rows[name].tree([_flat(table, memory) for table in tables])
    for name in forms.followed:
        columns[f"next_{name}"] = _following(block, name, behind, ends, memory)
    missing = np.zeros((len(lanes), steps), np.bool_)
    env_ts = np.array([moment.env_t for moment in decisions])
    env_t = spread(env_ts[:-1])
    is_next = np.count_nonzero(env_ts[1:] - env_ts[:-1] == 1) == env_t.size  # then it need not be turned round, too
    next_env_t = np.add(env_t, 1, out=memory.empty(env_t.shape, np.int64)) if is_next else spread(env_ts[1:])
    for end in ends:
        missing[end.places, end.step], next_env_t[end.places, end.step] = end.moment.missing, end.moment.env_t
    columns["next_obs_missing"], columns["next_env_t"] = _as_rows(missing), _as_rows(next_env_t)
    columns["env_t"] = _as_rows(env_t)
    for name, tables in block.answers.items():
        is_own = name == "actions" or tables is not block.answers["actions"]
        columns[name] = forms.answers[name].tree([_flat(table, memory, is_own=is_own) for table in tables])
    columns[VERSION] = _as_rows(spread(np.array([answer.columns[VERSION][0][:1] for answer in answers])))
    return columns


def _flat(table: AnyArray, memory: BatchMemory, *, is_own: bool = True) -> AnyArray:
    """A table (L, T, …) as a column of a batch: a view where it is in that order, and no other column reads it."""
    if is_own and table.flags.c_contiguous:
        return _as_rows(table)
    out = memory.empty(table.shape, table.dtype)
    out[...] = table
    return _as_rows(out)


def _following(block: Block, name: str, behind: Moment, ends: Sequence[_Ends], memory: BatchMemory) -> Tree:
    """A column of the row that comes after each row of a block."""
    form, tables = block.forms.rows[name], block.rows[name]
    found = form.room(len(block.lanes), block.length, empty=memory.empty)
    for leaf, table, last in zip(found, tables, form.fit(behind.column(name)), strict=True):
        if table.dtype == np.bool_ and not np.count_nonzero(table):  # flags of rows that an agent acts on
            leaf[...] = False
        else:
            leaf[:, :-1] = table[:, 1:]
        leaf[:, -1] = last
    for step, places, moment in ends:
        column = moment.column(name)
        parts = form.blanks(len(places)) if column is None else form.fit(column)
        for leaf, table, part in zip(found, tables, parts, strict=True):
            leaf[places, step] = part
            if name == "obs" and moment.missing is not None and np.count_nonzero(moment.missing):
                without = places[moment.missing]
                leaf[without, step] = table[without, step]
    return form.tree([_as_rows(leaf) for leaf in found])


def _as_rows(table: AnyArray) -> AnyArray:
    """View an array (L, T, …) as (L * T, …)."""
    return table.reshape(table.shape[0] * table.shape[1], *table.shape[2:])

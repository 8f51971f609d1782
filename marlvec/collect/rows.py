"""Where rows lie: `PolicyRows` as a policy gets them, `Moment` and `Answers` in a log, `Block` as a batch has them."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from marlvec.collect.columns import BOOL, COLUMNS, ROW_COLUMNS, VERSION, ColumnForm, ColumnForms, Leaves
from marlvec.connectors import Rows
from marlvec.env_ids import Where
from marlvec.trees import Tree, map_tree


def part_of(column: Tree, part: slice | None) -> Tree:
    """Rows of a column, as views; None: all of them."""
    if part is None:
        return column
    return column[part] if column.__class__ is np.ndarray else map_tree(lambda leaf: leaf[part], column)


def copied_rows(rows: Rows) -> Rows:
    """Rows with copies of all columns."""
    columns = dict(rows.items())
    for name, column in columns.items():
        columns[name] = column.copy() if isinstance(column, np.ndarray) else map_tree(_copy, column)
    return Rows.of_length(columns, len(rows))


class PolicyRows(Rows):
    """Rows that their policy may write into: a column is copied when it is first read.

    A policy reads two or three of a dozen columns, and there may be many policies. Nothing writes into ``source``, of
    which these are ``part``. With a length of -1 they are columns of the caller's own, as those of `Rows`. ``owned``
    columns are in no other code's hands, so they need not be copied.
    """

    __slots__ = ("_copied", "_owned", "_part", "_source")

    _source: Mapping[str, Tree]
    _copied: dict[str, Tree]

    def __init__(
        self, source: Mapping[str, Tree], part: slice | None = None, length: int = -1, owned: Collection[str] = ()
    ) -> None:
        if length < 0:
            super().__init__(source)
            return
        self._source, self._part, self._copied, self._owned = source, part, {}, owned
        self._n = length

    @property
    def _columns(self) -> dict[str, Tree]:  # of `Rows` a plain attribute
        copied = self._copied
        if copied is not self._source:
            self._source = self._copied = copied = {name: self[name] for name in self._source}
        return copied

    @_columns.setter
    def _columns(self, columns: dict[str, Tree]) -> None:
        self._source = self._copied = columns  # of rows that `take` and others make of these
        self._part, self._owned = None, ()

    def __getitem__(self, name: str) -> Tree:
        found = self._copied.get(name)
        if found is not None:
            return found
        if name not in self._source:
            raise KeyError(f"no column {name!r}; the columns are {list(self._source)}")
        found = part_of(self._source[name], self._part)
        if name not in self._owned:
            found = found.copy() if isinstance(found, np.ndarray) else map_tree(_copy, found)
        self._copied[name] = found
        return found

    def __getattr__(self, name: str) -> Tree:
        if name in PolicyRows.__slots__ or name.startswith("__"):  # a half-built instance has none
            raise AttributeError(name)
        return self[name] if name in self._source else super().__getattr__(name)

    def __contains__(self, name: object) -> bool:
        return name in self._source

    def __reduce__(self) -> tuple[Any, ...]:
        return Rows, (self._columns,)

    def keys(self) -> KeysView[str]:
        """Names of the columns, in order."""
        return self._source.keys()

    def get(self, name: str, default: Tree = None) -> Tree:
        """The column of this name, or ``default`` where there is none."""
        return self[name] if name in self._source else default

    def replace(self, **columns: Tree) -> PolicyRows:
        """As of other rows; what has not been read yet is not copied here, either."""
        for column in columns.values():
            if type(column) is not np.ndarray or not column.ndim or len(column) != self._n:
                self._check(columns)
                break
        rows = PolicyRows.__new__(PolicyRows)
        rows._source, rows._copied = {**self._source, **columns}, {**self._copied, **columns}
        rows._part, rows._owned, rows._n = self._part, self._owned, self._n
        return rows


def _copy(leaf: Any) -> NDArray[Any]:
    return np.array(leaf)


AnyArray = NDArray[Any]
Pieces = dict[int, list[NDArray[np.uint8]]]

_LARGE = 1 << 16  # bytes; smaller pieces malloc gives out again by itself
_MOST = 1 << 28  # bytes of one batch that are remembered
_ALIGNMENT = 64  # bytes; JAX shares arrays that begin at a multiple of it, and copies others


class BatchMemory:
    """Makes arrays that batches keep.

    Fresh memory comes from the system a page at a time, when it is first touched, and that costs more than writing to
    it does. Once a batch and all that was made of it without a copy (views, tensors) are gone, nothing but this object
    refers to its memory, and the next batch may have it. Who writes ``batch = collector.collect(...)`` holds one batch
    while the next is made, so the memory of two is remembered, and what neither of two batches has needed is let go.
    """

    def __init__(self) -> None:
        self._older: Pieces = {}
        self._last: Pieces = {}
        self._now: Pieces = {}
        self._bytes = 0  # of those
        self._lock = Lock()  # a column may be read while another thread makes the next batch

    def begin(self) -> None:
        """Another batch is to be made."""
        with self._lock:
            self._older, self._last, self._now, self._bytes = self._last, self._now, {}, 0

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> AnyArray:
        """An array that may hold anything, and is the caller's own; a large one begins at a multiple of 64 bytes."""
        kind = np.dtype(dtype)
        size = kind.itemsize * math.prod(shape)
        if size < _LARGE or kind.hasobject or not _COUNTS or self._bytes + size > _MOST:
            return np.empty(shape, kind)
        with self._lock:
            memory = self._unused(size)
            self._now.setdefault(size, []).append(memory)
            self._bytes += size
        start = -memory.__array_interface__["data"][0] % _ALIGNMENT
        return memory[start : start + size].view(kind).reshape(shape)

    def _unused(self, size: int) -> NDArray[np.uint8]:
        """Memory of this size that is not in use any more, or new."""
        for pieces in (self._older.get(size, ()), self._last.get(size, ())):
            for k in range(len(pieces)):
                if _references(pieces, k) == _ALONE:
                    return pieces.pop(k)  # type: ignore[union-attr]  # there is none in an empty tuple
        return np.empty(size + _ALIGNMENT - 1, np.uint8)


def _references(pieces: Any, k: int) -> int:
    return sys.getrefcount(pieces[k])


_ALONE = _references([np.empty(0, np.uint8)], 0)
"""Reference count of an array that only a list holds."""

_COUNTS = getattr(sys, "_is_gil_enabled", lambda: True)()
"""Whether counts of references can be relied on, which they cannot where threads run without a common lock."""


IntArray = NDArray[np.int64]

_LANE_COLUMNS = ("env_id", "agent_index")  # the same in each step
# Nearly always False: written where they are not.
_FLAGS = tuple(name for name in ROW_COLUMNS if COLUMNS[name].kinds == BOOL and not COLUMNS[name].is_wide)


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
        self.names = dict.fromkeys(forms.rows)  # of the columns that rows have
        self.width = len(self.names)
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
        return Rows.of_length(dict(BlockStep(self, t)), len(self.lanes))

    def column(self, name: str, t: int) -> Tree:
        """One column of step ``t``, as views; the block has it."""
        if name in self.fixed:
            return self.fixed[name]
        tables, form = self.rows[name], self.forms.rows[name]
        return tables[0][:, t] if form.dtype is not None else form.tree([table[:, t] for table in tables])

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


class BlockStep(Mapping[str, Tree]):
    """The columns of one step of a block, as views that are made when they are read."""

    __slots__ = ("_block", "_names", "_t")

    def __init__(self, block: Block, t: int) -> None:
        self._block, self._t = block, t
        self._names = block.names

    def __getitem__(self, name: str) -> Tree:
        return self._block.column(name, self._t)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def keys(self) -> KeysView[str]:
        """Names of the columns, in order."""
        return self._names.keys()


def items(array: AnyArray, axes: int) -> AnyArray:
    """View all that lies behind the first axes as items of one kind, which numpy copies in half the time of numbers."""
    size = array.itemsize * math.prod(array.shape[axes:])
    found: AnyArray = array.reshape(*array.shape[:axes], -1).view(np.dtype((np.void, size)))[..., 0]
    return found


def _are_same(leaves: Leaves, others: Leaves) -> bool:
    return len(leaves) == len(others) and all(map(is_, leaves, others))


BoolArray = NDArray[np.bool_]


@dataclass(slots=True)
class Moment:
    """A policy's rows that came together; or the remains of older moments, in which a lane may have several."""

    lanes: IntArray  # (n,) env * A + agent; ascending where they came together
    ticks: IntArray | int  # the round they came in, or (n,)
    env_t: IntArray  # (n,) env steps that their episodes had made by then
    final: BoolArray | bool  # whether they are last rows, or (n,)
    missing: BoolArray | None  # (n,) which last rows have no observation; None where there are no last rows
    columns: Mapping[str, Tree]  # last rows may lack some that connectors add; empty where they are in a block
    part: slice | None = None  # which rows of the columns these are; None: all
    block: Block | None = None  # where the columns are, at step t
    t: int = 0
    places: Where | None = None  # the lanes as a faster index
    spare: Rows | None = None  # the same rows in arrays that no other code has, which the policy is given once

    @classmethod
    def none(cls) -> Moment:
        """No rows."""
        nothing = np.zeros(0, np.int64)
        return cls(nothing, 0, nothing, False, None, {})

    @property
    def where(self) -> Where:
        """The lanes as an index."""
        return self.lanes if self.places is None else self.places

    @property
    def rows(self) -> Rows:
        """The rows; nothing may write into their arrays."""
        if self.block is not None:
            return self.block.read_rows(self.t)
        return Rows.of_length({name: part_of(self.columns[name], self.part) for name in self.columns}, len(self.lanes))

    def given(self) -> Rows:
        """The rows for a policy, which may write into their arrays; each call gives others."""
        rows, self.spare = self.spare, None
        if rows is not None:
            return rows
        if self.block is not None:  # whose arrays are those of a batch later
            return PolicyRows(BlockStep(self.block, self.t), None, len(self.lanes))
        return PolicyRows(self.columns, self.part, len(self.lanes))

    def column(self, name: str) -> Tree | None:
        """Return one column; None if these rows do not have it."""
        block = self.block
        if block is None:
            return part_of(self.columns[name], self.part) if name in self.columns else None
        return block.column(name, self.t) if name in block.names else None

    def take(self, mask: BoolArray) -> Moment:
        """Some of the rows, which came together."""
        lanes = self.lanes[mask]
        if not len(lanes):
            return Moment.none()
        missing = None if self.missing is None else self.missing[mask]
        columns = dict(self.rows.take(mask).items())
        ticks = self.ticks if isinstance(self.ticks, int) else self.ticks[mask]
        return Moment(lanes, ticks, self.env_t[mask], self.final, missing, columns)

    def join(self, other: Moment) -> Moment:
        """These rows, which wait for their policy, and others that do; in no round, as they came in several."""
        if not len(self.lanes):
            return other
        lanes, env_t = (np.concatenate([getattr(one, name) for one in (self, other)]) for name in ("lanes", "env_t"))
        order = np.argsort(lanes, kind="stable")
        rows = Rows.concat(_with_masks([self.rows, other.rows])).take(order)
        return Moment(lanes[order], 0, env_t[order], False, None, dict(rows.items()))


def _with_masks(parts: list[Rows]) -> list[Rows]:
    """Rows of which some came before an env gave its first mask: until then all was allowed."""
    if ("action_mask" in parts[0]) == ("action_mask" in parts[1]):
        return parts
    shape = next(part["action_mask"].shape[1:] for part in parts if "action_mask" in part)
    return [
        part if "action_mask" in part else part.replace(action_mask=np.ones((len(part), *shape), np.bool_))
        for part in parts
    ]


@dataclass(slots=True)
class Answers:
    """A policy's answers to rows of ``lanes`` (n,); in order of time where a lane has several."""

    lanes: IntArray
    columns: dict[str, Leaves]  # leaves (n, …); of those that are in a block, the version alone
    block: Block | None = None  # where the others are, at step t
    t: int = 0

    def leaves(self, name: str) -> Leaves | None:
        """Leaves of one column; None where these answers do not have it."""
        block = self.block
        if block is None or name in self.columns:
            return self.columns.get(name)
        tables = block.answers.get(name)
        return None if tables is None else [table[:, self.t] for table in tables]

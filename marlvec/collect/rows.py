"""Where rows lie: `PolicyRows` as a policy gets them, `Moment` and `Answers` in the log, `Block` for large columns."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, KeysView, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from marlvec.collect.columns import COLUMNS, ColumnForms, Leaves, Source
from marlvec.connectors import Rows
from marlvec.env_ids import Where
from marlvec.trees import Tree, map_tree

Part = slice | NDArray[np.int64] | None
"""Which rows of some columns; None: all of them."""


def part_of(column: Tree, part: Part) -> Tree:
    """Rows of a column, as views where they are a slice."""
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
        self, source: Mapping[str, Tree], part: Part = None, length: int = -1, owned: Collection[str] = ()
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
BoolArray = NDArray[np.bool_]

DERIVED = ("env_id", "agent_index", "eps_id")
"""Columns that follow from what a log knows of each row."""


class Block:
    """Of a policy that plays the same L lanes at each of the next T steps: tables (L, T, …) of its large columns.

    Step t of such a column is written to ``[:, t]``, where the batch has it, so that large rows lie in memory once.
    Nothing that was written is read before its step counts, so an interrupt may come at any line.

    Attributes:
        number: The policy's.
        lanes: (L,), ascending.
        length: T.
        steps: So many steps' rows have come; T + 1 of them: it is full, and the rows behind its last step have come.
        said: To so many steps' rows the answer has come.
        behind: Those rows behind the last step.
        tables: By name, of columns that are one array with large rows.
    """

    __slots__ = ("behind", "lanes", "length", "number", "said", "steps", "tables")

    def __init__(self, number: int, waiting: PolicyPart, length: int, forms: ColumnForms, memory: BatchMemory) -> None:
        """Make room for the large columns of the rows that wait. MemoryError: there is not as much."""
        self.number, self.lanes, self.length = number, waiting.lanes, length
        self.steps = self.said = 0
        self.behind: PolicyPart | None = None
        self.tables: dict[str, tuple[AnyArray, AnyArray]] = {}  # also with rows as items of one kind
        for name in waiting.columns:
            form = forms.rows[name]
            if form.dtype is None or form.dtype.hasobject or name in _NOT_IN_TABLES:
                continue
            if form.dtype.itemsize * math.prod(form.shape or ()) * len(self.lanes) >= _WIDE:
                [table] = form.table(len(self.lanes), length, memory.empty)
                if table.flags.c_contiguous:
                    self.tables[name] = table, items(table, 2)

    @property
    def is_whole(self) -> bool:
        """Whether it is full, and all its steps but the last rows were answered."""
        return self.steps == self.length + 1 and self.said == self.length

    def is_next(self, lanes: IntArray) -> bool:
        """Whether rows of these lanes may be those of its next step, or come behind its last one."""
        return self.steps <= self.length and (lanes is self.lanes or np.array_equal(lanes, self.lanes))

    def write(self, columns: Mapping[str, Tree], part: Part, forms: ColumnForms) -> dict[str, Tree]:
        """Write rows of the next step; return the columns with views of the tables in place of what was written."""
        t, found = self.steps, {name: part_of(column, part) for name, column in columns.items()}
        for name, (table, wide) in self.tables.items():
            [value] = forms.rows[name].fit(found[name])
            if value.flags.c_contiguous:
                wide[:, t] = items(value, 1)
            else:
                table[:, t] = value
            found[name] = table[:, t]
        return found

    def add(self, part: PolicyPart) -> None:
        """Count rows as those of the next step."""
        self.steps += 1
        if self.steps > self.length:
            self.behind = part


_WIDE = 1 << 14  # bytes of one step's rows, from which on they are written to where the batch has them
_NOT_IN_TABLES = {name for name, column in COLUMNS.items() if column.source in (Source.OUTCOME, Source.NONE)}


def items(array: AnyArray, axes: int) -> AnyArray:
    """View all that lies behind the first axes as items of one kind, which numpy copies in half the time of numbers."""
    size = array.itemsize * math.prod(array.shape[axes:])
    found: AnyArray = array.reshape(*array.shape[:axes], -1).view(np.dtype((np.void, size)))[..., 0]
    return found


@dataclass(slots=True)
class PolicyPart:
    """One policy's rows among those of a moment; the same object waits for the policy's answer."""

    number: int  # the policy's, or `UNREAD`
    lanes: IntArray  # (n,) env * A + agent; ascending where they came together
    columns: Mapping[str, Tree]  # nothing may write into their arrays; last rows may lack some that connectors add
    part: Part = None  # which rows of the columns these are
    places: Where | None = None  # the lanes as a faster index
    shared: Collection[str] = ()  # columns that other code may write into later, or connectors have made
    spare: Rows | None = None  # the same rows in arrays that no other code has, which the policy is given once

    @classmethod
    def none(cls) -> PolicyPart:
        """No rows."""
        return cls(UNREAD, np.zeros(0, np.int64), {})

    @property
    def where(self) -> Where:
        """The lanes as an index."""
        return self.lanes if self.places is None else self.places

    @property
    def rows(self) -> Rows:
        """The rows; nothing may write into their arrays."""
        return Rows.of_length({name: part_of(self.columns[name], self.part) for name in self.columns}, len(self.lanes))

    def given(self) -> Rows:
        """The rows for a policy, which may write into their arrays; each call gives others."""
        rows, self.spare = self.spare, None
        return PolicyRows(self.columns, self.part, len(self.lanes)) if rows is None else rows

    def take(self, mask: BoolArray) -> PolicyPart:
        """Some of the rows."""
        lanes = self.lanes[mask]
        if not len(lanes):
            return PolicyPart.none()
        return PolicyPart(self.number, lanes, dict(self.rows.take(mask).items()), shared=self.shared)

    def join(self, other: PolicyPart) -> PolicyPart:
        """These rows, which wait for their policy, and others that do."""
        if not len(self.lanes):
            return other
        lanes = np.concatenate([self.lanes, other.lanes])
        order = np.argsort(lanes, kind="stable")
        rows = Rows.concat(_with_masks([self.rows, other.rows])).take(order)
        return PolicyPart(other.number, lanes[order], dict(rows.items()))


UNREAD = -1
"""Stands for policies whose rows are counted alone, and not read."""


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
class Moment:
    """Rows that came together, policy after policy; or the remains of older moments, where a lane may have several."""

    lanes: IntArray  # (n,) env * A + agent
    ticks: IntArray | int  # the round they came in, or (n,)
    env_t: IntArray  # (n,) env steps that their episodes had made by then
    eps_id: IntArray  # (n,)
    final: BoolArray | bool  # whether they are last rows, or (n,)
    missing: BoolArray | None  # (n,) which last rows have no observation; None where there are no last rows
    parts: Sequence[PolicyPart]
    numbers: IntArray | None = None  # (n,) each row's policy; None: the parts' rows are one after the other
    by_time: bool = True  # whether the rows of a lane are in order; else those of a policy are
    removed: Sequence[tuple[int, IntArray]] = ()  # lanes whose rows connectors took out, by policy

    def take(self, mask: BoolArray) -> Moment:
        """Some of the rows that came together; parts of which none is left go."""
        parts, start = [], 0
        for part in self.parts:
            own = mask[start : start + len(part.lanes)]
            start += len(part.lanes)
            if np.count_nonzero(own):
                parts.append(part.take(own))
        ticks = self.ticks if isinstance(self.ticks, int) else self.ticks[mask]
        missing = None if self.missing is None else self.missing[mask]
        return Moment(self.lanes[mask], ticks, self.env_t[mask], self.eps_id[mask], self.final, missing, parts)


@dataclass(slots=True)
class PolicyAnswers:
    """One policy's answers: leaves (n, …) for each of its `ColumnForms.answers`, as far as those were known then.

    Nothing writes into the leaves.
    """

    number: int
    lanes: IntArray
    leaves: Sequence[Leaves | None]


@dataclass(slots=True)
class Answers:
    """Answers that came together, policy after policy; or the remains of older ones."""

    parts: Sequence[PolicyAnswers]
    lanes: IntArray | None = None  # (n,) in order of time, and each one's policy; None: the parts', one after the other
    numbers: IntArray | None = None

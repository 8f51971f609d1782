"""`RowLog`: one policy's rows and answers, in the order in which they came; a batch sorts them when it is read.

`read_block` makes the batch of a full block, in the block's own arrays wherever the batch has the same.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.columns import (
    LATE,
    VERSION,
    ColumnForm,
    ColumnForms,
    Leaves,
    Source,
    columns_from,
    names,
    order_columns,
    plain_columns,
)
from marlvec.collect.rows import Answers, BatchMemory, Block, Moment, part_of
from marlvec.connectors.rows import Later, with_later
from marlvec.errors import ArgumentError
from marlvec.serialization.saved import State, array_field, check_fields
from marlvec.trees import Tree, map_tree

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

    size, over = len(lanes) * steps, [(end.places, end.step, end.moment.env_t) for end in ends]

    def spread(planes: Sequence[AnyArray]) -> AnyArray:
        """Steps' arrays (L,), or one number each, as an array (L, T)."""
        out = memory.empty((len(lanes), steps), np.int64)
        out[...] = np.array(planes).reshape(steps, -1).T
        return out

    def next_env_t() -> AnyArray:
        out = spread(env_ts[1:])
        for places, step, env_t in over:
            out[places, step] = env_t
        return _as_rows(out)

    columns: dict[str, Tree] = {
        name: Later(size, Whole(partial(np.repeat, values, steps))) for name, values in block.fixed.items()
    }
    for name, tables in block.rows.items():
        if name in _OUTCOME:
            columns[name] = _following(block, name, behind, ends, memory)
        elif name not in _UNREAD:
            columns[name] = forms.rows[name].tree([_flat(table, memory) for table in tables])
    for name in forms.followed:
        columns[f"next_{name}"] = _next_column(block, name, columns[name], behind, ends, memory)
    missing = np.zeros((len(lanes), steps), np.bool_)
    for end in ends:
        missing[end.places, end.step] = end.moment.missing
    columns["next_obs_missing"] = _as_rows(missing)
    env_ts = [moment.env_t for moment in decisions]
    columns["env_t"] = Later(size, Whole(lambda: _as_rows(spread(env_ts[:-1]))))
    columns["next_env_t"] = Later(size, Whole(next_env_t))
    for name, tables in block.answers.items():
        is_own = name == "actions" or tables is not block.answers["actions"]
        columns[name] = forms.answers[name].tree([_flat(table, memory, is_own=is_own) for table in tables])
    versions = [answer.columns[VERSION][0][:1] for answer in answers]
    columns[VERSION] = Later(size, Whole(lambda: _as_rows(spread(versions))))
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


def _next_column(
    block: Block, name: str, column: Tree, behind: Moment, ends: Sequence[_Ends], memory: BatchMemory
) -> Later:
    """A column of the row that comes after each row of a block, made of that column in the batch when it is read."""
    form, steps = block.forms.rows[name], block.length
    own = form.fit(column)
    lasts = [form.fit(behind.column(name))]
    places = [np.arange(steps - 1, len(block.lanes) * steps, steps)]
    for end in ends:
        found, at = end.moment.column(name), end.places * steps + end.step
        leaves = form.blanks(len(at)) if found is None else form.fit(found)
        if name == "obs" and end.moment.missing is not None and np.count_nonzero(end.moment.missing):
            leaves = [np.array(leaf) for leaf in leaves]
            for leaf, table in zip(leaves, own, strict=True):
                leaf[end.moment.missing] = table[at[end.moment.missing]]
        lasts.append(leaves)
        places.append(at)
    where = np.concatenate(places)
    order = where.argsort(kind="stable")
    order = order[np.append(where[order[1:]] != where[order[:-1]], True)]  # an end counts, not the row behind it
    leaves = [np.concatenate(parts).take(order, axis=0) for parts in zip(*lasts, strict=True)]
    return Later(len(block.lanes) * steps, Followers(form, own, where[order], leaves, memory))


class Whole:
    """Makes a column as a whole, once, and rows of it, for columns that cost little beside `obs`."""

    __slots__ = ("_column", "_make")

    def __init__(self, make: Callable[[], Tree]) -> None:
        self._make, self._column = make, None

    def __call__(self, where: IntArray | None) -> Tree:
        column = self._column
        if column is None:
            self._column = column = self._make()
        return column if where is None else column.take(where)


class Followers:
    """Makes a column of the rows that come after rows of a batch: nearly always the next row of the same column.

    ``own``: leaves of the column, (n, …); ``places``: ascending positions of rows that the next one does not follow,
    the last one among them; ``others``: leaves of the rows that follow those.
    """

    __slots__ = ("_form", "_memory", "_others", "_own", "_places")

    def __init__(self, form: ColumnForm, own: Leaves, places: IntArray, others: Leaves, memory: BatchMemory) -> None:
        self._form, self._own, self._places, self._others, self._memory = form, own, places, others, memory

    def __call__(self, where: IntArray | None) -> Tree:
        found, places = [], self._places
        if where is not None:
            at = places.searchsorted(where)
            is_other = (places[at] == where).nonzero()[0]  # each position is at most the last of these
            at, after = at[is_other], where + 1
            after[is_other] = 0
        for own, others in zip(self._own, self._others, strict=True):
            if where is None:
                leaf = self._memory.empty(own.shape, own.dtype)
                leaf[:-1], leaf[places] = own[1:], others
            else:
                leaf = own.take(after, axis=0)
                leaf[is_other] = others[at]
            found.append(leaf)
        return self._form.tree(found)


def _as_rows(table: AnyArray) -> AnyArray:
    """View an array (L, T, …) as (L * T, …)."""
    return table.reshape(table.shape[0] * table.shape[1], *table.shape[2:])


BoolArray = NDArray[np.bool_]
Part = TypeVar("Part", Moment, Answers)
RowNumbers: TypeAlias = IntArray | range
"""Numbers of a log's rows, ascending; a range: all closed transitions of a full block."""

_OUTCOME, _UNREAD = names(Source.OUTCOME), names(Source.NONE)


@dataclass(slots=True)
class _Kept:
    """The content of a log, in order of time; replaced as a whole when rows are dropped."""

    moments: list[Moment] = field(default_factory=list)
    answers: list[Answers] = field(default_factory=list)
    block: Block | None = None  # where the rows of the next step go; None: rows are stored as they come
    # So many moments are in the block; one more than it has room for: it is full, and the rows behind its last step
    # have come.
    steps: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether the block can be read in place: it holds all rows but last ones and those behind it."""
        return self.block is not None and self.steps > self.block.length


class _Index:
    """All R rows of a log, numbered through, and the successor of each; see `Moment`.

    ``starts`` has the number of each moment's first row, then R.
    """

    def __init__(self, moments: Sequence[Moment], num_lanes: int) -> None:
        self.starts, sizes = _starts(moments), [len(moment.lanes) for moment in moments]
        size, none = self.starts[-1], np.zeros(0, np.int64)
        self.lane = np.concatenate([none, *[moment.lanes for moment in moments]])
        self.env_t = np.concatenate([none, *[moment.env_t for moment in moments]])
        ticks = [moment.ticks for moment in moments]
        self.tick = np.array([tick if isinstance(tick, int) else 0 for tick in ticks], np.int64).repeat(sizes)
        for start, tick in zip(self.starts, ticks, strict=False):
            if not isinstance(tick, int):  # remains of older moments, or envs in different rounds
                self.tick[start : start + len(tick)] = tick
        has_ends = np.array([moment.missing is not None for moment in moments], np.bool_).repeat(sizes)
        self.missing = np.zeros(size, np.bool_)
        self.missing[has_ends] = np.concatenate([none, *[m.missing for m in moments if m.missing is not None]])
        self.final = has_ends
        if len(moments) and moments[0].missing is not None:  # remains of older moments, perhaps not all last rows
            self.final[: sizes[0]] = moments[0].final
        # (R,) row numbers by lane, then time
        self.order = self.lane.astype(_key_dtype(num_lanes)).argsort(kind="stable")
        sorted_lane = self.lane[self.order]
        has_next = np.zeros(size, np.bool_)
        has_next[:-1] = sorted_lane[1:] == sorted_lane[:-1]
        has_next &= ~self.final[self.order]
        at = has_next.nonzero()[0]
        self.after = np.full(size, -1)  # (R,) number of the row that closes a row's transition; -1: none
        self.after[self.order[at]] = self.order[at + 1]

    def answer_of(self, lanes: IntArray, num_lanes: int) -> IntArray:
        """Return the number of each row's answer, (R,), -1: none; ``lanes`` (K,) are the answers', in order of time."""
        found = np.full(len(self.lane), -1)
        decisions = (~self.final).nonzero()[0]
        own = self.lane[decisions]
        if np.array_equal(own[: len(lanes)], lanes):  # each moment was answered as it came
            found[decisions[: len(lanes)]] = np.arange(len(lanes))
            return found
        decisions = self.order[~self.final[self.order]]  # by lane; each lane's first rows are the answered ones
        counts, starts = np.bincount(lanes, minlength=num_lanes), np.zeros(num_lanes, np.int64)
        np.cumsum(np.bincount(own, minlength=num_lanes)[:-1], out=starts[1:])
        is_answered = np.arange(len(decisions)) - starts[self.lane[decisions]] < counts[self.lane[decisions]]
        found[decisions[is_answered]] = lanes.astype(_key_dtype(num_lanes)).argsort(kind="stable")
        return found


def _starts(parts: Sequence[Moment | Answers]) -> list[int]:
    return [0, *accumulate(len(part.lanes) for part in parts)]


def _narrowed(parts: Sequence[Part], starts: Sequence[int], numbers: IntArray) -> tuple[Sequence[Part], IntArray]:
    """The parts from that of the first number on, and the numbers there: what is kept of a log is at its end."""
    first = bisect_right(starts, int(numbers.min(initial=starts[-1] - 1))) - 1
    return (parts[first:], numbers - starts[first]) if first > 0 else (parts, numbers)


def _remains(
    columns: Mapping[str, Tree], lanes: IntArray, ticks: IntArray, env_t: IntArray, final: BoolArray, missing: BoolArray
) -> Moment:
    """Rows of older moments as one; see `Moment`, whose ``missing`` is None where there are no last rows."""
    if np.count_nonzero(final):
        return Moment(lanes, ticks, env_t, final, missing, columns)
    return Moment(lanes, ticks, env_t, False, None, columns)


def _key_dtype(num_lanes: int) -> Any:
    # A stable sort of 16-bit keys is a radix sort.
    return np.uint16 if num_lanes <= np.iinfo(np.uint16).max else np.int64


class RowLog:
    """Rows and answers of one policy.

    Ctrl-C may come at any line: a moment, or an answer, is made first and appended by one call; to drop rows, the rest
    is copied and replaces all by one store.
    """

    def __init__(self, forms: ColumnForms, num_lanes: int, memory: BatchMemory) -> None:
        self.forms, self._memory, self.num_lanes = forms, memory, num_lanes
        self._kept = _Kept()
        self._last_index: tuple[_Kept, _Index] | None = None  # of which it is the index

    def __len__(self) -> int:
        """Number of stored rows."""
        return sum(len(moment.lanes) for moment in self._kept.moments)

    # --- in

    def begin_block(self, length: int) -> None:
        """Write the rows of the next ``length`` steps of all lanes into a block, if only waiting rows are stored."""
        moments = self._kept.moments
        if len(moments) != 1 or self._kept.answers or moments[0].missing is not None:
            return
        [waiting] = moments
        if np.count_nonzero(waiting.lanes[1:] <= waiting.lanes[:-1]):
            return
        self._memory.begin()
        rows = dict(waiting.rows.items())
        try:
            block = Block(self.forms, waiting.lanes, rows, length, self._memory)
        except MemoryError:  # so much may be asked for that only an interrupt ends it
            return
        block.write(rows, 0)
        moment = Moment(waiting.lanes, waiting.ticks, waiting.env_t, False, None, {}, block=block)
        self._kept = _Kept([moment], [], block, 1)

    def append(self, moment: Moment, shared: Collection[str] = ()) -> None:
        """Store rows behind the agent connectors, which close the transitions that led to them.

        The moment is the log's from now on: it may move its columns into a block. Last rows may lack columns that
        connectors add. ``shared`` columns, which other code may write into later or connectors have made, are checked,
        and copied; the other arrays are stored as they are.
        """
        kept, forms, columns = self._kept, self.forms, moment.columns
        is_last = moment.missing is not None
        if is_last or columns.keys() != forms.rows.keys():
            forms.check_rows(columns, final=is_last)
        block = None if is_last or kept.block is None else self._block_for(moment.lanes)
        if block is not None:
            block.write(columns, kept.steps, moment.part)
            moment.columns, moment.part, moment.block, moment.t = {}, None, block, kept.steps
        elif shared:
            own = {name: columns[name] for name in shared if name in columns}
            moment.columns = {**columns, **{name: self._copied(name, column) for name, column in own.items()}}
        kept.moments.append(moment)
        kept.steps += not is_last

    def _copied(self, name: str, column: Tree) -> Tree:
        """A copy of a column, once it was found to have its form."""
        form = self.forms.rows.get(name)
        if form is None:  # of last rows, before any other rows have it
            return map_tree(np.array, column)
        return form.tree([leaf.copy() for leaf in form.fit(column)])

    def count(self, lanes: IntArray, ticks: IntArray | int, env_t: IntArray, eps_id: IntArray, *, final: bool) -> None:
        """Store rows that are not read: whose they are alone, no lane twice; see `append` and `Moment`."""
        missing = np.zeros(len(lanes), np.bool_) if final else None
        self._kept.moments.append(Moment(lanes, ticks, env_t, final, missing, {"eps_id": eps_id}))

    def _block_for(self, lanes: IntArray) -> Block | None:
        """The block, where it has room for these lanes' rows; from where it has none on there is none."""
        kept = self._kept
        block = kept.block
        if block is None:
            return None
        is_regular = lanes is block.lanes or np.array_equal(lanes, block.lanes)
        if not is_regular or kept.steps > block.length or block.width < len(self.forms.rows):
            kept.block = None
            return None
        return block if kept.steps < block.length else None

    def answer(self, lanes: IntArray, parts: Sequence[Leaves]) -> None:
        """Store what the policy answered to these lanes' last rows: what `ColumnForms.check_answer` returned."""
        kept, block = self._kept, self._kept.block
        version = parts[list(self.forms.answers).index(VERSION)]  # an array that nothing writes into
        if block is not None:
            t = len(kept.answers)
            is_next = t < block.length and t == kept.steps - 1 and len(lanes) == len(block.lanes)
            if is_next and block.write_answer(parts, t):
                kept.answers.append(Answers(lanes, {VERSION: version}, block, t))
                return
            kept.block = None
        columns = dict(zip(self.forms.answers, parts, strict=True))
        said = columns["actions"]
        own = [leaf.copy() for leaf in said]
        for name, leaves in columns.items():
            if name != VERSION:
                columns[name] = own if leaves is said else [leaf.copy() for leaf in leaves]
        kept.answers.append(Answers(lanes, columns))

    # --- looking

    @property
    def _index(self) -> _Index:
        kept, found = self._kept, self._last_index
        if found is None or found[0] is not kept or len(found[1].starts) != len(kept.moments) + 1:
            self._last_index = found = kept, _Index(kept.moments, self.num_lanes)
        return found[1]

    def closed(self, eps_ids: IntArray | None = None) -> RowNumbers:
        """Numbers of the rows whose transitions' outcome is known, of all episodes or of some."""
        kept = self._kept
        if eps_ids is None and kept.is_whole:
            assert kept.block is not None
            return range(len(kept.block.lanes) * kept.block.length)
        numbers = (self._index.after >= 0).nonzero()[0]
        return numbers if eps_ids is None else numbers[np.isin(self._eps_id(numbers), eps_ids)]

    def of_episodes(self, eps_ids: IntArray) -> IntArray:
        """Numbers of all rows of some episodes, last rows and rows that wait for an action included."""
        numbers = np.arange(len(self))
        return numbers[np.isin(self._eps_id(numbers), eps_ids)]

    def without(self, numbers: RowNumbers, eps_ids: Collection[int]) -> RowNumbers:
        """Drop the rows of these episodes from some row numbers."""
        if not eps_ids or not len(numbers):
            return numbers
        numbers = self._numbers(numbers)
        return numbers[~np.isin(self._eps_id(numbers), list(eps_ids))]

    def _numbers(self, numbers: RowNumbers) -> IntArray:
        return (self._index.after >= 0).nonzero()[0] if isinstance(numbers, range) else numbers

    def _eps_id(self, numbers: IntArray) -> IntArray:
        parts = [moment.column("eps_id") for moment in self._kept.moments]
        found: IntArray = np.concatenate([np.zeros(0, np.int64), *parts])[numbers]
        return found

    def closing_order(self, numbers: RowNumbers) -> tuple[IntArray, IntArray]:
        """Round in which each transition was closed, and its lane."""
        index, numbers = self._index, self._numbers(numbers)
        return index.tick[index.after[numbers]], index.lane[numbers]

    def closed_until(self, last: tuple[int, int]) -> RowNumbers:
        """Numbers of the rows whose transitions were closed up to this (round, lane)."""
        numbers = self._numbers(self.closed())
        rounds, lanes = self.closing_order(numbers)
        found: IntArray = numbers[(rounds < last[0]) | ((rounds == last[0]) & (lanes <= last[1]))]
        return found

    @property
    def open_lanes(self) -> IntArray:
        """Lanes with a row that waits for an action, or for its outcome; ascending."""
        index = self._index
        return np.sort(index.lane[(index.after < 0) & ~index.final])

    # --- out

    def read(self, numbers: RowNumbers, unroll_id: int) -> tuple[dict[str, Tree], int]:
        """Return columns of some of the `closed` transitions by env, agent and time; and the next fragment's number.

        A fragment is a stretch of one agent's episode; ``unroll_id`` is the first one's number.
        """
        if isinstance(numbers, range):
            kept = self._kept
            assert kept.block is not None
            columns = read_block(kept.block, kept.moments, kept.answers, self._memory)
            starts = np.zeros(len(numbers), np.bool_)
            starts[:: kept.block.length] = True  # where the next lane begins
        else:
            columns, lane = self._read_sorted(numbers)
            starts = np.zeros(len(numbers), np.bool_)
            starts[1:] = lane[1:] != lane[:-1]
        eps_id, ended = columns["eps_id"], columns["terminated"] | columns["truncated"]
        starts[1:] |= eps_id[1:] != eps_id[:-1]
        starts[1:] |= ended[:-1]  # an agent that came back has a new life
        starts[:1] = False
        memory, fragments = self._memory, int(np.count_nonzero(starts)) + 1

        def numbered() -> AnyArray:
            found = np.cumsum(starts, out=memory.empty(starts.shape, np.int64))
            found += unroll_id
            return found

        columns["unroll_id"] = Later(len(starts), Whole(numbered))
        return with_later(order_columns(columns)), unroll_id + fragments

    def _read_sorted(self, numbers: IntArray) -> tuple[dict[str, Tree], IntArray]:
        self._memory.begin()
        index, rows = self._index, self.forms.rows
        wanted = np.zeros(len(index.lane), np.bool_)
        wanted[numbers] = True
        numbers = index.order[wanted[index.order]]
        after = index.after[numbers]
        missing, lane = index.missing[after], index.lane[numbers]
        columns = {
            name: self._tree(name, after if name in _OUTCOME else numbers) for name in rows if name not in _UNREAD
        }
        is_other = np.ones(len(numbers), np.bool_)
        is_other[:-1] = (after[:-1] != numbers[1:]) | missing[:-1]
        places = is_other.nonzero()[0]
        for name in self.forms.followed:
            form = rows[name]
            others = (np.where(missing, numbers, after) if name == "obs" else after)[places]
            leaves, own = form.fit(self._tree(name, others)), form.fit(columns[name])
            columns[f"next_{name}"] = Later(len(numbers), Followers(form, own, places, leaves, self._memory))
        columns["next_obs_missing"] = missing
        columns["env_t"], columns["next_env_t"] = index.env_t[numbers], index.env_t[after]
        answers = index.answer_of(self._answered, self.num_lanes)[numbers]
        columns |= {name: self._said(name, answers) for name in self.forms.answers}
        return columns, lane

    @property
    def _answered(self) -> IntArray:
        return np.concatenate([np.zeros(0, np.int64), *(answer.lanes for answer in self._kept.answers)])

    def _tree(self, name: str, numbers: IntArray) -> Tree:
        """Return one column of some rows."""
        form = self.forms.rows[name]
        moments, numbers = _narrowed(self._kept.moments, self._index.starts, numbers)
        if form.dtype is not None:
            with suppress(KeyError):  # of rows in a block, and of those that came before the column
                column_of = [(moment.columns[name], moment.part) for moment in moments]
                return self._take([[c if part is None else c[part]] for c, part in column_of], numbers)[0]
        found = []
        for moment in moments:
            column = moment.columns[name] if name in moment.columns else moment.column(name)
            if column is None:
                leaves = form.blanks(len(moment.lanes))
            elif form.dtype is None:
                leaves = form.fit(part_of(column, moment.part))
            else:  # what is stored was found to have this form
                leaves = [column if moment.part is None else column[moment.part]]
            found.append(leaves)
        return form.tree(self._take(found, numbers))

    def _take(self, parts: Sequence[Leaves], numbers: IntArray) -> Leaves:
        """Rows of parts that are numbered through, as new arrays: per leaf (n, …)."""
        out = []
        for leaves in zip(*parts, strict=True):
            whole = np.concatenate(leaves) if len(leaves) > 1 else leaves[0]
            leaf = self._memory.empty((len(numbers), *whole.shape[1:]), whole.dtype)
            # With another mode numpy takes into an array of its own first.
            out.append(whole.take(numbers, axis=0, out=leaf, mode="clip"))
        return out

    def _said(self, name: str, numbers: IntArray) -> Tree:
        """Return one column of some answers."""
        form, answers = self.forms.answers[name], self._kept.answers
        parts, numbers = _narrowed(answers, _starts(answers), numbers)
        found = []
        for part in parts:
            leaves = part.leaves(name)
            found.append(form.blanks(len(part.lanes)) if leaves is None else leaves)
        return form.tree(self._take(found, numbers))

    # --- dropping

    def forget(self, numbers: RowNumbers) -> None:
        """Drop the first closed transitions of each lane, delivered or lost, and last rows that nothing leads to."""
        if isinstance(numbers, range):
            self._replace(self._kept.moments[-1:], [])
            return
        if not len(numbers):
            return
        index = self._index
        keep = ~index.final
        keep[numbers] = False
        after = index.after[keep]
        keep[after[after >= 0]] = True
        self._keep(keep.nonzero()[0])

    def keep_ended(self, ended_N: IntArray) -> None:
        """Drop all rows but those of episodes with ids below their env's in ``ended_N``, (N,)."""
        numbers, num_agents = np.arange(len(self)), self.num_lanes // len(ended_N)
        self._keep(numbers[self._eps_id(numbers) < ended_N[self._index.lane // num_agents]])

    def clear(self) -> None:
        """Drop everything; the columns' forms stay known."""
        self._replace([], [])

    def _replace(self, moments: list[Moment], answers: list[Answers]) -> None:
        self._kept = _Kept(moments, answers)

    def _keep(self, numbers: IntArray) -> None:
        """Keep some rows, ascending, and the answers to them."""
        self._replace(*self._merged(numbers))

    def _merged(self, numbers: IntArray) -> tuple[list[Moment], list[Answers]]:
        """Some rows, ascending, as one moment, and the answers to them, in new arrays."""
        index, moments, answers = self._index, self._kept.moments, self._kept.answers
        if not len(numbers):
            return [], []
        final, missing = index.final[numbers], index.missing[numbers]
        some, _ = _narrowed(moments, index.starts, numbers)
        names = [name for name in self.forms.rows if any(moment.column(name) is not None for moment in some)]
        columns: dict[str, Tree] = {name: self._tree(name, numbers) for name in names}
        if not names:  # rows that are counted alone
            columns["eps_id"] = self._eps_id(numbers)
        rows = _remains(columns, index.lane[numbers], index.tick[numbers], index.env_t[numbers], final, missing)
        lanes = self._answered
        answered = index.answer_of(lanes, self.num_lanes)[numbers]
        answered = answered[answered >= 0]
        if not len(answered):
            return [rows], []
        said, _ = _narrowed(answers, _starts(answers), answered)
        names = [name for name in self.forms.answers if any(part.leaves(name) is not None for part in said)]
        own = {name: self.forms.answers[name].fit(self._said(name, answered)) for name in names}
        return [rows], [Answers(lanes[answered], own)]

    # --- saved

    def get_state(self) -> State:
        """Return all rows and answers, as arrays that later calls do not change."""
        moments, answers = self._merged(np.arange(len(self)))
        none: dict[str, Tree] = {}
        index, forms = self._index, self.forms.answers
        rows: dict[str, Any] = {name: getattr(index, name).copy() for name in _ARRAYS}
        rows["eps_id"] = self._eps_id(np.arange(len(self)))
        columns = {name: column for name, column in moments[0].columns.items() if name != "eps_id"} if moments else none
        rows["columns"] = plain_columns(columns, "stored rows")
        said = {name: forms[name].tree(leaves) for name, leaves in answers[0].columns.items()} if answers else none
        return {
            "rows": rows,
            "answers": {
                "lane": answers[0].lanes if answers else np.zeros(0, np.int64),
                "columns": plain_columns(said, "stored answers"),
            },
        }

    def prepare(self, state: State, forms: ColumnForms | None = None) -> Callable[[], None]:
        """Validate a state from `get_state()`; return a function that installs it.

        ``forms``: the columns' forms at that time; None: the rows are counted alone.
        """
        where = "stored rows"
        check_fields(state, ("rows", "answers"), where)
        rows = check_fields(state["rows"], (*_ARRAYS, "eps_id", "columns"), where)
        answers = check_fields(state["answers"], ("lane", "columns"), where)
        size = len(array_field(rows, "lane", np.int64, (None,), where))
        arrays = {name: array_field(rows, name, dtype, (size,), where) for name, dtype in _ARRAYS.items()}
        eps_id = array_field(rows, "eps_id", np.int64, (size,), where)
        said_lanes = array_field(answers, "lane", np.int64, (None if forms else 0,), where)
        columns = columns_from(rows["columns"], size, where)
        said_columns = columns_from(answers["columns"], len(said_lanes), f"stored answers of {len(said_lanes)} in lane")
        forms, keeps_rows = self.forms if forms is None else forms, forms is not None
        wanted = (forms.rows.keys() if size and keeps_rows else set()) - LATE - {"eps_id"}
        if missing := sorted(wanted - columns.keys()):
            raise ArgumentError(f"{where}: the columns {missing} are missing")
        if missing := sorted((forms.answers.keys() if len(said_lanes) else set()) - LATE - said_columns.keys()):
            raise ArgumentError(f"{where}: answers to {len(said_lanes)} in lane lack the columns {missing}")
        leaves = forms.fit_saved(columns, where)
        columns = {**{name: forms.rows[name].tree(leaves[name]) for name in columns}, "eps_id": eps_id}
        new = RowLog(forms, self.num_lanes, self._memory)
        for lanes in (arrays["lane"], said_lanes):
            if len(lanes) and not 0 <= lanes.min() <= lanes.max() < self.num_lanes:
                raise ArgumentError(
                    f"{where}: lanes from {lanes.min()} to {lanes.max()}, and there are {self.num_lanes}"
                )
        moment = _remains(columns, *arrays.values())
        stored = [Answers(said_lanes, forms.fit_saved(said_columns, where))] if len(said_lanes) else []
        new._replace([moment] if size else [], stored)
        if keeps_rows:
            acted, said = (
                np.bincount(lanes, minlength=self.num_lanes) for lanes in (arrays["lane"][~arrays["final"]], said_lanes)
            )
            answered = new._index.answer_of(said_lanes, self.num_lanes) if (said <= acted).all() else np.full(size, -1)
            if (answered[new._index.after >= 0] < 0).any():
                raise ArgumentError(f"{where}: there are not as many answers as rows that were answered")

        def put() -> None:
            self.forms = forms
            self._replace(new._kept.moments, new._kept.answers)

        return put


_ARRAYS: dict[str, Any] = {
    **dict.fromkeys(("lane", "tick", "env_t"), np.int64),
    **dict.fromkeys(("final", "missing"), np.bool_),
}

"""`RowLog`: the rows and answers of all policies, in the order in which they came; a batch sorts them, once.

Where a policy's agents act at every step, `Block`, nothing is sorted, and large columns lie where its batch has them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

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
from marlvec.collect.rows import (
    DERIVED,
    UNREAD,
    Answers,
    BatchMemory,
    Block,
    Moment,
    PolicyAnswers,
    PolicyPart,
    PolicyRows,
    part_of,
)
from marlvec.connectors.rows import Later, with_later
from marlvec.errors import ArgumentError
from marlvec.serialization.saved import State, array_field, check_fields
from marlvec.trees import Tree, map_tree

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
AnyArray = NDArray[Any]
_OUTCOME, _UNUSED = names(Source.OUTCOME), names(Source.NONE)
_NOTHING: IntArray = np.zeros(0, np.int64)
EVERYTHING = (np.iinfo(np.int64).max, 0)
"""The (round, lane) of which all transitions are closed before."""

RowNumbers: TypeAlias = IntArray | range
"""Numbers of the log's rows, ascending; a range: all closed transitions, where all blocks are whole."""


# --- columns that are made when they are read


class Whole:
    """Makes a column as a whole, once, and rows of it, for columns that cost little beside `obs`."""

    __slots__ = ("_column", "_make")

    def __init__(self, make: Callable[[], Tree]) -> None:
        self._make, self._column = make, None

    def __call__(self, where: IntArray | None) -> Tree:
        column = self._column
        if column is None:
            self._column = column = self._make()
        return column if where is None else column.take(where, axis=0)


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


# --- which row follows which


class _Index:
    """All R rows of a log, numbered through, and the successor of each; see `Moment`.

    ``starts`` has the number of each moment's first row, then R.
    """

    def __init__(self, moments: Sequence[Moment], num_lanes: int) -> None:
        sizes = [len(moment.lanes) for moment in moments]
        self.starts = [0, *accumulate(sizes)]
        size = self.starts[-1]
        self.lane = joined([moment.lanes for moment in moments])
        self.env_t = joined([moment.env_t for moment in moments])
        self.eps_id = joined([moment.eps_id for moment in moments])
        ticks = [moment.ticks for moment in moments]
        self.tick = np.array([tick if isinstance(tick, int) else 0 for tick in ticks], np.int64).repeat(sizes)
        for start, tick in zip(self.starts, ticks, strict=False):
            if not isinstance(tick, int):  # remains of older moments, or envs in different rounds
                self.tick[start : start + len(tick)] = tick
        has_ends = np.array([moment.missing is not None for moment in moments], np.bool_).repeat(sizes)
        self.missing = np.zeros(size, np.bool_)
        self.missing[has_ends] = joined([moment.missing for moment in moments if moment.missing is not None])
        self.final = has_ends
        for start, moment in zip(self.starts, moments, strict=False):
            if not isinstance(moment.final, bool):  # remains of older moments, perhaps not all last rows
                self.final[start : start + len(moment.lanes)] = moment.final
        # (R,) row numbers by lane, then time
        self.is_by_time = all(moment.by_time for moment in moments)
        if self.is_by_time:
            self.order = self.lane.astype(_key_dtype(num_lanes)).argsort(kind="stable")
        else:  # ids of an env's episodes grow, and a policy's own rows are in order
            self.order = np.lexsort((self.eps_id, self.lane))
        sorted_lane = self.lane[self.order]
        has_next = np.zeros(size, np.bool_)
        has_next[:-1] = sorted_lane[1:] == sorted_lane[:-1]
        has_next &= ~self.final[self.order]
        at = has_next.nonzero()[0]
        self.after = np.full(size, -1)  # (R,) number of the row that closes a row's transition; -1: none
        self.after[self.order[at]] = self.order[at + 1]
        parts = [part for moment in moments for part in moment.parts]
        self.number = np.array([part.number for part in parts], np.int64).repeat([len(part.lanes) for part in parts])
        for start, moment in zip(self.starts, moments, strict=False):
            if moment.numbers is not None:
                self.number[start : start + len(moment.lanes)] = moment.numbers
        self._places: dict[int, IntArray] = {}

    def of(self, number: int) -> IntArray:
        """Each row's position among the rows of one policy, (R,), for rows that are its."""
        if (found := self._places.get(number)) is None:
            self._places[number] = found = np.cumsum(self.number == number) - 1
        return found

    def answer_of(self, answers: AnswerIndex) -> IntArray:
        """Return the number of each row's answer, (R,), -1: none."""
        found, given = np.full(len(self.lane), -1), len(answers.lane)
        is_decision = ~self.final & (self.number != UNREAD)
        decisions = is_decision.nonzero()[0]
        if not given or (
            np.array_equal(self.lane[decisions[:given]], answers.lane)
            and np.array_equal(self.number[decisions[:given]], answers.number)
        ):  # each moment was answered as it came
            found[decisions[:given]] = np.arange(given)
            return found
        # A policy's first rows in a lane are the answered ones, in the order of its answers there.
        decisions = np.lexsort((self.number, self.lane))
        decisions = decisions[is_decision[decisions]]
        key, said = self._key(self.lane[decisions], self.number[decisions]), self._key(answers.lane, answers.number)
        first = np.searchsorted(key, key)
        order = said.argsort(kind="stable")
        at = np.searchsorted(said[order], key) + np.arange(len(key)) - first
        is_answered = at < np.searchsorted(said[order], key, side="right")
        found[decisions[is_answered]] = order[at[is_answered]]
        return found

    def _key(self, lane: IntArray, number: IntArray) -> IntArray:
        most = int(self.number.max(initial=0)) + 1
        return lane * most + number


def joined(parts: Sequence[Any]) -> Any:
    """Concatenate arrays of integers or flags; of none, an empty one."""
    return np.concatenate(parts) if parts else _NOTHING


def _key_dtype(num_lanes: int) -> Any:
    # A stable sort of 16-bit keys is a radix sort.
    return np.uint16 if num_lanes <= np.iinfo(np.uint16).max else np.int64


class AnswerIndex:
    """All K answers of a log, numbered through: of each its lane, and its policy's number."""

    def __init__(self, answers: Sequence[Answers]) -> None:
        parts = [part for one in answers for part in one.parts]
        if all(one.lanes is None for one in answers[1:]) and (not answers or answers[0].lanes is None):
            sizes = [len(part.lanes) for part in parts]
            self.lane = joined([part.lanes for part in parts])
            self.number = np.array([part.number for part in parts], np.int64).repeat(sizes)
            return
        lanes, numbers = [], []
        for one in answers:
            if one.lanes is not None:
                lanes.append(one.lanes)
                numbers.append(one.numbers)
            else:
                lanes += [part.lanes for part in one.parts]
                numbers += [np.full(len(part.lanes), part.number) for part in one.parts]
        self.lane, self.number = joined(lanes), joined(numbers)

    def of(self, number: int) -> IntArray:
        """Each answer's position among the answers of one policy, (K,), for those that are its."""
        found: IntArray = np.cumsum(self.number == number) - 1
        return found


# --- the log


@dataclass(slots=True)
class _Kept:
    """The content of a log, in order of time; replaced as a whole when rows are dropped."""

    moments: list[Moment] = field(default_factory=list)
    answers: list[Answers] = field(default_factory=list)
    # By policy's number, where all rows that are kept are of blocks; empty: rows are stored as they come.
    blocks: dict[int, Block] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether the blocks can be read without sorting: they hold all rows but last ones and those behind them."""
        return len(self.blocks) > 0 and all(block.is_whole for block in self.blocks.values())


class _Ends(NamedTuple):
    """Last rows: the step after which they came, their lanes' places in the block, and the rows."""

    step: int
    places: IntArray
    part: PolicyPart
    missing: BoolArray
    env_t: IntArray


class RowLog:
    """Rows and answers of all policies.

    Ctrl-C may come at any line: moments, or answers, are made first and appended by one call; to drop rows, the rest
    is copied and replaces all by one store.

    Attributes:
        forms: Forms of the columns of each policy, by its number.
    """

    def __init__(self, num_lanes: int, agent_num: int, memory: BatchMemory | None = None) -> None:
        self.num_lanes, self._agent_num = num_lanes, agent_num
        self._memory = BatchMemory() if memory is None else memory
        self.forms: dict[int, ColumnForms] = {}
        self._kept = _Kept()
        self._last_index: tuple[_Kept, _Index] | None = None  # of which it is the index

    def __len__(self) -> int:
        """Number of stored rows."""
        return sum(len(moment.lanes) for moment in self._kept.moments)

    def size(self, number: int) -> int:
        """Number of stored rows of one policy, or of those that are not read."""
        return sum(len(part.lanes) for moment in self._kept.moments for part in moment.parts if part.number == number)

    # --- in

    def begin_blocks(self, length: int, waiting: Mapping[int, PolicyPart]) -> None:
        """The next ``length`` steps are of all these lanes, by policy, if only their rows are stored, and wait."""
        kept = self._kept
        if kept.answers or len(self) != sum(len(part.lanes) for part in waiting.values()):
            return
        if any(moment.missing is not None for moment in kept.moments):
            return
        self._memory.begin()
        blocks = {}
        for number, part in waiting.items():
            if np.count_nonzero(part.lanes[1:] <= part.lanes[:-1]):
                return
            try:
                blocks[number] = Block(number, part, length, self.forms[number], self._memory)
            except MemoryError:  # so much may be asked for that only an interrupt ends it
                return
        parts = [part for moment in kept.moments for part in moment.parts]
        if len(parts) != len(blocks) or not all(
            p.number in blocks and blocks[p.number].is_next(p.lanes) for p in parts
        ):
            return  # rows that wait since unlike moments
        for part in parts:
            block = blocks[part.number]
            if block.tables:
                part.columns, part.part = block.write(part.columns, part.part, self.forms[part.number]), None
            block.add(part)
        self._kept = _Kept(kept.moments, [], blocks)

    def append(self, moments: Sequence[Moment], owned: Collection[str] = ()) -> None:
        """Store rows behind the agent connectors, which close the transitions that led to them.

        The moments are the log's from now on. Last rows may lack columns that connectors add. Shared columns, which
        other code may write into later or connectors have made, are checked, and copied; the other arrays are stored as
        they are. Where large columns are written to where a batch has them, policies get the arrays that came; the
        ``owned`` ones are in no other code's hands.
        """
        kept = self._kept
        for moment in moments:
            is_last, blocks = moment.missing is not None, kept.blocks
            for part in moment.parts:
                number, columns = part.number, part.columns
                block = blocks.get(number) if blocks else None
                if blocks and (block is None or not (is_last or block.is_next(part.lanes))):
                    kept.blocks = blocks = {}
                if number == UNREAD:
                    continue
                forms = self.forms[number]
                if is_last or columns.keys() != forms.rows.keys():
                    forms.check_rows(columns, final=is_last)
                if not blocks or is_last or block is None or block.steps == block.length:
                    if part.shared:
                        self._own(part, part.shared, forms)
                    continue
                tables = block.tables
                if part.shared:
                    self._own(part, [name for name in part.shared if name not in tables], forms)
                if tables:
                    came = part.columns, part.part
                    part.columns, part.part = block.write(*came, forms), None
                    if not part.shared:
                        part.spare = PolicyRows(*came, len(part.lanes), owned)
        if kept.blocks:
            for moment in moments:
                if moment.missing is None:
                    for part in moment.parts:
                        kept.blocks[part.number].add(part)
        kept.moments.extend(moments)

    def _own(self, part: PolicyPart, names: Collection[str], forms: ColumnForms) -> None:
        """Copy some columns, once each was found to have its form."""
        columns = dict(part.columns)
        for name in names:
            if name in columns:
                form, column = forms.rows.get(name), columns[name]
                if form is None:  # of last rows, before any other rows have it
                    columns[name] = map_tree(np.array, column)
                else:
                    columns[name] = form.tree([leaf.copy() for leaf in form.fit(column)])
        part.columns = columns

    def answer(self, parts: Sequence[PolicyAnswers]) -> None:
        """Store what policies answered to these lanes' last rows: what `ColumnForms.check_answer` returned, of each.

        The leaves are the log's from now on.
        """
        kept = self._kept
        if kept.blocks:
            for part in parts:
                block = kept.blocks[part.number]
                if not block.said == block.steps - 1 < block.length or len(part.lanes) != len(block.lanes):
                    kept.blocks = {}
                    break
                block.said += 1
        kept.answers.append(Answers(parts))

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
            return range(sum(len(block.lanes) * block.length for block in kept.blocks.values()))
        index = self._index
        numbers = (index.after >= 0).nonzero()[0]
        return numbers if eps_ids is None else numbers[np.isin(index.eps_id[numbers], eps_ids)]

    def counts(self, numbers: RowNumbers) -> dict[int, int]:
        """How many of some rows each policy has, where it has any; under `UNREAD` those that are not read."""
        if isinstance(numbers, range):
            return {number: len(block.lanes) * block.length for number, block in self._kept.blocks.items()}
        found = np.bincount(self._index.number[numbers] - UNREAD).tolist()
        return {number + UNREAD: count for number, count in enumerate(found) if count}

    def has_closed(self, number: int) -> bool:
        """Whether a policy has transitions whose outcome is known."""
        return number in self.counts(self.closed())

    def of_episodes(self, eps_ids: IntArray) -> IntArray:
        """Numbers of all rows of some episodes, last rows and rows that wait for an action included."""
        found: IntArray = np.isin(self._index.eps_id, eps_ids).nonzero()[0]
        return found

    def without(self, numbers: RowNumbers, eps_ids: Collection[int]) -> RowNumbers:
        """Drop the rows of these episodes from some row numbers."""
        if not eps_ids or not len(numbers):
            return numbers
        numbers = self._numbers(numbers)
        return numbers[~np.isin(self._index.eps_id[numbers], list(eps_ids))]

    def _numbers(self, numbers: RowNumbers) -> IntArray:
        return (self._index.after >= 0).nonzero()[0] if isinstance(numbers, range) else numbers

    def closing_order(self, numbers: RowNumbers) -> tuple[IntArray, IntArray]:
        """Round in which each transition was closed, and its lane."""
        index, numbers = self._index, self._numbers(numbers)
        return index.tick[index.after[numbers]], index.lane[numbers]

    def closed_until(self, last: tuple[int, int]) -> RowNumbers:
        """Numbers of the rows whose transitions were closed up to this (round, lane)."""
        if last is EVERYTHING:
            return self.closed()
        numbers = self._numbers(self.closed())
        rounds, lanes = self.closing_order(numbers)
        found: IntArray = numbers[(rounds < last[0]) | ((rounds == last[0]) & (lanes <= last[1]))]
        return found

    def last_of_first(self, amount: int) -> tuple[int, int]:
        """Round and lane of the last of the ``amount`` transitions that were closed first: by round, env and agent."""
        rounds, lanes = self.closing_order(self.closed())
        last = np.lexsort((lanes, rounds))[amount - 1]
        return int(rounds[last]), int(lanes[last])

    @property
    def open_lanes(self) -> IntArray:
        """Lanes with a row that waits for an action, or for its outcome; ascending."""
        index = self._index
        return np.sort(index.lane[(index.after < 0) & ~index.final])

    # --- out

    def begin_batch(self, numbers: RowNumbers) -> None:
        """A batch of these rows is to be read, policy by policy."""
        if not isinstance(numbers, range):  # else `begin_blocks` has said so
            self._memory.begin()

    def read(self, number: int, numbers: RowNumbers, unroll_id: int) -> tuple[dict[str, Tree], int]:
        """Return columns of one policy's rows among some `closed` ones, by env, agent and time.

        A fragment is a stretch of one agent's episode; ``unroll_id`` is the first one's number. Also returns that of
        the fragment after the last one.
        """
        if isinstance(numbers, range):
            block = self._kept.blocks[number]
            columns = self._read_block(block)
            starts = np.zeros(len(block.lanes) * block.length, np.bool_)
            starts[:: block.length] = True  # where the next lane begins
        else:
            columns, lane = self._read_sorted(number, numbers)
            starts = np.zeros(len(lane), np.bool_)
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

    # --- out of a block

    def _read_block(self, block: Block) -> dict[str, Tree]:
        """Return the columns of all closed transitions of a whole block."""
        forms, lanes, steps = self.forms[block.number], block.lanes, block.length
        size, rows, ends = len(lanes) * steps, [], []
        env_ts, eps_ids = [], []
        for moment in self._kept.moments:
            start = 0
            for part in moment.parts:
                own: slice | IntArray = slice(start, start + len(part.lanes))
                start += len(part.lanes)
                if part.number != block.number:
                    continue
                if moment.numbers is not None:
                    own = (moment.numbers == block.number).nonzero()[0]
                if moment.missing is None:
                    rows.append(part)
                    env_ts.append(moment.env_t[own])
                    eps_ids.append(moment.eps_id[own])
                else:
                    places = lanes.searchsorted(part.lanes)
                    ends.append(_Ends(len(rows) - 1, places, part, moment.missing[own], moment.env_t[own]))

        def next_env_t() -> AnyArray:
            out = self._table(env_ts[1:])
            for end in ends:
                out[end.places, end.step] = end.env_t
            return _as_rows(out)

        columns: dict[str, Any] = {
            "env_id": Later(size, Whole(lambda: np.repeat(lanes // self._agent_num, steps))),
            "agent_index": Later(size, Whole(lambda: np.repeat(lanes % self._agent_num, steps))),
            "eps_id": _as_rows(self._table(eps_ids[:-1])),
        }
        for name, form in forms.rows.items():
            if name in _UNUSED or name in DERIVED:
                continue
            table = block.tables.get(name)
            if table is not None:
                columns[name] = _as_rows(table[0])
                continue
            if name in _LATER and form.dtype is not None:
                arrays = [leaf for (leaf,) in _columns(rows[:-1], form)]
                columns[name] = Later(size, Whole(partial(self._column_of, arrays)))
                continue
            is_outcome = name in _OUTCOME
            leaves = self._tables(form, rows[1:] if is_outcome else rows[:-1])
            if is_outcome:
                _put_ends(form, leaves, ends)
            columns[name] = form.tree([_as_rows(leaf) for leaf in leaves])
        for name in forms.followed:
            columns[f"next_{name}"] = self._next_in_block(block, forms.rows[name], columns[name], ends)
        missing = np.zeros((len(lanes), steps), np.bool_)
        for end in ends:
            missing[end.places, end.step] = end.missing
        columns["next_obs_missing"] = _as_rows(missing)
        columns["env_t"] = Later(size, Whole(partial(self._column_of, env_ts[:-1])))
        columns["next_env_t"] = Later(size, Whole(next_env_t))
        answers = self._answers_of(block.number)
        for k, (name, form) in enumerate(forms.answers.items()):
            parts = _said(answers, k, form)
            if name in _LATER and form.dtype is not None:
                arrays = [leaf for (leaf,) in parts]
                columns[name] = Later(size, Whole(partial(self._column_of, arrays)))
            else:
                columns[name] = form.tree([_as_rows(self._table(leaf)) for leaf in zip(*parts, strict=True)])
        return columns

    def _tables(self, form: ColumnForm, parts: Sequence[PolicyPart]) -> list[AnyArray]:
        """A column of T steps' rows, per leaf (L, T, …)."""
        name = form.name
        if name in _FLAGS and form.dtype == np.bool_ and all(p.columns.get(name) is p.columns["last"] for p in parts):
            return [np.zeros((len(parts[0].lanes), len(parts)), np.bool_)]  # of rows that an agent acts on
        return [self._table(leaves) for leaves in zip(*_columns(parts, form), strict=True)]

    def _table(self, parts: Sequence[AnyArray]) -> AnyArray:
        """T arrays (L, …) as one (L, T, …)."""
        first, steps = parts[0], len(parts)
        out = self._memory.empty((len(first), steps, *first.shape[1:]), first.dtype)
        if first.ndim == 1 or first.nbytes < _SMALL:  # narrow rows that are next to each other are sorted at once
            out[...] = np.concatenate(parts).reshape(steps, *first.shape).swapaxes(0, 1)
        else:
            for t, part in enumerate(parts):
                out[:, t] = part
        return out

    def _column_of(self, parts: Sequence[AnyArray]) -> AnyArray:
        return _as_rows(self._table(parts))

    def _next_in_block(self, block: Block, form: ColumnForm, column: Tree, ends: Sequence[_Ends]) -> Later:
        """A column of the row that comes after each row of a block, made of the batch's column when it is read."""
        steps, own = block.length, form.fit(column)
        assert block.behind is not None
        lasts = _columns([block.behind], form)
        places = [np.arange(steps - 1, len(block.lanes) * steps, steps)]
        for end in ends:
            at, [leaves] = end.places * steps + end.step, _columns([end.part], form)
            if form.name == "obs" and np.count_nonzero(end.missing):
                leaves = [np.array(leaf) for leaf in leaves]
                for leaf, table in zip(leaves, own, strict=True):
                    leaf[end.missing] = table[at[end.missing]]
            lasts.append(leaves)
            places.append(at)
        where = np.concatenate(places)
        order = where.argsort(kind="stable")
        order = order[np.append(where[order[1:]] != where[order[:-1]], True)]  # an end counts, not the row behind it
        leaves = [np.concatenate(parts).take(order, axis=0) for parts in zip(*lasts, strict=True)]
        return Later(len(block.lanes) * steps, Followers(form, own, where[order], leaves, self._memory))

    # --- out, sorted

    def _read_sorted(self, number: int, numbers: IntArray) -> tuple[dict[str, Tree], IntArray]:
        index, forms = self._index, self.forms[number]
        wanted = np.zeros(len(index.lane), np.bool_)
        wanted[numbers] = True
        wanted &= index.number == number
        numbers = index.order[wanted[index.order]]
        after = index.after[numbers]
        missing, lane = index.missing[after], index.lane[numbers]
        places = index.of(number)
        rows, following = places[numbers], places[after]
        parts = self._parts_of(number)
        columns: dict[str, Any] = {**self._derived(lane), "eps_id": index.eps_id[numbers]}
        is_other = np.ones(len(numbers), np.bool_)
        is_other[:-1] = (after[:-1] != numbers[1:]) | missing[:-1]
        others, followed = is_other.nonzero()[0], forms.followed
        for name, form in forms.rows.items():
            if name in _UNUSED or name in DERIVED:
                continue
            if name in _LATER and form.dtype is not None:
                columns[name] = self._taken_later([leaf for (leaf,) in _columns(parts, form)], rows)
                continue
            whole = _whole(parts, form)
            own = self._take(whole, following if name in _OUTCOME else rows)
            columns[name] = form.tree(own)
            if name in followed:
                at = (np.where(missing, rows, following) if name == "obs" else following)[others]
                leaves = [leaf.take(at, axis=0) for leaf in whole]
                columns[f"next_{name}"] = Later(len(numbers), Followers(form, own, others, leaves, self._memory))
        columns["next_obs_missing"] = missing
        columns["env_t"], columns["next_env_t"] = (self._taken_later([index.env_t], at) for at in (numbers, after))
        said = AnswerIndex(self._kept.answers)
        answers = said.of(number)[index.answer_of(said)[numbers]]
        given = self._answers_of(number)
        for k, (name, form) in enumerate(forms.answers.items()):
            if name in _LATER and form.dtype is not None:
                columns[name] = self._taken_later([leaf for (leaf,) in _said(given, k, form)], answers)
            else:
                columns[name] = self._answered(k, form, given, answers)
        return columns, lane

    def _taken_later(self, parts: Sequence[AnyArray], rows: IntArray) -> Later:
        """A column of some rows of these arrays, one after the other, that is made when it is read."""
        return Later(len(rows), Whole(lambda: self._take([np.concatenate(parts)], rows)[0]))

    def _derived(self, lane: IntArray) -> dict[str, Tree]:
        return {"env_id": lane // self._agent_num, "agent_index": lane % self._agent_num}

    def _parts_of(self, number: int) -> list[PolicyPart]:
        return [part for moment in self._kept.moments for part in moment.parts if part.number == number]

    def _answers_of(self, number: int) -> list[PolicyAnswers]:
        return [part for answers in self._kept.answers for part in answers.parts if part.number == number]

    def _tree(self, form: ColumnForm, parts: Sequence[PolicyPart], rows: IntArray) -> Tree:
        """Return one column of some of a policy's rows."""
        return form.tree(self._take(_whole(parts, form), rows))

    def _answered(self, k: int, form: ColumnForm, parts: Sequence[PolicyAnswers], rows: IntArray) -> Tree:
        """Return one column of some of a policy's answers."""
        return form.tree(self._take(_concatenated(_said(parts, k, form), form), rows))

    def _take(self, whole: Leaves, numbers: IntArray) -> Leaves:
        """Rows of leaves, as new arrays: per leaf (n, …)."""
        out = []
        for leaf in whole:
            found = self._memory.empty((len(numbers), *leaf.shape[1:]), leaf.dtype)
            # With another mode numpy takes into an array of its own first.
            out.append(leaf.take(numbers, axis=0, out=found, mode="clip"))
        return out

    # --- dropping

    def forget(self, numbers: RowNumbers) -> None:
        """Drop the first closed transitions of each lane, delivered or lost, and last rows that nothing leads to."""
        if isinstance(numbers, range):
            behind = [id(block.behind) for block in self._kept.blocks.values()]
            self._kept = _Kept([m for m in self._kept.moments if m.parts and id(m.parts[0]) in behind])
            return
        if not len(numbers):
            return
        index = self._index
        keep = ~index.final
        keep[numbers] = False
        after = index.after[keep]
        keep[after[after >= 0]] = True
        self._keep(keep.nonzero()[0])

    def lose(self, eps_ids: IntArray) -> int:
        """Drop all rows of some episodes; return how many transitions of them were closed."""
        closed = len(self.closed(eps_ids))
        self.forget(self.of_episodes(eps_ids))
        return closed

    def keep_ended(self, ended_N: IntArray) -> int:
        """Drop all rows but those of episodes with ids below their env's, (N,); return how many transitions stay."""
        index = self._index
        self._keep((index.eps_id < ended_N[index.lane // self._agent_num]).nonzero()[0])
        return len(self.closed())

    def clear(self) -> None:
        """Drop everything; the columns' forms stay known."""
        self._kept = _Kept()

    def _keep(self, numbers: IntArray) -> None:
        """Keep some rows, ascending, and the answers to them, in new arrays."""
        index, kept = self._index, self._kept
        if not len(numbers):
            self._kept = _Kept()
            return
        said = AnswerIndex(kept.answers)
        answered = index.answer_of(said)[numbers]
        if not index.is_by_time:
            order = index.order[np.isin(index.order, numbers)]
            numbers, answered = order, index.answer_of(said)[order]
        final, missing = index.final[numbers], index.missing[numbers]
        has_ends = np.count_nonzero(final) > 0
        if not has_ends:  # answered ones first: so each answer is found without sorting
            order = np.argsort(answered < 0, kind="stable")
            numbers, answered = numbers[order], answered[order]
        answered = answered[answered >= 0]
        owners, parts, answers = index.number[numbers], [], []
        for number in np.unique(owners).tolist():
            own = numbers[owners == number]
            if number == UNREAD:
                parts.append(PolicyPart(UNREAD, index.lane[own], {}))
                continue
            parts.append(PolicyPart(number, index.lane[own], self._stored_columns(number, own)))
            mine = answered[said.number[answered] == number]
            if len(mine):
                answers.append(self._merged_answers(number, said, mine))
        moment = Moment(
            index.lane[numbers],
            index.tick[numbers],
            index.env_t[numbers],
            index.eps_id[numbers],
            final if has_ends else False,
            missing if has_ends else None,
            parts,
            owners,
        )
        there = [Answers(answers, said.lane[answered], said.number[answered])] if answers else []
        self._kept = _Kept([moment], there)

    def _stored_columns(self, number: int, own: IntArray) -> dict[str, Tree]:
        """Columns of some of a policy's rows, but for those that follow from what the log knows of each row."""
        parts, rows = _narrowed(self._parts_of(number), self._index.of(number)[own])
        return {
            name: self._tree(form, parts, rows)
            for name, form in self.forms[number].rows.items()
            if name not in DERIVED and any(name in part.columns for part in parts)
        }

    def _merged_answers(self, number: int, said: AnswerIndex, own: IntArray) -> PolicyAnswers:
        """Some of a policy's answers as one; columns that none of them has stay out."""
        given, rows = _narrowed(self._answers_of(number), said.of(number)[own])
        leaves: list[Leaves | None] = []
        for k, form in enumerate(self.forms[number].answers.values()):
            is_there = any(k < len(part.leaves) and part.leaves[k] is not None for part in given)
            leaves.append(form.fit(self._answered(k, form, given, rows)) if is_there else None)
        return PolicyAnswers(number, said.lane[own], leaves)

    # --- saved

    def get_state(self, number: int) -> State:
        """Return all rows and answers of one policy, or of those not read, as arrays that later calls do not change.

        By round, last rows first, and lane: so equal logs have equal states, whatever they have dropped and loaded.
        """
        index = self._index
        numbers = (index.number == number).nonzero()[0]
        numbers = numbers[np.lexsort((index.lane[numbers], ~index.final[numbers], index.tick[numbers]))]
        rows: dict[str, Any] = {name: getattr(index, name)[numbers] for name in _ARRAYS}
        rows["eps_id"] = index.eps_id[numbers]
        columns: dict[str, Tree] = {}
        answers: dict[str, Tree] = {}
        said = AnswerIndex(self._kept.answers)
        own = index.answer_of(said)[numbers]
        own = own[own >= 0]
        if number != UNREAD:
            forms, derived = self.forms[number], self._derived(index.lane[numbers])
            stored = self._stored_columns(number, numbers) | derived
            columns = {name: stored[name] for name in forms.rows if name in stored}
        if len(own):
            pairs = zip(forms.answers.items(), self._merged_answers(number, said, own).leaves, strict=True)
            answers = {name: form.tree(leaves) for (name, form), leaves in pairs if leaves is not None}
        rows["columns"] = plain_columns(columns, "stored rows")
        said_columns = plain_columns(answers, "stored answers")
        return {"rows": rows, "answers": {"lane": said.lane[own], "columns": said_columns}}

    def prepare(self, states: Mapping[int, tuple[State, ColumnForms | None]]) -> Callable[[], None]:
        """Validate states from `get_state()`, each with the columns' forms of that time; None: rows counted alone.

        Returns a function that replaces all that is stored by theirs.
        """
        found = {number: self._stored(number, state, forms) for number, (state, forms) in states.items()}

        def put() -> None:
            for number, (_, forms) in states.items():
                if forms is not None:
                    self.forms[number] = forms
            self._kept = _together([one for one in found.values() if one.moments])

        return put

    def _stored(self, number: int, state: State, forms: ColumnForms | None) -> _Kept:
        """One policy's rows and answers out of a state."""
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
        keeps_rows = forms is not None
        if forms is None:
            forms = ColumnForms("rows that are not read")
        wanted = (forms.rows.keys() if size and keeps_rows else set()) - LATE - {"eps_id"}
        if missing := sorted(wanted - columns.keys()):
            raise ArgumentError(f"{where}: the columns {missing} are missing")
        if missing := sorted((forms.answers.keys() if len(said_lanes) else set()) - LATE - said_columns.keys()):
            raise ArgumentError(f"{where}: answers to {len(said_lanes)} in lane lack the columns {missing}")
        leaves = forms.fit_saved(columns, where)
        columns = {name: forms.rows[name].tree(leaves[name]) for name in columns if name not in DERIVED}
        for lanes in (arrays["lane"], said_lanes):
            if len(lanes) and not 0 <= lanes.min() <= lanes.max() < self.num_lanes:
                raise ArgumentError(
                    f"{where}: lanes from {lanes.min()} to {lanes.max()}, and there are {self.num_lanes}"
                )
        if not size:
            if len(said_lanes):
                raise ArgumentError(f"{where}: there are not as many answers as rows that were answered")
            return _Kept()
        lane, tick, env_t, final, lacks = arrays.values()
        has_ends = np.count_nonzero(final) > 0
        part = PolicyPart(number, lane, columns)
        moment = Moment(lane, tick, env_t, eps_id, final if has_ends else False, lacks if has_ends else None, [part])
        stored = _Kept([moment])
        if keeps_rows:
            index = _Index(stored.moments, self.num_lanes)
            acted, said = (np.bincount(lanes, minlength=self.num_lanes) for lanes in (lane[~final], said_lanes))
            said_leaves = forms.fit_saved(said_columns, where)
            if len(said_lanes):
                one = PolicyAnswers(number, said_lanes, [said_leaves.get(name) for name in forms.answers])
                stored.answers.append(Answers([one]))
            given = AnswerIndex(stored.answers)
            answered = index.answer_of(given) if (said <= acted).all() else np.full(size, -1)
            if (answered[index.after >= 0] < 0).any():
                raise ArgumentError(f"{where}: there are not as many answers as rows that were answered")
        return stored


def _together(parts: Sequence[_Kept]) -> _Kept:
    """Rows of several policies, each of one moment, policy after policy."""
    if len(parts) < 2:
        return parts[0] if parts else _Kept()
    moments = [part.moments[0] for part in parts]
    sizes = [len(moment.lanes) for moment in moments]
    final, missing = np.zeros((2, sum(sizes)), np.bool_)
    start = 0
    for moment, size in zip(moments, sizes, strict=True):
        if moment.missing is not None:
            final[start : start + size], missing[start : start + size] = moment.final, moment.missing
        start += size
    has_ends = np.count_nonzero(final) > 0
    whole = Moment(
        joined([moment.lanes for moment in moments]),
        joined([moment.ticks for moment in moments]),
        joined([moment.env_t for moment in moments]),
        joined([moment.eps_id for moment in moments]),
        final if has_ends else False,
        missing if has_ends else None,
        [moment.parts[0] for moment in moments],
        by_time=False,
    )
    return _Kept([whole], [answer for part in parts for answer in part.answers])


_ARRAYS: dict[str, Any] = {
    **dict.fromkeys(("lane", "tick", "env_t"), np.int64),
    **dict.fromkeys(("final", "missing"), np.bool_),
}
_FLAGS = ("terminated", "truncated")
_LATER = ("t", "actions_for_env", VERSION)  # columns that few learners read, and that hold little
_SMALL = 1 << 16  # bytes of one step's rows


def _columns(parts: Sequence[PolicyPart], form: ColumnForm) -> list[Leaves]:
    """The leaves of a column, part by part; blank ones where rows came before the column."""
    name = form.name
    if form.dtype is not None:
        with suppress(KeyError):
            return [[p.columns[name] if p.part is None else p.columns[name][p.part]] for p in parts]
    found = []
    for part in parts:
        column = part.columns.get(name)
        found.append(form.blanks(len(part.lanes)) if column is None else form.fit(part_of(column, part.part)))
    return found


def _whole(parts: Sequence[PolicyPart], form: ColumnForm) -> Leaves:
    """The leaves of a column, of all rows."""
    name = form.name
    if name in _FLAGS and form.dtype == np.bool_:
        sizes = [len(part.lanes) for part in parts]
        found = np.zeros(sum(sizes), np.bool_)  # as in rows that an agent acts on, nearly always
        for stop, size, part in zip(accumulate(sizes), sizes, parts, strict=True):
            if (column := part.columns[name]) is not part.columns.get("last"):
                found[stop - size : stop] = part_of(column, part.part)
        return [found]
    return _concatenated(_columns(parts, form), form)


def _concatenated(parts: Sequence[Leaves], form: ColumnForm) -> Leaves:
    if len(parts) < 2:
        return parts[0] if parts else form.room(0)
    if form.dtype is not None:
        return [np.concatenate([leaf for (leaf,) in parts])]
    return [np.concatenate(leaves) for leaves in zip(*parts, strict=True)]


def _said(parts: Sequence[PolicyAnswers], k: int, form: ColumnForm) -> list[Leaves]:
    """The leaves of the k-th column of answers, part by part; blank ones where these came before the column."""
    if len(parts) and len(parts[0].leaves) > k and all(part.leaves[k] is not None for part in parts):
        return [part.leaves[k] for part in parts]  # type: ignore[misc]  # none is None
    found = []
    for part in parts:
        leaves = part.leaves[k] if k < len(part.leaves) else None
        found.append(form.blanks(len(part.lanes)) if leaves is None else leaves)
    return found


def _narrowed(parts: Sequence[Any], numbers: IntArray) -> tuple[Sequence[Any], IntArray]:
    """The parts from that of the first number on, and the numbers there: what is kept of a log is at its end."""
    starts = [0, *accumulate(len(part.lanes) for part in parts)]
    first = bisect_right(starts, int(numbers.min(initial=starts[-1] - 1))) - 1
    return (parts[first:], numbers - starts[first]) if first > 0 else (parts, numbers)


def _put_ends(form: ColumnForm, tables: Sequence[AnyArray], ends: Sequence[_Ends]) -> None:
    """What last rows say of the transitions that they close."""
    for end in ends:
        for table, leaf in zip(tables, _columns([end.part], form)[0], strict=True):
            table[end.places, end.step] = leaf


def _as_rows(table: AnyArray) -> AnyArray:
    """View an array (L, T, …) as (L * T, …)."""
    return table.reshape(table.shape[0] * table.shape[1], *table.shape[2:])

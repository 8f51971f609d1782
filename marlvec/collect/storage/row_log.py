"""`RowLog`: one policy's rows and answers as they came; what belongs together is found when a batch is read.

A *lane* is one (env, agent): number ``env * A + agent``. Rows of a lane stand in order of time. A transition runs from
a row that an agent acted on to the lane's next row: its next turn, or its end. One stable sort by lane gives the links,
and the order of a batch (env, agent, time), at the same time. The k-th answer of a lane is that to its k-th row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.storage.batch_memory import BatchMemory
from marlvec.collect.storage.columns import ColumnForm, ColumnForms, Leaves, order_columns
from marlvec.connectors import Rows
from marlvec.env_ids import Where
from marlvec.trees import Tree

__all__ = ["RowLog"]

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
AnyArray = NDArray[Any]

_UNREAD = {"first", "last"}
_OUTCOME = ("rewards", "terminated", "truncated", "first", "last")  # of a transition those of its second row


@dataclass(slots=True)
class _Moment:
    """Rows that came together, or what is left of older ones; in order of time where a lane has several.

    Attributes:
        lanes: (n,) whose they are.
        ticks: (n,) the rounds they came in.
        env_t: (n,) env steps that their episodes had made by then.
        final: (n,) which are last rows.
        missing: (n,) which of those have no observation of their own.
        columns: Leaves (n, …) of each column; last rows may lack what connectors add.
    """

    lanes: IntArray
    ticks: IntArray
    env_t: IntArray
    final: BoolArray
    missing: BoolArray
    columns: dict[str, Leaves]


@dataclass(slots=True)
class _Answers:
    """What was decided about rows, and for which lanes; in order of time where a lane has several."""

    lanes: IntArray
    columns: dict[str, Leaves]


class _Index:
    """All rows of a log in one line, and how they follow each other.

    Attributes:
        lane, tick, env_t, final, missing: (R,) as in `_Moment`.
        order: (R,) row numbers by lane, then time.
        after: (R,) number of the row that closes a row's transition; -1: none.
        answer: (R,) number of the answer to a row; -1: none.
        row_starts, answer_starts: Number of the first row of each moment, and of the first answer of each call.
    """

    def __init__(self, moments: list[_Moment], answers: list[_Answers], num_lanes: int) -> None:
        def joined(name: str, dtype: Any) -> AnyArray:
            return np.concatenate([np.zeros(0, dtype), *(getattr(moment, name) for moment in moments)])

        self.lane, self.tick, self.env_t = (joined(name, np.int64) for name in ("lanes", "ticks", "env_t"))
        self.final, self.missing = joined("final", np.bool_), joined("missing", np.bool_)
        # A stable sort of 16-bit keys is a radix sort.
        kind = np.uint16 if num_lanes <= np.iinfo(np.uint16).max else np.int64
        self.order = np.argsort(self.lane.astype(kind), kind="stable")
        sorted_lane = self.lane[self.order]
        has_next = np.zeros(len(self.order), np.bool_)
        has_next[:-1] = sorted_lane[1:] == sorted_lane[:-1]
        has_next &= ~self.final[self.order]
        at = np.flatnonzero(has_next)
        self.after = np.full(len(self.order), -1)
        self.after[self.order[at]] = self.order[at + 1]
        self.answer = self._matched(answers, kind, num_lanes)
        self.row_starts, self.answer_starts = _starts(moments), _starts(answers)

    def _matched(self, answers: list[_Answers], kind: Any, num_lanes: int) -> IntArray:
        found = np.full(len(self.lane), -1)
        lanes = np.concatenate([np.zeros(0, np.int64), *(answer.lanes for answer in answers)])
        decisions = np.flatnonzero(~self.final)
        own = self.lane[decisions]
        if np.array_equal(own[: len(lanes)], lanes):  # each moment was answered as it came
            found[decisions[: len(lanes)]] = np.arange(len(lanes))
            return found
        decisions = self.order[~self.final[self.order]]  # by lane; each lane's first ones are those answered
        counts, starts = np.bincount(lanes, minlength=num_lanes), np.zeros(num_lanes, np.int64)
        np.cumsum(np.bincount(own, minlength=num_lanes)[:-1], out=starts[1:])
        is_answered = np.arange(len(decisions)) - starts[self.lane[decisions]] < counts[self.lane[decisions]]
        found[decisions[is_answered]] = np.argsort(lanes.astype(kind), kind="stable")
        return found


def _starts(parts: Sequence[_Moment | _Answers]) -> list[int]:
    return [0, *accumulate(len(part.lanes) for part in parts)]


class RowLog:
    """Rows and answers of one policy, appended to as they come.

    Ctrl-C may come at any line: rows and answers are built first and appended by one call; what drops some builds a new
    moment, and puts it in the place of all by one assignment.

    Args:
        forms: The columns' forms.
        num_lanes: N × A.
        memory: What makes the arrays of batches.

    Attributes:
        forms: As given.
        is_open_L: (L,) bool, a row of the lane waits for an action or for its outcome; for reading.
    """

    def __init__(self, forms: ColumnForms, num_lanes: int, memory: BatchMemory) -> None:
        self.forms, self._memory, self._num_lanes = forms, memory, num_lanes
        self._kept: tuple[list[_Moment], list[_Answers]] = ([], [])
        self.is_open_L = np.zeros(num_lanes, np.bool_)

    def __len__(self) -> int:
        return sum(len(moment.lanes) for moment in self._kept[0])

    # --- in

    def append(
        self,
        rows: Rows,
        lanes: IntArray,
        places: Where,
        tick: IntArray | int,
        env_t: IntArray,
        missing: BoolArray | None = None,
    ) -> int:
        """Store rows, and close the transitions that led to them.

        Args:
            rows: n rows behind the agent connectors.
            lanes: (n,) whose rows they are; ascending.
            places: The same as an index.
            tick: (n,) the rounds they came in, or that of all.
            env_t: (n,) env steps that their episodes had made by then.
            missing: None where an agent is to act on them. Else they are last rows, which may lack what connectors add;
                (n,) which of them have no observation of their own, so that the one there does not count.

        Returns:
            How many transitions were closed.

        Raises:
            ContractError: A column is missing, new, or has changed its form.
        """
        is_last, n = missing is not None, len(lanes)
        self.forms.check_rows(rows, final=is_last)
        columns = {
            name: [leaf.copy() for leaf in form.fit(rows[name])]
            for name, form in self.forms.rows.items()
            if name in rows and name not in _UNREAD
        }
        moment = _Moment(
            lanes,
            np.full(n, tick) if np.ndim(tick) == 0 else np.array(tick),
            np.array(env_t),
            np.full(n, is_last),
            np.zeros(n, np.bool_) if missing is None else missing.copy(),
            columns,
        )
        closed = int(np.count_nonzero(self.is_open_L[places]))
        self._kept[0].append(moment)
        self._forget_index()
        self.is_open_L[places] = not is_last
        return closed

    def answer(self, lanes: IntArray, parts: list[Leaves]) -> None:
        """Write down what the policy answered to these lanes' last rows: what `ColumnForms.check_answer` returned."""
        columns = {
            name: [leaf.copy() for leaf in leaves] for name, leaves in zip(self.forms.answers, parts, strict=True)
        }
        self._kept[1].append(_Answers(lanes, columns))
        self._forget_index()

    # --- looking

    @cached_property
    def _index(self) -> _Index:
        return _Index(*self._kept, self._num_lanes)

    def _forget_index(self) -> None:
        vars(self).pop("_index", None)

    def closed(self, eps_ids: IntArray | None = None) -> IntArray:
        """Numbers of the rows whose transitions' outcome is known, of all episodes or of some; ascending."""
        numbers = np.flatnonzero(self._index.after >= 0)
        return numbers if eps_ids is None else numbers[np.isin(self._eps_id(numbers), eps_ids)]

    def of_episodes(self, eps_ids: IntArray) -> IntArray:
        """Numbers of all rows of some episodes, ends and rows that wait for an action included; ascending."""
        numbers = np.arange(len(self))
        return numbers[np.isin(self._eps_id(numbers), eps_ids)]

    def without(self, numbers: IntArray, eps_ids: Collection[int]) -> IntArray:
        """Those of some rows that are of none of these episodes."""
        return numbers[~np.isin(self._eps_id(numbers), list(eps_ids))] if eps_ids else numbers

    def _eps_id(self, numbers: IntArray) -> IntArray:
        found: IntArray = self._take("eps_id", numbers)[0] if len(numbers) else np.zeros(0, np.int64)
        return found

    def closing_order(self, numbers: IntArray) -> tuple[IntArray, IntArray]:
        """Tick at which each transition was closed, and its lane."""
        index = self._index
        return index.tick[index.after[numbers]], index.lane[numbers]

    # --- out

    def read(self, numbers: IntArray, unroll_id: int) -> tuple[dict[str, Tree], int]:
        """Columns of transitions, ordered by env, agent and time.

        Args:
            numbers: Some of `closed`, ascending; at least one.
            unroll_id: Number of the first fragment, a stretch of one agent's episode.

        Returns:
            The columns, and the number after the last fragment's.
        """
        self._memory.begin()
        index, rows = self._index, self.forms.rows
        wanted = np.zeros(len(index.lane), np.bool_)
        wanted[numbers] = True
        numbers = index.order[wanted[index.order]]
        after = index.after[numbers]
        missing, lane = index.missing[after], index.lane[numbers]
        columns = {name: self._tree(name, numbers) for name in rows if name not in _OUTCOME}
        columns |= {name: self._tree(name, after) for name in ("rewards", "terminated", "truncated")}
        columns["next_obs"] = self._tree("obs", np.where(missing, numbers, after))
        columns["next_obs_missing"] = missing
        if "state" in columns:
            columns["next_state"] = self._tree("state", after)
        columns["env_t"], columns["next_env_t"] = index.env_t[numbers], index.env_t[after]
        starts = np.zeros(len(numbers), np.int64)
        starts[1:] = (lane[1:] != lane[:-1]) | (columns["eps_id"][1:] != columns["eps_id"][:-1])
        starts[1:] |= (columns["terminated"] | columns["truncated"])[:-1]  # an agent that came back has a new life
        columns["unroll_id"] = np.cumsum(starts) + unroll_id
        answers = index.answer[numbers]
        columns |= {
            name: form.tree(self._take(name, answers, of_answers=True)) for name, form in self.forms.answers.items()
        }
        return order_columns(columns), int(columns["unroll_id"][-1]) + 1

    def _tree(self, name: str, numbers: IntArray) -> Tree:
        return self.forms.rows[name].tree(self._take(name, numbers))

    def _take(self, name: str, numbers: IntArray, *, of_answers: bool = False) -> Leaves:
        """Leaves of one column, of some rows or answers."""
        form = (self.forms.answers if of_answers else self.forms.rows)[name]
        parts: Sequence[_Moment | _Answers] = self._kept[1] if of_answers else self._kept[0]
        starts = self._index.answer_starts if of_answers else self._index.row_starts
        if len(numbers) < starts[-1]:  # what is kept of a log stands at its end
            first = bisect_right(starts, int(numbers.min(initial=starts[-1] - 1))) - 1
            parts, numbers = parts[first:], numbers - starts[first]
        found = [part.columns.get(name) or _blank(form, len(part.lanes)) for part in parts]
        out = []
        for leaves in zip(*found, strict=True):
            whole = np.concatenate(leaves) if len(leaves) > 1 else leaves[0]
            leaf = self._memory.empty((len(numbers), *whole.shape[1:]), whole.dtype)
            # With another mode numpy takes into an array of its own first.
            out.append(whole.take(numbers, axis=0, out=leaf, mode="clip"))
        return out

    # --- dropping

    def forget(self, numbers: IntArray) -> None:
        """Drop transitions that were handed over or lost, and with them the ends that nothing leads to any more."""
        index = self._index
        keep = ~index.final
        keep[numbers] = False
        after = index.after[keep]
        keep[after[after >= 0]] = True
        self._keep(np.flatnonzero(keep))

    def keep_ended(self, ended_N: IntArray, num_agents: int) -> None:
        """Drop all rows but those of episodes whose ids are below that of their env, of which none waits any more.

        Args:
            ended_N: (N,) episodes of an env with smaller ids than this have ended.
            num_agents: A.
        """
        self.is_open_L[:] = False
        numbers = np.arange(len(self))
        self._keep(numbers[self._eps_id(numbers) < ended_N[self._index.lane // num_agents]])

    def clear(self) -> None:
        """Drop everything; the columns' forms stay known."""
        self._kept = [], []
        self._forget_index()
        self.is_open_L[:] = False

    def _keep(self, numbers: IntArray) -> None:
        """Keep some rows, ascending, and the answers to them."""
        index = self._index
        answered = index.answer[numbers]
        answered = answered[answered >= 0]
        names = {name for moment in self._kept[0] for name in moment.columns}
        columns = {name: self._take(name, numbers) for name in self.forms.rows if name in names}
        lane, tick, env_t = index.lane[numbers], index.tick[numbers], index.env_t[numbers]
        rows = _Moment(lane, tick, env_t, index.final[numbers], index.missing[numbers], columns)
        names = {name for answer in self._kept[1] for name in answer.columns}
        answer_lanes = np.concatenate([np.zeros(0, np.int64), *(answer.lanes for answer in self._kept[1])])
        answers = _Answers(
            answer_lanes[answered],
            {name: self._take(name, answered, of_answers=True) for name in self.forms.answers if name in names},
        )
        self._kept = ([rows] if len(numbers) else []), ([answers] if len(answered) else [])
        self._forget_index()


def _blank(form: ColumnForm, n: int) -> Leaves:
    leaves = form.room(n)
    form.blank(leaves)
    return leaves

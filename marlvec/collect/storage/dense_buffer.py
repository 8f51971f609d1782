"""`DenseBuffer`: one policy's rows where all its agents act in every step, as arrays whose reshape is the batch.

A *lane* is one (env, agent); a lane's rows of one call of `collect` stand side by side, so that (L, T, …) arrays, read
as (L * T, …), are in the order of a batch: by env, agent and time. They are made anew for each batch, which keeps them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import is_
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.storage.batch_memory import BatchMemory
from marlvec.collect.storage.columns import ROW_COLUMNS, ColumnForms, Leaves, order_columns
from marlvec.connectors import Rows
from marlvec.env_ids import Where
from marlvec.trees import Tree

__all__ = ["DenseBuffer", "LastRows", "Moment"]

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
AnyArray = NDArray[Any]

_DERIVED = ("env_id", "agent_index", "eps_id", "t", "first", "last")  # follow from lane, column, and where ends were
_LARGE = 1 << 16  # bytes
_OUTCOME = ("rewards", "terminated", "truncated")  # stand in the column of the decision that led there


def _items(array: AnyArray, axes: int) -> AnyArray:
    """What lies behind these first axes as items of one kind, which are copied in half the time that numbers take."""
    size = array.itemsize * math.prod(array.shape[axes:])
    found: AnyArray = array.reshape(*array.shape[:axes], -1).view(np.dtype((np.void, size)))[..., 0]
    return found


@dataclass(frozen=True, slots=True)
class LastRows:
    """Final rows of lanes whose episodes ended.

    Attributes:
        column: Of the decision that led to the end.
        places: (n,) which lanes, by position.
        rows: The rows.
        missing: (n,) which of them have no observation of their own.
    """

    column: int
    places: IntArray
    rows: Rows
    missing: BoolArray


@dataclass(frozen=True, slots=True)
class Moment:
    """One column, as it came.

    Attributes:
        tick: The round in which its rows came.
        rows: The lanes' rows.
        env_t: (L,) env steps that their episodes had made.
        answer: What was decided, as `ColumnForms.check_answer` gives it; None while they wait.
        ends: What ended with that decision.
    """

    tick: int
    rows: Rows
    env_t: IntArray
    answer: list[Leaves] | None
    ends: list[LastRows]


class DenseBuffer:
    """Rows of a fixed number of steps, in each of which all lanes act.

    Ctrl-C may come at any line: what a step writes stands behind the columns that are closed, which are one more when
    `append` ends.

    Args:
        forms: The columns' forms.
        num_lanes: N × A.
        num_agents: A.
        length: T, how many steps there is room for.
        rows: The rows of all lanes that wait for an action; the same agents' of every env, by env and agent.
        tick: The round in which they came.
        env_t: (L,) env steps that their episodes had made.
        memory: Where arrays come from.

    Attributes:
        forms: As given.
        lanes: (L,) which lanes these are.
        slot_L: (N × A,) 0 where a lane's row waits for an action or for its outcome, else -1; for reading.
    """

    def __init__(
        self,
        forms: ColumnForms,
        num_lanes: int,
        num_agents: int,
        length: int,
        rows: Rows,
        tick: int,
        env_t: IntArray,
        memory: BatchMemory,
    ) -> None:
        self.forms, self._num_agents, self._length, self._tick = forms, num_agents, length, tick
        self._memory = memory
        self.lanes: IntArray = rows["env_id"] * num_agents + rows["agent_index"]
        self._width = int(np.count_nonzero(rows["env_id"] == rows["env_id"][0]))  # lanes of an env
        self._eps_id, self._env_t, self._offset = (
            rows["eps_id"][:: self._width].copy(),
            env_t[:: self._width],
            rows["t"] - env_t,
        )
        self.slot_L = np.full(num_lanes, -1, np.int64)
        self.slot_L[self.lanes] = 0
        self._seen: dict[str, Leaves] = {}  # of the rows themselves
        self._seen_items: dict[str, AnyArray] = {}  # the same of large rows, see `_items`
        self._outcome: dict[str, Leaves] = {}
        self._answers: dict[str, Leaves] = {}
        self._version_T: IntArray = np.zeros(length, np.int64)  # the policy's
        self._ends: list[LastRows] = []
        self._begun: list[
            tuple[int, IntArray, IntArray]
        ] = []  # column, envs by position, and ids of episodes that began
        self._answered = -1  # the last column that was
        self._size = 0  # columns that are closed
        self._behind: Rows | None = None  # those that wait, which stand in no column where there is none left
        forms.check_rows(rows)
        self._make_room()
        self._came = {name: [leaf.copy() for leaf in forms.rows[name].fit(rows[name])] for name in _OUTCOME}
        self._put(dict(rows.items()), 0)
        self._behind = rows

    def resized(self, length: int) -> DenseBuffer:
        """Another buffer with what waits here alone, and room for so many steps."""
        column, rows = self._size, self._behind
        assert rows is not None
        env_t = np.repeat(column - self._since(column), self._width)
        tick = self._tick + column
        return DenseBuffer(self.forms, len(self.slot_L), self._num_agents, length, rows, tick, env_t, self._memory)

    def _make_room(self) -> None:
        """Arrays for columns that have come to be known."""
        for name, form in self.forms.rows.items():
            known = self._outcome if name in _OUTCOME else self._seen
            if name in known or name in _DERIVED:
                continue
            leaves = form.table(len(self.lanes), self._length, self._memory.empty)
            if name in ("terminated", "truncated"):  # which are written where they say something
                for leaf in leaves:
                    leaf[...] = 0
            elif self._behind is not None:
                form.blank([leaf[:, : self._size + 1] for leaf in leaves])
            known[name] = leaves
            is_plain = form.dtype is not None and not form.dtype.hasobject and leaves[0].flags.c_contiguous
            if is_plain and name in self._seen and leaves[0].nbytes >= max(1, self._length) * _LARGE:
                self._seen_items[name] = _items(leaves[0], 2)

    def __len__(self) -> int:
        return (self._size + 1) * len(self.lanes)

    # --- in

    def answer(self, places: Where, parts: list[Leaves]) -> None:
        """Write down what the policy answered to the rows that wait; see `SlotBuffer.answer`. These are all lanes'."""
        t, answers = self._size, self._answers
        if len(answers) < len(parts):
            self._make_room_for_answers()
        for (name, leaves), part in zip(answers.items(), parts, strict=True):
            if name == "policy_version":
                self._version_T[t] = part[0][0]
            elif name == "actions_for_env" and leaves is answers["actions"]:
                said = parts[self._said]
                if len(part) != len(said) or not all(map(is_, part, said)):
                    self._part_from_said(part, t)
            else:
                for leaf, values in zip(leaves, part, strict=True):
                    leaf[:, t] = values
        self._answered = t

    def _make_room_for_answers(self) -> None:
        """Arrays for columns that have come to be known."""
        forms, shape = self.forms.answers, (len(self.lanes), self._length)
        self._said = list(forms).index("actions")
        for name in list(forms)[len(self._answers) :]:
            if name == "policy_version":  # the same of all lanes
                self._answers[name] = [np.broadcast_to(self._version_T, shape)]
            elif name != "actions_for_env":
                self._answers[name] = forms[name].table(*shape, self._memory.empty)
            else:  # until other actions are sent than the policy says
                self._answers[name] = self._answers["actions"]

    def _part_from_said(self, sent: Leaves, t: int) -> None:
        """From now on what is sent to the envs is not what the policy says."""
        leaves = self.forms.answers["actions_for_env"].table(len(self.lanes), self._length, self._memory.empty)
        if t:
            for leaf, said in zip(leaves, self._answers["actions"], strict=True):
                leaf[:, :t] = said[:, :t]
        for leaf, values in zip(leaves, sent, strict=True):
            leaf[:, t] = values
        self._answers["actions_for_env"] = leaves

    def append(
        self,
        rows: Rows,
        lanes: IntArray,
        places: Where,
        tick: IntArray | int,
        env_t: IntArray,
        missing: BoolArray | None = None,
    ) -> int:
        """Store rows, and close the transitions that led to them; see `SlotBuffer.append`.

        They are the next rows of all lanes; or, before those, last rows, of all lanes of some envs.
        """
        if missing is not None:
            return self._end(rows, lanes, missing)
        columns, forms, t = dict(rows.items()), self.forms.rows, self._size
        if columns.keys() != forms.keys():
            self.forms.check_rows(rows)
            self._make_room()
        for name, leaves in self._outcome.items():
            value, form = columns[name], forms[name]
            if value.__class__ is np.ndarray and value.dtype == form.dtype and value.shape[1:] == form.shape:
                if name == "rewards" or np.count_nonzero(value):  # else it is what there is
                    leaves[0][:, t] = value
            else:
                for leaf, part in zip(leaves, form.fit(value), strict=True):
                    leaf[:, t] = part
        end = self._ends[-1] if self._ends else None
        if end is not None and end.column == t:
            for name, leaves in self._outcome.items():
                for leaf, part in zip(leaves, forms[name].fit(end.rows[name]), strict=True):
                    leaf[end.places, t] = part
        else:
            end = None
        self._put(columns, t + 1)
        self._behind = rows
        closed = len(self.lanes)
        if end is not None:
            again = end.places
            closed -= len(again)
            envs = again[:: self._width] // self._width
            self._begun.append((t + 1, envs, rows["eps_id"][envs * self._width]))
            self.slot_L[self.lanes[again]] = 0
        self._size = t + 1
        return closed

    def _end(self, rows: Rows, lanes: IntArray, missing: BoolArray) -> int:
        self.forms.check_rows(rows, final=True)
        for name, form in self.forms.rows.items():
            if name in rows:
                form.fit(rows[name])
        self._ends.append(LastRows(self._size, np.searchsorted(self.lanes, lanes), rows, missing))
        self.slot_L[lanes] = -1
        return len(lanes)

    def _put(self, columns: Mapping[str, Any], t: int) -> None:
        """Write rows into a column, where there is one."""
        if t == self._length:
            return
        forms = self.forms.rows
        for name, leaves in self._seen.items():
            value, form = columns[name], forms[name]
            if value.__class__ is np.ndarray and value.dtype == form.dtype and value.shape[1:] == form.shape:
                if name in self._seen_items and value.flags.c_contiguous:
                    self._seen_items[name][:, t] = _items(value, 1)
                else:
                    leaves[0][:, t] = value
            else:
                for leaf, part in zip(leaves, form.fit(value), strict=True):
                    leaf[:, t] = part

    # --- out

    def closed(self) -> range:
        """Numbers of the transitions whose outcome is known."""
        return range(self._size * len(self.lanes))

    def without(self, slots: range, eps_ids: Collection[int]) -> range:
        """All of them: where some episodes are for no batch, slots are used."""
        return slots

    def _since(self, column: int) -> IntArray:
        """Per env the column in which the episode began that runs in a column; below 0 if before the first one."""
        since = -self._env_t
        for begun, envs, _ in self._begun:
            if begun <= column:
                since[envs] = begun
        return since

    def _episodes(self) -> tuple[IntArray, IntArray, IntArray]:
        """Per env, of its closed columns and the one behind: eps_id, env_t, and how many episodes have begun so far."""
        shape = len(self._eps_id), self._size + 1
        eps_ids, env_ts, counts = np.empty(shape, np.int64), np.empty(shape, np.int64), np.empty(shape, np.int64)
        eps_id, since, count = self._eps_id.copy(), -self._env_t, np.zeros_like(self._eps_id)
        nothing = np.zeros(0, np.int64)
        at = 0
        for column, envs, ids in (*self._begun, (shape[1], nothing, nothing)):
            if column > shape[1]:
                break  # it was written, and what it belongs to was not finished
            eps_ids[:, at:column] = eps_id[:, None]
            env_ts[:, at:column] = np.arange(at, column) - since[:, None]
            counts[:, at:column] = count[:, None]
            eps_id[envs], since[envs], at = ids, column, column
            count[envs] += 1
        return eps_ids, env_ts, counts

    def _turns(self, eps_id: IntArray, env_t: IntArray) -> IntArray:
        """Decisions made before each row: as many as env steps, but for agents that came into an episode later.

        Args:
            eps_id: (N, 1, T).
            env_t: Likewise.

        Returns:
            What can be broadcast to (N, agents, T).
        """
        if not self._offset.any():
            return env_t
        own = eps_id == self._eps_id[:, None, None]
        turns: IntArray = env_t + own * self._offset.reshape(-1, self._width, 1)
        return turns

    def read(self, slots: range, unroll_id: int) -> tuple[dict[str, Tree], int]:
        """Columns of all closed transitions, ordered by env, agent and time; views of this buffer where that is full.

        Args:
            slots: What `closed` returned.
            unroll_id: Number of the first fragment, a stretch of one agent's episode.

        Returns:
            The columns, and the number after the last fragment's.
        """
        size, rows = self._size, self.forms.rows
        columns = {
            name: rows[name].tree([self._flat(leaf) for leaf in leaves])
            for name, leaves in (*self._seen.items(), *self._outcome.items())
        }
        for name in ("obs", "state"):
            if name in self._seen:
                columns[f"next_{name}"] = rows[name].tree([self._flat(leaf) for leaf in self._followers(name)])
        missing = np.zeros((len(self.lanes), size), np.bool_)
        for end in self._ends:
            missing[end.places[end.missing], end.column] = True
        eps_id, env_t, count = (plane[:, None, :size] for plane in self._episodes())
        lane_NW1 = self.lanes.reshape(-1, self._width, 1)
        columns |= {
            "next_obs_missing": self._flat(missing),
            "t": self._spread(self._turns(eps_id, env_t)),
            "env_t": self._spread(env_t),
            "next_env_t": self._spread(env_t + 1),
            "eps_id": self._spread(eps_id),
            "unroll_id": self._unroll_ids(count, columns["terminated"] | columns["truncated"], unroll_id),
            "env_id": self._spread(lane_NW1 // self._num_agents),
            "agent_index": self._spread(lane_NW1 % self._num_agents),
        }
        for name, leaves in self._answers.items():
            is_own = name == "actions" or (name != "policy_version" and leaves is not self._answers["actions"])
            columns[name] = self.forms.answers[name].tree([self._flat(leaf, is_own=is_own) for leaf in leaves])
        return order_columns(columns), int(columns["unroll_id"][-1]) + 1

    def _flat(self, leaf: NDArray[Any], *, is_own: bool = True) -> NDArray[Any]:
        """An array (L, T, …) as a column of a batch: a view where all of it is read, and no other column reads it."""
        n, size = len(self.lanes), self._size
        flat = n * size, *leaf.shape[2:]
        if is_own and leaf.shape[1] == size and leaf.flags.c_contiguous:
            return leaf.reshape(flat)
        out = self._memory.empty(flat, leaf.dtype)
        out.reshape(n, size, *leaf.shape[2:])[...] = leaf[:, :size]
        return out

    def _spread(self, plane: IntArray) -> IntArray:
        """What is broadcast to (N, agents, T), as a column of a batch."""
        shape = len(self._eps_id), self._width, self._size
        out: IntArray = self._memory.empty(shape, np.int64)
        out[...] = plane
        return out.reshape(-1)

    def _unroll_ids(self, count: IntArray, ended: BoolArray, first: int) -> IntArray:
        """Numbers of the fragments; one ends with its episode, and where a connector says that the agent did."""
        shape = len(self._eps_id), self._width, self._size
        out: IntArray = self._memory.empty(shape, np.int64)
        is_last = count[:, :, 1:] != count[:, :, :-1]
        if not np.count_nonzero(is_last != ended.reshape(shape)[:, :, :-1]):
            fragments = np.repeat(count[:, 0, -1] + 1, self._width)  # of each lane
            before = np.cumsum(fragments) - fragments + first
            np.add(count, before.reshape(-1, self._width, 1), out=out)
            return out.reshape(-1)
        starts = np.ones(shape, np.bool_)
        starts[:, :, 1:] = is_last | ended.reshape(shape)[:, :, :-1]
        np.cumsum(starts.reshape(-1), out=out.reshape(-1))
        out += first - 1
        return out.reshape(-1)

    def _followers(self, name: str) -> Leaves:
        """Per leaf of obs or state: that of the row behind each closed one."""
        form, size = self.forms.rows[name], self._size
        found = form.room(len(self.lanes), size, empty=self._memory.empty)
        for leaf, own, last in zip(found, self._seen[name], self._row_leaves(name, size), strict=True):
            leaf[:, :-1] = own[:, 1:size]
            leaf[:, -1] = last
        for end in self._ends:
            for leaf, own, part in zip(found, self._seen[name], form.fit(end.rows[name]), strict=True):
                leaf[end.places, end.column] = part
                if name == "obs" and end.missing.any():
                    without = end.places[end.missing]
                    leaf[without, end.column] = own[without, end.column]
        return found

    def _row_leaves(self, name: str, k: int) -> Leaves:
        """What rows of one column say, of those that do not follow from where they stand."""
        if k == self._length:
            assert self._behind is not None
            return self.forms.rows[name].fit(self._behind[name])
        if name in self._seen:
            return [leaf[:, k] for leaf in self._seen[name]]
        # Those of the outcome stand beside the decision that led there, but for the first column's.
        return [leaf[:, k - 1] for leaf in self._outcome[name]] if k else self._came[name]

    def moments(self) -> Iterator[Moment]:
        """Column by column what came, with the rows that wait or were answered last."""
        eps_ids, env_ts, _ = self._episodes()
        turns, width = self._turns(eps_ids[:, None], env_ts[:, None]), self._width
        turns = np.broadcast_to(turns, (len(eps_ids), width, turns.shape[2])).reshape(len(self.lanes), -1)
        for k in range(self._size + 1):
            columns: dict[str, Tree] = {
                "env_id": self.lanes // self._num_agents,
                "agent_index": self.lanes % self._num_agents,
                "eps_id": np.repeat(eps_ids[:, k], width),
                "t": turns[:, k],
                "first": turns[:, k] == 0,
                "last": np.zeros(len(self.lanes), np.bool_),
            }
            for name in (*self._seen, *self._outcome):
                columns[name] = self.forms.rows[name].tree(self._row_leaves(name, k))
            answer = (
                [[leaf[:, k] for leaf in leaves] for leaves in self._answers.values()] if k <= self._answered else None
            )
            ends = [self._completed(end) for end in self._ends if end.column == k]
            yield Moment(self._tick + k, Rows(columns), np.repeat(env_ts[:, k], width), answer, ends)

    def waiting(self) -> Rows:
        """The rows that wait for an action, as they came."""
        *_, last = self.moments()
        return last.rows

    def _completed(self, end: LastRows) -> LastRows:
        """Last rows with the columns that have come to be known since."""
        more = {}
        for name, form in self.forms.rows.items():
            if name in ROW_COLUMNS and name not in end.rows:
                leaves = form.room(len(end.places))
                form.blank(leaves)
                more[name] = form.tree(leaves)
        return replace(end, rows=end.rows.replace(**more)) if more else end

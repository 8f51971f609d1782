"""`DenseBuffer`: one policy's rows where all its agents act in every step, as arrays whose reshape is the batch.

A *lane* is one (env, agent); a lane's rows of one call of `collect` stand side by side, so that (L, T, …) arrays, read
as (L * T, …), are in the order of a batch: by env, agent and time. They are made anew for each batch, which keeps them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.storage.columns import ROW_COLUMNS, ColumnForms, Leaves, order_columns
from marlvec.connectors import Rows
from marlvec.env_ids import Where
from marlvec.trees import Tree

__all__ = ["DenseBuffer", "LastRows", "Moment"]

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

_DERIVED = ("env_id", "agent_index", "eps_id", "t", "first", "last")  # follow from lane, column, and where ends were
_OUTCOME = ("rewards", "terminated", "truncated")  # stand in the column of the decision that led there


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

    Attributes:
        forms: As given.
        lanes: (L,) which lanes these are.
        slot_L: (N × A,) 0 where a lane's row waits for an action or for its outcome, else -1; for reading.
        keeps_columns: True, see `SlotBuffer`.
    """

    keeps_columns = True

    def __init__(
        self,
        forms: ColumnForms,
        num_lanes: int,
        num_agents: int,
        length: int,
        rows: Rows,
        tick: int,
        env_t: IntArray,
    ) -> None:
        self.forms, self._num_agents, self._length, self._tick = forms, num_agents, length, tick
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
        self._outcome: dict[str, Leaves] = {}
        self._answers: list[Leaves] = []
        self._ends: list[LastRows] = []
        self._begun: list[
            tuple[int, IntArray, IntArray]
        ] = []  # column, envs by position, and ids of episodes that began
        self._answered = -1  # the last column that was
        self._size = 0  # columns that are closed
        self._behind: Rows | None = None  # those that wait
        forms.check_rows(rows)
        self._make_room()
        self._came = {name: [leaf.copy() for leaf in forms.rows[name].fit(rows[name])] for name in _OUTCOME}
        self._put(rows, 0)

    def resized(self, length: int) -> DenseBuffer:
        """Another buffer with what waits here alone, and room for so many steps."""
        column, rows = self._size, self._behind
        assert rows is not None
        env_t = np.repeat(column - self._since(column), self._width)
        return DenseBuffer(self.forms, len(self.slot_L), self._num_agents, length, rows, self._tick + column, env_t)

    def _make_room(self) -> None:
        """Arrays for columns that have come to be known."""
        for name, form in self.forms.rows.items():
            known = self._outcome if name in _OUTCOME else self._seen
            if name in known or name in _DERIVED:
                continue
            leaves = form.table(len(self.lanes), self._length)
            if name in ("terminated", "truncated"):  # which are written where they say something
                for leaf in leaves:
                    leaf[...] = 0
            elif self._behind is not None:
                form.blank([leaf[:, : self._size + 1] for leaf in leaves])
            known[name] = leaves

    def __len__(self) -> int:
        return (self._size + 1) * len(self.lanes)

    # --- in

    def answer(self, places: Where, parts: list[Leaves]) -> None:
        """Write down what the policy answered to the rows that wait; see `SlotBuffer.answer`. These are all lanes'."""
        if len(self._answers) < len(parts):
            forms = list(self.forms.answers.values())[len(self._answers) :]
            self._answers += [form.table(len(self.lanes), self._length) for form in forms]
        t = self._size
        for leaves, part in zip(self._answers, parts, strict=True):
            for leaf, values in zip(leaves, part, strict=True):
                leaf[:, t] = values
        self._answered = t

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
        forms, t = self.forms.rows, self._size
        if rows.keys() != forms.keys():
            self.forms.check_rows(rows)
            self._make_room()
        ends = self._ends and self._ends[-1].column == t
        for name, leaves in self._outcome.items():
            value, form = rows[name], forms[name]
            if value.__class__ is np.ndarray and value.dtype == form.dtype and value.shape[1:] == form.shape:
                if name == "rewards" or np.count_nonzero(value):  # else it is what there is
                    leaves[0][:, t] = value
            else:
                for leaf, part in zip(leaves, form.fit(value), strict=True):
                    leaf[:, t] = part
            if ends:
                for leaf, part in zip(leaves, forms[name].fit(self._ends[-1].rows[name]), strict=True):
                    leaf[self._ends[-1].places, t] = part
        self._put(rows, t + 1)
        closed = len(self.lanes)
        if ends:
            again = self._ends[-1].places
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

    def _put(self, rows: Rows, t: int) -> None:
        """Write rows into a column, where there is one; those behind the last column are kept as they are."""
        if t < self._length:
            forms = self.forms.rows
            for name, leaves in self._seen.items():
                value, form = rows[name], forms[name]
                if value.__class__ is np.ndarray and value.dtype == form.dtype and value.shape[1:] == form.shape:
                    leaves[0][:, t] = value
                else:
                    for leaf, part in zip(leaves, form.fit(value), strict=True):
                        leaf[:, t] = part
        self._behind = rows

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
        """Decisions made before each row: as many as env steps, but for agents that came into an episode later."""
        turns = np.repeat(env_t, self._width, axis=0)
        if self._offset.any():
            first = np.repeat(eps_id == self._eps_id[:, None], self._width, axis=0)
            turns += first * self._offset[:, None]
        return turns

    def read(self, slots: range, unroll_id: int) -> tuple[dict[str, Tree], int]:
        """Columns of all closed transitions, ordered by env, agent and time; views of this buffer where that is full.

        Args:
            slots: What `closed` returned.
            unroll_id: Number of the first fragment, a stretch of one agent's episode.

        Returns:
            The columns, and the number after the last fragment's.
        """
        n, size, rows = len(self.lanes), self._size, self.forms.rows

        def flat(leaf: NDArray[Any]) -> NDArray[Any]:
            return leaf[:, :size].reshape(n * size, *leaf.shape[2:])

        def spread(values: IntArray) -> IntArray:
            return np.repeat(values, size)

        columns = {
            name: rows[name].tree([flat(leaf) for leaf in leaves])
            for name, leaves in (*self._seen.items(), *self._outcome.items())
        }
        for name in ("obs", "state"):
            if name in self._seen:
                columns[f"next_{name}"] = rows[name].tree([flat(leaf) for leaf in self._followers(name)])
        missing = np.zeros((n, size), np.bool_)
        for end in self._ends:
            missing[end.places[end.missing], end.column] = True
        eps_id, env_t, count = (plane[:, :size] for plane in self._episodes())
        env_t_L = np.repeat(env_t, self._width, axis=0)
        columns |= {
            "next_obs_missing": flat(missing),
            "t": flat(self._turns(eps_id, env_t)),
            "env_t": flat(env_t_L),
            "next_env_t": flat(env_t_L + 1),
            "eps_id": flat(np.repeat(eps_id, self._width, axis=0)),
            "unroll_id": self._unroll_ids(count, columns["terminated"] | columns["truncated"]) + unroll_id,
            "env_id": spread(self.lanes // self._num_agents),
            "agent_index": spread(self.lanes % self._num_agents),
        }
        for (name, form), leaves in zip(self.forms.answers.items(), self._answers, strict=True):
            columns[name] = form.tree([flat(leaf) for leaf in leaves])
        return order_columns(columns), int(columns["unroll_id"][-1]) + 1

    def _unroll_ids(self, count: IntArray, ended: BoolArray) -> IntArray:
        """Numbers of the fragments from 0; one ends with its episode, and where a connector says that the agent did."""
        size, width = self._size, self._width
        is_last = np.ones(count.shape, np.bool_)
        is_last[:, :-1] = count[:, 1:] != count[:, :-1]
        if np.array_equal(np.repeat(is_last, width, axis=0)[:, :-1], ended.reshape(-1, size)[:, :-1]):
            before = np.cumsum(np.repeat(count[:, -1] + 1, width))
            found: IntArray = np.repeat(count, width, axis=0)
            found[1:] += before[:-1, None]
            return found.reshape(-1)
        starts = np.repeat(is_last, width, axis=0).reshape(-1)
        return np.concatenate([[0], np.cumsum((starts | ended)[:-1])])

    def _followers(self, name: str) -> Leaves:
        """Per leaf of obs or state: that of the row behind each closed one."""
        form, size = self.forms.rows[name], self._size
        found = form.room(len(self.lanes), size)
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
        turns, width = self._turns(eps_ids, env_ts), self._width
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
            answer = [[leaf[:, k] for leaf in leaves] for leaves in self._answers] if k <= self._answered else None
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

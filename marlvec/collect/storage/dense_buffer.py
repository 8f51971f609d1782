"""`DenseBuffer`: one policy's rows where all its agents act in every step, as arrays whose reshape is the batch.

A *lane* is one (env, agent); a lane's rows of one call of `collect` stand side by side, so that (L, T, …) arrays, read
as (L * T, …), are in the order of a batch: by env, agent and time. They are made anew for each batch, which keeps them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.storage.columns import ROW_COLUMNS, ColumnForm, ColumnForms, Leaves, order_columns
from marlvec.trees import Tree

__all__ = ["DenseBuffer", "LastRows", "Moment"]

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

_DERIVED = ("env_id", "agent_index", "eps_id", "t", "first", "last")  # follow from lane, column, and where ends were
_OUTCOME = ("rewards", "terminated", "truncated")  # belong to the column before


@dataclass(frozen=True, slots=True)
class LastRows:
    """Final rows of lanes whose episodes ended.

    Attributes:
        column: Of the decision that led to the end.
        places: (n,) which lanes, by position.
        rows: Their columns.
        missing: (n,) which of them have no observation of their own.
        next_eps_id: (n,) the episodes that begin there.
    """

    column: int
    places: IntArray
    rows: Mapping[str, Tree]
    missing: BoolArray
    next_eps_id: IntArray


def _completed(end: LastRows, form: ColumnForm) -> LastRows:
    """Last rows with a column that has come to be known since."""
    leaves = form.room(len(end.places))
    form.blank(leaves)
    return replace(end, rows={**end.rows, form.name: form.tree(leaves)})


@dataclass(frozen=True, slots=True)
class Moment:
    """One column, as it came.

    Attributes:
        column: Which.
        rows: Columns of the lanes' rows.
        env_t: (L,) env steps that their episodes had made.
        answer: What was decided, as `ColumnForms.check_answer` gives it; None while they wait.
        ends: What ended with that decision.
    """

    column: int
    rows: Mapping[str, Tree]
    env_t: IntArray
    answer: list[Leaves] | None
    ends: list[LastRows]


class DenseBuffer:
    """Rows of a fixed number of steps, in each of which all lanes act.

    Rows come in by `record`, the decisions about them by `answer`, and the next `record` closes those. `truncate` takes
    back what came last.

    Args:
        forms: The columns' forms.
        lanes: (L,) which lanes, ascending: the same agents of every env.
        num_agents: A.
        length: T, how many steps there is room for.
        rows: Columns of the rows that wait now.
        eps_id: (L,) the running episodes.
        env_t: (L,) env steps that these have made.
        turn: (L,) decisions made in them.

    Attributes:
        lanes: As given.
        size: How many columns are closed; the rows in the next one wait, or were answered.
    """

    def __init__(
        self,
        forms: ColumnForms,
        lanes: IntArray,
        num_agents: int,
        length: int,
        rows: Mapping[str, Tree],
        *,
        eps_id: IntArray,
        env_t: IntArray,
        turn: IntArray,
    ) -> None:
        self.lanes, self._num_agents, self._length, self._forms = lanes, num_agents, length, forms
        self._eps_id, self._env_t, self._turn = eps_id.copy(), env_t.copy(), turn.copy()
        self._seen: dict[str, Leaves] = {}  # of the rows themselves
        self._outcome: dict[str, Leaves] = {}
        self._answers: list[Leaves] = []
        self._ends: list[LastRows] = []
        self._answered = -1  # the last column that was
        self.size = 0
        forms.check_rows(rows)
        self._make_room()
        self._put(rows, 0)

    def _make_room(self) -> None:
        """Arrays for columns that have come to be known."""
        for name, form in self._forms.rows.items():
            known = self._outcome if name in _OUTCOME else self._seen
            if name in known or name in _DERIVED:
                continue
            leaves = known[name] = form.room(len(self.lanes), self._length)
            if name in _OUTCOME:
                for leaf in leaves:
                    leaf[...] = 0
            else:
                form.blank([leaf[:, : self.size + 1] for leaf in leaves])
                if name in ROW_COLUMNS:
                    self._ends = [_completed(end, form) for end in self._ends]

    # --- in

    def answer(self, parts: list[Leaves]) -> None:
        """Write down what was decided about the rows that wait: what `ColumnForms.check_answer` returned."""
        if len(self._answers) < len(parts):
            forms = list(self._forms.answers.values())
            self._answers += [form.room(len(self.lanes), self._length) for form in forms[len(self._answers) :]]
        for leaves, part in zip(self._answers, parts, strict=True):
            for leaf, values in zip(leaves, part, strict=True):
                leaf[:, self.size] = values
        self._answered = self.size

    def end(self, places: IntArray, rows: Mapping[str, Tree], missing: BoolArray, next_eps_id: IntArray) -> None:
        """Some lanes' episodes have ended with what was decided last; see `LastRows`. Before `record`.

        Raises:
            ContractError: A column is missing, or has changed its form.
        """
        self._forms.check_rows(rows, final=True)
        for name, form in self._forms.rows.items():
            if name in rows:
                form.fit(rows[name])
        self._ends.append(LastRows(self.size, places, rows, missing, next_eps_id))

    def record(self, rows: Mapping[str, Tree]) -> None:
        """The lanes' next rows are there, and with them the outcome of what was decided.

        Raises:
            ContractError: A column is missing or new, or has changed its form.
        """
        forms, t = self._forms.rows, self.size
        if rows.keys() != forms.keys():
            self._forms.check_rows(rows)
            self._make_room()
        for name, leaves in self._outcome.items():
            for leaf, part in zip(leaves, forms[name].fit(rows[name]), strict=True):
                if name == "rewards" or np.count_nonzero(part):  # else it is what there is
                    leaf[:, t] = part
        if self._ends and self._ends[-1].column == t:
            end = self._ends[-1]
            for name, leaves in self._outcome.items():
                for leaf, part in zip(leaves, forms[name].fit(end.rows[name]), strict=True):
                    leaf[end.places, t] = part
        self._put(rows, t + 1)
        self.size = t + 1

    def _put(self, rows: Mapping[str, Tree], t: int) -> None:
        """Write rows into a column, where there is one; rows behind the last column are kept as they are."""
        forms = self._forms.rows
        if t < self._length:
            for name, leaves in self._seen.items():
                value, form = rows[name], forms[name]
                if value.__class__ is np.ndarray and value.dtype == form.dtype and value.shape[1:] == form.shape:
                    leaves[0][:, t] = value
                else:
                    for leaf, part in zip(leaves, form.fit(value), strict=True):
                        leaf[:, t] = part
        self._behind = t, rows

    def truncate(self, size: int) -> None:
        """Take back what came when so many columns were closed and their rows in the next one waited."""
        for name in ("terminated", "truncated"):
            for leaf in self._outcome[name]:
                leaf[:, size:] = 0
        self._ends = [end for end in self._ends if end.column < size]
        self._answered = min(self._answered, size - 1)
        self.size = size

    # --- out

    def _planes(self) -> tuple[IntArray, IntArray, IntArray]:
        """Of every row, and of those that wait: eps_id, t and env_t, each (L, size + 1)."""
        shape = len(self.lanes), self.size + 1
        eps_id, begun = np.zeros(shape, np.int64), np.full(shape, np.iinfo(np.int64).min)
        eps_id[:, 0] = self._eps_id
        for end in self._ends:
            if end.column < self.size:
                eps_id[end.places, end.column + 1] = end.next_eps_id
                begun[end.places, end.column + 1] = end.column + 1
        np.maximum.accumulate(eps_id, axis=1, out=eps_id)  # an env's episodes have ascending ids
        since: list[IntArray] = []
        for counted in (self._turn, self._env_t):
            begun[:, 0] = -counted
            since.append(np.arange(shape[1]) - np.maximum.accumulate(begun, axis=1))
        return eps_id, since[0], since[1]

    def read(self, unroll_id: int) -> tuple[dict[str, Tree], int]:
        """Columns of all closed transitions, ordered by env, agent and time; views of this buffer where that is full.

        Args:
            unroll_id: Number of the first fragment, a stretch of one agent's episode.

        Returns:
            The columns, and the number after the last fragment's.
        """
        n, size = len(self.lanes), self.size

        def flat(leaf: NDArray[Any]) -> NDArray[Any]:
            return leaf[:, :size].reshape(n * size, *leaf.shape[2:])

        def spread(values: IntArray) -> IntArray:
            return np.repeat(values, size)

        rows, answers = self._forms.rows, self._forms.answers
        columns = {name: rows[name].tree([flat(leaf) for leaf in leaves]) for name, leaves in self._seen.items()}
        for name, leaves in self._outcome.items():
            columns[name] = rows[name].tree([flat(leaf) for leaf in leaves])
        for name in ("obs", "state"):
            if name in self._seen:
                columns[f"next_{name}"] = rows[name].tree([flat(leaf) for leaf in self._followers(name)])
        missing = np.zeros((n, size), np.bool_)
        for end in self._ends:
            missing[end.places[end.missing], end.column] = True
        columns["next_obs_missing"] = flat(missing)
        eps_id, t, env_t = (plane[:, :size] for plane in self._planes())
        starts = np.ones((n, size), np.bool_)
        starts[:, 1:] = eps_id[:, 1:] != eps_id[:, :-1]
        starts = flat(starts)
        starts[1:] |= (columns["terminated"] | columns["truncated"])[:-1]
        starts[0] = False
        columns["unroll_id"] = np.cumsum(starts) + unroll_id
        columns["eps_id"], columns["t"], columns["env_t"] = flat(eps_id), flat(t), flat(env_t)
        columns["next_env_t"] = columns["env_t"] + 1
        columns["env_id"] = spread(self.lanes // self._num_agents)
        columns["agent_index"] = spread(self.lanes % self._num_agents)
        for (name, form), leaves in zip(answers.items(), self._answers, strict=True):
            columns[name] = form.tree([flat(leaf) for leaf in leaves])
        return order_columns(columns), int(columns["unroll_id"][-1]) + 1

    def _followers(self, name: str) -> Leaves:
        """Per leaf of obs or state: that of the row behind each closed one."""
        form, size = self._forms.rows[name], self.size
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
        column, rows = self._behind
        if k == column:
            return self._forms.rows[name].fit(rows[name])
        if name in self._seen:
            return [leaf[:, k] for leaf in self._seen[name]]
        # Those of the outcome stand beside the decision that led there; nothing leads to the first column.
        return [leaf[:, k - 1] if k else np.zeros_like(leaf[:, 0]) for leaf in self._outcome[name]]

    def moments(self) -> Iterator[Moment]:
        """Column by column what came, the rows that wait or were answered last."""
        eps_id, t, env_t = self._planes()
        nothing = np.zeros(len(self.lanes), np.bool_)
        for k in range(self.size + 1):
            rows: dict[str, Tree] = {
                "env_id": self.lanes // self._num_agents,
                "agent_index": self.lanes % self._num_agents,
                "eps_id": eps_id[:, k],
                "t": t[:, k],
                "first": t[:, k] == 0,
                "last": nothing,
            }
            for name in (*self._seen, *self._outcome):
                rows[name] = self._forms.rows[name].tree(self._row_leaves(name, k))
            answer = [[leaf[:, k] for leaf in leaves] for leaves in self._answers] if k <= self._answered else None
            yield Moment(k, rows, env_t[:, k], answer, [end for end in self._ends if end.column == k])

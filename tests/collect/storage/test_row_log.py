"""A log beside a list of rows: whatever comes in whatever order, the same transitions are closed, read and dropped."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marlvec.collect.columns import ColumnForms
from marlvec.collect.row_log import RowLog
from marlvec.collect.rows import BatchMemory, Moment
from marlvec.connectors import Rows
from marlvec.errors import ContractError
from marlvec.trees import map_tree, tree_leaves, zip_trees

AGENTS = 3
OBS: dict[str, Any] = {
    "box": np.zeros((0, 2), np.float32),
    "dict": {"image": np.zeros((0, 2, 2), np.uint8), "pair": (np.zeros(0, np.int64), np.zeros((0, 1)))},
    "empty": np.zeros((0, 0), np.float32),
}


def row(columns: Any, i: int) -> Any:
    return {name: map_tree(lambda leaf: np.array(leaf[i]), column) for name, column in columns.items()}


class Book:
    """The same by hand: a list of rows, each with its lane's next one found by looking for it."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.columns: dict[str, Any] = {}  # by name, a column of no rows
        self.answers: dict[str, Any] = {}

    def append(self, columns: Any, lanes: Any, ticks: Any, env_t: Any, missing: Any) -> None:
        if missing is None:
            self.columns |= {name: map_tree(lambda leaf: leaf[:0], column) for name, column in columns.items()}
        for i, lane in enumerate(lanes.tolist()):
            tick = int(np.broadcast_to(ticks, lanes.shape)[i])
            final, lacks = missing is not None, missing is not None and bool(missing[i])
            place = {"lane": lane, "tick": tick, "env_t": int(env_t[i]), "final": final, "missing": lacks}
            self.rows.append({**place, "row": row(columns, i), "answer": None})

    def answer(self, lanes: Any, columns: Any) -> None:
        self.answers |= {name: map_tree(lambda leaf: leaf[:0], column) for name, column in columns.items()}
        for i, lane in enumerate(lanes.tolist()):
            waiting = [r for r in self.rows if r["lane"] == lane and not r["final"] and r["answer"] is None]
            waiting[0]["answer"] = row(columns, i)

    def after(self, k: int) -> int | None:
        if self.rows[k]["final"]:
            return None
        lane = self.rows[k]["lane"]
        return next((j for j in range(k + 1, len(self.rows)) if self.rows[j]["lane"] == lane), None)

    def eps_id(self, k: int) -> int:
        return int(self.rows[k]["row"]["eps_id"])

    def closed(self, eps_ids: Any = None) -> Any:
        found = [k for k in range(len(self.rows)) if self.after(k) is not None]
        return np.array([k for k in found if eps_ids is None or self.eps_id(k) in eps_ids], np.int64)

    def of_episodes(self, eps_ids: Any) -> Any:
        return np.array([k for k in range(len(self.rows)) if self.eps_id(k) in eps_ids], np.int64)

    def closing_order(self, numbers: Any) -> Any:
        return tuple(
            np.array(part, np.int64)
            for part in (
                [self.rows[self.after(k) or 0]["tick"] for k in numbers],
                [self.rows[k]["lane"] for k in numbers],
            )
        )

    def forget(self, numbers: Any) -> None:
        keep = {k for k in range(len(self.rows)) if not self.rows[k]["final"]} - set(numbers.tolist())
        keep |= {after for k in keep if (after := self.after(k)) is not None}
        self.rows = [self.rows[k] for k in sorted(keep)]

    def keep_ended(self, ended_N: Any) -> None:
        self.rows = [r for r in self.rows if r["row"]["eps_id"] < ended_N[r["lane"] // AGENTS]]

    def read(self, numbers: Any, unroll_id: int) -> tuple[dict[str, Any], int]:
        order = sorted(numbers.tolist(), key=lambda k: (self.rows[k]["lane"], k))
        first, then = [self.rows[k] for k in order], [self.rows[self.after(k) or 0] for k in order]

        def column(blank: Any, name: str, source: Any) -> Any:
            leaves = [one.get(name) for one in source]
            leaves = [map_tree(lambda leaf: _before(leaf, name), blank) if one is None else one for one in leaves]
            return zip_trees(
                lambda parts: np.array(parts[1:], parts[0].dtype).reshape(len(parts) - 1, *parts[0].shape[1:]),
                [blank, *leaves],
            )

        now, later, said = [r["row"] for r in first], [r["row"] for r in then], [r["answer"] for r in first]
        after = ("rewards", "terminated", "truncated")
        found = {
            n: column(b, n, later if n in after else now) for n, b in self.columns.items() if n not in ("first", "last")
        }
        seen = [b["row"] if not b["missing"] else a["row"] for a, b in zip(first, then, strict=True)]
        found["next_obs"] = column(self.columns["obs"], "obs", seen)
        for name in ("state", "action_mask", "added"):
            if name in self.columns:
                found[f"next_{name}"] = column(self.columns[name], name, later)
        found["next_obs_missing"] = np.array([r["missing"] for r in then], np.bool_)
        found["env_t"], found["next_env_t"] = (np.array([r["env_t"] for r in part], np.int64) for part in (first, then))
        fragments = []
        for i, k in enumerate(order):
            a, b = self.rows[order[i - 1]], self.rows[k]
            goes_on = i and a["lane"] == b["lane"] and a["row"]["eps_id"] == b["row"]["eps_id"]
            ended = i and (found["terminated"][i - 1] or found["truncated"][i - 1])
            unroll_id += bool(i and (not goes_on or ended))
            fragments.append(unroll_id)
        found["unroll_id"] = np.array(fragments, np.int64)
        found |= {name: column(blank, name, said) for name, blank in self.answers.items()}
        return found, unroll_id + 1


def _before(leaf: Any, name: str) -> Any:
    """What stands for a row of before its column came."""
    if name == "action_mask":
        return np.ones(leaf.shape[1:], np.bool_)
    return np.full(leaf.shape[1:], np.nan if leaf.dtype.kind == "f" else 0, leaf.dtype)


class Both:
    """A policy's lanes, whose rows and answers go into a log and into a book; what is asked of both is the same."""

    def __init__(self, num_envs: int, obs: Any, *, masked_from: int, state: bool, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.num_envs, self.obs, self.masked_from, self.state = num_envs, obs, masked_from, state
        self.num_lanes = num_envs * AGENTS
        self.book = Book()
        self.log = RowLog(ColumnForms("policy 'p'"), self.num_lanes, BatchMemory())
        self.tick, self.unroll, self.was_in_place = 0, 0, False
        self.eps_N = np.arange(num_envs)
        self.t_L = np.zeros(self.num_lanes, np.int64)
        self.waits_L = np.zeros(self.num_lanes, np.bool_)  # for an answer
        self.is_open_L = np.zeros(self.num_lanes, np.bool_)  # for an answer, or for what comes of it
        self.gone_L = np.zeros(self.num_lanes, np.bool_)

    def some(self, like: Any, n: int) -> Any:
        return map_tree(lambda leaf: self.rng.integers(0, 9, (n, *leaf.shape[1:])).astype(leaf.dtype), like)

    def rows(self, lanes: Any, *, last: bool) -> Rows:
        n, env_id = len(lanes), lanes // AGENTS
        found = {
            "env_id": env_id,
            "agent_index": lanes % AGENTS,
            "eps_id": self.eps_N[env_id],
            "t": self.t_L[lanes],
            "obs": self.some(self.obs, n),
            "rewards": self.rng.normal(size=n),
            "terminated": self.rng.random(n) < 0.5 if last else np.zeros(n, np.bool_),
            "truncated": np.full(n, last),
            "first": self.t_L[lanes] == 0,
            "last": np.full(n, last),
        }
        if self.tick >= self.masked_from:
            found["action_mask"] = (self.rng.random((n, 4)) < 0.5) | last  # a last row allows everything
        if self.state:
            found["state"] = self.rng.normal(size=(n, 3)).astype(np.float32)
        if not last:
            found["added"] = self.some({"x": np.zeros((0, 2))}, n)
        return Rows(found)

    def pick(self, of: Any, share: float) -> Any:
        lanes = np.flatnonzero(of)
        return lanes[self.rng.random(len(lanes)) < share]

    def observe(self, share: float) -> None:
        """Some lanes that are not waiting get their next rows."""
        lanes = self.pick(~self.waits_L & ~self.gone_L, share)
        if len(lanes):
            self._append(lanes, self.rows(lanes, last=False), None)
            self.waits_L[lanes] = self.is_open_L[lanes] = True
        self.tick += 1

    def end(self, share: float) -> None:
        """Some agents that have acted get their last rows."""
        lanes = self.pick(self.is_open_L & ~self.waits_L, share)
        if len(lanes):
            self._append(lanes, self.rows(lanes, last=True), self.rng.random(len(lanes)) < 0.3)
            self.is_open_L[lanes], self.gone_L[lanes] = False, True

    def _append(self, lanes: Any, rows: Rows, missing: Any) -> None:
        env_t = self.rng.integers(0, 50, len(lanes))
        tick = np.full(len(lanes), self.tick) if self.rng.random() < 0.5 else self.tick
        columns, is_last = dict(rows.items()), missing is not None
        self.book.append(columns, lanes, tick, env_t, missing)
        if self.rng.random() < 0.5:
            self.log.append(Moment(lanes, tick, env_t, is_last, missing, columns), list(columns))
            for _, leaf in tree_leaves(columns):
                leaf[...] = 99  # which by now belongs to somebody else
        elif self.rng.random() < 0.5:
            self.log.append(Moment(lanes, tick, env_t, is_last, missing, columns))
        else:  # as part of the rows of several policies
            more = Rows.concat([rows.slice(0, 1), rows, rows.slice(0, 1)])
            part = slice(1, 1 + len(lanes))
            self.log.append(Moment(lanes, tick, env_t, is_last, missing, dict(more.items()), part))

    def answer(self, share: float) -> None:
        """Some of those that wait are answered, whichever rows they came with."""
        lanes = self.pick(self.waits_L, share)
        if not len(lanes):
            return
        n = len(lanes)
        columns = {
            "actions": self.rng.integers(0, 5, n),
            "logp": self.some((np.zeros(0, np.float32),), n),
            "policy_version": np.full(n, self.tick),
        }
        if self.tick > 5:
            columns["off_policy"] = self.rng.random(n) < 0.5
        self.book.answer(lanes, columns)
        self.log.answer(lanes, self.log.forms.check_answer(columns))
        columns["actions"][...] = 99
        self.waits_L[lanes] = False
        self.t_L[lanes] += 1

    def turn_over(self, share: float) -> None:
        """Begin the next episode in some of the envs without living agents."""
        over = np.flatnonzero(~self.is_open_L.reshape(-1, AGENTS).any(axis=1))
        self._begin(over[self.rng.random(len(over)) < share])

    def lose(self, share: float) -> None:
        """Some envs lose their episodes, and all rows of those."""
        envs = np.flatnonzero(self.rng.random(self.num_envs) < share)
        same(self.log.of_episodes(self.eps_N[envs]), self.book.of_episodes(self.eps_N[envs]))
        for one in (self.book, self.log):
            one.forget(one.of_episodes(self.eps_N[envs]))
        self._begin(envs)

    def _begin(self, envs: Any) -> None:
        self.eps_N[envs] = self.eps_N.max(initial=0) + 1 + np.arange(len(envs))
        for table, value in ((self.t_L, 0), (self.waits_L, False), (self.is_open_L, False), (self.gone_L, False)):
            table.reshape(-1, AGENTS)[envs] = value

    def deliver(self, share: float) -> None:
        """A batch of all that is closed, or of what was closed first."""
        self.compare()
        numbers = self.book.closed()
        if share > 0.7:
            chosen: Any = self.log.closed()
        else:
            last = int(share * (self.tick + 1)), int(self.rng.integers(self.num_lanes))
            order = zip(*(part.tolist() for part in self.book.closing_order(numbers)), strict=True)
            numbers = numbers[np.array([pair <= last for pair in order], np.bool_)]
            chosen = self.log.closed_until(last)
            same(chosen, numbers)
        if not len(numbers):
            return
        want, stop = self.book.read(numbers, self.unroll)
        got, got_stop = self.log.read(chosen, self.unroll)
        assert got.keys() == want.keys()
        assert got_stop == stop
        for name, column in want.items():
            for (path, leaf), (got_path, got_leaf) in zip(tree_leaves(column), tree_leaves(got[name]), strict=True):
                assert path == got_path
                same(got_leaf, leaf, name)
        self.unroll = stop
        self.book.forget(numbers)
        self.log.forget(chosen)
        for _, leaf in tree_leaves(got):
            if leaf.flags.writeable and leaf.dtype != object:
                leaf[...] = 7  # the batch is its user's

    def all_act(self, share: float) -> None:
        """A batch of steps in which all lanes act, of a length that is known; something may come between."""
        self.cut(1.0)
        self.observe(1.0)
        length = int(self.rng.integers(1, 5))
        self.log.begin_block(length)
        for _ in range(length if share > 0.5 else length - 1):
            self.answer(1.0)
            if self.rng.random() < 0.3:
                self.end(0.5)
                self.gone_L[:] = False
            self.observe(1.0)
        self.was_in_place = isinstance(self.log.closed(), range)
        self.deliver(1.0)

    def save(self, share: float) -> None:
        """Go on with another log that has its state."""
        forms, state = self.log.forms, self.log.get_state()
        other = RowLog(ColumnForms("policy 'p'"), self.num_lanes, BatchMemory())
        other.prepare(copy.deepcopy(state), forms)()
        self.log = other
        again = self.log.get_state()
        for (path, leaf), (got_path, got_leaf) in zip(tree_leaves(state), tree_leaves(again), strict=True):
            assert path == got_path
            same(got_leaf, leaf, path)

    def cut(self, share: float) -> None:
        """After an interrupt only episodes that have ended stay."""
        if share < 0.9:
            return
        ended_N = np.where(self.is_open_L.reshape(-1, AGENTS).any(axis=1), self.eps_N, self.eps_N + 1)
        self.book.keep_ended(ended_N)
        self.log.keep_ended(ended_N)
        self._begin(np.arange(self.num_envs))

    def compare(self) -> None:
        assert len(self.log) == len(self.book.rows)
        numbers = self.book.closed()
        assert len(self.log.closed()) == len(numbers)
        some = self.rng.choice(self.eps_N, 2)
        same(self.log.closed(some), self.book.closed(some))
        kept = self.log.without(self.log.closed(), set(some.tolist()))
        assert len(kept) == len(numbers) - len(self.book.closed(some))
        for got, want in zip(self.log.closing_order(self.log.closed()), self.book.closing_order(numbers), strict=True):
            same(got, want)
        last = tuple(self.rng.integers(0, [self.tick + 1, self.num_lanes]).tolist())
        assert len(self.log.closed_until(last)) == sum(
            pair <= last for pair in zip(*(part.tolist() for part in self.book.closing_order(numbers)), strict=True)
        )
        same(self.log.open_lanes, np.flatnonzero(self.is_open_L))


def same(got: Any, want: Any, name: str = "") -> None:
    assert (got.dtype, got.shape) == (want.dtype, want.shape), name
    assert got.tobytes() == want.tobytes(), name


CALLS = ("observe", "answer", "observe", "answer", "end", "turn_over", "deliver", "lose", "cut", "all_act", "save")


@given(
    num_envs=st.integers(1, 4),
    obs=st.sampled_from(sorted(OBS)),
    masked_from=st.sampled_from([0, 3, 99]),
    state=st.booleans(),
    seed=st.integers(0, 2**16),
    calls=st.lists(st.tuples(st.sampled_from(CALLS), st.sampled_from([0.3, 0.8, 1.0])), min_size=5, max_size=60),
)
def test_row_log_equals_a_list_of_rows(
    num_envs: int, obs: str, masked_from: int, state: bool, seed: int, calls: list[tuple[str, float]]
) -> None:
    """Turns, deaths, late agents, answers to rows of many moments, lost episodes, batches of a part."""
    both = Both(num_envs, OBS[obs], masked_from=masked_from, state=state, seed=seed)
    for call, share in calls:
        getattr(both, call)(share)
        both.compare()
    both.deliver(1.0)


@pytest.mark.parametrize("obs", OBS)
def test_where_all_act_each_batch_is_what_came(obs: str) -> None:
    """Read in place, but for that in which a column comes that was not there before."""
    both = Both(3, OBS[obs], masked_from=10, state=True, seed=0)
    found = []
    for share in (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.3, 1.0, 1.0):
        both.all_act(share)
        found.append(both.was_in_place)
    assert not found[6]
    assert sum(found) >= 6
    assert both.tick > 12


def test_a_full_block_gives_out_its_own_arrays() -> None:
    """Wide rows are written once, to where the batch has them."""
    both = Both(3, OBS["box"], masked_from=0, state=True, seed=0)
    both.observe(1.0)
    both.log.begin_block(2)
    for _ in range(2):
        both.answer(1.0)
        both.observe(1.0)
    moment = both.log._kept.moments[0]
    assert moment.block is not None
    (table,) = moment.block.rows["state"] if moment.block.rows["state"][0].flags.c_contiguous else [None]
    got, _ = both.log.read(both.log.closed(), 0)
    assert table is None or np.shares_memory(got["state"], table)
    assert not np.shares_memory(got["next_state"], got["state"])


def test_a_column_that_changes_its_form_leaves_it_as_it_was() -> None:
    both = Both(2, OBS["box"], masked_from=99, state=False, seed=0)
    lanes = np.arange(6)
    columns = dict(both.rows(lanes, last=False).items())
    both.log.append(Moment(lanes, 0, np.zeros(6, np.int64), False, None, columns))
    bad = {**columns, "obs": np.zeros((6, 3), np.float32)}
    with pytest.raises(ContractError, match="'obs' was float32 of shape"):
        both.log.append(Moment(lanes, 1, np.ones(6, np.int64), False, None, bad), ["obs"])
    assert len(both.log) == 6
    assert not len(both.log.closed())

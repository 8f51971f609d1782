"""Where rows lie: the log beside a list of rows, blocks read in place, and columns of any form."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Text, Tuple
from hypothesis import given, settings
from hypothesis import strategies as st
from pettingzoo import ParallelEnv

import marlvec
from marlvec import Collector
from marlvec.collect import columns, row_log, rows
from marlvec.collect.columns import ColumnForms
from marlvec.collect.rollout import RolloutLoop
from marlvec.collect.row_log import RowLog
from marlvec.collect.rows import UNREAD, Moment, PolicyAnswers, PolicyPart
from marlvec.connectors import AgentPipeline, Rows, agent_connector
from marlvec.connectors.agent import ClipReward, FrameStack, NormalizeObs, PrevActions
from marlvec.errors import ContractError, RestartQuietly
from marlvec.policies import Policy
from marlvec.spaces import SpaceTree
from marlvec.trees import map_tree, tree_leaves, zip_trees
from tests.collect.plans import BATCH_MODES, FEW_OR_MANY, for_examples
from tests.collect.players import MODES
from tests.vector.support.kinds import BACKENDS, vectorize

# --- A log beside a list of rows: whatever comes in whatever order, the same transitions are closed, read and dropped


AGENTS = 3
POLICIES = 0, 1
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
        self.all_columns: dict[int, dict[str, Any]] = {k: {} for k in POLICIES}  # by name, a column of no rows
        self.all_answers: dict[int, dict[str, Any]] = {k: {} for k in POLICIES}

    def append(self, columns: Any, lanes: Any, numbers: Any, ticks: Any, env_t: Any, missing: Any) -> None:
        if missing is None:
            for number in {*numbers.tolist()} - {UNREAD}:
                self.all_columns[number] |= {
                    name: map_tree(lambda leaf: leaf[:0], column) for name, column in columns.items()
                }
        for i, lane in enumerate(lanes.tolist()):
            tick = int(np.broadcast_to(ticks, lanes.shape)[i])
            final, lacks = missing is not None, missing is not None and bool(missing[i])
            place = {"lane": lane, "tick": tick, "env_t": int(env_t[i]), "final": final, "missing": lacks}
            place["number"] = int(numbers[i])
            self.rows.append({**place, "row": row(columns, i), "answer": None})

    def answer(self, number: int, lanes: Any, columns: Any) -> None:
        if number != UNREAD:
            self.all_answers[number] |= {
                name: map_tree(lambda leaf: leaf[:0], column) for name, column in columns.items()
            }
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

    def read(self, number: int, numbers: Any, unroll_id: int) -> tuple[dict[str, Any], int]:
        numbers = np.array([k for k in numbers.tolist() if self.rows[k]["number"] == number], np.int64)
        order = sorted(numbers.tolist(), key=lambda k: (self.rows[k]["lane"], k))
        first, then = [self.rows[k] for k in order], [self.rows[self.after(k) or 0] for k in order]

        def column(blank: Any, name: str, source: Any) -> Any:
            leaves = [one.get(name) for one in source]
            leaves = [map_tree(lambda leaf: _before(leaf, name), blank) if one is None else one for one in leaves]
            return zip_trees(
                lambda parts: np.array(parts[1:], parts[0].dtype).reshape(len(parts) - 1, *parts[0].shape[1:]),
                [blank, *leaves],
            )

        own_columns, answers = self.all_columns[number], self.all_answers[number]
        now, later, said = [r["row"] for r in first], [r["row"] for r in then], [r["answer"] for r in first]
        after = ("rewards", "terminated", "truncated")
        found = {
            n: column(b, n, later if n in after else now) for n, b in own_columns.items() if n not in ("first", "last")
        }
        seen = [b["row"] if not b["missing"] else a["row"] for a, b in zip(first, then, strict=True)]
        found["next_obs"] = column(own_columns["obs"], "obs", seen)
        for name in ("state", "action_mask", "added"):
            if name in own_columns:
                found[f"next_{name}"] = column(own_columns[name], name, later)
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
        found |= {name: column(blank, name, said) for name, blank in answers.items()}
        return found, unroll_id + 1


def _before(leaf: Any, name: str) -> Any:
    """What stands for a row of before its column came."""
    if name == "action_mask":
        return np.ones(leaf.shape[1:], np.bool_)
    return np.full(leaf.shape[1:], np.nan if leaf.dtype.kind == "f" else 0, leaf.dtype)


class Both:
    """Lanes whose rows and answers go into a log and into a book; what is asked of both is the same."""

    def __init__(self, num_envs: int, obs: Any, *, masked_from: int, state: bool, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.num_envs, self.obs, self.masked_from, self.state = num_envs, obs, masked_from, state
        self.num_lanes = num_envs * AGENTS
        self.book = Book()
        self.log = self.new_log()
        self.waiting: list[PolicyPart] = []  # of the last rows to act on
        self.tick, self.unroll, self.was_in_place = 0, 0, False
        self.eps_N = np.arange(num_envs)
        self.t_L = np.zeros(self.num_lanes, np.int64)
        self.waits_L = np.zeros(self.num_lanes, np.bool_)  # for an answer
        self.is_open_L = np.zeros(self.num_lanes, np.bool_)  # for an answer, or for what comes of it
        self.gone_L = np.zeros(self.num_lanes, np.bool_)
        self.policies = [(0,), (0, 1), (0, 1, UNREAD)][seed % 3]
        self.number_L = np.zeros(self.num_lanes, np.int64)
        self._begin(np.arange(num_envs))

    def new_log(self) -> RowLog:
        log = RowLog(self.num_lanes, AGENTS)
        log.forms = {k: ColumnForms(f"policy {k}") for k in POLICIES}
        return log

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
        order = self.number_L[lanes].argsort(kind="stable")  # policy after policy
        lanes, rows, is_last = lanes[order], rows.take(order), missing is not None
        missing = missing[order] if is_last else None
        numbers, columns, eps_id = self.number_L[lanes], dict(rows.items()), rows["eps_id"]
        self.book.append(columns, lanes, numbers, tick, env_t, missing)
        kind, parts = self.rng.integers(3), []
        more = dict(Rows.concat([rows.slice(0, 1), rows, rows.slice(0, 1)]).items())
        for number in np.unique(numbers).tolist():
            own = (numbers == number).nonzero()[0]
            part = slice(int(own[0]), int(own[-1]) + 1)
            if number == UNREAD:
                parts.append(PolicyPart(UNREAD, lanes[part], {}))
            elif kind == 0:
                columns = dict(rows.take(own).items())
                parts.append(PolicyPart(number, lanes[part], columns, shared=[*columns]))
            elif kind == 1:
                parts.append(PolicyPart(number, lanes[part], columns, part))
            else:
                parts.append(PolicyPart(number, lanes[part], more, slice(part.start + 1, part.stop + 1)))
        given = [part.columns for part in parts if part.shared]
        self.log.append([Moment(lanes, tick, env_t, eps_id, is_last, missing, parts)])
        for columns in given:
            for _, leaf in tree_leaves(columns):
                leaf[...] = 99  # which by now belongs to somebody else
        if not is_last:
            self.waiting = parts

    def answer(self, share: float) -> None:
        """Some of those that wait are answered, whichever rows they came with."""
        lanes = self.pick(self.waits_L, share)
        if not len(lanes):
            return
        said = []
        for number in np.unique(self.number_L[lanes]).tolist():
            own = lanes[self.number_L[lanes] == number]
            n = len(own)
            columns = {
                "actions": self.rng.integers(0, 5, n),
                "logp": self.some((np.zeros(0, np.float32),), n),
                "policy_version": np.full(n, self.tick),
            }
            if self.tick > 5:
                columns["off_policy"] = self.rng.random(n) < 0.5
            self.book.answer(number, own, columns)
            if number != UNREAD:
                said.append(PolicyAnswers(number, own, self.log.forms[number].check_answer(columns)))
        if said:
            self.log.answer(said)
        self.waits_L[lanes] = False
        self.t_L[lanes] += 1

    def turn_over(self, share: float) -> None:
        """Begin the next episode in some of the envs without living agents."""
        over = np.flatnonzero(~self.is_open_L.reshape(-1, AGENTS).any(axis=1))
        self._begin(over[self.rng.random(len(over)) < share])

    def lose(self, share: float) -> None:
        """Some envs lose their episodes, and all rows of those."""
        envs = np.flatnonzero(self.rng.random(self.num_envs) < share)
        numbers = self.book.of_episodes(self.eps_N[envs])
        self.are_same(self.log.of_episodes(self.eps_N[envs]), numbers)
        closed = len(self.book.closed(self.eps_N[envs]))
        self.book.forget(numbers)
        assert self.log.lose(self.eps_N[envs]) == closed
        self._begin(envs)

    def _begin(self, envs: Any) -> None:
        self.eps_N[envs] = self.eps_N.max(initial=0) + 1 + np.arange(len(envs))
        for table, value in ((self.t_L, 0), (self.waits_L, False), (self.is_open_L, False), (self.gone_L, False)):
            table.reshape(-1, AGENTS)[envs] = value
        self.number_L.reshape(-1, AGENTS)[envs] = self.rng.choice(self.policies, (len(envs), AGENTS))

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
            self.are_same(chosen, numbers)
        if not len(numbers):
            return
        counts = self.log.counts(chosen)
        assert counts == dict(Counter(sorted(self.book.rows[k]["number"] for k in numbers)))
        batches = []
        for number in counts.keys() - {UNREAD}:
            want, stop = self.book.read(number, numbers, self.unroll)
            got, got_stop = self.log.read(number, chosen, self.unroll)
            assert got.keys() == want.keys()
            assert got_stop == stop
            for name, column in want.items():
                for (path, leaf), (got_path, got_leaf) in zip(tree_leaves(column), tree_leaves(got[name]), strict=True):
                    assert path == got_path
                    same(got_leaf, leaf, name)
            self.unroll = stop
            batches.append(dict(got.items()))
        self.book.forget(numbers)
        self.log.forget(chosen)
        for _, leaf in (leaf for batch in batches for leaf in tree_leaves(batch)):
            if leaf.flags.writeable and leaf.dtype != object:
                leaf[...] = 7  # the batch is its user's

    def all_act(self, share: float) -> None:
        """A batch of steps in which all lanes act, of a length that is known; something may come between."""
        self.cut(1.0)
        self.observe(1.0)
        length = int(self.rng.integers(1, 5))
        self.log.begin_blocks(length, {} if UNREAD in self.policies else {p.number: p for p in self.waiting})
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
        other, asked = self.new_log(), [*POLICIES, UNREAD]
        states = {number: self.log.get_state(number) for number in asked}
        other.prepare({k: (copy.deepcopy(states[k]), self.log.forms.get(k)) for k in asked})()
        self.log = other
        for number, state in states.items():
            again = self.log.get_state(number)
            for (path, leaf), (got_path, got_leaf) in zip(tree_leaves(state), tree_leaves(again), strict=True):
                assert path == got_path
                same(got_leaf, leaf, path)

    def cut(self, share: float) -> None:
        """After an interrupt only episodes that have ended stay."""
        if share < 0.9:
            return
        ended_N = np.where(self.is_open_L.reshape(-1, AGENTS).any(axis=1), self.eps_N, self.eps_N + 1)
        self.book.keep_ended(ended_N)
        assert self.log.keep_ended(ended_N) == len(self.book.closed())
        self._begin(np.arange(self.num_envs))

    def compare(self) -> None:
        assert len(self.log) == len(self.book.rows)
        numbers = self.book.closed()
        assert len(self.log.closed()) == len(numbers)
        some = self.rng.choice(self.eps_N, 2)
        self.are_same(self.log.closed(some), self.book.closed(some))
        kept = self.log.without(self.log.closed(), set(some.tolist()))
        assert len(kept) == len(numbers) - len(self.book.closed(some))
        got, want = (
            sorted(zip(*(part.tolist() for part in one.closing_order(these)), strict=True))
            for one, these in ((self.log, self.log.closed()), (self.book, numbers))
        )
        assert got == want
        last = tuple(self.rng.integers(0, [self.tick + 1, self.num_lanes]).tolist())
        assert len(self.log.closed_until(last)) == sum(pair <= last for pair in want)
        if want:
            assert self.log.last_of_first(len(want) // 2 + 1) == want[len(want) // 2]
        same(self.log.open_lanes, np.flatnonzero(self.is_open_L))
        for number in self.policies:
            assert self.log.size(number) == sum(r["number"] == number for r in self.book.rows)

    def are_same(self, got: Any, want: Any) -> None:
        """Rows by their numbers in the log and in the book, which may be in another order."""
        index = self.log._index
        columns = (index.lane[got], index.tick[got], index.final[got], index.number[got])
        names = ("lane", "tick", "final", "number")
        rows = [tuple(self.book.rows[k][name] for name in names) for k in want]
        assert sorted(zip(*(column.tolist() for column in columns), strict=True)) == sorted(rows)


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


def test_rows_of_some_lanes_alone_end_a_block() -> None:
    both = Both(3, OBS["box"], masked_from=99, state=False, seed=0)
    both.observe(1.0)
    both.log.begin_blocks(1, {part.number: part for part in both.waiting})
    assert both.log._kept.blocks
    both.answer(1.0)
    both.observe(0.5)
    assert not isinstance(both.log.closed(), range)
    both.deliver(1.0)


def test_a_whole_block_gives_out_its_own_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large rows are written once, to where the batch has them."""
    monkeypatch.setattr(rows, "_WIDE", 64)
    monkeypatch.setattr(columns, "_NARROW", 4)
    both = Both(3, OBS["box"], masked_from=0, state=True, seed=0)
    both.observe(1.0)
    both.log.begin_blocks(2, {part.number: part for part in both.waiting})
    for _ in range(2):
        both.answer(1.0)
        both.observe(1.0)
    block = both.log._kept.blocks[0]
    assert block.tables.keys() >= {"state", "obs"}
    got, _ = both.log.read(0, both.log.closed(), 0)
    assert np.shares_memory(got["state"], block.tables["state"][0])
    assert not np.shares_memory(got["next_state"], got["state"])


def test_a_column_that_changes_its_form_leaves_it_as_it_was() -> None:
    both = Both(2, OBS["box"], masked_from=99, state=False, seed=0)
    lanes = np.arange(6)
    columns = dict(both.rows(lanes, last=False).items())
    both.log.append([Moment(lanes, 0, lanes, lanes, False, None, [PolicyPart(0, lanes, columns)])])
    bad = {**columns, "obs": np.zeros((6, 3), np.float32)}
    with pytest.raises(ContractError, match="'obs' was float32 of shape"):
        both.log.append([Moment(lanes, 1, lanes, lanes, False, None, [PolicyPart(0, lanes, bad, shared=["obs"])])])
    assert len(both.log) == 6
    assert not len(both.log.closed())


# --- columns of any form, through whole collects: from its ids and its observation follows all else that a row holds


BOX = Box(-9, 999, (3,), np.float32)
SPACES: dict[str, Any] = {
    "box": BOX,
    "dict": Dict({"image": Box(0, 255, (2, 2), np.uint8), "pair": Tuple((Discrete(5), BOX))}),
    "tuple": Tuple((BOX, MultiDiscrete([2, 3]))),
    "text": Dict({"said": Text(4), "seen": BOX}),
}
BOX_OF: dict[str, Any] = {
    "box": lambda obs: obs,
    "dict": lambda obs: obs["pair"][1],
    "tuple": lambda obs: obs[0],
    "text": lambda obs: obs["seen"],
}
"""Where a space has the box whose first number is the episode."""


def drawn(*key: int) -> np.random.Generator:
    return np.random.default_rng(key)


def obs_of(space: str, env: int, episode: int, t: int, agent: int) -> Any:
    """What an agent sees."""
    rng, tree = drawn(env, episode, t, agent), SpaceTree(SPACES[space])
    leaves = [
        "".join(rng.choice(list("abcd"), 3))
        if isinstance(leaf.space, Text)
        else np.asarray(rng.integers(0, 2, leaf.shape), leaf.dtype)
        for leaf in tree.leaves
    ]
    obs = tree.unflatten(leaves)
    BOX_OF[space](obs)[0] = episode
    return obs


@cache
def plain_obs(space: str, *moment: int) -> list[Any]:
    return plain(obs_of(space, *moment))


def plain(tree: Any) -> list[Any]:
    """Leaves of a tree, as paths and lists."""
    return [(path, np.asarray(leaf).tolist()) for path, leaf in tree_leaves(tree)]


@cache
def mask_of(env: int, episode: int, t: int, agent: int) -> Any:
    return (drawn(1, env, episode, t, agent).random(4) < 0.5) | (np.arange(4) == 1)


def is_masked(masked: int, episode: int, t: int) -> bool:
    """Whether there are masks: from the beginning, or from the second step of an episode on."""
    return (episode, t) >= (masked, min(masked, 1))


@cache
def pay_of(env: int, episode: int, t: int, agent: int, action: int) -> float:
    """What an agent is paid for an action."""
    return float(action + drawn(2, env, episode, t, agent).normal())


@cache
def length_of(env: int, episode: int) -> int:
    return int(drawn(3, env, episode).integers(1, 7))


@cache
def is_strange(env: int, episode: int) -> bool:
    return bool(drawn(4, env, episode).random() < 0.4)


@cache
def ends_of(odd: str, env: int, episode: int, t: int, agent: int) -> tuple[bool, bool]:
    """Whether an agent is terminated or truncated at a moment."""
    if t == length_of(env, episode):
        cut = bool(drawn(5, env, episode, agent).random() < 0.5)
        return not cut, cut
    return odd == "death" and is_strange(env, episode) and t == 2 and agent == 1, False


class World(ParallelEnv):  # type: ignore[misc]  # pettingzoo has no type information
    """Three agents that mostly act all the time, in episodes of different lengths.

    Args:
        space: Of observations, by name.
        odd: What now and then happens in it: "death" of one agent before the others, an agent "late", a "restart".
        masked: From which episode on it gives action masks.
        env_index: Its place.
    """

    metadata: Any = {"name": "world", "render_modes": []}
    render_mode = None
    state_space = Box(-99, 99, (2,), np.float64)
    possible_agents = ["a", "b", "c"]

    def __init__(self, space: str, odd: str, masked: int, env_index: int = 0) -> None:
        self.agents: list[str] = []
        self.space, self.odd, self.masked, self.index, self.episode = space, odd, masked, env_index, -1

    def observation_space(self, agent: str) -> Any:
        return SPACES[self.space]

    def action_space(self, agent: str) -> Any:
        return Discrete(4)

    def state(self) -> Any:
        return np.array([self.episode, self.t], np.float64)

    def moment(self, agent: str) -> tuple[int, int, int, int]:
        return self.index, self.episode, self.t, "abc".index(agent)

    def told(self, agents: list[str]) -> tuple[Any, Any]:
        obs = {agent: obs_of(self.space, *self.moment(agent)) for agent in agents}
        if not is_masked(self.masked, self.episode, self.t):
            return obs, {agent: {} for agent in agents}
        return obs, {agent: {"action_mask": mask_of(*self.moment(agent))} for agent in agents}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.t, self.episode = 0, self.episode + 1
        late = self.odd == "late" and is_strange(self.index, self.episode)
        self.agents = self.possible_agents[: 2 if late else 3]
        return self.told(self.agents)

    def step(self, actions: Any) -> Any:
        rewards = {agent: pay_of(*self.moment(agent), actions[agent]) for agent in self.agents}
        self.t += 1
        if self.odd == "restart" and self.t == 2 and is_strange(self.index, self.episode):
            raise RestartQuietly("now and then")
        if self.t == 1 < length_of(self.index, self.episode) and "c" not in self.agents:
            self.agents, rewards["c"] = [*self.agents, "c"], 0.5
        here = self.agents
        ends = {agent: ends_of(self.odd, *self.moment(agent)) for agent in here}
        self.agents = [agent for agent in here if not any(ends[agent])]
        obs, infos = self.told(here)
        return obs, rewards, {a: end[0] for a, end in ends.items()}, {a: end[1] for a, end in ends.items()}, infos

    def close(self) -> None:
        pass


class Chooser(Policy):
    """Acts by numbers that follow from the row alone, and says more about it."""

    def __init__(self, salt: int) -> None:
        self.salt = salt

    def act(self, rows: Rows, *, explore: bool = True) -> Any:
        number = rows["eps_id"] * 7 + rows["t"] * 3 + rows["agent_index"] + self.salt
        actions = number % 4
        if "action_mask" in rows:
            actions = np.where(rows["action_mask"][np.arange(len(rows)), actions], actions, 1)
        return actions, {"logp": np.sin(number).astype(np.float32), "more": {"x": number[:, None] * 0.5}}


@agent_connector(name="count")
def count(rows: Rows) -> Rows:
    """Adds a column, but for last rows."""
    return rows if rows["last"].any() else rows.replace(counted=rows["t"] + 1)


CONNECTORS: dict[str, Any] = {
    "default": lambda: AgentPipeline.default(),
    "added": lambda: [count],
    "learned": lambda: [NormalizeObs(), ClipReward(limit=1.5), PrevActions(), FrameStack(2)],
}


@dataclass
class Setting:
    """How a collector and its envs are made."""

    space: str = "box"
    odd: str = ""
    masked: int = 99
    num_envs: int = 3
    backend: str = "sync"
    mode: str = "same_step"
    copy: bool = False
    state: bool = False
    policies: str = "ppp"
    connectors: str = "default"
    batch_mode: str = "truncate"

    def envs(self) -> marlvec.VectorEnv:
        factories = [partial(World, self.space, self.odd, self.masked, i) for i in range(self.num_envs)]
        return vectorize(self.backend, factories, autoreset_mode=self.mode, copy=self.copy, state=self.state)

    def collector(self, envs: marlvec.VectorEnv) -> Collector:
        names = sorted({*self.policies})
        chains = None if self.space == "text" else {name: CONNECTORS[self.connectors]() for name in names}
        return Collector(
            envs,
            {name: Chooser(salt) for salt, name in enumerate(names)},
            dict(zip("abc", self.policies, strict=True)),
            agent_connectors=chains,
            batch_mode=self.batch_mode,  # type: ignore[arg-type]  # one of the two
            seed=0,
        )

    def check(self, name: str, rows: Any) -> None:
        """Check every column of some rows."""
        is_changed = self.connectors == "learned" and self.space != "text"
        assert ("state" in rows, "next_state" in rows) == (self.state, self.state)
        salt = sorted({*self.policies}).index(name)
        episode_column = BOX_OF[self.space](rows["obs"])[:, 0] if not is_changed else rows["eps_id"] // self.num_envs
        columns = {key: plain(column) for key, column in rows.items()}
        for i in range(len(rows)):
            row: dict[str, Any] = {key: [(path, leaf[i]) for path, leaf in column] for key, column in columns.items()}
            one = {key: leaves[0][1] for key, leaves in row.items() if leaves}
            env, agent, t, then = (one[key] for key in ("env_id", "agent_index", "env_t", "next_env_t"))
            episode = int(episode_column[i])
            assert then == t + 1
            if not is_changed:
                assert row["obs"] == plain_obs(self.space, env, episode, t, agent)
                assert row["next_obs"] == plain_obs(self.space, env, episode, then, agent)
            elif self.odd == "restart":  # of an env that was built anew nobody knows how many episodes it has played
                continue
            assert (one["terminated"], one["truncated"]) == ends_of(self.odd, env, episode, then, agent)
            if self.state:
                assert (one["state"], one["next_state"]) == ([episode, t], [episode, then])
            mask = mask_of(env, episode, t, agent).tolist() if is_masked(self.masked, episode, t) else [True] * 4
            assert one.get("action_mask", [True] * 4) == mask, (env, episode, t, agent)
            number = one["eps_id"] * 7 + one["t"] * 3 + agent + salt
            action = number % 4 if mask[number % 4] else 1
            assert one["actions"] == one["actions_for_env"] == action
            assert (one["logp"], row["more"][0][1]) == (float(np.sin(number).astype(np.float32)), [number * 0.5])
            pay = pay_of(env, episode, t, agent, action) + 0.5 * (t == 1 and one["t"] == 0)
            assert one["rewards"] == (np.clip(pay, -1.5, 1.5) if is_changed else pay)
            if self.connectors == "added" and self.space != "text":
                assert one["counted"] == one["t"] + 1


def check_rows_of(setting: Setting, calls: Sequence[tuple[str, int]]) -> None:
    """Collect, and check every row."""
    with setting.envs() as envs:
        collector = setting.collector(envs)
        for unit, amount in calls:
            for name, rows in collector.collect(**{unit: amount}).items():
                setting.check(name, rows)
                leaves = [leaf for _, column in rows.items() for _, leaf in tree_leaves(column)]
                assert all(leaf.flags.writeable and leaf.flags.c_contiguous for leaf in leaves)
                assert not any(np.may_share_memory(one, other) for k, one in enumerate(leaves) for other in leaves[:k])


EVERY = [("env_steps", 3 * 8), ("env_steps", 3), ("agent_steps", 9 * 5), ("env_steps", 4), ("env_steps", 2)]
"""Steps of all envs, parts of such, agent steps."""


@pytest.mark.mostly_slow("collects whole runs on several backends", quick=4)
@FEW_OR_MANY
@pytest.mark.parametrize("space", SPACES)
def test_every_column_of_every_row_is_what_its_env_and_policy_gave(space: str, examples: int) -> None:
    settings = st.builds(
        Setting,
        space=st.just(space),
        odd=st.sampled_from(["", "", "death", "late", "restart"]),
        masked=st.sampled_from([99, 0, 2]),
        num_envs=st.integers(1, 4),
        mode=st.sampled_from(MODES),
        copy=st.booleans(),
        state=st.booleans(),
        policies=st.sampled_from(["ppp", "pqp", "pqr"]),
        connectors=st.sampled_from(sorted(CONNECTORS)),
        batch_mode=st.sampled_from(BATCH_MODES),
    )
    calls = st.lists(st.tuples(st.sampled_from(["env_steps", "agent_steps"]), st.integers(1, 40)), max_size=4)
    for_examples(
        min(examples, 40),
        lambda calls, **found: check_rows_of(calls=EVERY + calls, **found),
        setting=settings,
        calls=calls,
    )


@pytest.mark.mostly_slow("collects whole runs on several backends", quick=3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_column_is_right_on_every_backend(backend: str, mode: str) -> None:
    """Of envs of which one gives masks from its third episode on."""
    setting = Setting("dict", masked=2, backend=backend, mode=mode, state=True, policies="pqp", connectors="added")
    check_rows_of(setting, [*EVERY, ("env_steps", 3 * 4)])


# --- whole collects twice, read in place from blocks where that can be, and always sorted: both give the same


def observed(setting: Setting, calls: Sequence[tuple[str, int]], given_up: Sequence[int] | None) -> tuple[Any, int]:
    """All that can be seen of some calls, and how many of their batches were read in place.

    Args:
        setting: How things are made.
        calls: What is collected.
        given_up: Numbers of the ticks at which blocks are given up in any case; None: there are no blocks.
    """
    seen, in_place, tick = [], 0, 0
    with setting.envs() as envs:
        collector = setting.collector(envs)
        loop: RolloutLoop = collector._loop
        begin_call, step = loop.begin_call, loop.step

        def forced(needed: Any) -> None:
            nonlocal tick
            tick += 1
            if given_up is not None and tick in given_up:
                collector._policy_set.log._kept.blocks = {}
            step(needed)

        loop.step = forced  # type: ignore[method-assign]
        if given_up is None:
            loop.begin_call = lambda needed, length: begin_call(needed, 0)  # type: ignore[method-assign]
        for unit, amount in calls:
            batch = collector.collect(**{unit: amount})
            in_place += isinstance(collector._policy_set.log.closed(), range)
            seen.append((batch.env_steps, batch.agent_steps))
            for name, rows in batch.items():
                for key, column in rows.items():
                    for path, leaf in tree_leaves(column):
                        values = leaf.tolist() if leaf.dtype.kind == "O" else leaf.tobytes()
                        seen.append((name, key, path, leaf.dtype.str, leaf.shape, values))
        metrics = {**collector.metrics.summary(), "timers": None, "duration": None, "envs": None}
        seen += [metrics["return"], metrics["length"], metrics["env_steps"], metrics["agent_steps"]]
        seen += [metrics["env_steps_lost"], metrics["agent_steps_lost"], metrics["episodes_restarted"]]
        seen += [(e.eps_id, e.number, e.length, e.returns_A.tolist()) for e in collector.metrics.episodes]
    return seen, in_place


settings_of = partial(
    st.builds,
    Setting,
    space=st.sampled_from(sorted(SPACES)),
    odd=st.sampled_from(["", "", "death", "late", "restart"]),
    masked=st.sampled_from([99, 99, 0, 2]),
    num_envs=st.integers(1, 4),
    mode=st.sampled_from(MODES),
    copy=st.booleans(),
    state=st.booleans(),
    policies=st.sampled_from(["ppp", "pqp", "pqr"]),
    connectors=st.sampled_from(sorted(CONNECTORS)),
    batch_mode=st.sampled_from([*BATCH_MODES, "truncate"]),
)


@pytest.mark.slow("collects whole runs on several backends")
@settings(deadline=None)
@given(
    setting=settings_of(backend=st.just("sync")),
    calls=st.lists(st.tuples(st.sampled_from([1, 1, 1, 3, 0]), st.integers(1, 9)), min_size=1, max_size=5),
    given_up=st.sets(st.integers(1, 30), max_size=3),
)
def test_a_block_is_read_as_rows_are_sorted(setting: Setting, calls: list[Any], given_up: set[int]) -> None:
    """Steps of all envs, parts of such, agent steps; blocks are given up when they must be, or at any other tick."""
    amounts = [
        ("env_steps", k * setting.num_envs)
        if kind == 1
        else ("agent_steps", 3 * k * setting.num_envs)
        if kind
        else ("env_steps", k)
        for kind, k in calls
    ]
    want, none = observed(setting, amounts, None)
    got, in_place = observed(setting, amounts, sorted(given_up))
    assert got == want
    assert not none
    if not setting.odd and not given_up and setting.batch_mode == "truncate" and setting.mode == "same_step":
        assert in_place or all(kind == 0 for kind, _ in calls)


@pytest.mark.mostly_slow("collects whole runs on several backends", quick=8)
@pytest.mark.parametrize("backend", ["sync", "thread", "async"])
@pytest.mark.parametrize("mode", MODES)
def test_a_block_is_read_as_rows_are_sorted_on_every_backend(backend: str, mode: str) -> None:
    setting = Setting("dict", masked=1, backend=backend, mode=mode, state=True, policies="pqp", connectors="learned")
    calls = [*EVERY, ("env_steps", 3 * 4)]
    want, _ = observed(setting, calls, None)
    got, in_place = observed(setting, calls, [])
    assert got == want
    assert in_place == 4  # also that in which the first mask comes


class Scribbler(Chooser):
    """Writes into all that it is given, and then fails, when it is asked for the n-th time."""

    def __init__(self, fails_at: int) -> None:
        super().__init__(0)
        self.left = fails_at

    def act(self, rows: Rows, *, explore: bool = True) -> Any:
        seen, answer = rows["obs"].copy(), super().act(rows)
        for _, column in rows.items():
            column[...] = 0
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        return answer[0], {**answer[1], "seen": seen}


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("fails_at", [2, 3, 5, 8, 99])
def test_a_policy_may_write_into_its_rows_and_fail(fails_at: int, copy: bool) -> None:
    """It is asked anew about rows as they came; what is stored never was what it has written."""
    found = []
    for policy in (Scribbler(fails_at), Scribbler(-1)):
        with vectorize("sync", [partial(World, "box", "", 99, i) for i in range(3)], copy=copy) as envs:
            collector = Collector(envs, {"p": policy}, "p", seed=0)
            collector.collect(env_steps=3)
            try:
                batch = collector.collect(env_steps=18)
            except KeyboardInterrupt:
                batch = collector.collect(env_steps=18)
            np.testing.assert_array_equal(batch["p"]["obs"], batch["p"]["seen"])
            found.append([(name, column["x"] if name == "more" else column) for name, column in batch["p"].items()])
    for (name, got), (_, want) in zip(*found, strict=True):
        np.testing.assert_array_equal(got, want, err_msg=name)


@pytest.mark.mostly_slow("collects whole runs on several backends", quick=4)
@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("fails_at", [2, 3, 5, 8, 99])
def test_several_policies_may_write_into_their_rows_and_one_may_fail(fails_at: int, copy: bool) -> None:
    """Policies that are drawn for each episode are given parts of the same arrays."""

    def mapping(agent: str, episode: Any) -> str:
        return ("p", "q", "old")[(episode.number + episode.env_id + ord(agent)) % 3]

    found = []
    for policy in (Scribbler(fails_at), Scribbler(-1)):
        with vectorize("sync", [partial(World, "box", "death", 99, i) for i in range(3)], copy=copy) as envs:
            collector = Collector(envs, {"p": Scribbler(-1), "q": policy}, mapping, seed=0)
            collector.add_policy("old", Scribbler(-1), frozen=True)
            batches = [collector.collect(env_steps=3)]
            for _ in range(4):
                try:
                    batches.append(collector.collect(env_steps=18))
                except KeyboardInterrupt:
                    batches.append(collector.collect(env_steps=18))
            for batch in batches:
                for rows in batch.values():
                    np.testing.assert_array_equal(rows["obs"], rows["seen"])
            found.append(
                [
                    (name, column["x"] if name == "more" else column)
                    for batch in batches
                    for policy_id in ("p", "q")
                    if policy_id in batch
                    for name, column in batch[policy_id].items()
                ]
            )
    for (name, got), (_, want) in zip(*found, strict=True):
        np.testing.assert_array_equal(got, want, err_msg=name)


def test_where_there_is_no_memory_for_a_block_the_same_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a batch that is asked for too large, for one; the next one may have a block again."""
    setting = Setting(copy=True)
    calls = [("env_steps", 3 * 8)] * 3
    want, in_place = observed(setting, calls, [])
    assert in_place == 3
    block, made = row_log.Block, []

    def scarce(*what: Any) -> Any:
        made.append(what)
        if len(made) == 2:
            raise MemoryError
        return block(*what)

    monkeypatch.setattr(row_log, "Block", scarce)
    got, in_place = observed(setting, calls, [])
    assert got == want
    assert in_place == 2


def test_memory_of_sorted_batches_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """All policies' columns of a batch are of one generation, and two batches back they are gone."""
    monkeypatch.setattr(rows, "_LARGE", 64)
    setting, held = Setting(odd="death", policies="pqp"), []
    with setting.envs() as envs:
        collector = setting.collector(envs)
        memory = collector._policy_set.log._memory
        for _ in range(12):
            collector.collect(env_steps=3 * 8 + 1)
            assert not isinstance(collector._policy_set.log.closed(), range)
            held.append(
                sum(len(pieces) for part in (memory._older, memory._last, memory._now) for pieces in part.values())
            )
    assert max(held[6:]) < 1.5 * max(held[3:6])

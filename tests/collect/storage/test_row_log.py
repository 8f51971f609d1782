"""A log of rows beside slots: whatever comes in whatever order, the same transitions are closed, read and dropped."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marlvec.collect.storage.batch_memory import BatchMemory
from marlvec.collect.storage.columns import ColumnForms
from marlvec.collect.storage.row_log import RowLog
from marlvec.collect.storage.slot_buffer import SlotBuffer
from marlvec.connectors import Rows
from marlvec.errors import ContractError
from marlvec.trees import map_tree, tree_leaves

AGENTS = 3
OBS: dict[str, Any] = {
    "box": np.zeros((0, 2), np.float32),
    "dict": {"image": np.zeros((0, 2, 2), np.uint8), "pair": (np.zeros(0, np.int64), np.zeros((0, 1)))},
    "empty": np.zeros((0, 0), np.float32),
}


class Both:
    """A policy's lanes, whose rows and answers go into slots and into a log; what is asked of both is the same."""

    def __init__(self, num_envs: int, obs: Any, *, masked_from: int, state: bool, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.num_envs, self.obs, self.masked_from, self.state = num_envs, obs, masked_from, state
        self.num_lanes = num_envs * AGENTS
        self.slots = SlotBuffer(ColumnForms("policy 'p'"), self.num_lanes, BatchMemory())
        self.log = RowLog(ColumnForms("policy 'p'"), self.num_lanes, BatchMemory())
        self.tick, self.unroll = 0, 0
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
            found["action_mask"] = self.rng.random((n, 4)) < 0.5
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
        closed = [buffer.append(rows, lanes, lanes, tick, env_t, missing) for buffer in (self.slots, self.log)]
        assert closed == [np.count_nonzero(self.is_open_L[lanes])] * 2

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
        self.slots.answer(lanes, self.slots.forms.check_answer(columns))
        self.log.answer(lanes, self.log.forms.check_answer(columns))
        self.waits_L[lanes] = False
        self.t_L[lanes] += 1

    def turn_over(self, share: float) -> None:
        """Begin the next episode in some of the envs without living agents."""
        over = np.flatnonzero(~self.is_open_L.reshape(-1, AGENTS).any(axis=1))
        self._begin(over[self.rng.random(len(over)) < share])

    def lose(self, share: float) -> None:
        """Some envs lose their episodes, and all rows of those."""
        envs = np.flatnonzero(self.rng.random(self.num_envs) < share)
        numbers = [buffer.of_episodes(self.eps_N[envs]) for buffer in (self.slots, self.log)]
        same(*numbers)
        for buffer, mine in zip((self.slots, self.log), numbers, strict=True):
            buffer.forget(mine)
        for lanes in (envs[:, None] * AGENTS + np.arange(AGENTS)).reshape(-1)[:, None]:
            self.slots.slot_L[lanes] = -1
            self.log.is_open_L[lanes] = False
        self._begin(envs)

    def _begin(self, envs: Any) -> None:
        self.eps_N[envs] = self.eps_N.max(initial=0) + 1 + np.arange(len(envs))
        for table, value in ((self.t_L, 0), (self.waits_L, False), (self.is_open_L, False), (self.gone_L, False)):
            table.reshape(-1, AGENTS)[envs] = value

    def deliver(self, share: float) -> None:
        """A batch of all that is closed, or of a part of it."""
        self.compare()
        numbers = self.slots.closed()
        numbers = numbers if share > 0.7 else numbers[self.rng.random(len(numbers)) < share]
        if not len(numbers):
            return
        want, stop = self.slots.read(numbers, self.unroll)
        got, got_stop = self.log.read(numbers, self.unroll)
        assert list(got) == list(want)
        assert got_stop == stop
        for name, column in want.items():
            for (path, leaf), (got_path, got_leaf) in zip(tree_leaves(column), tree_leaves(got[name]), strict=True):
                assert path == got_path
                same(got_leaf, leaf)
        self.unroll = stop
        for buffer in (self.slots, self.log):
            buffer.forget(numbers)

    def cut(self, share: float) -> None:
        """After an interrupt only episodes that have ended stay."""
        if share < 0.9:
            return
        ended_N = np.where(self.is_open_L.reshape(-1, AGENTS).any(axis=1), self.eps_N, self.eps_N + 1)
        self.slots.keep_ended(ended_N)
        self.log.keep_ended(ended_N, AGENTS)
        self._begin(np.arange(self.num_envs))

    def compare(self) -> None:
        assert len(self.log) == len(self.slots)
        numbers = self.slots.closed()
        same(self.log.closed(), numbers)
        some = self.rng.choice(self.eps_N, 2)
        same(self.log.closed(some), self.slots.closed(some))
        same(self.log.without(numbers, set(some.tolist())), self.slots.without(numbers, set(some.tolist())))
        for got, want in zip(self.log.closing_order(numbers), self.slots.closing_order(numbers), strict=True):
            same(got, want)
        same(self.log.is_open_L, self.slots.slot_L >= 0)


def same(got: Any, want: Any) -> None:
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    assert got.tobytes() == want.tobytes()


CALLS = ("observe", "answer", "observe", "answer", "end", "turn_over", "deliver", "lose", "cut")


@given(
    num_envs=st.integers(1, 4),
    obs=st.sampled_from(sorted(OBS)),
    masked_from=st.sampled_from([0, 3, 99]),
    state=st.booleans(),
    seed=st.integers(0, 2**16),
    calls=st.lists(st.tuples(st.sampled_from(CALLS), st.sampled_from([0.3, 0.8, 1.0])), min_size=5, max_size=60),
)
def test_it_closes_reads_and_drops_what_slots_do(
    num_envs: int, obs: str, masked_from: int, state: bool, seed: int, calls: list[tuple[str, float]]
) -> None:
    """Turns, deaths, late agents, answers to rows of many moments, lost episodes, batches of a part."""
    both = Both(num_envs, OBS[obs], masked_from=masked_from, state=state, seed=seed)
    for call, share in calls:
        getattr(both, call)(share)
        both.compare()
    both.deliver(1.0)


def test_where_all_act_each_batch_is_what_came() -> None:
    both = Both(3, OBS["box"], masked_from=0, state=True, seed=0)
    for k in range(40):
        for call in ("observe", "answer", *(("end", "turn_over") if k % 7 == 6 else ())):
            getattr(both, call)(1.0)
        if k % 10 == 9:
            both.deliver(1.0)


def test_what_came_is_not_changed_by_whose_arrays_it_was() -> None:
    both = Both(2, OBS["box"], masked_from=99, state=False, seed=0)
    lanes = np.arange(6)
    rows = both.rows(lanes, last=False)
    columns = {"actions": np.arange(6), "policy_version": np.zeros(6, np.int64)}
    want = rows["obs"].copy(), columns["actions"].copy()
    both.log.append(rows, lanes, lanes, 0, np.zeros(6, np.int64))
    both.log.answer(lanes, both.log.forms.check_answer(columns))
    rows["obs"][...] = 99
    columns["actions"][...] = 99
    both.log.append(both.rows(lanes, last=False), lanes, lanes, 1, np.ones(6, np.int64))
    got, _ = both.log.read(both.log.closed(), 0)
    same(got["obs"], want[0])
    same(got["actions"], want[1])


def test_a_column_that_changes_its_form_leaves_it_as_it_was() -> None:
    both = Both(2, OBS["box"], masked_from=99, state=False, seed=0)
    lanes = np.arange(6)
    both.log.append(both.rows(lanes, last=False), lanes, lanes, 0, np.zeros(6, np.int64))
    bad = both.rows(lanes, last=False).replace(obs=np.zeros((6, 3), np.float32))
    with pytest.raises(ContractError, match="'obs' was float32 of shape"):
        both.log.append(bad, lanes, lanes, 1, np.ones(6, np.int64))
    assert len(both.log) == 6
    assert not len(both.log.closed())

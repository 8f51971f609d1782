"""A dense buffer beside slots: the same rows go into both, and the same columns come out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marlvec.collect.storage import dense_buffer
from marlvec.collect.storage.batch_memory import BatchMemory
from marlvec.collect.storage.columns import ColumnForms
from marlvec.collect.storage.dense_buffer import DenseBuffer
from marlvec.collect.storage.slot_buffer import SlotBuffer
from marlvec.connectors import Rows
from marlvec.errors import ContractError
from marlvec.trees import map_tree, tree_leaves
from tests.collect.storage.test_row_log import OBS

AGENTS = 3


@dataclass
class World:
    """Makes rows of a policy's lanes in every env, as the collector would."""

    num_envs: int
    agents: list[int]
    obs: Any
    rng: np.random.Generator
    masked_from: int
    state: bool
    ticks: int = 0
    eps_id: Any = None
    env_t: Any = None
    turn: Any = None
    forms: list[ColumnForms] = field(default_factory=lambda: [ColumnForms("policy 'p'"), ColumnForms("policy 'p'")])

    def __post_init__(self) -> None:
        n = self.num_envs
        self.lanes = np.add.outer(np.arange(n) * AGENTS, self.agents).ravel()
        self.eps_id = np.arange(n)
        self.env_t = self.rng.integers(0, 5, n)  # episodes may have begun before, and agents later than those
        self.turn = np.maximum(np.repeat(self.env_t, len(self.agents)) - self.rng.integers(0, 3, len(self.lanes)), 0)

    @property
    def env_of(self) -> Any:
        return self.lanes // AGENTS

    def some(self, like: Any, n: int) -> Any:
        return map_tree(lambda leaf: self.rng.integers(0, 9, (n, *leaf.shape[1:])).astype(leaf.dtype), like)

    def rows(self, places: Any, *, last: bool = False) -> dict[str, Any]:
        n, lanes = len(places), self.lanes[places]
        ended = self.rng.random((2, n)) < 0.5
        found = {
            "env_id": lanes // AGENTS,
            "agent_index": lanes % AGENTS,
            "eps_id": self.eps_id[lanes // AGENTS],
            "t": self.turn[places].copy(),
            "obs": self.some(self.obs, n),
            "rewards": self.rng.normal(size=n),
            "terminated": ended[0] | ~ended[1] if last else np.zeros(n, np.bool_),
            "truncated": ended[1] if last else np.zeros(n, np.bool_),
            "first": self.turn[places] == 0,
            "last": np.full(n, last),
        }
        if self.ticks >= self.masked_from:
            found["action_mask"] = self.rng.random((n, 4)) < 0.5
        if self.state:
            found["state"] = self.rng.normal(size=(n, 3)).astype(np.float32)
        if not last:
            found["added"] = self.some({"x": np.zeros((0, 2))}, n)
        return found

    def answer(self) -> dict[str, Any]:
        n = len(self.lanes)
        actions = self.rng.integers(0, 5, n)
        return {
            "actions": actions,
            "logp": self.some((np.zeros(0, np.float32),), n),
            "actions_for_env": actions,
            "policy_version": np.full(n, self.ticks),
        }


class Both:
    """One world, stored in both ways at once; the dense one may be given up for a third, which adopts it."""

    def __init__(self, world: World, length: int) -> None:
        self.world, self.everyone = world, np.arange(len(world.lanes))
        num_lanes = world.num_envs * AGENTS
        self.slots, self.other = (SlotBuffer(forms, num_lanes, BatchMemory()) for forms in world.forms)
        rows = Rows(world.rows(self.everyone))
        self.slots.append(rows, world.lanes, world.lanes, 0, self.env_t)
        self.dense: DenseBuffer | None = DenseBuffer(
            world.forms[1], num_lanes, AGENTS, length, rows, 0, self.env_t, BatchMemory()
        )

    def demote(self) -> None:
        if self.dense is not None:
            self.other.adopt(self.dense)
            self.dense = None

    def tick(self, ending: list[int], demote_at: int) -> None:
        """One step of all; the dense buffer is given up before it, after the answer, or after the ends."""
        world = self.world
        if demote_at == 0:
            self.demote()
        answer = world.answer()
        for buffer in self.buffers():
            buffer.answer(world.lanes, buffer.forms.check_answer(answer))
        world.ticks += 1
        world.turn += 1
        world.env_t += 1
        if demote_at == 1:
            self.demote()
        places = np.flatnonzero(np.isin(world.env_of, ending))
        if len(places):
            rows, missing = Rows(world.rows(places, last=True)), world.rng.random(len(places)) < 0.3
            self.append(rows, world.lanes[places], self.env_t[places], missing)
            world.eps_id[ending] += world.num_envs
            world.env_t[ending] = 0
            world.turn[places] = 0
        if demote_at == 2:
            self.demote()
        self.append(Rows(world.rows(self.everyone)), world.lanes, self.env_t, None)

    def append(self, rows: Rows, lanes: Any, env_t: Any, missing: Any) -> None:
        ours, other = (b.append(rows, lanes, lanes, self.world.ticks, env_t, missing) for b in self.buffers())
        assert ours == other
        ours, other = (b.slot_L >= 0 for b in self.buffers())
        assert ours.tolist() == other.tolist()

    @property
    def env_t(self) -> Any:
        return self.world.env_t[self.world.env_of]

    def buffers(self) -> tuple[SlotBuffer, Any]:
        return self.slots, self.other if self.dense is None else self.dense

    def check(self, unroll_id: int) -> None:
        (got, other), (want, number) = (b.read(b.closed(), unroll_id) for b in self.buffers()[::-1])
        assert number == other
        check_equal(got, want)
        if self.dense is None:
            ours, theirs = (sorted(zip(*b.closing_order(b.closed()), strict=True)) for b in self.buffers())
            assert ours == theirs


def check_equal(got: Mapping[str, Any], want: Mapping[str, Any]) -> None:
    assert list(got) == list(want)
    for name in want:
        ours, theirs = list(tree_leaves(got[name])), list(tree_leaves(want[name]))
        assert [path for path, _ in ours] == [path for path, _ in theirs]
        for (path, a), (_, b) in zip(ours, theirs, strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape), (name, path)
            assert a.tobytes() == b.tobytes(), (name, path)


worlds = st.builds(
    World,
    num_envs=st.integers(1, 4),
    agents=st.sampled_from([[0], [1, 2], [0, 1, 2], [0, 2]]),
    obs=st.sampled_from(list(OBS.values())),
    rng=st.integers(0, 2**16).map(np.random.default_rng),
    masked_from=st.sampled_from([0, 2, 99]),
    state=st.booleans(),
)


@pytest.mark.slow("collects whole runs on several backends")
@settings(deadline=None)
@given(
    world=worlds,
    steps=st.lists(st.tuples(st.sets(st.integers(0, 3)), st.integers(0, 30)), min_size=1, max_size=8),
    spare=st.integers(0, 2),
    unroll_id=st.integers(0, 9),
)
def test_dense_columns_are_those_of_slots(world: World, steps: list[Any], spare: int, unroll_id: int) -> None:
    """Whatever ends when, whether or not the arrays are full, and wherever the dense buffer is given up."""
    both = Both(world, len(steps) + spare)
    for ending, demote_at in steps:
        both.tick(sorted(i for i in ending if i < world.num_envs), demote_at)
        both.check(unroll_id)


@pytest.mark.slow("collects whole runs on several backends")
@settings(deadline=None)
@given(world=worlds, steps=st.lists(st.sets(st.integers(0, 3)), min_size=2, max_size=8), data=st.data())
def test_what_is_delivered_is_dropped_and_what_waits_stays(world: World, steps: list[Any], data: st.DataObject) -> None:
    """In the middle of some steps a batch takes all there is; the dense buffer may be given up right after that."""
    both = Both(world, len(steps))
    at = data.draw(st.integers(1, len(steps)))
    for k, ending in enumerate(steps):
        if k == at:
            assert both.dense is not None
            both.slots.forget(both.slots.closed())
            both.dense = both.dense.resized(0).resized(len(steps) - at)
            assert len(both.dense) == len(both.slots) == len(world.lanes)
            if data.draw(st.booleans()):
                both.demote()
        both.tick(sorted(i for i in ending if i < world.num_envs), -1)
        both.check(0)


@pytest.mark.parametrize("agents", [[0, 1, 2], [1]])
@pytest.mark.parametrize("steps", [[[], [1], []], [[]]], ids=len)
@pytest.mark.parametrize("as_said", [True, False])
@pytest.mark.parametrize("choices", [1, 9])
def test_a_full_buffer_is_read_without_a_copy(agents: Any, steps: Any, as_said: bool, choices: int) -> None:
    """And no two columns have the same memory, whatever the form of the actions."""
    wide = np.zeros((0, 9), np.float32)
    world = World(len(steps), agents, wide, np.random.default_rng(0), 99, state=False)
    plain = world.answer

    def answer() -> dict[str, Any]:
        found = plain()
        found["actions"] = np.repeat(found["actions"][:, None], choices, axis=1)
        return found | {"actions_for_env": found["actions"] if as_said else found["actions"] + 1}

    world.answer = answer  # type: ignore[method-assign]
    both = Both(world, len(steps))
    for ending in steps:
        both.tick(ending, -1)
    both.check(0)
    dense = both.dense
    assert dense is not None
    columns, _ = dense.read(dense.closed(), 0)
    assert np.shares_memory(columns["obs"], dense._seen["obs"][0])
    leaves = [leaf for column in columns.values() for _, leaf in tree_leaves(column)]
    assert not any(np.shares_memory(one, other) for k, one in enumerate(leaves) for other in leaves[:k])
    assert all(leaf.flags.writeable and leaf.flags.c_contiguous for c in columns.values() for _, leaf in tree_leaves(c))


@pytest.mark.parametrize("name", ["rewards", "obs", "added"])
def test_rows_of_another_form_are_refused_as_by_slots(name: str) -> None:
    world = World(2, [0, 1], OBS["box"], np.random.default_rng(0), 99, state=False)
    both = Both(world, 4)
    both.tick([], -1)
    assert both.dense is not None
    rows = world.rows(both.everyone)
    rows[name] = np.zeros((4, 7), np.float16)
    messages = []
    for buffer in both.buffers():
        with pytest.raises(ContractError, match=name) as caught:
            buffer.append(Rows(rows), world.lanes, world.lanes, 2, both.env_t)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    del rows[name]
    with pytest.raises(ContractError, match="gave the columns"):
        both.dense.append(Rows(rows), world.lanes, world.lanes, 2, both.env_t)
    if name != "added":
        rows = world.rows(both.everyone[:2], last=True)
        del rows[name]
        with pytest.raises(ContractError, match="dropped column"):
            both.dense.append(Rows(rows), world.lanes[:2], world.lanes[:2], 2, both.env_t[:2], np.zeros(2, np.bool_))


@pytest.mark.parametrize("demote_at", [-1, 1])
def test_what_is_sent_parts_from_what_is_said_in_the_middle(demote_at: int) -> None:
    """Once it does, the columns are two; what came before stands in both."""
    world = World(2, [0, 2], OBS["box"], np.random.default_rng(0), 99, state=False)
    plain = world.answer

    def answer() -> dict[str, Any]:
        return plain() | ({"actions_for_env": np.arange(4)} if world.ticks in (2, 3) else {})

    world.answer = answer  # type: ignore[method-assign]
    both = Both(world, 5)
    for k in range(5):
        both.tick([], demote_at if k == 4 else -1)
        both.check(0)


@pytest.mark.parametrize("obs", [np.zeros((0, 3, 7), np.uint8), np.zeros((0, 9), np.float32), np.zeros((0, 2), "U4")])
def test_large_rows_are_those_of_slots(obs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which are written as wholes, however they lie in memory."""
    monkeypatch.setattr(dense_buffer, "_LARGE", 1)
    world = World(3, [0, 2], obs, np.random.default_rng(0), 99, state=True)
    both, plain = Both(world, 4), world.rows
    assert both.dense is not None
    assert set(both.dense._seen_items) == {"obs"}

    def scattered(places: Any, **more: Any) -> dict[str, Any]:
        rows = plain(places, **more)
        return rows | {"obs": np.repeat(rows["obs"], 2, axis=-1)[..., ::2]}

    for k, ending in enumerate([[], [1], [0, 2], []]):
        world.rows = scattered if k == 1 else plain  # type: ignore[method-assign]
        both.tick(ending, -1)
        both.check(0)

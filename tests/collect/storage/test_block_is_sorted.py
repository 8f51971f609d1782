"""Whole collects twice, read in place from blocks where that can be, and always sorted: both give the same."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marlvec import Collector
from marlvec.collect import row_log
from marlvec.collect.rollout import RolloutLoop
from marlvec.connectors import Rows
from marlvec.trees import tree_leaves
from tests.collect.helpers.plans import BATCH_MODES
from tests.collect.helpers.players import MODES
from tests.collect.storage.test_columns import CONNECTORS, EVERY, SPACES, Chooser, Setting, World
from tests.vector.support.kinds import vectorize


def play(setting: Setting, calls: Sequence[tuple[str, int]], given_up: Sequence[int] | None) -> tuple[Any, int]:
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
                for runner in collector._runners.values():
                    runner.log._kept.block = None
            step(needed)

        loop.step = forced  # type: ignore[method-assign]
        if given_up is None:
            loop.begin_call = lambda needed, length: begin_call(needed, 0)  # type: ignore[method-assign]
        for unit, amount in calls:
            batch = collector.collect(**{unit: amount})
            in_place += any(isinstance(runner.log.closed(), range) for runner in collector._runners.values())
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
    want, none = play(setting, amounts, None)
    got, in_place = play(setting, amounts, sorted(given_up))
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
    want, _ = play(setting, calls, None)
    got, in_place = play(setting, calls, [])
    assert got == want
    assert in_place == 3  # in the first, the first mask comes


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
    want, in_place = play(setting, calls, [])
    assert in_place == 3
    block, made = row_log.Block, []

    def scarce(*what: Any) -> Any:
        made.append(what)
        if len(made) == 2:
            raise MemoryError
        return block(*what)

    monkeypatch.setattr(row_log, "Block", scarce)
    got, in_place = play(setting, calls, [])
    assert got == want
    assert in_place == 2

"""Collecting in a thread: bounded, stopped, saved and resumed without losing a row."""

from __future__ import annotations

import threading
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from marlvec.collect import Collector, MultiAgentBatch
from marlvec.collect.background import Background
from marlvec.connectors import Rows
from marlvec.errors import ArgumentError, BusyError, EnvRaised, StateError
from marlvec.policies import FunctionPolicy, Policy
from marlvec.testing.scripted import RaisingEnv
from marlvec.vector import AsyncVectorEnv
from tests.collect.players import EchoPolicy, asynchronous, noop, sync
from tests.collect.reference import same_batch
from tests.collect.saved import columns_of, counted
from tests.collect.test_state import Plan
from tests.vector.test_saved_states import same
from tests.waiting import LONG, until

# --- collecting in a thread: bounded, stopped and resumed without losing a row, and weights that change between steps


Key = tuple[int, ...]


def keys(batches: list[MultiAgentBatch]) -> list[Key]:
    names = ("env_id", "agent_index", "eps_id", "t")
    rows = [batch["main"] for batch in batches]
    return [key for own in rows for key in zip(*(own[name].tolist() for name in names), strict=True)]


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "marlvec-collector"]


@pytest.mark.mostly_slow("collects whole runs on several backends", quick=2)
@pytest.mark.checklist(112)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("backend", ["sync", "async"])
def test_batches_are_those_of_the_foreground(backend: str, overlap: bool) -> None:
    made = sync("keyed", 4, 2) if backend == "sync" else asynchronous("keyed", 4, 2, num_workers=2)
    with made as envs, sync("keyed", 4, 2) as plain:
        foreground = Collector(plain, EchoPolicy(), seed=5)
        collector = Collector(envs, EchoPolicy(), seed=5, overlap=overlap)
        with collector.background(env_steps=21, total=100, ahead=2) as batches:
            got = list(batches)
        assert [batch.env_steps for batch in got] == [21, 21, 21, 21, 16]
        for batch in got:
            same_batch(batch, foreground.collect(env_steps=batch.env_steps))
        same_batch(collector.collect(env_steps=9), foreground.collect(env_steps=9))
    assert not threads()


def test_the_thread_is_gone_when_the_block_is_left_also_where_all_was_collected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Background._run

    def run_and_linger(background: Background) -> None:
        run(background)
        time.sleep(0.2)  # as a thread may that is done, where others have the cores

    monkeypatch.setattr(Background, "_run", run_and_linger)
    with sync("parallel", 2, 2) as envs:
        collector = Collector(envs, EchoPolicy(), seed=0)
        with collector.background(env_steps=10, total=20) as batches:
            assert len(list(batches)) == 2
        assert not threads()


@pytest.mark.fault("E12")
@pytest.mark.parametrize("ahead", [1, 3])
def test_a_slow_consumer_makes_the_thread_wait(ahead: int) -> None:
    with sync("parallel", 2, 2) as envs:
        collector = Collector(envs, EchoPolicy(), seed=0)
        with collector.background(env_steps=10, ahead=ahead) as batches:
            for taken in range(1, 5):
                until(lambda: len(batches) == ahead)
                steps = collector.metrics.env_steps
                time.sleep(0.05)
                assert collector.metrics.env_steps == steps == 10 * (taken - 1 + ahead)
                assert next(batches).env_steps == 10


@pytest.mark.mostly_slow("collects whole runs on several backends", quick=4)
@pytest.mark.fault("E11")
@pytest.mark.fault("E13")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("batch_mode", ["truncate", "complete"])
def test_leaving_midway_loses_nothing(batch_mode: Any, overlap: bool) -> None:
    with asynchronous("keyed", 4, 2, num_workers=2) as envs:
        collector = Collector(envs, EchoPolicy(), seed=5, batch_mode=batch_mode, overlap=overlap)
        got = []
        for leave_after in (0, 1, 3, 2):
            with collector.background(env_steps=37, ahead=2) as batches:
                for _ in range(leave_after):
                    got.append(next(batches))
                time.sleep(0.004 * leave_after)
            assert not threads()
            got += list(batches)  # whole ones that waited
            got.append(collector.collect(env_steps=5))  # and what was in the making
        metrics = collector.metrics
        assert not metrics.env_steps_lost
        assert not metrics.agent_steps_lost
        found = keys(got)
        assert len(found) == len(set(found)) == sum(batch.agent_steps for batch in got)
        if batch_mode == "truncate":
            assert sum(batch.env_steps for batch in got) == metrics.env_steps
        by_track: dict[Key, list[int]] = {}
        for *track, t in sorted(found):
            by_track.setdefault(tuple(track), []).append(t)
        assert all(ts == list(range(len(ts))) for ts in by_track.values())


@pytest.mark.fault("E11")
def test_thread_error_is_raised_at_once_and_collecting_continues() -> None:
    fails = threading.Event()

    def trouble(call: int) -> None:
        if fails.is_set():
            fails.clear()
            raise ValueError("scripted")

    with sync("parallel", 2, 2) as envs, sync("parallel", 2, 2) as plain:
        collector, other = Collector(envs, EchoPolicy(0, trouble), seed=0), Collector(plain, EchoPolicy(), seed=0)
        with collector.background(env_steps=10, ahead=2) as batches:
            same_batch(next(batches), other.collect(env_steps=10))
            until(lambda: len(batches) == 2)
            fails.set()
            same_batch(next(batches), other.collect(env_steps=10))
            until(lambda: not fails.is_set() and not threads())
            with pytest.raises(ValueError, match="scripted") as caught:
                next(batches)
            assert "in policy 'main'" in caught.value.__notes__[0]
            for _ in range(3):
                same_batch(next(batches), other.collect(env_steps=10))


def test_unseen_thread_error_is_raised_at_block_exit() -> None:
    def act(rows: Rows) -> Any:
        raise ValueError("scripted")

    with sync("parallel", 2, 2) as envs:
        collector = Collector(envs, FunctionPolicy(act), seed=0)
        with pytest.raises(ValueError, match="scripted"), collector.background(env_steps=10):
            until(lambda: not threads())
        with pytest.raises(KeyError, match="mine"), collector.background(env_steps=10):
            until(lambda: not threads())
            raise KeyError("mine")


@pytest.mark.fault("E13")
def test_after_an_env_has_failed_the_next_batch_is_of_new_episodes() -> None:
    makes = [lambda i=i: RaisingEnv(at=9, only_env=1, env_index=i) for i in range(3)]
    with AsyncVectorEnv(makes, num_workers=2) as envs:
        collector = Collector(envs, noop(), seed=0)
        with collector.background(env_steps=6) as batches:
            handed = 0
            with pytest.raises(EnvRaised):
                for batch in batches:
                    handed += batch.env_steps
            handed += next(batches).env_steps  # what ran is lost, and it goes on
        assert collector.metrics.episodes_interrupted == 3
        handed += sum(batch.env_steps for batch in batches)
        collector.reset()
        assert collector.metrics.env_steps == handed + collector.metrics.env_steps_lost
        assert collector.collect(env_steps=6).env_steps == 6


class Versioned(Policy):
    """Says which weights it used, at the beginning and at the end of a call.

    Calls wait in their middle until somebody waits for their end, unless they need not: so every update is asked for
    in the midst of a step, whoever runs first.
    """

    def __init__(self) -> None:
        self.weights = np.zeros(2, int)
        self.calls = 0
        self.entered = threading.Event()
        self.need_not_wait = threading.Event()

    def play_with(self, collector: Collector) -> None:
        self.collector = collector

    def act(self, rows: Rows, *, explore: bool = True) -> Any:
        before = self.weights.copy()
        self.calls += 1
        self.entered.set()
        # Nothing public tells who waits without waiting for it.
        until(lambda: self.need_not_wait.is_set() or self.collector._update_lock._waiting)
        time.sleep(0.0005)
        used = np.tile([before[0], self.weights[1]], (len(rows), 1))
        return np.zeros(len(rows), int), {"used": used}


@pytest.mark.slow("collects whole runs on several backends")
@pytest.mark.fault("E14")
@pytest.mark.parametrize("overlap", [False, True])
def test_every_row_carries_the_version_of_the_weights_that_decided_it(overlap: bool) -> None:
    with asynchronous("parallel", 4, 2, num_workers=2) as envs:
        policy = Versioned()
        collector = Collector(envs, policy, seed=0, overlap=overlap)
        policy.play_with(collector)
        seen: set[int] = set()
        with collector.background(env_steps=400, total=1200, ahead=3) as batches:
            for _ in range(60):
                assert policy.entered.wait(LONG)
                with collector.updating():
                    policy.weights[0] += 1
                    time.sleep(0.0005)
                    policy.weights[1] += 1
                    policy.version += 1
                    policy.entered.clear()  # there is a call between any two updates
            policy.need_not_wait.set()
            for batch in batches:
                rows = batch["main"]
                np.testing.assert_array_equal(rows["used"][:, 0], rows["policy_version"])
                np.testing.assert_array_equal(rows["used"][:, 1], rows["policy_version"])
                seen.update(rows["policy_version"].tolist())
        assert seen == set(range(61))


def test_updating_waits_for_a_step_at_most_and_is_not_starved() -> None:
    with sync("parallel", 2, 2) as envs:
        policy = Versioned()
        collector = Collector(envs, policy, seed=0)
        policy.play_with(collector)
        with collector.background(env_steps=10_000_000) as _:
            for k in range(50):
                assert policy.entered.wait(LONG)
                with collector.updating(), collector.updating():
                    policy.entered.clear()
                    steps, calls = collector.metrics.env_steps, policy.calls
                    assert (steps, calls) == (2 * (k + 1), k + 1), "the step in progress, and none after it"
                    time.sleep(0.002)
                    assert (collector.metrics.env_steps, policy.calls) == (steps, calls)
            policy.need_not_wait.set()


def test_updating_inside_a_step_raises() -> None:
    with sync("parallel", 2, 2) as envs:
        collector: Collector

        def in_a_step(step: Any) -> None:
            with collector.updating():
                pass

        collector = Collector(envs, noop(), seed=0, callbacks=[{"on_episode_step": in_a_step}])
        with pytest.raises(StateError, match="in the middle of a step"):
            collector.collect(env_steps=4)
        collector = Collector(envs, noop(), seed=0)
        with collector.updating(), pytest.raises(StateError, match="waits for itself"):
            collector.collect(env_steps=4)


def test_one_collects_at_a_time() -> None:
    with sync("parallel", 2, 2) as envs:
        collector = Collector(envs, noop(), seed=0, batch_size=10)
        with collector.background() as batches:
            for call in (lambda: collector.collect(env_steps=1), collector.reset, collector.background):
                with pytest.raises(StateError, match="in the background"):
                    call()
            assert next(batches).env_steps == 10
        entered, go_on = threading.Event(), threading.Event()

        def act(rows: Rows) -> Any:
            entered.set()
            assert go_on.wait(LONG)
            return np.zeros(len(rows), int)

        collector = Collector(envs, FunctionPolicy(act), seed=0)
        thread = threading.Thread(target=collector.collect, args=(4,))
        thread.start()
        assert entered.wait(LONG)
        with pytest.raises(BusyError, match="another thread"):
            collector.collect(4)
        go_on.set()
        thread.join()
        with pytest.raises(ArgumentError, match="ahead=0"):
            collector.background(env_steps=4, ahead=0)
        with pytest.raises(ArgumentError, match="exactly one"):
            collector.background()


# --- states that are saved while a thread collects: what it had made and nobody had taken comes first afterwards


AMOUNT, BATCHES = {"env_steps": 14}, 7


def made_in_one_go(plan: Plan) -> list[Any]:
    collector = plan.make()
    with collector.envs, collector.background(**AMOUNT) as batches:
        return [columns_of(batch) for batch in islice(batches, BATCHES)]


@pytest.mark.mostly_slow("collects in the background", quick=2)
@pytest.mark.parametrize("batch_mode", ["truncate", "complete"])
@pytest.mark.parametrize("ahead", [1, 3])
def test_the_next_batches_come_next(batch_mode: str, ahead: int, tmp_path: Path) -> None:
    plan = Plan("turns", batch_mode=batch_mode, policies="by lot", follows=True)
    want = made_in_one_go(plan)
    collector, got = plan.make(), []
    with collector.envs, collector.background(**AMOUNT, ahead=ahead) as batches:
        got += [columns_of(batch) for batch in islice(batches, 3)]
        if ahead > 1:
            until(lambda: len(batches) > 1)
        collector.save(tmp_path / "one.npz")
        rest = [columns_of(batch) for batch in islice(batches, BATCHES - 3)]
        same(got + rest, want)
    other = plan.make()
    with other.envs:
        other.load(tmp_path / "one.npz")
        other.save(tmp_path / "two.npz")
        other.load(tmp_path / "two.npz")
        if ahead > 1:
            with pytest.raises(StateError, match="batches that were made in the background"):
                other.collect(**AMOUNT)
        with other.background(**AMOUNT, total=14 * 40) as batches:
            same([columns_of(batch) for batch in islice(batches, BATCHES - 3)], want[3:])


def test_untaken_batches_are_lost_and_counted(tmp_path: Path) -> None:
    plan = Plan("parallel")
    collector = plan.make()
    with collector.envs, collector.background(**AMOUNT, ahead=3) as batches:
        next(batches)
        until(lambda: len(batches) > 1)
        collector.save(tmp_path / "one.npz")
    other: Collector = plan.make()
    with other.envs:
        other.load(tmp_path / "one.npz")
        other.reset()
        sums = counted(other)
        assert sums["env_steps_lost"] == sums["env_steps"] - 14
        assert other.collect(**AMOUNT).env_steps == 14


def test_a_callback_of_the_thread_may_not_ask() -> None:
    plan = Plan("parallel")
    collector = plan.make()
    with collector.envs, pytest.raises(StateError, match="callback"):
        collector._callback_list._listeners["on_sample_end"].append(("me", lambda *_: collector.get_state()))
        with collector.background(**AMOUNT) as batches:
            next(batches)

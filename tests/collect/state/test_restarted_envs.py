"""Envs whose states cannot be saved begin new episodes; what ran in them is lost, and counted."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from marlvec import Collector, external
from marlvec.errors import StateError
from marlvec.policies import RandomPolicy
from tests.collect.state.saved import Amounts, batches_of, counted, goes_on_alike, without_clock
from tests.vector.support.kinds import ParallelWalk, PlainSingleWalk, vectorize, walks
from tests.vector.test_saved_states import same


class Closed(ParallelWalk):
    """Keeps its state to itself."""

    get_state = set_state = None  # type: ignore[assignment]


def make(batch_mode: Any, closed: tuple[int, ...] = (1, 3), **options: Any) -> Collector:
    factories = walks("parallel", 4)
    for i in closed:
        factories[i] = partial(Closed, i)
    return Collector(vectorize("sync", factories, **options), RandomPolicy(), batch_mode=batch_mode, seed=3)


LATER: Amounts = [{"env_steps": 13}, {"episodes": 5}, {"agent_steps": 40}]


@pytest.mark.mostly_slow("collects whole runs on several backends", quick=4)
@pytest.mark.parametrize("batch_mode", ["truncate", "complete"])
@pytest.mark.parametrize("closed", [(1, 3), (0, 1, 2, 3)])
def test_their_episodes_are_lost_and_counted(batch_mode: Any, closed: tuple[int, ...], tmp_path: Path) -> None:
    collector = make(batch_mode, closed)
    with collector.envs:
        assert np.flatnonzero(~collector.resumes_exactly).tolist() == list(closed)
        batches = [collector.collect(env_steps=23)]
        running = collector._current.state.eps_id_N[list(closed)].tolist()
        collector.save(tmp_path / "one.npz")
        before = counted(collector)
    runs = []
    for _ in range(2):
        other = make(batch_mode, closed)
        with other.envs:
            other.load(tmp_path / "one.npz")
            after = counted(other)
            assert after["episodes_restarted"] == before["episodes_restarted"] + len(closed)
            assert after["env_steps"] == before["env_steps"]
            waits = before["env_steps"] - batches[0].env_steps if batch_mode == "complete" else 0
            assert 0 <= after["env_steps_lost"] - before["env_steps_lost"] <= waits
            if closed == (0, 1, 2, 3) and batch_mode == "truncate":
                assert after["agent_steps_lost"] == after["agent_steps"] - batches[0].agent_steps
            came = [other.collect(**amount) for amount in LATER]
            for batch in came:
                assert not set(batch["main"].eps_id.tolist()) & set(running)
            own = counted(other)
            waiting = other._current.state.counters.waiting_env_steps
            delivered = batches[0].env_steps + sum(batch.env_steps for batch in came)
            assert own["env_steps"] == delivered + own["env_steps_lost"] + waiting
            runs.append([dict(batch["main"].items()) for batch in came])
    same(runs[0], runs[1])  # the new episodes have seeds that follow from the state


def test_masked_envs_stay_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_one = partial(fragile, 4)
    goes_on_alike(make_one, tmp_path, [{"env_steps": 60}], LATER)
    assert caplog.records
    caplog.clear()


class Fragile(ParallelWalk):
    """Raises in one of its steps, once."""

    def step(self, actions: Any) -> Any:
        if self.walk.index == 2 and self.walk.t == 3 and self.walk.episode > 0:
            raise RuntimeError("it broke")
        return super().step(actions)


def fragile(n: int) -> Collector:
    envs = vectorize("sync", [partial(Fragile, i) for i in range(n)], on_fault="mask")
    return Collector(envs, RandomPolicy(), seed=2)


def test_state_saved_after_a_policy_error_repeats_the_call(tmp_path: Path) -> None:
    """A state in the middle of a batch, with answers that were made and not sent."""

    class Failing(RandomPolicy):
        fails_at, asked = 9, 0

        def act(self, rows: Any, *, explore: bool = True) -> Any:
            self.asked += 1
            if self.asked == self.fails_at:
                raise RuntimeError("out of order")
            return super().act(rows, explore=explore)

    def build(fails_at: int = 0) -> Collector:
        failing = Failing()
        failing.fails_at = fails_at
        envs = vectorize("sync", walks("parallel", 3))
        return Collector(envs, {"a": RandomPolicy(), "b": failing}, dict(zip("abc", "aba", strict=True)), seed=4)

    collector, other = build(9), build()
    with collector.envs, other.envs:
        with pytest.raises(RuntimeError, match="out of order"):
            collector.collect(env_steps=40)
        collector.save(tmp_path / "one.npz")
        want = batches_of(collector, LATER)
        other.load(tmp_path / "one.npz")
        same(batches_of(other, LATER), want)
        same(without_clock(other.get_state()), without_clock(collector.get_state()))


@pytest.mark.parametrize("lockstep", [False, True])
def test_envs_driven_from_outside_have_no_state(lockstep: bool) -> None:
    with external.make(partial(PlainSingleWalk, 0), 2, lockstep=lockstep) as envs:
        collector = Collector(envs, RandomPolicy())
        with pytest.raises(StateError, match="external envs cannot be saved"):
            collector.get_state()

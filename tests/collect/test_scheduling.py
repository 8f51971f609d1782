"""Overlap of inference with stepping: whatever order envs come back in, they make the steps they make without."""

from __future__ import annotations

import random
import time
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from marlvec.collect import Collector, MultiAgentBatch
from marlvec.collect.scheduling import index_of
from marlvec.connectors import FilterRows, NormalizeObs
from marlvec.errors import EnvRaised
from marlvec.policies import FunctionPolicy, RandomPolicy
from marlvec.testing import NoOpEnv
from marlvec.testing.scripted import RaisingEnv, ScriptedParallelEnv
from marlvec.vector.async_env import AsyncVectorEnv
from tests.collect.players import MODES, EchoPolicy, Scattered, factories, noop, sync
from tests.collect.reference import same_batch

# --- overlap of inference with stepping: whatever order envs come back in, they make the steps they make without
# That rows are right in any order of replies is held in `test_rollout.py`.


class Stamping(NoOpEnv):
    """Says in its infos which env it is, and in which of its steps."""

    def __init__(self, env_index: int) -> None:
        super().__init__()
        self.stamp = env_index

    def step(self, actions: Any) -> Any:
        self.stamp += 100
        *rest, infos = super().step(actions)
        return (*rest, {agent: {**infos.get(agent, {}), "stamp": self.stamp} for agent in self.possible_agents})


def test_policies_answer_while_envs_are_on_the_way() -> None:
    sizes: list[tuple[int, int]] = []

    def act(rows: Any) -> Any:
        sizes.append((len(np.unique(rows["env_id"])), collector._loop.scheduler._num_away))
        return np.zeros(len(rows), int)

    with Scattered([NoOpEnv] * 8, 0) as envs:
        collector = Collector(envs, FunctionPolicy(act), overlap=True, seed=0)
        batch = collector.collect(env_steps=8 * 50)
    assert batch.env_steps == 400
    assert sizes[:2] == [(4, 0), (4, 4)]  # half of them at a time, from the beginning
    inside = sizes[2:62]  # in the end the last ones are waited for
    assert all(count + away == 8 and away > 0 for count, away in inside)
    assert {count for count, _ in inside} == {4}


class Dawdling(ScriptedParallelEnv):
    """Takes longer every now and then, each time at other steps."""

    def step(self, actions: Any) -> Any:
        if random.SystemRandom().random() < 0.2:
            time.sleep(0.002)
        return super().step(actions)


@pytest.mark.slow("collects whole runs on several backends")
@pytest.mark.parametrize("mode", MODES)
def test_equal_seeds_give_equal_bits_however_long_envs_take(mode: str) -> None:
    """Also where policies draw from one stream for all rows, and connectors keep statistics over all of them."""

    def collected() -> list[MultiAgentBatch]:
        makes = [partial(Dawdling, agent_num=2, env_index=i, longest=6) for i in range(6)]
        with AsyncVectorEnv(makes, num_workers=2, autoreset_mode=mode) as envs:
            connectors = [NormalizeObs()]
            collector = Collector(envs, RandomPolicy(), agent_connectors=connectors, overlap=True, seed=4)
            return [collector.collect(**{unit: k}) for unit, k in (("env_steps", 301), ("agent_steps", 77))]

    for first, second in zip(collected(), collected(), strict=True):
        same_batch(second, first)


def test_a_half_is_taken_in_whole_in_env_order_and_in_turn() -> None:
    told: list[list[int]] = []
    callback_list = {"on_episode_step": lambda step: told.append(step.env_ids.tolist())}
    with Scattered([NoOpEnv] * 6, 3) as envs:
        Collector(envs, noop(), overlap=True, callbacks=[callback_list], seed=0).collect(env_steps=6 * 20)
    assert told == [[0, 2, 4], [1, 3, 5]] * 20


@pytest.mark.parametrize("copy", [False, True])
def test_infos_of_a_half_that_came_in_pieces_are_each_envs_own(copy: bool) -> None:
    told: dict[int, list[int]] = {}

    def on_step(step: Any) -> None:
        for i, info in zip(step.env_ids.tolist(), step.infos, strict=True):
            told.setdefault(i, []).append(info["agent_0"]["stamp"])

    with Scattered([partial(Stamping, env_index=i) for i in range(5)], 11, copy=copy) as envs:
        Collector(envs, noop(), overlap=True, callbacks=[{"on_episode_step": on_step}], seed=0).collect(env_steps=60)
    assert told == {i: [100 * t + i for t in range(1, 13)] for i in range(5)}


@pytest.mark.fault("E11")
def test_reset_after_env_failure_drops_pending_replies() -> None:
    makes = [lambda i=i: RaisingEnv(at=3, only_env=1, env_index=i) for i in range(4)]
    with AsyncVectorEnv(makes, num_workers=2) as envs:
        collector = Collector(envs, noop(), overlap=True, seed=0)
        with pytest.raises(EnvRaised):
            collector.collect(env_steps=400)
        collector.reset()
        assert collector.collect(env_steps=8).env_steps == 8


@pytest.mark.slow("collects whole runs on several backends")
@pytest.mark.fault("E11")
@settings(max_examples=40)
@given(fails_at=st.integers(0, 12), order=st.integers(0, 2**32), mode=st.sampled_from(MODES))
def test_a_policy_that_raises_costs_no_row(fails_at: int, order: int, mode: str) -> None:
    def trouble(call: int) -> None:
        if call == fails_at + 1:
            raise ValueError("scripted")

    def collected(policy: EchoPolicy, envs: Any) -> dict[tuple[int, ...], Any]:
        collector = Collector(envs, policy, overlap=True, seed=1)
        batches = []
        while sum(batch.env_steps for batch in batches) < 60:
            try:
                batches.append(collector.collect(env_steps=60 - sum(batch.env_steps for batch in batches)))
            except ValueError:
                continue
        assert sum(batch.env_steps for batch in batches) == collector.metrics.env_steps == 60
        names = ("env_id", "agent_index", "eps_id", "t")
        found = {}
        for batch in batches:
            rows = batch["main"]
            for i, key in enumerate(zip(*(rows[name].tolist() for name in names), strict=True)):
                assert key not in found
                found[key] = (rows["obs"][i].tolist(), int(rows["actions"][i]), float(rows["rewards"][i]))
        return found

    with Scattered(factories("keyed", 3, 2), order, autoreset_mode=mode) as envs, sync("keyed", 3, 2, mode) as plain:
        assert collected(EchoPolicy(0, trouble), envs) == collected(EchoPolicy(), plain)


def test_rows_that_connectors_take_out_and_no_ops_are_the_same() -> None:
    def run(envs: Any, overlap: bool) -> MultiAgentBatch:
        keep = FilterRows(lambda rows: (rows["obs"].sum(axis=1).astype(int) % 3) != 0, noop="repeat")
        return Collector(envs, EchoPolicy(), agent_connectors=[keep], seed=2, overlap=overlap).collect(env_steps=90)

    with sync("parallel", 5, 3) as plain, Scattered(factories("parallel", 5, 3), 5) as envs:
        same_batch(run(envs, overlap=True), run(plain, overlap=False))


# --- numbers as an index: it picks what the numbers pick


@given(st.sets(st.integers(0, 30)))
@example(set())
@example({5})
@example(set(range(0, 31, 3)))
@example({0, 1, 2, 4, 8})
@example({0, 1, 3, 6})
def test_it_picks_the_same_rows(ids: set[int]) -> None:
    chosen = np.array(sorted(ids), np.int64)
    places = index_of(chosen)
    np.testing.assert_array_equal(np.arange(31)[places], chosen)
    if len(set(np.diff(chosen).tolist())) <= 1 and len(chosen):
        assert isinstance(places, slice)

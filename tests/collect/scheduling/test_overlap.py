"""Overlap of inference with stepping: whatever order envs come back in, they make the steps they make without."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from marlvec.collect import Collector, MultiAgentBatch
from marlvec.connectors import FilterRows, FrameStack, NormalizeObs
from marlvec.errors import EnvRaised
from marlvec.policies import FunctionPolicy, RandomPolicy
from marlvec.testing import NoOpEnv
from marlvec.testing.scripted import RaisingEnv, ScriptedParallelEnv
from marlvec.vector.backends.process import AsyncVectorEnv
from marlvec.vector.backends.sync import SyncVectorEnv
from marlvec.vector.backends.thread import ThreadVectorEnv
from tests.collect.helpers.players import KINDS, MODES, EchoPolicy, factories, sync
from tests.collect.helpers.reference import Reference, check_batch
from tests.collect.rollout.test_reference import CALLS, SALTS, by_agent, by_episode, given_mapping, one


class Scattered(SyncVectorEnv):
    """Envs come back one at a time, in any order.

    Args:
        factories: The envs.
        order: Seed of that order.
        settings: As `SyncVectorEnv`'s.
    """

    def __init__(self, factories: Any, order: int, **settings: Any) -> None:
        self.order = random.Random(order)
        self.largest = 0  # envs received in one call
        super().__init__(factories, **settings)

    def _send_request(self, operation: str, env_ids: NDArray[np.int64], arguments: tuple[Sequence[Any], ...]) -> None:
        if operation not in ("send", "reset"):
            super()._send_request(operation, env_ids, arguments)
            return
        self._is_sending = True
        for k in range(len(env_ids)):
            own = tuple([argument[k]] for argument in arguments)
            self._requests.insert(self.order.randint(0, len(self._requests)), (operation, env_ids[k : k + 1], own))


class Stamping(NoOpEnv):
    """Says in its infos which env it is, and in which of its steps."""

    def __init__(self, env_index: int) -> None:
        super().__init__()
        self.stamp = env_index

    def step(self, actions: Any) -> Any:
        self.stamp += 100
        *rest, infos = super().step(actions)
        return (*rest, {agent: {**infos.get(agent, {}), "stamp": self.stamp} for agent in self.possible_agents})


def same_batch(got: MultiAgentBatch, want: MultiAgentBatch) -> None:
    """To the bit, ids and order included."""
    assert (got.env_steps, got.agent_steps, list(got)) == (want.env_steps, want.agent_steps, list(want))
    for policy, rows in want.items():
        assert list(got[policy].keys()) == list(rows.keys())
        for name, column in rows.items():
            np.testing.assert_array_equal(got[policy][name], column, err_msg=name, strict=True)


@pytest.mark.checklist(49)
@pytest.mark.checklist(112)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(
    num_envs=st.integers(1, 5),
    agent_num=st.integers(1, 3),
    seed=st.integers(0, 2**32),
    order=st.integers(0, 2**32),
    mapping=st.sampled_from([one, by_agent, by_episode]),
    batch_mode=st.sampled_from(["truncate", "complete"]),
    mode=st.sampled_from(MODES),
    calls=CALLS,
    copy=st.booleans(),
)
def test_rows_are_the_references_in_whatever_order_envs_come_back(
    kind: str,
    num_envs: int,
    agent_num: int,
    seed: int,
    order: int,
    mapping: Any,
    batch_mode: Any,
    mode: str,
    calls: list[tuple[Any, int]],
    copy: bool,
) -> None:
    made = factories(kind, num_envs, agent_num)
    with Scattered(made, order, autoreset_mode=mode, copy=copy, validate="strict") as envs:
        policies = {name: EchoPolicy(salt) for name, salt in SALTS.items()}
        collector = Collector(
            envs, policies, given_mapping(mapping, envs.agents), batch_mode=batch_mode, seed=seed, overlap=True
        )
        reference = Reference(kind, num_envs, agent_num, seed, mapping=mapping, salts=SALTS)
        for unit, amount in calls:
            check_batch(reference, collector.collect(**{unit: amount}), getattr(reference, batch_mode)(unit, amount))
        assert collector.metrics.env_steps == sum(world.steps for world in reference.worlds)
        assert collector.metrics.episodes_total == len(reference.records)
        assert not envs._call_state.pending  # nothing is on the way between two calls


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["parallel", "masked turns", "keyed"])
@pytest.mark.parametrize("backend", [AsyncVectorEnv, ThreadVectorEnv])
def test_workers_give_the_same_batches(backend: Any, kind: str, mode: str) -> None:
    made = factories(kind, 6, 3)
    calls: list[dict[str, int]] = [{"env_steps": 61}, {"agent_steps": 23}, {"episodes": 4}, {"env_steps": 5}]
    for batch_mode in ("truncate", "complete"):
        copy = batch_mode == "truncate"
        with (
            sync(kind, 6, 3, mode) as plain,
            backend(made, num_workers=2, autoreset_mode=mode, copy=copy) as workers,
        ):
            options: dict[str, Any] = {"batch_mode": batch_mode, "seed": 3}
            want = Collector(plain, EchoPolicy(), agent_connectors=[FrameStack(3)], **options)
            got = Collector(workers, EchoPolicy(), agent_connectors=[FrameStack(3)], overlap=True, **options)
            for call in calls:
                same_batch(got.collect(**call), want.collect(**call))


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
        noop = FunctionPolicy(lambda rows: np.zeros(len(rows), int))
        Collector(envs, noop, overlap=True, callbacks=[callback_list], seed=0).collect(env_steps=6 * 20)
    assert told == [[0, 2, 4], [1, 3, 5]] * 20


@pytest.mark.parametrize("copy", [False, True])
def test_infos_of_a_half_that_came_in_pieces_are_each_envs_own(copy: bool) -> None:
    told: dict[int, list[int]] = {}

    def on_step(step: Any) -> None:
        for i, info in zip(step.env_ids.tolist(), step.infos, strict=True):
            told.setdefault(i, []).append(info["agent_0"]["stamp"])

    with Scattered([partial(Stamping, env_index=i) for i in range(5)], 11, copy=copy) as envs:
        noop = FunctionPolicy(lambda rows: np.zeros(len(rows), int))
        Collector(envs, noop, overlap=True, callbacks=[{"on_episode_step": on_step}], seed=0).collect(env_steps=60)
    assert told == {i: [100 * t + i for t in range(1, 13)] for i in range(5)}


@pytest.mark.fault("E13")
@settings(max_examples=20)
@given(
    strikes=st.lists(st.integers(3, 30), min_size=1, max_size=3),
    amounts=st.lists(st.integers(1, 25), min_size=1, max_size=4),
    order=st.integers(0, 2**32),
    mode=st.sampled_from(MODES),
)
def test_lost_episodes_are_counted_to_the_step(strikes: list[int], amounts: list[int], order: int, mode: str) -> None:
    n = len(strikes) + 1  # the last one stays well
    makes = [
        lambda i=i, at=at: RaisingEnv(at=at, only_env=i if i < n - 1 else n, env_index=i, agent_num=2)
        for i, at in enumerate([*strikes, 0])
    ]
    with Scattered(makes, order, autoreset_mode=mode, on_fault="mask") as envs:
        collector = Collector(envs, FunctionPolicy(lambda rows: np.zeros(len(rows), int)), overlap=True, seed=0)
        metrics, handed = collector.metrics, 0
        for amount in amounts:
            assert collector.collect(env_steps=amount).env_steps == amount
            handed += amount
            assert metrics.env_steps == handed + metrics.env_steps_lost
        assert metrics.episodes_faulty == len(envs.masked_env_ids)


def test_a_worker_that_dies_costs_its_episodes_alone() -> None:
    makes = [lambda i=i: RaisingEnv(at=3, only_env=1, env_index=i) for i in range(4)]
    with AsyncVectorEnv(makes, num_workers=2, on_fault="restart") as envs:
        collector = Collector(envs, FunctionPolicy(lambda rows: np.zeros(len(rows), int)), overlap=True, seed=0)
        batch = collector.collect(env_steps=40)
        assert batch.env_steps == 40
        assert collector.metrics.episodes_faulty > 0
        assert collector.metrics.env_steps == 40 + collector.metrics.env_steps_lost


@pytest.mark.fault("E11")
def test_after_an_env_has_failed_reset_begins_anew_with_nothing_left_on_the_way() -> None:
    makes = [lambda i=i: RaisingEnv(at=3, only_env=1, env_index=i) for i in range(4)]
    with AsyncVectorEnv(makes, num_workers=2) as envs:
        collector = Collector(envs, FunctionPolicy(lambda rows: np.zeros(len(rows), int)), overlap=True, seed=0)
        with pytest.raises(EnvRaised):
            collector.collect(env_steps=400)
        collector.reset()
        assert collector.collect(env_steps=8).env_steps == 8


@pytest.mark.fault("E11")
@settings(max_examples=40)
@given(fails_at=st.integers(0, 12), order=st.integers(0, 2**32), mode=st.sampled_from(MODES))
def test_a_policy_that_raises_costs_no_row(fails_at: int, order: int, mode: str) -> None:
    class Failing(EchoPolicy):
        def act(self, rows: Any, *, explore: bool = True) -> Any:
            answer = super().act(rows, explore=explore)
            if len(self.calls) == fails_at + 1:
                raise ValueError("scripted")
            return answer

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
        assert collected(Failing(), envs) == collected(EchoPolicy(), plain)


@pytest.mark.parametrize("overlap", [False, True])
def test_hooks_of_an_episode_come_in_one_order(overlap: bool) -> None:
    told: dict[int, list[str]] = {}
    steps: dict[int, int] = {}

    def on_step(step: Any) -> None:
        assert step.env_ids.tolist() == sorted(step.env_ids.tolist())
        for episode, info in zip(step.episodes, step.infos, strict=True):
            assert isinstance(info, dict)
            told[episode.eps_id].append("step")
            steps[episode.env_id] = steps.get(episode.env_id, 0) + 1

    callback_list = {
        "on_episode_created": lambda episode: told.setdefault(episode.eps_id, []).append("created"),
        "on_episode_start": lambda episode: told[episode.eps_id].append("start"),
        "on_episode_step": on_step,
        "on_episode_end": lambda episode, record: told[episode.eps_id].append(f"end {record.length}"),
    }
    with Scattered(factories("parallel", 4, 2), 7) as envs:
        Collector(envs, EchoPolicy(), callbacks=[callback_list], overlap=overlap, seed=0).collect(env_steps=100)
    assert steps == dict.fromkeys(range(4), 25)
    ended = [lives for lives in told.values() if lives[-1].startswith("end")]
    assert len(ended) >= 8
    for lives in told.values():
        assert lives[:2] == ["created", "start"]
        count = lives.count("step")
        assert lives[2:] in (["step"] * count, ["step"] * count + [f"end {count}"])


def test_rows_that_connectors_take_out_and_no_ops_are_the_same() -> None:
    def run(envs: Any, overlap: bool) -> MultiAgentBatch:
        keep = FilterRows(lambda rows: (rows["obs"].sum(axis=1).astype(int) % 3) != 0, noop="repeat")
        return Collector(envs, EchoPolicy(), agent_connectors=[keep], seed=2, overlap=overlap).collect(env_steps=90)

    with sync("parallel", 5, 3) as plain, Scattered(factories("parallel", 5, 3), 5) as envs:
        same_batch(run(envs, overlap=True), run(plain, overlap=False))

"""Metrics: ended episodes, statistics, timers, and deltas of many collectors."""

from __future__ import annotations

import json
import math
import pickle
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marlvec.collect import Collector, Metrics
from marlvec.collect.callbacks import RunningEpisode
from marlvec.collect.metrics import (
    TIMERS,
    Counters,
    CurrentState,
    EndedEpisodes,
    FinishedEpisodes,
    Stats,
    stats_of_agents,
    stats_of_episodes,
    stats_of_policy,
)
from marlvec.connectors import ClipReward
from marlvec.errors import ArgumentError
from marlvec.policies import FunctionPolicy, RandomPolicy
from marlvec.testing.scripted import CounterEnv
from marlvec.vector.in_process import SyncVectorEnv
from tests.collect.players import MODES, EchoPolicy, noop, sync

# --- returns, lengths and durations against counts by hand; rewards that wait for their agent; timers


@pytest.mark.checklist(119)
@pytest.mark.checklist(85)
@pytest.mark.parametrize("mode", MODES)
def test_returns_and_lengths_equal_a_count_by_hand(mode: str) -> None:
    """Env 0 plays episodes of 2 and 3 steps in turn, env 1 of 4. A step pays episode * 10**6 + t * 1000 + agent."""
    lengths = [[2, 3], [4]]
    with SyncVectorEnv(
        [lambda i=i: CounterEnv(lengths[i], agent_num=2, env_index=i) for i in range(2)], autoreset_mode=mode
    ) as envs:
        policies = {"p": noop(), "q": noop()}
        mapping = {"agent_0": "q", "agent_1": "p"}
        collector = Collector(envs, policies, mapping, agent_connectors=[ClipReward(sign=True)], seed=0, window=4)
        began = time.perf_counter()
        batch = collector.collect(env_steps=20)
        elapsed = time.perf_counter() - began

        assert set(batch["p"]["rewards"].tolist()) == {1.0}  # clipped; what follows is not
        metrics = collector.metrics
        assert (metrics.env_steps, metrics.agent_steps, metrics.episodes_total) == (20, 40, 6)

        def paid(episode: int, length: int, agent: int) -> float:
            return length * (episode * 1e6 + agent) + 1e3 * length * (length + 1) / 2

        # Ten steps each. Env 0 ends after 2, 5, 7 and 10 steps, env 1 after 4 and 8; the window keeps the last four.
        episodes = [(0, 1, 3), (0, 2, 2), (1, 1, 4), (0, 3, 3)]
        assert [(e.env_id, e.number, e.length) for e in metrics.episodes] == episodes
        both = [paid(number, length, 0) + paid(number, length, 1) for _, number, length in episodes]
        assert [e.episode_return for e in metrics.episodes] == both
        assert metrics.returns == Stats(4, min(both), sum(both) / 4, max(both))
        assert metrics.lengths == Stats(4, 2.0, 3.0, 4.0)
        assert metrics.env(1)["return"] == Stats(1, both[2], both[2], both[2])
        assert metrics.env(0)["length"] == Stats(3, 2.0, 8 / 3, 3.0)
        for agent, policy in (("agent_0", "q"), ("agent_1", "p")):
            own = [paid(number, length, int(agent[-1])) for _, number, length in episodes]
            assert metrics.agent(agent)["return"] == Stats(4, min(own), sum(own) / 4, max(own))
            assert metrics.policy(policy)["return"] == metrics.agent(agent)["return"]
            assert metrics.policy(policy)["length"] == Stats(4, 2.0, 3.0, 4.0)
            for stats in (metrics.policy(policy)["duration"], metrics.agent(agent)["duration"]):
                assert 0 < stats.min <= stats.mean <= stats.max < elapsed
        assert 0 < metrics.durations.min < metrics.durations.max < elapsed
        assert 0 < metrics.env(0)["duration"].min < elapsed

        summary = metrics.summary()
        assert json.loads(json.dumps(summary))["policies"]["p"]["length"] == {
            "count": 4,
            "min": 2.0,
            "mean": 3.0,
            "max": 4.0,
        }
        assert summary["envs"][1]["length"]["mean"] == 4.0
        with pytest.raises(KeyError, match="no agent 'agent_9'"):
            metrics.agent("agent_9")
        with pytest.raises(KeyError, match="no policy 'r'"):
            metrics.policy("r")


@pytest.mark.checklist(120)
def test_everything_can_be_read_before_the_first_step() -> None:
    with sync("parallel", 2, 2) as envs:
        metrics = Collector(envs, RandomPolicy()).metrics
        assert metrics.returns.count == 0
        assert np.isnan(metrics.returns.mean)
        assert metrics.episodes == []
        assert set(metrics.timers) == set(TIMERS)
        assert all(timer.mean == 0.0 == timer.seconds for timer in metrics.timers.values())
        assert metrics.summary()["timers"]["env_wait"] == {"seconds": 0.0, "calls": 0}
        assert (metrics.summary()["episodes_faulty"], metrics.summary()["episodes_restarted"]) == (0, 0)
        assert "0 env steps" in repr(metrics)
    with pytest.raises(ArgumentError, match="at least 1"):
        Metrics(("a",), ("p",), window=0)


@pytest.mark.checklist(120)
def test_timers_tell_where_the_time_goes() -> None:
    def slow(rows: Any) -> Any:
        time.sleep(0.002)
        return np.zeros(len(rows), int)

    with sync("parallel", 2, 2) as envs:
        collector = Collector(envs, FunctionPolicy(slow), seed=0)
        began = time.perf_counter()
        collector.collect(env_steps=20)
        elapsed = time.perf_counter() - began
        timers = collector.metrics.timers
        assert timers["inference"].calls == timers["env_wait"].calls == timers["ingest"].calls == 10
        assert timers["inference"].seconds >= 0.02
        assert timers["inference"].mean == pytest.approx(timers["inference"].seconds / 10)
        assert sum(timer.seconds for timer in timers.values()) < elapsed


# --- numbers of one's own


@pytest.mark.checklist(120)
def test_own_numbers_are_over_the_window_without_nan() -> None:
    """Episodes of 3 steps, the window holds the last 4 of 6; they count 0 to 5, every other one of which is NaN."""

    def on_episode_start(episode: RunningEpisode) -> None:
        episode.custom["number"] = episode.number
        episode.custom["half"] = np.float32(episode.number / 2)
        episode.custom["sparse"] = math.nan if episode.number % 2 else episode.number
        episode.custom["never"] = math.nan

    def on_episode_end(episode: RunningEpisode, record: Any) -> None:
        assert record.custom is episode.custom
        episode.custom["late"] = np.array(record.length)
        if episode.number == 1:
            episode.custom["old"] = 1.0

    def on_sample_end(batch: Any, metrics: Metrics) -> None:
        metrics.add_value("batch", batch.env_steps)
        metrics.add_value("nan", math.nan)

    with SyncVectorEnv([lambda: CounterEnv(3, agent_num=1)]) as envs:
        callbacks = [on_episode_start, on_episode_end, on_sample_end]
        collector = Collector(envs, noop(), callbacks=callbacks, seed=0, window=4)
        metrics = collector.metrics
        assert metrics.custom == {}
        for amount in (3, 6, 1, 2, 4, 2):
            collector.collect(env_steps=amount)
        assert [e.custom["number"] for e in metrics.episodes] == [2, 3, 4, 5]
        assert {type(value) for e in metrics.episodes for value in e.custom.values()} == {float}
        custom = metrics.custom
        assert custom["number"] == Stats(4, 2.0, 3.5, 5.0)
        assert custom["half"] == Stats(4, 1.0, 1.75, 2.5)
        assert custom["sparse"] == Stats(2, 2.0, 3.0, 4.0)
        assert custom["late"] == Stats(4, 3.0, 3.0, 3.0)
        assert custom["batch"] == Stats(4, 1.0, 2.25, 4.0)  # the last four calls
        assert custom["never"].count == custom["nan"].count == 0
        assert "old" not in custom  # its episode has left the window
        plain = json.loads(json.dumps(metrics.summary()["custom"]))
        assert plain["sparse"] == {"count": 2, "min": 2.0, "mean": 3.0, "max": 4.0}
        assert [e.number for e in metrics.latest(2)] == [4, 5]
        assert metrics.latest(99) == metrics.episodes


@pytest.mark.parametrize("value", ["3", None, [1.0, 2.0], 10**400])
def test_a_value_that_is_not_a_number_is_refused_by_name(value: Any) -> None:
    with SyncVectorEnv([lambda: CounterEnv(2, agent_num=1)]) as envs:

        def on_episode_start(episode: RunningEpisode) -> None:
            episode.custom.update(bad=value, good=1)

        collector = Collector(envs, noop(), callbacks=[on_episode_start], seed=0)
        with pytest.raises(ArgumentError, match=r"Episode\(eps_id=0, .*custom\['bad'\]: expected one number, got"):
            collector.collect(env_steps=5)
        assert collector.metrics.custom == {"good": Stats(1, 1.0, 1.0, 1.0)}
        with pytest.raises(ArgumentError, match=r"add_value\('loss'\): expected one number, got"):
            collector.metrics.add_value("loss", value)
        assert "loss" not in collector.metrics.custom


def test_the_time_of_callbacks_is_theirs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def clock() -> float:
        return now

    def on_episode_step(step: Any) -> None:
        nonlocal now
        now += 2.0

    for name, module in list(sys.modules.items()):
        if name.startswith("marlvec.collect.") and hasattr(module, "perf_counter"):
            monkeypatch.setattr(module, "perf_counter", clock)
    with sync("parallel", 2, 2) as envs:
        collector = Collector(envs, RandomPolicy(), callbacks=[on_episode_step], seed=0)
        collector.collect(env_steps=20)
        timers = collector.metrics.timers
        assert timers["callbacks"].calls == 10
        assert {name: timer.seconds for name, timer in timers.items() if timer.seconds} == {"callbacks": 20.0}


# --- the table of finished episodes beside a plain list of their records


AGENTS = ("x", "y", "z")
IDS = ("p", "q", "r", "s")
NAMES = dict(enumerate((*IDS, *IDS)))  # some were removed, and added again


def finished(rng: np.random.Generator, k: int, policy_ids: Mapping[int, str], first: int) -> FinishedEpisodes:
    a = len(AGENTS)
    return FinishedEpisodes(
        eps_id=first + np.arange(k),
        env_id=np.sort(rng.integers(0, 4, k)),
        number=rng.integers(0, 9, k),
        length=rng.integers(0, 99, k),
        returns=rng.normal(size=(k, a)) * 10.0 ** rng.integers(-9, 9, (k, a)),
        lengths=rng.integers(0, 99, (k, a)),
        present=rng.random((k, a)) < 0.8,
        truncated=rng.random((k, a)) < 0.5,
        policy=rng.choice(list(policy_ids), (k, a)),
        duration=rng.random(k),
        made=np.full(k, None, np.object_),
        policy_ids=policy_ids,
    )


def plain(record: Any) -> list[Any]:
    values = [record.eps_id, record.env_id, record.number, record.length, record.policies, record.duration]
    arrays = record.returns_A, record.lengths_A, record.present_A, record.truncated_A
    return values + [array.tolist() for array in arrays] + [dict(record.custom)]


@pytest.mark.slow("a hundred tables, each read in full after each row")
@given(
    window=st.integers(1, 12),
    adds=st.lists(st.tuples(st.integers(0, 9), st.sets(st.integers(0, 6), min_size=1)), max_size=12),
    seed=st.integers(0, 2**16),
)
def test_table_is_a_list_of_the_last_records(window: int, adds: list[Any], seed: int) -> None:
    """Whatever comes, under whatever ids, and whether or not a record was made before its row was added."""
    rng = np.random.default_rng(seed)
    current = CurrentState(4)
    metrics, last, total = Metrics(AGENTS, IDS, window=window, current=current), deque[Any](maxlen=window), 0
    for k, numbers in adds:
        episodes = finished(rng, k, {number: NAMES[number] for number in numbers}, total)
        told = {int(i): episodes.record(int(i), {"n": float(i)}) for i in np.flatnonzero(rng.random(k) < 0.3)}
        want = [episodes.record(i) for i in range(k)]
        for i in set(range(k)) - set(told):
            episodes.made[i] = None
        metrics.add(episodes)
        last.extend(want)
        assert metrics.episodes_total == total, "they count from when the tick is published"
        total += k
        current.state = current.state._replace(counters=Counters(episodes_total=total))
        assert metrics.episodes_total == total
        got = metrics.episodes
        assert list(map(plain, got)) == list(map(plain, last))
        assert all(a is b for a, b in zip(got, metrics.episodes, strict=True)), "one object a record"
        assert all(record in got or record.eps_id < got[0].eps_id for record in told.values())
        assert list(map(plain, metrics.latest(3))) == list(map(plain, last))[-3:]
        assert metrics.policies_seen == list(dict.fromkeys(name for e in last for name in e.policies))
        found = stats_of_episodes(last)
        assert (metrics.returns, metrics.lengths, metrics.durations) == tuple(found.values())
        for i in range(4):
            assert metrics.env(i) == stats_of_episodes(e for e in last if e.env_id == i)
        for a, name in enumerate(AGENTS):
            assert metrics.agent(name) == stats_of_agents([(e, a) for e in last if e.present_A[a]])
        for name in IDS:
            assert metrics.policy(name) == stats_of_policy(last, name)
        numbers = [e.custom["n"] for e in last if e.custom]
        assert metrics.custom == ({"n": Stats.of(numbers)} if numbers else {})
        assert sorted(metrics.summary()["envs"]) == sorted({e.env_id for e in last})


def test_memory_follows_the_window_and_not_what_has_passed() -> None:
    rng, table = np.random.default_rng(0), EndedEpisodes(len(AGENTS), 10)
    for number in range(2_000):
        table.add(finished(rng, 5, {i: f"v{i}" for i in (number, number + 1)}, 5 * number))
    assert (table.size, len(table)) == (10_000, 10)
    assert len(table._arrays) <= 2 * (10 + 5)
    assert len(table._arrays.policy_ids) <= 2 * (10 + 5) * 2


@given(st.integers(1, 300), st.integers(0, 2**16))
def test_sums_over_many_agents_are_to_the_bit_those_of_one_episode(a: int, seed: int) -> None:
    returns = np.random.default_rng(seed).normal(size=(7, a)) * 1e3
    assert returns[2:6].sum(axis=1).tolist() == [float(row.copy().sum()) for row in returns[2:6]]


def test_a_window_holds_an_episode_at_least() -> None:
    with pytest.raises(ArgumentError, match="at least 1"):
        EndedEpisodes(1, 0)


# --- deltas of metrics: those of many collectors together are a recount of all their episodes


ADDS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30), st.booleans()), max_size=20)


def sent(delta: Any) -> Any:
    return pickle.loads(pickle.dumps(delta))


@pytest.mark.slow("sixty tables, each read in full after each row")
@settings(max_examples=60)
@given(window=st.integers(1, 12), head_window=st.integers(1, 12), adds=ADDS, seed=st.integers(0, 2**16))
def test_deltas_of_three_are_the_list_of_all_records(window: int, head_window: int, adds: Any, seed: int) -> None:
    """However long the windows are, and whatever each calls its policies by number."""
    rng = np.random.default_rng(seed)
    current = [CurrentState(4) for _ in range(3)]
    parts = [Metrics(AGENTS, IDS, window=window, current=one) for one in current]
    head, told = Metrics(AGENTS, IDS, window=head_window), list[Any]()
    untold: list[list[Any]] = [[], [], []]
    for part in parts:
        assert len(part.take_delta().episodes) == 0
    for who, k, tells in adds:
        total = current[who].counters.episodes_total
        episodes = finished(rng, k, dict(enumerate(np.roll(list(NAMES.values()), who).tolist())), total)
        untold[who] += [plain(sent(episodes).record(i, {"n": float(i)} if i % 2 else None)) for i in range(k)]
        for i in range(k):
            if i % 2 or rng.random() < 0.3:
                episodes.record(i, {"n": float(i)} if i % 2 else None)
        parts[who].add(episodes)
        parts[who].add_value("v", float(total))
        parts[who].add_value("v", math.nan)
        parts[who].timers["ingest"].add(0.5)
        current[who].state = current[who].state._replace(counters=Counters(episodes_total=total + k, env_steps=total))
        if tells:
            head.add_delta(sent(parts[who].take_delta()))
            told += untold[who]
            untold[who] = []
            assert head.last_values == {"v": float(total)}
        assert head.episodes_total == len(told)
        assert list(map(plain, head.episodes)) == told[-head_window:]
        last = head.episodes
        assert head.returns == stats_of_episodes(last)["return"]
        for name in IDS:
            assert head.policy(name) == stats_of_policy(last, name)
        assert head.agent("y") == stats_of_agents([(e, 1) for e in last if e.present_A[1]])
    head.add_delta(*(sent(part.take_delta()) for part in parts))
    assert head.episodes_total == len(told) + sum(map(len, untold))
    assert head.env_steps == sum(part.env_steps for part in parts)
    assert (head.timers["ingest"].calls, head.timers["ingest"].seconds) == (len(adds), len(adds) / 2)


def test_two_collectors_together_are_a_recount_of_what_both_have_played() -> None:
    def note(episode: RunningEpisode, record: Any) -> None:
        episode.custom["twice"] = 2.0 * record.length

    with sync("parallel", 3, 2) as envs, sync("parallel", 2, 2) as others:
        pair = [
            Collector(each, EchoPolicy(k), seed=k, stream=k, window=2, callbacks=[{"on_episode_end": note}])
            for k, each in enumerate((envs, others))
        ]
        pair[0].collect(env_steps=50)  # before it begins
        before, decided = pair[0].metrics.episodes_total, pair[0].metrics.agent_steps
        for collector in pair:
            assert not any(collector.metrics.take_delta().counters.values())
        head = Metrics(envs.agents, ("main",), window=1000)
        ended: list[int] = []
        for _ in range(4):
            for collector in pair:
                rows = collector.collect(env_steps=60)["main"]
                ended += np.unique(rows.eps_id[rows.terminated | rows.truncated]).tolist()
                head.add_delta(sent(collector.metrics.take_delta()))
        assert [e.eps_id for e in head.episodes if e.eps_id in ended] == [e.eps_id for e in head.episodes]
        assert {e.stream for e in head.episodes} == {0, 1}
        assert (head.env_steps, head.agent_steps) == (480, sum(c.metrics.agent_steps for c in pair) - decided)
        assert head.episodes_total == sum(c.metrics.episodes_total for c in pair) - before
        assert head.episode_values["twice"].mean == pytest.approx(2 * head.lengths.mean)


def test_shown_delta_can_be_undone() -> None:
    """As where a callback fails and the batch is not handed out; whatever the window forgets meanwhile."""
    rng, current = np.random.default_rng(0), CurrentState(4)
    part, head = Metrics(AGENTS, IDS, current=current), Metrics(AGENTS, ("p",), window=3)
    part.take_delta()

    def delta(k: int) -> Any:
        part.add(finished(rng, k, dict(enumerate(IDS)), part.episodes_total))
        part.add_value("v", float(k))
        counters = Counters(episodes_total=part.episodes_total + k)
        current.state = current.state._replace(counters=counters)
        return part.take_delta()

    head.add_delta(delta(5))
    for k in range(1, 40):
        before, shown = head.state, (list(map(plain, head.episodes)), head.last_values, head.policies)
        deltas = [delta(k), delta(1), delta(0)]
        head.show(head.after(deltas))
        assert head.episodes_total == before.rollout.counters.episodes_total + k + 1
        head.show(before)
        assert (list(map(plain, head.episodes)), head.last_values, head.policies) == shown
        if k % 3 == 0:
            head.add_delta(*deltas)
            assert head.policies == IDS
    assert len(head._table._arrays) <= 200, "it does not grow with what has passed"


def test_those_of_other_agents_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"of the agents \['x', 'y', 'z'\] got some of \['w'\]"):
        Metrics(AGENTS, IDS).add_delta(Metrics(("w",), IDS).take_delta())

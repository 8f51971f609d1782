"""The table of finished episodes beside a plain list of their records."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marlvec.collect.metrics import (
    Counters,
    CurrentState,
    EpisodeTable,
    FinishedEpisodes,
    Metrics,
    Stats,
    stats_of_agents,
    stats_of_episodes,
    stats_of_policy,
)
from marlvec.errors import ArgumentError

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
    rng, table = np.random.default_rng(0), EpisodeTable(len(AGENTS), 10)
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
        EpisodeTable(1, 0)

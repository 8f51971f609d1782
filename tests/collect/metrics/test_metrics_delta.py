"""Deltas of metrics: those of many collectors together are a recount of all their episodes."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marlvec.collect import Collector, Metrics
from marlvec.collect.callbacks import RunningEpisode
from marlvec.collect.metrics import Counters, CurrentState, stats_of_agents, stats_of_episodes, stats_of_policy
from marlvec.errors import ArgumentError
from tests.collect.helpers.players import EchoPolicy, sync
from tests.collect.metrics.test_episode_table import AGENTS, IDS, NAMES, finished, plain

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

"""Returns, lengths and durations against counts by hand; rewards that wait for their agent; timers."""

from __future__ import annotations

import json
import math
import sys
import time
from typing import Any

import numpy as np
import pytest

from marlvec.collect import Collector, Metrics
from marlvec.collect.callbacks import RunningEpisode
from marlvec.collect.metrics import TIMERS, Stats
from marlvec.connectors import ClipReward
from marlvec.errors import ArgumentError
from marlvec.policies import FunctionPolicy, RandomPolicy
from marlvec.testing.scripted import CounterEnv
from marlvec.vector.in_process import SyncVectorEnv
from tests.collect.helpers.players import MODES, sync

noop = FunctionPolicy(lambda rows: np.zeros(len(rows), int))


@pytest.mark.checklist(119)
@pytest.mark.checklist(85)
@pytest.mark.parametrize("mode", MODES)
def test_returns_and_lengths_equal_a_count_by_hand(mode: str) -> None:
    """Env 0 plays episodes of 2 and 3 steps in turn, env 1 of 4. A step pays episode * 10**6 + t * 1000 + agent."""
    lengths = [[2, 3], [4]]
    with SyncVectorEnv(
        [lambda i=i: CounterEnv(lengths[i], agent_num=2, env_index=i) for i in range(2)], autoreset_mode=mode
    ) as envs:
        policies = {"p": FunctionPolicy(noop.function), "q": FunctionPolicy(noop.function)}
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
        collector = Collector(envs, noop, callbacks=callbacks, seed=0, window=4)
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

        collector = Collector(envs, noop, callbacks=[on_episode_start], seed=0)
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

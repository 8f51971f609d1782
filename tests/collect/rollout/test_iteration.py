"""Batch after batch: `for batch in collector`, and any amount up to a total."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marlvec.collect import Collector
from marlvec.errors import ArgumentError, StateError
from marlvec.policies import FunctionPolicy
from tests.collect.helpers.players import EchoPolicy, sync
from tests.collect.helpers.reference import same_batch


@pytest.mark.checklist(112)
def test_a_collector_is_iterated_over_in_batches_of_its_size() -> None:
    with sync("keyed", 3, 2) as envs, sync("keyed", 3, 2) as others:
        collector = Collector(envs, EchoPolicy(), batch_size=7, seed=0)
        plain = Collector(others, EchoPolicy(), seed=0)
        for batch in islice(collector, 5):
            same_batch(batch, plain.collect(env_steps=7))
        same_batch(next(iter(collector)), plain.collect(env_steps=7))  # another iteration goes on


def test_a_batch_is_counted_as_the_collector_counts() -> None:
    with sync("parallel", 3, 2) as envs:
        collector = Collector(envs, EchoPolicy(), batch_size=11, count_by="agent_steps", seed=0)
        assert [batch.agent_steps for batch in islice(collector, 3)] == [11, 11, 11]


def test_without_a_batch_size_it_says_what_to_do() -> None:
    with sync("parallel", 1, 1) as envs:
        collector = Collector(envs, EchoPolicy())
        with pytest.raises(StateError, match=r"batch_size.*batches\(env_steps"):
            iter(collector)
        for size in (0, -1, 1.5, True, "4"):
            with pytest.raises(ArgumentError, match="batch_size=.*an integer of at least 1"):
                Collector(envs, EchoPolicy(), batch_size=size)  # type: ignore[arg-type]


@pytest.mark.slow("collects whole runs on several backends")
@settings(max_examples=40)
@given(
    amount=st.integers(1, 20),
    total=st.integers(1, 60),
    unit=st.sampled_from(["env_steps", "agent_steps"]),
    batch_mode=st.sampled_from(["truncate", "complete"]),
)
def test_a_total_is_met_and_no_more_is_collected(amount: int, total: int, unit: Any, batch_mode: Any) -> None:
    with sync("parallel", 3, 2) as envs:
        collector = Collector(envs, EchoPolicy(), batch_mode=batch_mode, seed=0)
        sizes = [getattr(batch, unit) for batch in collector.batches(**{unit: amount}, total=total)]
    if batch_mode == "truncate":
        assert sizes == [amount] * (total // amount) + ([total % amount] if total % amount else [])
    else:
        assert sum(sizes) >= total > sum(sizes[:-1])
        assert all(size >= amount for size in sizes[:-1])


def test_episodes_are_counted_as_asked() -> None:
    with sync("parallel", 2, 2) as envs:
        collector = Collector(envs, EchoPolicy(), batch_mode="complete", seed=0)
        counts = [len(set(batch["main"]["eps_id"].tolist())) for batch in collector.batches(episodes=3, total=7)]
        assert counts == [3, 3, 1]


@pytest.mark.parametrize("total", [0, -3, 2.5])
def test_a_wrong_total_is_refused_at_once(total: Any) -> None:
    with sync("parallel", 1, 1) as envs:
        collector = Collector(envs, EchoPolicy())
        with pytest.raises(ArgumentError, match=r"batches\(total="):
            collector.batches(env_steps=3, total=total)
        with pytest.raises(ArgumentError, match=r"batches\(\): expected exactly one"):
            collector.batches(total=3)


@pytest.mark.fault("E11")
def test_batch_error_is_raised_and_loses_no_rows() -> None:
    failing = [False]

    def act(rows: Any) -> Any:
        if failing[0]:
            raise ValueError("scripted")
        return [0] * len(rows)

    with sync("parallel", 2, 2) as envs:
        collector = Collector(envs, FunctionPolicy(act), seed=0)
        seen = 0
        for batch in collector.batches(env_steps=5, total=10):
            seen += batch.env_steps
            failing[0] = True
            with pytest.raises(ValueError, match="scripted"):
                next(collector.batches(env_steps=5))
            failing[0] = False
        assert seen == 10 == collector.metrics.env_steps


def test_a_bar_shows_how_far_it_has_come(capsys: pytest.CaptureFixture[str]) -> None:
    with sync("parallel", 2, 2) as envs:
        collector = Collector(envs, EchoPolicy(), seed=0)
        for _ in collector.batches(env_steps=20, total=50, progress=True):
            pass
        list(islice(collector.batches(episodes=1, progress=True), 2))
    shown = capsys.readouterr().err
    assert "env steps" in shown
    assert "50/50" in shown
    assert "mean return" in shown
    assert "…" not in shown

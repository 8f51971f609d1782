"""States that are saved while a thread collects: what it had made and nobody had taken comes first afterwards."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from marlvec import Collector
from marlvec.errors import StateError
from tests.collect.state.saved import columns_of, counted
from tests.collect.state.test_exact_resume import Plan
from tests.vector.test_saved_states import same
from tests.waiting import until

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

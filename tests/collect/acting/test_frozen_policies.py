"""Policies that are never trained, and what else self-play asks of a collector."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from marlvec.collect import Collector, Episode
from marlvec.connectors import AgentPipeline, LearnerConnector, LearnerPipeline, NormalizeObs, Rows
from marlvec.errors import StateError
from tests.collect.helpers.players import KINDS, EchoPolicy, sync


class Seen(LearnerConnector):
    """Notes whose rows it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: set[str] = set()

    def see_batch(self, batch: Any) -> None:
        self.shown |= set(batch)

    def __call__(self, rows: Rows) -> Rows:
        return rows


@pytest.mark.parametrize("batch_mode", ["truncate", "complete"])
def test_a_frozen_policy_is_in_no_batch_and_its_connectors_learn_nothing(batch_mode: Any) -> None:
    seen = Seen()
    with sync("parallel", 3, 2) as envs:
        collector = Collector(
            envs,
            {"main": EchoPolicy()},
            lambda name, episode: "old" if name.endswith("1") and "old" in collector.policies else "main",
            agent_connectors={"main": [NormalizeObs()]},
            learner_connectors={"main": LearnerPipeline([seen])},
            batch_mode=batch_mode,
            seed=0,
        )
        collector.collect(env_steps=60)
        collector.add_policy("old", EchoPolicy(), agent_connectors=AgentPipeline([NormalizeObs()]), frozen=True)
        collector.train()
        frozen, learning = collector.agent_connectors["old"], collector.agent_connectors["main"]
        before = repr(frozen.state_dict()), repr(learning.state_dict())
        batch = collector.collect(env_steps=120)
        assert set(batch) == {"main"}
        assert batch.agent_steps > len(batch["main"])
        assert seen.shown == {"main", "old"}  # a centralised critic may still look at everybody's rows
        collector.policies_to_train = ["main", "old"]
        assert set(collector.collect(env_steps=60)) == {"main"}
        assert (repr(frozen.state_dict()), frozen.training) == (before[0], False)
        assert repr(learning.state_dict()) != before[1]
        collector.eval()
        assert not learning.training


@pytest.mark.mostly_slow("collects whole runs on several backends", quick=3)
@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("batch_mode", ["truncate", "complete"])
def test_unread_rows_of_frozen_policies_change_nothing(kind: str, batch_mode: Any) -> None:
    """Where learner connectors look at them they are kept; else they are counted alone, and batches are the same."""

    def collected(learner: list[Any]) -> tuple[list[Any], Collector]:
        def mapping(name: str, episode: Any) -> str:
            return ("main", "old", "older")[(int(name[-1]) + episode.number) % 3]

        with sync(kind, 4, 3) as envs:
            collector = Collector(
                envs, {"main": EchoPolicy()}, mapping, learner_connectors=learner, batch_mode=batch_mode, seed=3
            )
            collector.add_policy("old", EchoPolicy(), like="main", learner_connectors=(), frozen=True)
            collector.add_policy("older", EchoPolicy(), like="main", learner_connectors=(), frozen=True)
            amounts = [{"env_steps": 30}, {"agent_steps": 17}, {"episodes": 5}, {"agent_steps": 40}, {"env_steps": 21}]
            return [collector.collect(**amount) for amount in amounts], collector  # type: ignore[arg-type]  # one each

    kept, _ = collected([Seen()])
    counted, collector = collected([])
    for one, other in zip(kept, counted, strict=True):
        assert (one.env_steps, one.agent_steps) == (other.env_steps, other.agent_steps)
        assert one.keys() == other.keys()
        for name in one:
            assert one[name].keys() == other[name].keys()
            for column, values in one[name].items():
                if column != "unroll_id":
                    np.testing.assert_array_equal(values, other[name][column], err_msg=column)
    assert [runner.keeps_rows for runner in collector._runners.values()] == [True, False, False]


def test_learner_connectors_that_come_too_late_for_rows_of_frozen_policies_say_so() -> None:
    with sync("parallel", 3, 2) as envs:
        collector = Collector(
            envs, {"main": EchoPolicy()}, lambda name, _: "main" if name[-1] == "0" else "old", seed=0
        )
        collector.add_policy("old", EchoPolicy(), frozen=True)
        collector.collect(env_steps=9)
        collector.learner_connectors["main"].append(seen := Seen())
        with pytest.raises(StateError, match=r"'old' were not kept .* reset\(\)"):
            collector.collect(env_steps=9)
        collector.reset()
        collector.collect(env_steps=9)
        assert seen.shown == {"main", "old"}


def test_stream_is_shared_by_all_episodes_only() -> None:
    one, other = Episode(0, 0, 0, 7), Episode(9, 3, 4, 7)
    assert one.stream(5).integers(1 << 60) == other.stream(5).integers(1 << 60)
    drawn = [one.stream(5), one.stream(6), one.stream(5, 0), one.rng, Episode(0, 0, 0, 8).stream(5)]
    assert len({int(rng.integers(1 << 60)) for rng in drawn}) == 5

"""Learner connectors in the collector: each policy's own chain, all policies' rows in sight, and nothing lost."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest

from marlvec.collect import Collector
from marlvec.connectors import (
    FlattenObs,
    GeneralAdvantageEstimation,
    LearnerConnector,
    LearnerPipeline,
    PadSequences,
    ReturnsToGo,
    Rows,
    Standardize,
    UnpadSequences,
    learner_connector,
)
from marlvec.errors import ArgumentError
from marlvec.policies import FunctionPolicy, RandomPolicy
from marlvec.testing.scripted import CounterEnv
from marlvec.vector.in_process import SyncVectorEnv
from tests.collect.helpers.players import MODES, EchoPolicy, sync
from tests.connectors.samples import same_tree


def play(mode: str = "same_step", **options: Any) -> Collector:
    envs = SyncVectorEnv([partial(CounterEnv, [5, 2, 9], env_index=i) for i in range(3)], autoreset_mode=mode)
    return Collector(envs, FunctionPolicy(valued), seed=0, **options)


def valued(rows: Rows) -> Any:
    return rows.env_id % 5, {"values": rows.obs[:, 3] / 10}


class Failing(LearnerConnector):
    """Fails a number of times."""

    def __init__(self, times: int) -> None:
        self.times = times

    def __call__(self, rows: Rows) -> Rows:
        self.times -= 1
        if self.times >= 0:
            raise ValueError("not today")
        return rows


class Others(LearnerConnector):
    """A critic that sees all: how many rows each policy has, and what they were."""

    def __init__(self) -> None:
        self.batch: dict[str, Rows] = {}

    def see_batch(self, batch: Mapping[str, Rows]) -> None:
        self.batch = dict(batch)

    def __call__(self, rows: Rows) -> Rows:
        total = sum(float(others["rewards"].sum()) for others in self.batch.values())
        return rows.replace(everyone=np.full(len(rows), total), rewards=rows["rewards"] * 0)


@pytest.mark.parametrize("batch_mode", ["truncate", "complete"])
@pytest.mark.parametrize("mode", MODES)
def test_a_chain_in_the_collector_is_the_chain_on_its_batches(mode: str, batch_mode: Any) -> None:
    chain = LearnerPipeline([GeneralAdvantageEstimation(0.9, 0.8, lambda rows: rows.obs[:, 3]), Standardize()])
    with_chain = play(mode, batch_mode=batch_mode, learner_connectors=chain)
    assert with_chain.learner_connectors["main"] is chain
    without = play(mode, batch_mode=batch_mode)
    for amount in (20, 7, 31):
        learnt, plain = with_chain.collect(env_steps=amount), without.collect(env_steps=amount)
        assert (learnt.env_steps, learnt.agent_steps) == (plain.env_steps, plain.agent_steps)
        expected = chain(plain["main"])
        same_tree(dict(learnt["main"].items()), expected)
        assert abs(learnt["main"]["advantages"].mean()) < 1e-6


def test_what_makes_other_rows_does_not_change_the_count() -> None:
    pads = play(learner_connectors=[PadSequences(4)])
    back = play(learner_connectors=[PadSequences(4), UnpadSequences()])
    plain = play()
    for amount in (20, 9):
        padded, there_and_back, rows = (c.collect(env_steps=amount) for c in (pads, back, plain))
        assert padded.agent_steps == there_and_back.agent_steps == rows.agent_steps == len(rows["main"])
        assert padded["main"]["obs"].shape[1] == 4
        assert padded["main"]["loss_mask"].sum() == len(rows["main"])
        for name, column in rows["main"].items():
            np.testing.assert_array_equal(there_and_back["main"][name], column)


@pytest.mark.checklist(117)
def test_each_piece_sees_all_policies_rows_before_any_is_changed() -> None:
    policies = {"left": EchoPolicy(), "right": EchoPolicy()}
    mapping = {"agent_0": "left", "agent_1": "right", "agent_2": "right"}
    with sync("parallel", 3, 3) as envs:
        one = Collector(envs, policies, mapping, learner_connectors=[Others()], seed=1)
        batch = one.collect(env_steps=40)
    policies = {"left": EchoPolicy(), "right": EchoPolicy()}
    with sync("parallel", 3, 3) as envs:
        plain = Collector(envs, policies, mapping, seed=1).collect(env_steps=40)
    total = sum(float(plain[name]["rewards"].sum()) for name in plain)
    assert total
    for name in batch:
        assert set(batch[name]["everyone"].tolist()) == {total}
        assert not batch[name]["rewards"].any()
    assert len({id(chain) for chain in one.learner_connectors.values()}) == 2


@pytest.mark.fault("E11")
@pytest.mark.parametrize("batch_mode", ["truncate", "complete"])
def test_where_one_fails_nothing_is_lost(batch_mode: Any) -> None:
    collector, plain = play(batch_mode=batch_mode, learner_connectors=[Failing(2)]), play(batch_mode=batch_mode)
    for _ in range(2):
        with pytest.raises(ValueError, match="not today") as caught:
            collector.collect(env_steps=30)
        assert any("no row is lost" in note for note in caught.value.__notes__)
    for _ in range(2):
        batch, expected = collector.collect(env_steps=30), plain.collect(env_steps=30)
        assert (batch.env_steps, batch.agent_steps) == (expected.env_steps, expected.agent_steps)
        same_tree(dict(batch["main"].items()), dict(expected["main"].items()))


def test_chains_by_policy_and_invalid_chains() -> None:
    policies = {"left": RandomPolicy(), "right": RandomPolicy()}
    mapping = {"agent_0": "left", "agent_1": "right", "agent_2": "right"}
    with sync("parallel", 2, 3) as envs:
        batch = Collector(envs, policies, mapping, learner_connectors={"right": [ReturnsToGo(0.5)]}, seed=1).collect(
            env_steps=20
        )
        assert "returns_to_go" in batch["right"]
        assert "returns_to_go" not in batch["left"]
        with pytest.raises(ArgumentError, match="unknown policies"):
            Collector(envs, policies, mapping, learner_connectors={"middle": []})
        with pytest.raises(ArgumentError, match="LearnerConnectors"):
            Collector(envs, RandomPolicy(), learner_connectors=[FlattenObs()])


def test_a_function_is_one_too_and_modes_reach_it() -> None:
    @learner_connector
    def halved(rows: Rows) -> Rows:
        return rows.replace(rewards=rows["rewards"] / 2)

    collector, plain = play(learner_connectors=[halved]), play()
    np.testing.assert_array_equal(
        collector.collect(env_steps=9)["main"]["rewards"], plain.collect(env_steps=9)["main"]["rewards"] / 2
    )
    collector.eval()
    assert not collector.learner_connectors["main"][0].training
    collector.train()
    assert collector.learner_connectors["main"][0].training

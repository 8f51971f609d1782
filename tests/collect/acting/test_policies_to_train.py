"""Policies that learn beside policies that do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from marlvec.collect import Collector
from marlvec.connectors import LearnerConnector, Rows
from marlvec.errors import ArgumentError, ContractError
from marlvec.policies import Policy, RandomPolicy, ScriptedPolicy
from tests.collect.acting.test_mapping import mixed
from tests.collect.helpers.players import EchoPolicy, sync

IDS = ("learner", "frozen", "random", "script")


def four() -> dict[str, Policy]:
    script = ScriptedPolicy(lambda obs, agent, t, memory: _allowed(memory)[t % len(_allowed(memory))])
    return {"learner": EchoPolicy(0), "frozen": EchoPolicy(1), "random": RandomPolicy(), "script": script}


def seats(envs: Any) -> dict[str, str]:
    return dict(zip(envs.agents, IDS, strict=True))


def _allowed(memory: Any) -> list[int]:
    return list(range(5)) if memory.action_mask is None else np.flatnonzero(memory.action_mask).tolist()


def same(mine: Any, other: Any, *, but: tuple[str, ...] = ()) -> None:
    assert mine.keys() == other.keys()
    for name, column in mine.items():
        if name not in but:
            np.testing.assert_array_equal(column, other[name], strict=True)


@pytest.mark.checklist(117)
def test_learner_connectors_see_the_others_rows_all_the_same() -> None:
    class Critic(LearnerConnector):
        def see_batch(self, batch: Any) -> None:
            self.seen = {name: len(rows) for name, rows in batch.items()}

        def __call__(self, rows: Rows) -> Rows:
            return rows.replace(others=np.full(len(rows), self.seen.get("frozen", 0)))

    with sync("parallel", 3, 4) as envs:
        chains = {"learner": [Critic()], "frozen": [Critic()]}
        learns = ["learner"]
        collector = Collector(envs, four(), seats(envs), policies_to_train=learns, learner_connectors=chains, seed=0)
        batch = collector.collect(env_steps=60)
        assert list(batch) == ["learner"]
        lengths = batch.agent_steps - len(batch["learner"])
        assert 0 < batch["learner"]["others"][0] < lengths
        assert chains["frozen"]


def test_it_may_change_between_batches_and_a_function_is_asked_at_each() -> None:
    asked: list[str] = []

    def learns(name: str) -> bool:
        asked.append(name)
        return name == turn[0]

    turn = ["learner"]
    with sync("parallel", 2, 4) as envs:
        collector = Collector(envs, four(), seats(envs), policies_to_train=learns, seed=0)
        assert list(collector.collect(env_steps=10)) == ["learner"]
        turn[0] = "random"
        assert list(collector.collect(env_steps=10)) == ["random"]
        assert sorted(asked) == sorted([*IDS, *IDS])
        collector.policies_to_train = {"script"}
        assert list(collector.collect(env_steps=10)) == ["script"]
        assert collector.policies_to_train == ("script",)
        collector.policies_to_train = None
        assert set(collector.collect(env_steps=10)) == set(IDS)


def test_a_function_that_raises_costs_no_row() -> None:
    def learns(name: str) -> bool:
        if fail[0]:
            raise ValueError("not yet")
        return True

    fail = [True]
    with sync("turns", 2, 4) as envs:
        collector = Collector(envs, four(), seats(envs), policies_to_train=learns, seed=0)
        with pytest.raises(ValueError, match="not yet") as caught:
            collector.collect(env_steps=20)
        assert "in policies_to_train('learner'); no row is lost" in caught.value.__notes__[0]
        fail[0] = False
        batch = collector.collect(env_steps=20)
    with sync("turns", 2, 4) as envs:
        whole = Collector(envs, four(), seats(envs), seed=0).collect(env_steps=20)
    assert list(batch) == list(whole)
    for name, rows in batch.items():
        same(rows, whole[name])


def test_what_names_no_policies_is_refused() -> None:
    with sync("parallel", 1, 4) as envs:
        for given, message in (
            ("learner", "must be a list of policy ids"),
            (3, "must be a list of policy ids"),
            (["learner", "nobody"], r"unknown policies \['nobody'\]"),
        ):
            with pytest.raises(ArgumentError, match=message):
                Collector(envs, four(), seats(envs), policies_to_train=given)  # type: ignore[arg-type]  # on purpose


@pytest.mark.checklist(106)
def test_one_policy_for_different_spaces_raises() -> None:
    with mixed() as envs, pytest.raises(ContractError, match=r"'one'.*spaces differ"):
        Collector(envs, {"one": RandomPolicy()}, "one", policies_to_train=[])

"""Policies that come and go while a collector runs."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from marlvec.collect import Collector
from marlvec.connectors import AgentPipeline, FrameStack, NormalizeObs, Rows
from marlvec.errors import ArgumentError, StateError
from marlvec.policies import Policy, RandomPolicy
from marlvec.vector.settings import RestartLimit
from tests.collect.helpers.mortal import Deaths, dying_counters
from tests.collect.helpers.plans import FEW_OR_MANY, for_examples
from tests.collect.helpers.players import KINDS, MODES, EchoPolicy, sync

Key = tuple[int, int, int]  # episode, agent, number of its decision


class Player(EchoPolicy):
    """Acts alike whoever it is, so that all runs go alike; notes when it was asked, and does not forgive it later."""

    def __init__(self, name: str) -> None:
        super().__init__(0)
        self.name, self.gone = name, False
        self.asked: list[Key] = []

    def act(self, rows: Rows, *, explore: bool = True) -> Any:
        assert not self.gone, f"{self.name} was asked after it was removed"
        self.asked += zip(rows["eps_id"].tolist(), rows["agent_index"].tolist(), rows["t"].tolist(), strict=True)
        actions, columns = super().act(rows, explore=explore)
        return actions, columns


def keyed(batch: Any) -> dict[Key, tuple[str, dict[str, Any]]]:
    """A batch's rows by who did what when."""
    found: dict[Key, tuple[str, dict[str, Any]]] = {}
    for policy, rows in batch.items():
        columns = {name: column.tolist() for name, column in rows.items() if name != "unroll_id"}
        for i in range(len(rows)):
            row = {name: values[i] for name, values in columns.items()}
            key = row["eps_id"], row["agent_index"], row["t"]
            assert key not in found
            found[key] = policy, row
    return found


def all_of(collector: Collector, amounts: list[int]) -> dict[Key, tuple[str, dict[str, Any]]]:
    found: dict[Key, tuple[str, dict[str, Any]]] = {}
    for amount in amounts:
        new = keyed(collector.collect(env_steps=amount))
        assert not found.keys() & new.keys()
        found |= new
    return found


def without_names(rows: dict[Key, Any]) -> dict[Key, Any]:
    """Rows, whoever played."""
    return {key: row for key, (_, row) in rows.items()}


def remove_when_it_can_be(collector: Collector, name: str) -> dict[Key, Any]:
    """Remove a policy that no episode will name any more; returns the rows that are collected until it is gone."""
    rows: dict[Key, Any] = {}
    while True:
        try:
            collector.remove_policy(name)
        except StateError:
            rows |= all_of(collector, [3])
        else:
            return rows


@pytest.mark.slow("collects whole runs on several backends")
@FEW_OR_MANY
def test_a_policy_that_is_removed_is_not_asked_again_and_no_row_differs(examples: int) -> None:
    """Named by nobody any more it plays its episodes to their ends, is removed, and its last rows still come."""

    def check(kind: str, mode: str, batch_mode: Any, amounts: list[int], copy: bool) -> None:
        def run(*, remove: bool) -> tuple[dict[Key, Any], list[Player], Collector]:
            players = [Player(name) for name in "abc"]
            named = players[:]

            def mapping(name: str, episode: Any) -> str:
                return named[(int(name[-1]) + episode.number) % len(named)].name

            with sync(kind, 3, 3, mode, copy=copy) as envs:
                collector = Collector(envs, {p.name: p for p in players}, mapping, batch_mode=batch_mode, seed=2)
                rows = all_of(collector, amounts)
                for player in players[:2] if remove else ():
                    named.remove(player)
                    rows |= remove_when_it_can_be(collector, player.name)
                    player.gone = True
                rows |= all_of(collector, [13, 25, 9, 30, 60])
                return rows, players, collector

        mine, players, collector = run(remove=True)
        rows, *_ = run(remove=False)
        both = mine.keys() & rows.keys()  # the amounts differ, and so do the last rows
        assert len(both) >= min(len(mine), len(rows)) > 0 or batch_mode == "complete"
        assert all(mine[key][1] == rows[key][1] for key in both)
        asked = {key: player.name for player in players for key in player.asked}
        assert sum(len(player.asked) for player in players) == len(asked) == collector.metrics.agent_steps
        for key, (policy, row) in mine.items():
            assert policy == asked[key]  # rows come under the id of who decided
            assert row["seen"] == np.sum(row["obs"])
        assert list(collector.policies) == ["c"]
        if batch_mode == "truncate":  # all that is known has come
            assert len(mine) > len(asked) - 10

    for_examples(
        examples,
        check,
        kind=st.sampled_from(sorted(KINDS)),
        mode=st.sampled_from(MODES),
        batch_mode=st.sampled_from(["truncate", "complete"]),
        amounts=st.lists(st.integers(1, 40), min_size=1, max_size=4),
        copy=st.booleans(),
    )


@pytest.mark.slow("collects whole runs on several backends")
@pytest.mark.checklist(107)
@pytest.mark.fault("E5")
@pytest.mark.parametrize("kind", ["parallel", "turns", "keyed"])
def test_removing_a_policy_that_plays_raises(kind: str) -> None:
    players = {name: Player(name) for name in "ab"}
    with sync(kind, 2, 2) as envs:
        collector = Collector(envs, players, dict(zip(envs.agents, "ab", strict=True)), seed=0)
        with pytest.raises(
            StateError, match=rf"'a' cannot be removed: by the policy_mapping it plays \['{envs.agents[0]}'"
        ):
            collector.remove_policy("a")
        first = all_of(collector, [9])
        with pytest.raises(StateError, match="by the policy_mapping"):
            collector.remove_policy("a")
        with pytest.raises(KeyError, match=r"'x'.*\['a', 'b'\]"):
            collector.remove_policy("x")
        rows = without_names(first | all_of(collector, [20]))
        with sync(kind, 2, 2) as others:  # where one policy plays all along
            assert rows == without_names(all_of(Collector(others, EchoPolicy(0), seed=0), [9, 20]))

        function = Collector(envs, players, lambda name, episode: "ab"[episode.number % 2], seed=0)
        function.collect(env_steps=2)
        with pytest.raises(StateError, match=r"'a' cannot be removed: it plays \d+ agents in running .*of env 0 first"):
            function.remove_policy("a")
        function.collect(env_steps=30)


def test_policy_without_agents_can_be_removed() -> None:
    with sync("parallel", 2, 2) as envs:
        collector = Collector(envs, {name: Player(name) for name in "abc"}, lambda *_: who[0], seed=0)
        who = ["b"]
        collector.remove_policy("a")  # before anything runs
        collector.collect(env_steps=20)
        collector.remove_policy("c")
        assert list(collector.policies) == ["b"]
        assert list(collector.agent_connectors) == ["b"]
        assert list(collector.collect(env_steps=20)) == ["b"]
        who[0] = "c"
        with pytest.raises(KeyError, match=r"'c'.*\['b'\]"):
            collector.collect(episodes=9)
        who[0] = "b"
        collector.add_policy("d", Player("d"))
        who[0] = "d"
        collector.reset(seed=1)
        collector.remove_policy("b")
        assert list(collector.collect(env_steps=9)) == ["d"]


def test_rows_of_a_removed_policy_still_come_and_then_it_is_gone() -> None:
    who = ["a"]
    with sync("parallel", 3, 2) as envs:
        collector = Collector(
            envs, {n: Player(n) for n in "ab"}, lambda *_: who[0], batch_mode="complete", count_by="env_steps", seed=0
        )
        collector.collect(episodes=1)
        who[0] = "b"
        rows = remove_when_it_can_be(collector, "a")  # more episodes end meanwhile
        assert list(collector.policies) == ["b"]
        with pytest.raises(StateError, match="rows that are still to come"):
            collector.add_policy("a", Player("a"))
        assert collector.metrics.policies == ("a", "b")
        late = keyed(collector.collect(episodes=6))
        assert {policy for policy, _ in late.values()} == {"a", "b"}
        assert not rows.keys() & late.keys()
        collector.collect(episodes=120)
        collector.add_policy("a", Player("a"))  # its last rows have come
        assert collector.metrics.policies == ("b", "a")


def test_a_removed_policy_takes_no_memory_however_many_come_and_go() -> None:
    who = ["p0"]
    with sync("turns", 2, 2) as envs:
        collector = Collector(envs, {"p0": Player("p0")}, lambda *_: who[0], seed=0)
        for i in range(30):
            collector.collect(episodes=3)
            who[0] = f"p{i + 1}"
            collector.add_policy(who[0], Player("next"))
            for name in list(collector.policies)[:-1]:
                with suppress(StateError):
                    collector.remove_policy(name)
        for name in list(collector.policies)[:-1]:
            remove_when_it_can_be(collector, name)
        assert list(collector.policies) == ["p30"]
        collector.collect(env_steps=40)
        collector.collect(env_steps=40)
        assert len(collector._policy_set.runners) == 1  # nothing public counts them


class Stacked(Policy):
    """Says what its observation was, to the last number."""

    def act(self, rows: Rows, *, explore: bool = True) -> Any:
        return np.zeros(len(rows), int), {"saw": np.array(rows["obs"], np.float64), "began": rows["first"]}


def test_each_added_policy_gets_its_own_seed() -> None:
    def actions(which: str) -> list[int]:
        with sync("parallel", 2, 2) as envs:
            collector = Collector(envs, {"a": RandomPolicy()}, lambda *_: who[0], seed=0)
            who = ["a"]
            collector.collect(env_steps=1)
            collector.add_policy("b", RandomPolicy())
            who[0] = which
            collector.reset(seed=0)
            return collector.collect(env_steps=40)[which]["actions_for_env"].tolist()

    assert actions("b") == actions("b")
    assert actions("b") != actions("a")


def test_an_added_policy_plays_whom_the_mapping_gives_it() -> None:
    latest = ["a"]
    with sync("keyed", 3, 3) as envs:
        collector = Collector(envs, {"a": Player("a")}, lambda *_: latest[0], seed=0)
        collector.collect(env_steps=20)
        collector.add_policy("b", Player("b"))
        assert list(collector.policies) == ["a", "b"]
        latest[0] = "b"
        batch = collector.collect(episodes=9)
        assert set(batch) == {"a", "b"}  # episodes that ran stayed with "a"
        assert "b" in collector.metrics.summary()["policies"]
        for given, error, message in (
            (("a", Player("x")), ArgumentError, "there is a policy 'a' already"),
            ((3, Player("x")), ArgumentError, "must be a string"),
            (("c", collector.policies["a"]), ArgumentError, "has the id 'a' already"),
            (("c", Player), ArgumentError, "must be a marlvec Policy.* got the class Player: give an instance"),
        ):
            with pytest.raises(error, match=message):
                collector.add_policy(*given)  # type: ignore[arg-type]  # on purpose
        with pytest.raises(KeyError, match="'nobody'"):
            collector.add_policy("c", Player("c"), like="nobody")
        assert list(collector.policies) == list(collector.agent_connectors) == ["a", "b"]


def test_an_added_policy_may_have_copies_of_anothers_connectors() -> None:
    with sync("parallel", 2, 2) as envs:
        collector = Collector(envs, {"a": Stacked()}, lambda *_: who[0], agent_connectors=[NormalizeObs()], seed=0)
        who = ["a"]
        collector.collect(env_steps=40)
        with pytest.raises(ArgumentError, match="one chain of connectors was given for all policies"):
            collector.add_policy("b", Stacked())
        collector.add_policy("b", Stacked(), like="a")
        collector.add_policy("c", Stacked(), agent_connectors=[])
        mine, other = collector.agent_connectors["a"], collector.agent_connectors["b"]
        assert mine is not other
        np.testing.assert_equal(other.state_dict(), mine.state_dict())
        assert len(collector.agent_connectors["c"]) == 0
        with pytest.raises(ArgumentError, match="is another policy's"):
            collector.add_policy("d", Stacked(), agent_connectors=mine)
        who[0] = "b"
        assert "b" in collector.collect(episodes=6)
    with sync("parallel", 2, 2) as envs:
        collector = Collector(envs, {"a": Stacked()}, agent_connectors={"a": AgentPipeline([FrameStack(2)])}, seed=0)
        collector.add_policy("b", Stacked())  # like one that was left out of the dict
        assert repr(collector.agent_connectors["b"]) == repr(AgentPipeline.default())


@pytest.mark.slow("collects whole runs on several backends")
def test_faults_during_a_policy_change_lose_only_their_episodes() -> None:
    """Every decision is in a batch, lost, or still open: whatever happens to envs while somebody leaves."""
    deaths: Deaths = {(i, k): ("step", 6, False) for i in range(3) for k in range(9)}
    limit = RestartLimit(count=100, backoff=0.0)
    with dying_counters(deaths, 3, length=[5, 9], agent_num=3, max_restarts=limit) as envs:
        collector = Collector(envs, {"p0": Player("p0")}, lambda *_: who[0], seed=0)
        got, who = 0, ["p0"]
        for i in range(12):
            got += collector.collect(env_steps=10).agent_steps
            who[0] = f"p{i + 1}"
            collector.add_policy(who[0], Player("next"))
            for name in list(collector.policies)[:-1]:
                with suppress(StateError):
                    collector.remove_policy(name)
        got += collector.collect(env_steps=10).agent_steps
        metrics = collector.metrics
        assert metrics.episodes_faulty > 5
        assert got + metrics.agent_steps_lost == metrics.agent_steps


@pytest.mark.parametrize("before", [1, 65_535, 65_536])
def test_policies_have_their_rows_however_many_there_were_before_them(before: int) -> None:
    """A league adds one after the other for as long as it is trained; nothing wraps around."""

    def played(before: int) -> dict[Key, tuple[str, dict[str, Any]]]:
        with sync("parallel", 4, 3) as envs:

            def who(agent: str, episode: Any) -> str:
                return ("main", "other")[(episode.number + envs.agents.index(agent)) % 2]

            collector = Collector(envs, {"main": EchoPolicy(0)}, who, seed=0)
            collector._policy_set._count = before
            collector.add_policy("other", EchoPolicy(1))
            return all_of(collector, [40, 40, 40])

    few, many = played(1), played(before)
    assert few == many
    assert len({name for name, _ in many.values()}) == 2

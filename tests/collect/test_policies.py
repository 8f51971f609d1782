"""Which policy plays which agent: mappings, policies that come, go or are never trained, and random first steps."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from hypothesis import strategies as st

from marlvec.collect import Collector, Episode
from marlvec.collect.row_builder import RowDraws
from marlvec.connectors import (
    AgentPipeline,
    FrameStack,
    LearnerPipeline,
    NormalizeObs,
    RnnState,
    Rows,
)
from marlvec.errors import ArgumentError, ContractError, StateError
from marlvec.policies import FunctionPolicy, Policy, RandomPolicy, ScriptedPolicy
from marlvec.sampling import SpaceSampler
from marlvec.spaces import SpaceTree
from marlvec.testing.scripted import SampledEnv
from marlvec.vector.in_process import SyncVectorEnv
from marlvec.vector.settings import RestartLimit
from tests.collect.plans import FEW_OR_MANY, Deaths, dying_counters, for_examples
from tests.collect.players import KINDS, MODES, EchoPolicy, Looking, Scattered, factories, noop, sync
from tests.collect.reference import same_batch

# --- who plays whom, and one call per policy and tick


def duo() -> dict[str, EchoPolicy]:
    return {"left": EchoPolicy(0), "right": EchoPolicy(1)}


def mixed(num_envs: int = 2) -> SyncVectorEnv:
    """Two agents with different spaces."""
    spaces = [Box(-1, 1, (3,), np.float32), Box(-1, 1, (2,), np.float32)], [Discrete(3), Discrete(4)]
    return SyncVectorEnv([lambda i=i: SampledEnv(*spaces, env_index=i, length=3) for i in range(num_envs)])


@pytest.mark.checklist(104)
@pytest.mark.fault("E5")
@pytest.mark.parametrize("mode", MODES)
def test_a_mapping_function_is_asked_once_per_episode_and_agent_and_its_word_holds_for_the_episode(mode: str) -> None:
    asked: list[tuple[int, int, int, str]] = []
    answers: dict[tuple[int, str], str] = {}

    def mapping(name: str, episode: Episode) -> str:
        asked.append((episode.eps_id, episode.env_id, episode.number, name))
        answer = ["left", "right"][int(episode.rng.integers(2))]  # may depend on the episode
        answers[episode.eps_id, name] = answer
        return answer

    with sync("keyed", 3, 3, mode) as envs:
        collector = Collector(envs, duo(), mapping, seed=1)
        batches = [collector.collect(env_steps=17) for _ in range(6)]
        episodes = collector.metrics.episodes_total + 3
        assert episodes > 12
        assert Counter(asked) == dict.fromkeys(asked, 1)
        assert [name for *_, name in asked] == list(envs.agents) * episodes
        for batch in batches:
            for policy, rows in batch.items():
                names = [envs.agents[a] for a in rows["agent_index"]]
                assert {answers[e, name] for e, name in zip(rows["eps_id"], names, strict=True)} == {policy}
        for record in collector.metrics.episodes:
            assert record.policies == tuple(answers[record.eps_id, name] for name in envs.agents)

        with pytest.raises(KeyError, match=r"'nobody'.*\['left', 'right'\]"):
            Collector(envs, duo(), lambda name, episode: "nobody").collect(env_steps=1)
        with pytest.raises(KeyError, match=r"'nobody'.*\['left', 'right'\]"):
            Collector(envs, duo(), "nobody")
        with pytest.raises(KeyError, match=r"agent_1.*'nobody'.*\['left', 'right'\]"):
            Collector(envs, duo(), {"agent_0": "left", "agent_1": "nobody", "agent_2": "left"})

        later = Collector(envs, duo(), lambda name, episode: "left" if episode.number < 2 else "nobody")
        with pytest.raises(KeyError, match="known ones"):
            later.collect(env_steps=200)
        with pytest.raises(KeyError, match="known ones"):
            later.collect(env_steps=200)


@pytest.mark.parametrize("mode", MODES)
def test_another_mapping_function_says_who_plays_in_episodes_that_begin(mode: str) -> None:
    def left(name: str, episode: Episode) -> str:
        return "left"

    def right(name: str, episode: Episode) -> str:
        return "right"

    with sync("keyed", 3, 3, mode) as envs:
        collector = Collector(envs, duo(), left, seed=1, batch_mode="complete")
        before = collector.collect(episodes=2)
        collector.policy_mapping = right
        after = [collector.collect(episodes=2) for _ in range(6)]
        who: dict[str, set[int]] = {"left": set(), "right": set()}
        for batch in after:
            for policy, rows in batch.items():
                who[policy] |= set(rows["eps_id"].tolist())
        assert list(before) == ["left"]
        assert who["left"], "episodes that were running"
        assert len(who["left"]) <= envs.num_envs
        assert len(who["right"]) > envs.num_envs
        assert not who["left"] & who["right"], "none changes hands within an episode"
        assert list(after[-1]) == ["right"]
        for wrong in ("left", dict.fromkeys(envs.agents, "left")):
            with pytest.raises(ArgumentError, match="must be a function of"):
                collector.policy_mapping = wrong
        with pytest.raises(ArgumentError, match=r"must be a function of .agent, episode"):
            collector.policy_mapping = lambda agent: "left"
        assert collector.policy_mapping is right
        fixed = Collector(envs, duo(), "left")
        assert fixed.policy_mapping == dict.fromkeys(envs.agents, "left")
        with pytest.raises(StateError, match="the policy_mapping is fixed"):
            fixed.policy_mapping = right


@pytest.mark.mostly_slow("collects whole runs on several backends", quick="each")
@pytest.mark.fault("E5")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("at", [0, 2])
def test_a_mapping_function_that_raises_ends_the_call_and_reset_goes_on(mode: str, at: int) -> None:
    """Whoever raises in the middle of a step leaves nothing that could be gone on with, and is not hidden."""
    fails = [True]

    def mapping(name: str, episode: Episode) -> str:
        if fails[0] and episode.number == at:
            raise ZeroDivisionError("no idea who")
        return ["left", "right"][episode.number % 2]

    with sync("parallel", 2, 2, mode) as envs:
        collector = Collector(envs, duo(), mapping, seed=1)
        with pytest.raises(ZeroDivisionError, match="no idea who"):
            collector.collect(env_steps=200)
        with pytest.raises(ZeroDivisionError, match="no idea who"):
            collector.collect(env_steps=1)
        fails[0] = False
        collector.reset(seed=1)
        after = collector.collect(env_steps=50)
    with sync("parallel", 2, 2, mode) as envs:
        expected = Collector(envs, duo(), mapping, seed=1).collect(env_steps=50)
    for name, rows in expected.items():
        for column in ("env_id", "agent_index", "t", "terminated", "truncated"):  # the env counts its resets
            np.testing.assert_array_equal(after[name][column], rows[column])


@pytest.mark.checklist(106)
def test_agents_of_different_spaces_need_policies_of_their_own() -> None:
    with mixed() as envs:
        for mapping in ("left", {"agent_0": "left", "agent_1": "left"}):
            with pytest.raises(ContractError, match=r"'left'.*'agent_0'.*'agent_1'.*spaces differ"):
                Collector(envs, {"left": RandomPolicy(), "right": RandomPolicy()}, mapping)
        with pytest.raises(ContractError, match="spaces differ"):
            Collector(envs, RandomPolicy())
        with pytest.raises(ContractError, match=r"'one'.*spaces differ"):
            Collector(envs, {"one": RandomPolicy()}, "one", policies_to_train=[])
        late = Collector(
            envs,
            {"left": RandomPolicy(), "right": RandomPolicy()},
            lambda name, episode: "left" if name == "agent_0" or episode.number else "right",
        )
        with pytest.raises(ContractError, match="spaces differ"):
            late.collect(env_steps=100)


def test_groups_of_different_spaces_each_play_their_own_way() -> None:
    with mixed(3) as envs:
        policies = {"unused": RandomPolicy(), "right": RandomPolicy(), "left": RandomPolicy()}
        for mapping in ({"agent_0": "left", "agent_1": "right"}, lambda name, _: {"0": "left", "1": "right"}[name[-1]]):
            collector = Collector(envs, policies, mapping, seed=0)
            batch = collector.collect(env_steps=30)
            assert list(batch) == ["right", "left"]
            assert batch["left"].obs.shape == (30, 3)
            assert batch["right"].obs.shape == (30, 2)
            assert set(batch["right"].actions.tolist()) == {0, 1, 2, 3}
            assert policies["unused"].action_space is None


def test_invalid_mapping_raises() -> None:
    with sync("parallel", 1, 2) as envs:
        for mapping, message in (
            ({"agent_0": "left"}, r"misses the agents \['agent_1'\]"),
            ({"agent_0": "left", "agent_1": "left", "agent_9": "left"}, r"unknown agents \['agent_9'\]"),
            (3, "must be a policy id"),
        ):
            with pytest.raises(ArgumentError, match=message):
                Collector(envs, duo(), mapping)  # type: ignore[arg-type]  # on purpose
        with pytest.raises(ArgumentError, match="expected which of the policies"):
            Collector(envs, duo())


def test_a_mapping_function_of_other_arguments_is_refused_before_anything_is_played() -> None:
    wrong: list[tuple[Any, str]] = [
        (lambda agent: "left", r"got <function .*> of \(agent\): write lambda agent, episode"),
        (lambda: "left", r"of \(\)"),
        (lambda agent, episode, worker: "left", r"of \(agent, episode, worker\)"),
        (lambda agent, *, episode: "left", r"of \(agent, \*, episode\)"),
    ]
    with sync("parallel", 1, 2) as envs:
        for mapping, message in wrong:
            with pytest.raises(ArgumentError, match=f"policy_mapping must be a function of .agent, episode.*{message}"):
                Collector(envs, duo(), mapping)
        for right in (lambda *_: "left", lambda a, e, **more: "left", lambda a, e=None: "left", {}.setdefault):
            Collector(envs, duo(), right, seed=0)
        collector = Collector(envs, duo(), lambda *_: "nobody")
        with pytest.raises(KeyError, match=r"'nobody'; the known ones are .*: give one of those, or add the other"):
            collector.collect(env_steps=1)


# --- policies that come and go while a collector runs


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
        assert len(collector._policy_set.log.forms) == 1


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
        collector = Collector(envs, {"a": noop()}, lambda *_: who[0], agent_connectors=[NormalizeObs()], seed=0)
        who = ["a"]
        collector.collect(env_steps=40)
        with pytest.raises(ArgumentError, match="one chain of connectors was given for all policies"):
            collector.add_policy("b", noop())
        collector.add_policy("b", noop(), like="a")
        collector.add_policy("c", noop(), agent_connectors=[])
        mine, other = collector.agent_connectors["a"], collector.agent_connectors["b"]
        assert mine is not other
        np.testing.assert_equal(other.state_dict(), mine.state_dict())
        assert len(collector.agent_connectors["c"]) == 0
        with pytest.raises(ArgumentError, match="is another policy's"):
            collector.add_policy("d", noop(), agent_connectors=mine)
        who[0] = "b"
        assert "b" in collector.collect(episodes=6)
    with sync("parallel", 2, 2) as envs:
        collector = Collector(envs, {"a": noop()}, agent_connectors={"a": AgentPipeline([FrameStack(2)])}, seed=0)
        collector.add_policy("b", noop())  # like one that was left out of the dict
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


# --- policies that are never trained, and what else self-play asks of a collector


@pytest.mark.parametrize("batch_mode", ["truncate", "complete"])
def test_a_frozen_policy_is_in_no_batch_and_its_connectors_learn_nothing(batch_mode: Any) -> None:
    seen = Looking()
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

    kept, _ = collected([Looking()])
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
        collector.learner_connectors["main"].append(seen := Looking())
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


# --- policies that learn beside policies that do not


IDS = ("learner", "frozen", "random", "script")


def four() -> dict[str, Policy]:
    script = ScriptedPolicy(lambda obs, agent, t, memory: _allowed(memory)[t % len(_allowed(memory))])
    return {"learner": EchoPolicy(0), "frozen": EchoPolicy(1), "random": RandomPolicy(), "script": script}


def seats(envs: Any) -> dict[str, str]:
    return dict(zip(envs.agents, IDS, strict=True))


def _allowed(memory: Any) -> list[int]:
    return list(range(5)) if memory.action_mask is None else np.flatnonzero(memory.action_mask).tolist()


@pytest.mark.checklist(117)
def test_learner_connectors_see_the_others_rows_all_the_same() -> None:
    class Critic(Looking):
        def __call__(self, rows: Rows) -> Rows:
            return rows.replace(others=np.full(len(rows), len(self.batch.get("frozen", ()))))

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
    same_batch(batch, whole)


def test_what_names_no_policies_is_refused() -> None:
    with sync("parallel", 1, 4) as envs:
        for given, message in (
            ("learner", "must be a list of policy ids"),
            (3, "must be a list of policy ids"),
            (["learner", "nobody"], r"unknown policies \['nobody'\]"),
        ):
            with pytest.raises(ArgumentError, match=message):
                Collector(envs, four(), seats(envs), policies_to_train=given)  # type: ignore[arg-type]  # on purpose


# --- random steps before the first ones of the policies


def check_first_steps(
    kind: str, num_envs: int, random_steps: int, amounts: list[int], mode: str, order: int | None
) -> None:
    policy = EchoPolicy()
    options: dict[str, Any] = {"random_steps": random_steps, "seed": 3}
    settings = {"autoreset_mode": mode, "validate": "strict"}
    with sync(kind, num_envs, 2, mode) as envs, Scattered(factories(kind, num_envs, 2), order, **settings) as others:
        collector = Collector(envs, policy, **options)
        overlapping = Collector(others, EchoPolicy(), overlap=True, **options)
        for amount in amounts:
            batch = collector.collect(env_steps=amount)
            same_batch(overlapping.collect(env_steps=amount), batch)
            for rows in batch.values():
                if "action_mask" in rows:
                    assert rows["action_mask"][np.arange(len(rows)), rows["actions"]].all()
        asked = {env for call in policy.calls for env, _ in call}
        for env in range(num_envs):
            share, steps = ((n + num_envs - 1 - env) // num_envs for n in (random_steps, sum(amounts)))
            assert steps > share or env not in asked


@pytest.mark.slow("collects whole runs on several backends")
@FEW_OR_MANY
def test_the_first_steps_are_random_and_marked(examples: int) -> None:
    check_first_steps("parallel", 2, 1, [2], "same_step", 0)  # with overlap `off_policy` comes first
    for_examples(
        examples,
        check_first_steps,
        kind=st.sampled_from(list(KINDS)),
        num_envs=st.integers(1, 4),
        random_steps=st.integers(0, 40),
        amounts=st.lists(st.integers(1, 15), min_size=1, max_size=5),
        mode=st.sampled_from(MODES),
        order=st.integers(0, 2**32),
    )


def test_every_row_tells_whether_its_policy_was_asked() -> None:
    with sync("buffer", 2, 1) as envs:
        policy = EchoPolicy()
        collector = Collector(envs, policy, random_steps=7, seed=0)
        rows = collector.collect(env_steps=30)["main"]
        asked = sum(map(len, policy.calls))
        assert int((~rows["off_policy"]).sum()) <= asked <= int((~rows["off_policy"]).sum()) + 2
        marked = rows["off_policy"]
        assert marked.any()
        np.testing.assert_array_equal(rows["seen"][~marked], rows["obs"][~marked].sum(axis=1))
        said = rows["seen"][marked]
        assert (np.isnan(said) if said.dtype.kind == "f" else said == 0).all()
        assert marked[rows["env_id"] == 0].tolist() == sorted(marked[rows["env_id"] == 0].tolist(), reverse=True)


@pytest.mark.slow("collects whole runs on several backends")
def test_random_actions_reach_every_choice_alike() -> None:
    with sync("buffer", 4, 3) as envs:
        rows = Collector(envs, EchoPolicy(), random_steps=4000, seed=0).collect(env_steps=2000)["main"]
        assert rows["off_policy"].all()
        counts = np.bincount(rows["actions"], minlength=5)
        assert (np.abs(counts / len(rows) - 0.2) < 0.03).all()


def test_it_is_over_once_and_for_all() -> None:
    with sync("keyed", 2, 2) as envs:
        policy = EchoPolicy()
        collector = Collector(envs, policy, random_steps=6, seed=0)
        collector.collect(env_steps=6)
        assert not policy.calls
        collector.reset()
        collector.collect(env_steps=1)
        assert policy.calls


@pytest.mark.parametrize("kind", ["parallel", "masked turns", "keyed"])
def test_recurrent_policy_has_its_states_in_the_first_steps_also_with_overlap(kind: str) -> None:
    def act(rows: Rows) -> Any:
        actions = rows["action_mask"].argmax(axis=1) if "action_mask" in rows else np.zeros(len(rows), np.int64)
        return actions, {"state_out": rows["state_in"] + 1}

    def options() -> dict[str, Any]:
        return {"agent_connectors": [RnnState(np.zeros((), np.int64))], "random_steps": 9, "seed": 3}

    with sync(kind, 3, 2) as envs, Scattered(factories(kind, 3, 2), 5) as others:
        collector = Collector(envs, FunctionPolicy(act), **options())
        overlapping = Collector(others, FunctionPolicy(act), overlap=True, **options())
        for amount in (4, 20):
            batch = collector.collect(env_steps=amount)
            same_batch(overlapping.collect(env_steps=amount), batch)
            rows = batch["main"]
            assert rows["off_policy"].any()
            np.testing.assert_array_equal(rows["state_in"], rows["t"])
            np.testing.assert_array_equal(rows["state_out"], rows["t"] + 1)


@pytest.mark.parametrize("steps", [-1, 1.5, "3", None])
def test_a_wrong_number_is_refused(steps: Any) -> None:
    with sync("keyed", 2, 2) as envs, pytest.raises(ArgumentError, match="random_steps="):
        Collector(envs, EchoPolicy(), random_steps=steps)


SPACES = {
    "discrete": Discrete(5, start=2),
    "multi": MultiDiscrete([3, 4]),
    "bounded": Box(-2.0, 3.0, (2, 2), np.float32),
    "unbounded": Box(-np.inf, np.array([1.0, np.inf], np.float32), (2,), np.float32),
    "bytes": Box(0, 255, (3,), np.uint8),
    "wide": Box(-(2**63), 2**63 - 1, (2,), np.int64),
    "tree": Dict({"a": Discrete(3), "b": Box(0.0, 1.0, (), np.float64)}),
}


@pytest.mark.parametrize("name", SPACES)
def test_draws_belong_to_rows_in_whatever_batch_they_stand(name: str) -> None:
    space, n = SPACES[name], 200
    ids = np.arange(n)
    rows = Rows({"eps_id": ids // 10, "agent_index": ids % 2, "t": ids % 5, "env_id": ids % 3})
    sampler = SpaceSampler(SpaceTree(space))
    draw: Any = partial(RowDraws, 3, "test")
    tree = SpaceTree(space)
    whole = tree.flatten(sampler.sample(draw(rows), n))
    some = np.array([5, 150, 7, 63])
    part = tree.flatten(sampler.sample(draw(rows.take(some)), len(some)))
    for leaf, own in zip(whole, part, strict=True):
        np.testing.assert_array_equal(leaf[some], own)
    for i in range(n):
        assert space.contains(tree.unflatten([np.asarray(leaf[i]) for leaf in whole]))

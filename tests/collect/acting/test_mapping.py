"""Who plays whom, and one call per policy and tick."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from marlvec.collect import Collector, Episode
from marlvec.errors import ArgumentError, ContractError, StateError
from marlvec.policies import RandomPolicy
from marlvec.testing.scripted import SampledEnv
from marlvec.vector.in_process import SyncVectorEnv
from tests.collect.helpers.players import MODES, EchoPolicy, sync


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

"""Agents that end without a final observation, over whole episodes: what is not known is marked, never made up."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box

import marlvec
from marlvec.collect import Collector
from marlvec.connectors import FrameStack, GeneralAdvantageEstimation, NormalizeReward, Rows, TeamObs
from marlvec.envs import RLlibAdapter
from marlvec.envs.wrappers import TimeLimit
from marlvec.errors import ContractError, EnvFault
from marlvec.policies import FunctionPolicy
from marlvec.testing.scripted import CounterEnv, KeyedEnv, Script, ScriptedParallelEnv
from marlvec.vector.in_process import SyncVectorEnv
from tests.collect.helpers.players import MODES

SCRIPT = Script([0, 1, 0, 0], [4, 3, 5, 6], ["terminated", "truncated", "both", "truncated"])


def waits(t: int, a: int) -> bool:
    return (t + a) % 3 == 0


def silent(**options: Any) -> KeyedEnv:
    return KeyedEnv(SCRIPT, agent_num=4, waits=waits, last_obs=False, **options)


def valued() -> FunctionPolicy:
    """Acts anyhow, and says of each observation what it is worth."""
    return FunctionPolicy(lambda rows: (np.zeros(len(rows), np.int64), {"values": worth(rows["obs"])}))


def worth(obs: Any) -> Any:
    return np.asarray(obs, np.float64).sum(axis=1) % 17.0


class Ragged(KeyedEnv):
    """Agent 0 sees less than the others, so that with ``pad=True`` an env writes into a part of its row."""

    def __init__(self, **options: Any) -> None:
        super().__init__(SCRIPT, agent_num=4, waits=waits, last_obs=False, **options)
        self.observation_spaces["agent_0"] = Box(-np.inf, np.inf, (5,), np.float64)

    def reset(self, **kwargs: Any) -> Any:
        obs, infos = super().reset(**kwargs)
        return self.cut(obs), infos

    def step(self, actions: Any) -> Any:
        obs, *rest = super().step(actions)
        return self.cut(obs), *rest

    def cut(self, obs: Any) -> Any:
        return {agent: seen[:5] if agent == "agent_0" else seen for agent, seen in obs.items()}


@pytest.mark.mostly_slow("collects whole runs on several backends", quick="each")
@pytest.mark.checklist(109)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize("pad", [False, True])
def test_the_vectorizer_marks_missing_final_observations(backend: Any, mode: Any, pad: bool) -> None:
    factories = [partial(Ragged if pad else silent, env_index=i) for i in range(3)]
    workers = 2 if backend == "async" else None
    with marlvec.make(factories, backend=backend, num_workers=workers, autoreset_mode=mode, pad=pad) as envs:
        obs, infos = envs.reset(seed=0)
        before, told = obs.copy(), 0
        assert "final_observation_missing" not in infos
        for _ in range(30):
            actions = np.zeros((3, 4), np.int64)
            obs, _, terminated, truncated, infos = envs.step(actions)
            ended = terminated | truncated
            missing = infos.get("final_observation_missing", np.zeros((3, 4), bool))
            np.testing.assert_array_equal(missing, ended, err_msg="nobody in these envs has one")
            if ended.any():
                # It repeats what the agent was shown last.
                np.testing.assert_array_equal(infos["final_observation"][ended], before[ended])
                told += 1
            before = obs.copy()
            if mode == "disabled" and infos.get("_final_observation", np.zeros(3, bool)).any():
                before = envs.reset()[0].copy()
        assert told > 10


@pytest.mark.checklist(109)
@pytest.mark.parametrize("mode", MODES)
def test_next_obs_repeats_what_the_policy_saw_and_is_marked(mode: str) -> None:
    """Through connectors too: a stack of frames is not pushed on by a frame that there never was."""
    chain = [FrameStack(3), NormalizeReward()]
    with SyncVectorEnv([partial(silent, env_index=i) for i in range(2)], autoreset_mode=mode) as envs:
        rows = Collector(envs, valued(), agent_connectors=chain, batch_mode="complete", seed=0).collect(episodes=6)[
            "main"
        ]
    ended = rows["terminated"] | rows["truncated"]
    np.testing.assert_array_equal(rows["next_obs_missing"], ended)
    np.testing.assert_array_equal(rows["next_obs"][ended], rows["obs"][ended])
    assert ended.sum() == 6 * 4
    inner = np.flatnonzero(~ended)
    np.testing.assert_array_equal(rows["next_obs"][inner], rows["obs"][inner + 1])


@pytest.mark.mostly_slow("collects whole runs on several backends", quick=3)
@pytest.mark.checklist(109)
@pytest.mark.parametrize("mode", MODES)
def test_advantages_bootstrap_from_nothing_that_was_made_up(mode: str) -> None:
    """Terminated: the end is worth 0. Truncated: the last row is left out, and its own value is the end of the rest."""
    asked: list[int] = []

    def value_of(rows: Rows) -> Any:
        asked.append(len(rows))
        return worth(rows["obs"])

    gae = GeneralAdvantageEstimation(0.9, 0.8, value_of)
    with SyncVectorEnv([partial(silent, env_index=i) for i in range(2)], autoreset_mode=mode) as envs:
        collector = Collector(envs, valued(), learner_connectors=[gae], batch_mode="complete", seed=0)
        rows = collector.collect(episodes=4)["main"]
    assert not asked  # no fragment was cut in the middle, and at no end is there anything to ask about
    assert len(rows.split_by_fragment()) == 16
    for part in rows.split_by_fragment():
        values, rewards = part["values"], part["rewards"]
        known = len(part) - (not part["terminated"][-1])
        advantages, ahead = np.zeros(len(part)), 0.0
        for t in reversed(range(known)):
            after = values[t + 1] if t + 1 < len(part) else 0.0
            ahead = rewards[t] + 0.9 * after - values[t] + 0.9 * 0.8 * ahead
            advantages[t] = ahead
        np.testing.assert_allclose(part["advantages"], advantages, rtol=1e-6)
        np.testing.assert_allclose(part["value_targets"], advantages + values, rtol=1e-6)


@pytest.mark.checklist(109)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("limit", [2, 3, 4])
def test_time_limit_gives_waiting_agents_no_final_observation(mode: str, limit: int) -> None:
    """The others are observed in the step in which time is up, so theirs is a true one."""
    forever = Script.together(3, 10**6)

    def factory() -> Any:
        return TimeLimit(RLlibAdapter(KeyedEnv(forever, agent_num=3, waits=waits)), limit)

    with SyncVectorEnv([factory] * 2, autoreset_mode=mode) as envs:
        rows = Collector(envs, valued(), batch_mode="complete", seed=0).collect(episodes=6)["main"]
    last = rows.take(rows["truncated"])
    assert len(last) == 6 * 3
    assert not last["terminated"].any()
    np.testing.assert_array_equal(last["next_env_t"], limit)
    np.testing.assert_array_equal(last["next_obs_missing"], (limit + last["agent_index"]) % 3 == 0)
    # The fourth number in a scripted observation is the step it was made in.
    np.testing.assert_array_equal(last["next_obs"][~last["next_obs_missing"], 3], limit)


@pytest.mark.checklist(109)
def test_envs_that_always_show_the_end_are_never_marked() -> None:
    for kind in (ScriptedParallelEnv, KeyedEnv):
        with SyncVectorEnv([partial(kind, agent_num=3, env_index=i) for i in range(2)]) as envs:
            rows = Collector(envs, valued(), seed=0).collect(env_steps=100)["main"]
            assert rows["terminated"].any()
            assert not rows["next_obs_missing"].any()


@pytest.mark.checklist(109)
@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_where_the_api_demands_one_its_absence_is_an_error(end: Any) -> None:
    class Mute(ScriptedParallelEnv):
        def step(self, actions: Any) -> Any:
            obs, *rest = super().step(actions)
            obs.pop("agent_0") if self.world.t == 2 else None
            return obs, *rest

    with SyncVectorEnv([lambda: Mute(Script([0, 0], [2, 4], [end, end]), agent_num=2)]) as envs:
        collector = Collector(envs, valued(), seed=0)
        with pytest.raises(EnvFault, match="observations: expected one of the live agent 'agent_0', got none"):
            collector.collect(env_steps=4)


def test_a_policy_may_not_use_the_names() -> None:
    for name in ("env_t", "next_env_t", "next_obs_missing"):
        policy = FunctionPolicy(lambda rows, name=name: (np.zeros(len(rows), int), {name: np.zeros(len(rows))}))
        with SyncVectorEnv([lambda: CounterEnv(3)]) as envs, pytest.raises(ContractError, match=name):
            Collector(envs, policy, seed=0).collect(env_steps=3)


# --- agents that come only to end, and the dead


@pytest.mark.checklist(110)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [ScriptedParallelEnv, KeyedEnv])
@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_an_agent_whose_first_observation_is_its_last_is_in_the_metrics(kind: Any, mode: str, end: Any) -> None:
    script = Script([0, 2], [4, 2], ["terminated", end])
    with SyncVectorEnv([lambda: kind(script, agent_num=2)], autoreset_mode=mode) as envs:
        collector = Collector(envs, valued(), seed=0, batch_mode="complete")
        batch = collector.collect(episodes=3)
    assert set(batch["main"]["agent_index"].tolist()) == {0}
    assert len(batch["main"]) == 3 * 4
    for record in collector.metrics.episodes:
        assert record.present_A.tolist() == [True, True]
        assert record.lengths_A.tolist() == [4, 0]
        assert record.returns_A[1] > 0
    assert collector.metrics.agent("agent_1")["return"].count == 3


@pytest.mark.checklist(110)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [ScriptedParallelEnv, KeyedEnv])
def test_data_of_an_agent_that_has_ended_is_an_error(kind: Any, mode: str) -> None:
    class Haunted(kind):  # type: ignore[misc]
        def step(self, actions: Any) -> Any:
            obs, rewards, *rest = super().step(actions)
            if self.world.t == 4 and self.world.episode == 1:
                obs["agent_0"], rewards["agent_0"] = obs["agent_1"], 1.0
            return obs, rewards, *rest

    script = Script([0, 0], [3, 6], ["terminated", "terminated"])
    with SyncVectorEnv([lambda: Haunted(script, agent_num=2)], autoreset_mode=mode) as envs:
        collector = Collector(envs, valued(), seed=0)
        assert collector.collect(env_steps=9).agent_steps == 9 + 6  # an episode, and half of the next
        with pytest.raises(EnvFault, match="agent 'agent_0'.* has ended"):
            collector.collect(env_steps=1)


@pytest.mark.parametrize("mode", MODES)
def test_a_team_sees_no_more_of_an_agent_that_ended_without_a_final_observation(mode: Any) -> None:
    """What stands in its place repeats what was seen before, and belongs to no moment."""
    with marlvec.make([partial(silent, env_index=i) for i in range(3)], backend="sync", autoreset_mode=mode) as envs:
        policy = FunctionPolicy(lambda rows: np.zeros(len(rows), np.int64))
        rows = Collector(envs, policy, agent_connectors=[TeamObs()], seed=0).collect(env_steps=3 * 30)["main"]
    looked = 0
    for i in range(len(rows)):
        gone = [a for a, death in enumerate(SCRIPT.deaths) if rows["env_t"][i] >= death]
        assert not rows["obs"]["team_mask"][i][gone].any()
        looked += len(gone)
    assert looked > 20

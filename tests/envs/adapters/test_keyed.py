"""RLlib-style envs through their adapter, against rules written by hand over whole episodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from hypothesis import given, settings
from hypothesis import strategies as st

from marlvec.envs import COMMON, RLlibAdapter, adapt
from marlvec.errors import ContractError
from marlvec.testing.scripted import KeyedEnv, Script, decode, draw_script
from tests.envs.support.rig import Rig

EPISODES = 3


def waits(t: int, a: int) -> bool:
    return (t + a) % 3 == 0


@pytest.mark.fault("D3")
@given(
    seed=st.integers(0, 10_000),
    agent_num=st.integers(1, 4),
    int_ids=st.booleans(),
    last_obs=st.booleans(),
    old_api=st.booleans(),
    reuse=st.booleans(),
)
@settings(max_examples=60)
def test_agents_that_enter_leave_and_wait(
    seed: int, agent_num: int, int_ids: bool, last_obs: bool, old_api: bool, reuse: bool
) -> None:
    rng = np.random.default_rng(seed)
    scripts = [draw_script(rng, agent_num, 9) for _ in range(EPISODES)]
    options: dict[str, Any] = {"agent_num": agent_num, "waits": waits, "int_ids": int_ids, "last_obs": last_obs}
    plain = KeyedEnv(scripts, **options)
    rig = Rig(adapt(KeyedEnv(scripts, **options, old_api=old_api, reuse_buffer=reuse)))
    ids = plain.possible_agents
    assert rig.spec.agents == tuple(map(str, ids))
    for episode in range(EPISODES):
        obs, _ = plain.reset(seed=episode)
        rig.reset(seed=episode)
        known = {agent: row.copy() for agent, row in obs.items()}
        ended: set[Any] = set()
        over = False
        while not over:
            actions = {agent: int(rng.integers(5)) for agent in obs if agent not in ended}
            obs, rewards, terminateds, truncateds, infos = plain.step(dict(actions))
            got = rig.step([actions.get(agent, 4) for agent in ids])
            over = terminateds["__all__"] or truncateds["__all__"]
            known |= obs
            before, ended = set(ended), ended | {a for a in rewards if terminateds[a] or truncateds[a]}
            for a, agent in enumerate(ids):
                expected = known.get(agent) if agent not in before else None
                np.testing.assert_array_equal(rig.row(a), np.zeros(7) if expected is None else expected)
                assert rig.reward_A[a] == rewards.get(agent, 0.0)
                assert rig.alive_A[a] == (agent in known and agent not in ended)
                assert rig.acting_A[a] == (agent in obs and agent not in ended)
                fresh = agent in ended and agent not in before
                # Four dicts cannot say "both": done with the time limit's mark is truncated.
                cut = fresh and truncateds[agent]
                assert rig.truncated_A[a] == cut
                assert rig.terminated_A[a] == (fresh and terminateds[agent] and not (old_api and cut))
            assert rig.done is over
            if not old_api:
                expected_infos: dict[str, Any] = {str(k): v for k, v in infos.items() if v and k != "__common__"}
                if "__common__" in infos:
                    expected_infos[COMMON] = infos["__common__"]
                np.testing.assert_equal(got, expected_infos or None)


@pytest.mark.parametrize(("key", "flag"), [("terminateds", [True, False]), ("truncateds", [False, True])])
def test_all_ends_those_that_have_no_flag_of_their_own(key: str, flag: list[bool]) -> None:
    class Cut(KeyedEnv):
        def step(self, actions: dict[Any, Any]) -> Any:
            obs, rewards, terminateds, truncateds, infos = super().step(actions)
            if self.world.t == 4:
                {"terminateds": terminateds, "truncateds": truncateds}[key]["__all__"] = True
            return obs, rewards, terminateds, truncateds, infos

    script = Script([0, 0, None], [2, 9, 9], ["terminated", "terminated", "terminated"])
    rig = Rig(RLlibAdapter(Cut(script)))
    for episode in range(EPISODES):
        rig.reset(seed=0)
        for t in range(1, 5):
            rig.step([0, 0, 0])
            assert rig.done is (t == 4)
        assert [rig.terminated_A.tolist(), rig.truncated_A.tolist()] == [
            [False, flag[0], False],
            [False, flag[1], False],
        ]
        assert decode(rig.row(1)) == (0, 0, episode, 4, 1)
        assert not rig.alive_A.any()


def test_an_episode_is_over_when_all_have_ended_in_any_mixture() -> None:
    """Not only when ``__all__`` says so: RLlib's own PettingZoo wrapper never says it for a mixture."""

    class Mute(KeyedEnv):
        def step(self, actions: dict[Any, Any]) -> Any:
            obs, rewards, terminateds, truncateds, infos = super().step(actions)
            return obs, rewards, {**terminateds, "__all__": False}, truncateds, infos

    rig = Rig(adapt(Mute(Script([0, 0, 0], [2, 4, 4], ["terminated", "truncated", "both"]))))
    for _ in range(EPISODES):
        rig.reset(seed=0)
        for t in range(1, 5):
            rig.step([0, 0, 0])
            assert rig.done is (t == 4)


@pytest.mark.fault("D5")
def test_steps_without_anyone() -> None:
    """Everyone waits; an agent ends with its first observation; nobody is there from the start."""

    class Pause(KeyedEnv):
        def step(self, actions: dict[Any, Any]) -> Any:
            if self.world.t == 1:
                assert actions == {}
            return super().step(actions)

    script = Script([0, 0], [6, 6], ["terminated", "terminated"])
    rig = Rig(adapt(Pause(script, agent_num=2, waits=lambda t, a: t == 1)))
    for _ in range(EPISODES):
        rig.reset(seed=0)
        rig.step([0, 0])
        assert rig.flags()["acting"] == [False, False]
        assert rig.flags()["alive"] == [True, True]
        while not rig.done:
            rig.step([0, 0])
        assert decode(rig.row(0)).t == 6

    born_dead = Script([0, 3], [5, 3], ["terminated", "terminated"])
    rig = Rig(adapt(KeyedEnv(born_dead, agent_num=2)))
    rig.reset(seed=0)
    for t in range(1, 6):
        rig.step([0, 0])
        assert rig.terminated_A.tolist() == [t == 5, t == 3]
        assert rig.alive_A.tolist() == [t < 5, False]

    class Empty(KeyedEnv):
        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            super().reset(seed=seed, options=options)
            return {}, {}

    with pytest.raises(ContractError, match="observations: expected at least one agent's, got none"):
        Rig(adapt(Empty(born_dead, agent_num=2))).reset(seed=0)


def _shape(form: str) -> Any:
    """An RLlib-style env that keeps its agents and spaces in one of the ways that are seen in the wild."""
    observation, action = Box(0, 9, (2,), np.float32), Discrete(3)

    class Env:
        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            return {agent: np.zeros(2, np.float32) for agent in ("a", "b")}, {}

        def step(self, actions: dict[str, Any]) -> Any:
            obs = {agent: np.full(2, actions[agent], np.float32) for agent in ("a", "b")}
            return obs, {"a": 1.0, "b": 2.0}, {"__all__": True}, {"__all__": False}, {}

    env: Any = Env()
    if form == "dicts":
        env.observation_spaces, env.action_spaces = {"a": observation, "b": observation}, {"a": action, "b": action}
    elif form == "functions":
        env._agent_ids = {"b", "a"}
        env.get_observation_space, env.get_action_space = lambda agent: observation, lambda agent: action
    elif form == "shared":
        env.possible_agents, env.observation_space, env.action_space = ["a", "b"], observation, action
    elif form == "nested":
        from gymnasium.spaces import Dict

        env.get_agent_ids = lambda: {"a", "b"}
        env.observation_space = Dict({"a": observation, "b": observation})
        env.action_space = Dict({"a": action, "b": action})
    return env


@pytest.mark.parametrize("form", ["dicts", "functions", "shared", "nested"])
def test_wherever_agents_and_spaces_are_kept(form: str) -> None:
    rig = Rig(adapt(_shape(form)))
    assert isinstance(rig.env, RLlibAdapter)
    assert rig.spec.agents == ("a", "b")
    for _ in range(EPISODES):
        rig.reset(seed=0)
        rig.step([1, 2])
        assert [rig.row(a).tolist() for a in range(2)] == [[1.0, 1.0], [2.0, 2.0]]
        assert rig.terminated_A.all()
        assert rig.done

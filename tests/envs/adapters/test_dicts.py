"""PettingZoo Parallel and RLlib-style envs through their adapters, against loops by hand over whole episodes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from hypothesis import given, settings
from hypothesis import strategies as st
from mpe2 import simple_spread_v3, simple_tag_v3
from pettingzoo import ParallelEnv

from marlvec.envs import COMMON, ParallelAdapter, RLlibAdapter, adapt
from marlvec.errors import ContractError
from marlvec.testing.scripted import (
    CounterEnv,
    KeyedEnv,
    NoOpEnv,
    Script,
    ScriptedParallelEnv,
    checksum,
    decode,
    draw_script,
)
from tests.envs.support import Rig

# --- PettingZoo Parallel envs through their adapter, against loops written by hand over whole episodes


EPISODES = 3


def play(rig: Rig, plain: Any, rng: np.random.Generator, seed: int, *, four: bool = False) -> int:
    """Play one episode on the adapter and on the same env by hand; everything must agree in every step.

    Returns:
        Steps of the episode.
    """
    names = list(plain.possible_agents)
    result = plain.reset(seed=seed)
    obs, infos = (result, {}) if four else result
    rig_infos = rig.reset(seed=seed)
    born, ended = set(obs), set[str]()
    check(rig, names, obs, {}, {}, {}, live=set(obs))
    assert_infos_equal(rig_infos, expected_infos(infos, names))
    steps = 0
    while plain.agents:
        actions = {agent: int(rng.integers(plain.action_space(agent).n)) for agent in plain.agents}
        result = plain.step(dict(actions))
        if four:
            obs, rewards, dones, infos = result
            cut = {a for a in dones if infos.get(a, {}).get("TimeLimit.truncated")}
            terminations = {a: done and a not in cut for a, done in dones.items()}
            truncations = {a: done and a in cut for a, done in dones.items()}
        else:
            obs, rewards, terminations, truncations, infos = result
        rig_infos = rig.step([actions.get(name, 4) for name in names])  # those that do not act get nonsense
        born |= set(obs)
        ended |= {agent for agent in obs if terminations[agent] or truncations[agent]}
        check(rig, names, obs, rewards, terminations, truncations, live=born - ended)
        assert_infos_equal(rig_infos, expected_infos(infos, names))
        steps += 1
        assert rig.done is not bool(plain.agents)
    return steps


def check(
    rig: Rig, names: list[str], obs: Any, rewards: Any, terminations: Any, truncations: Any, live: set[str]
) -> None:
    for a, name in enumerate(names):
        row = rig.row(a)
        expected = obs.get(name)
        if expected is None:
            assert not np.any(row), f"{name} is not in the episode, but has an observation"
        else:
            assert row.dtype == expected.dtype
            np.testing.assert_array_equal(row, expected)
        assert rig.reward_A[a] == rewards.get(name, 0.0)
    assert rig.flags() == {
        "terminated": [bool(terminations.get(name, False)) for name in names],
        "truncated": [bool(truncations.get(name, False)) for name in names],
        "alive": [name in live for name in names],
        "acting": [name in live for name in names],
    }


def expected_infos(infos: dict[str, Any], names: list[str]) -> dict[str, Any] | None:
    out = {name: info for name, info in infos.items() if info and name in names}
    rest = {name: info for name, info in infos.items() if info and name not in names}
    return ({**out, COMMON: rest} if rest else out) or None


def assert_infos_equal(got: Any, expected: Any) -> None:
    np.testing.assert_equal(got, expected)


@pytest.mark.slow("plays whole episodes of many envs")
@pytest.mark.fault("C13")
@pytest.mark.fault("D3")
@given(seed=st.integers(0, 10_000), agent_num=st.integers(1, 5), reuse=st.booleans(), old_api=st.booleans())
@settings(max_examples=60)
def test_agents_that_enter_and_leave(seed: int, agent_num: int, reuse: bool, old_api: bool) -> None:
    """Drawn scripts: late births, early deaths, terminations, truncations and both at once, infos here and there."""
    options: dict[str, Any] = {"agent_num": agent_num, "longest": 9, "old_api": old_api}
    plain = ScriptedParallelEnv(**options)
    rig = Rig(adapt(ScriptedParallelEnv(**options, reuse_buffer=reuse)))
    rng = np.random.default_rng(seed)
    for episode in range(EPISODES):
        play(rig, plain, rng, seed + episode, four=old_api)


@pytest.mark.fault("C13")
def test_infos_are_snapshots_where_the_env_reuses_its_dicts() -> None:
    infos = {(t, a): {"marks": np.array([t, a])} for t in range(5) for a in range(2)}
    script = Script([0, 0], [4, 4], ["truncated", "truncated"], infos)
    rig = Rig(adapt(ScriptedParallelEnv(script, agent_num=2, reuse_buffer=True)))
    for _ in range(EPISODES):
        kept = [rig.reset(seed=1), *(rig.step([0, 0]) for _ in range(4))]
        assert rig.done
        rig.reset()
        for t, info in enumerate(kept):
            assert info is not None
            assert [info[f"agent_{a}"]["marks"].tolist() for a in range(2)] == [[t, 0], [t, 1]]


@pytest.mark.parametrize("make", [simple_spread_v3.parallel_env, simple_tag_v3.parallel_env], ids=["spread", "tag"])
def test_mpe_is_bit_identical_to_a_plain_loop(make: Any) -> None:
    plain, rig = make(), Rig(adapt(make()))
    rng = np.random.default_rng(3)
    for episode in range(EPISODES):
        assert play(rig, plain, rng, 40 + episode) == 25
        rig.env.write_state(rig.slot)
        np.testing.assert_array_equal(rig.state, plain.state())
    rig.env.close()


def test_an_agents_actions_are_its_own() -> None:
    rig = Rig(adapt(CounterEnv(length=6, agent_num=3)))
    rng = np.random.default_rng(0)
    for episode in range(EPISODES):
        rig.reset(seed=episode)
        expected = [1, 1, 1]
        while not rig.done:
            actions = rng.integers(5, size=3).tolist()
            rig.step(actions)
            expected = [(before * 31 + action + 1) % 65_521 for before, action in zip(expected, actions, strict=True)]
            assert [checksum(rig.row(a)) for a in range(3)] == expected
            assert [decode(rig.row(a))[2:] for a in range(3)] == [(episode, int(rig.row(0)[3]), a) for a in range(3)]


@pytest.mark.fault("D10")
@given(seed=st.integers(0, 1_000))
@settings(max_examples=25)
def test_the_order_of_keys_means_nothing(seed: int) -> None:
    shuffler = random.Random(seed)

    def shuffle(table: dict[str, Any]) -> dict[str, Any]:
        return dict(shuffler.sample(list(table.items()), len(table)))

    class Shuffled(ScriptedParallelEnv):
        def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            result = tuple(shuffle(table) for table in super().reset(seed, options))
            shuffler.shuffle(self.agents)
            return result

        def step(self, actions: dict[str, Any]) -> Any:
            result = tuple(shuffle(table) for table in super().step(actions))
            shuffler.shuffle(self.agents)
            return result

    plain, rig = ScriptedParallelEnv(agent_num=4), Rig(adapt(Shuffled(agent_num=4)))
    rng = np.random.default_rng(seed)
    for episode in range(EPISODES):
        play(rig, plain, rng, seed + episode)


def test_numpy_flags_and_rewards_are_as_good_as_plain_ones() -> None:
    class Numpy(CounterEnv):
        def step(self, actions: dict[str, Any]) -> Any:
            obs, rewards, terminations, truncations, infos = super().step(actions)
            return (
                obs,
                {agent: np.float32(t) for t, agent in enumerate(rewards)},
                {agent: np.bool_(value) for agent, value in terminations.items()},
                {agent: np.bool_(value) for agent, value in truncations.items()},
                infos,
            )

    rig = Rig(ParallelAdapter(Numpy(length=4)))
    for _ in range(EPISODES):
        rig.reset(seed=0)
        for t in range(1, 5):
            rig.step([0, 1, 2])
            assert rig.reward_A.tolist() == [0.0, 1.0, 2.0]
            assert rig.truncated_A.tolist() == [t == 4] * 3
        assert rig.done


def test_float64_observations_of_a_float32_space_are_cast() -> None:
    class Wide(NoOpEnv):
        def step(self, actions: dict[str, Any]) -> Any:
            obs, *rest = super().step(actions)
            return {agent: row.astype(np.float64) + 0.25 for agent, row in obs.items()}, *rest

    rig = Rig(adapt(Wide(length=3)))
    for _ in range(EPISODES):
        rig.reset(seed=0)
        while not rig.done:
            rig.step([0, 0, 0])
            assert [float(rig.row(a)[0]) for a in range(3)] == [float(np.float32(a / 3) + 0.25) for a in range(3)]
            assert rig.row(0).dtype == np.float32


def test_the_callers_options_stay_as_they_are() -> None:
    class Greedy(CounterEnv):
        seen: list[Any] = []

        def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            if options is not None:
                self.seen.append(options["level"].pop("depth"))
            return super().reset(seed, options)

    rig, options = Rig(adapt(Greedy())), {"level": {"depth": 3}}
    for _ in range(EPISODES):
        rig.reset(seed=0, options=options)
    assert Greedy.seen == [3] * EPISODES
    assert options == {"level": {"depth": 3}}


def test_an_episode_without_seed_goes_on_with_the_envs_own_stream() -> None:
    plain, rig = CounterEnv(), Rig(adapt(CounterEnv()))
    plain.reset(seed=5)
    rig.reset(seed=5)
    draws = []
    for _ in range(EPISODES):
        expected, _ = plain.reset()
        rig.reset()
        np.testing.assert_array_equal(rig.row(0), expected["agent_0"])
        draws.append(rig.row(0)[6])
    assert len(set(draws)) == EPISODES


# --- One reward, and one flag, for a team


class Team(CounterEnv):
    """Says one reward and one flag for all, as told, where PettingZoo's API has a dict of them."""

    def step(self, actions: Any) -> Any:
        obs, rewards, terminations, truncations, infos = super().step(actions)
        one = next(iter(rewards.values())), all(terminations.values()), all(truncations.values())
        self.agents = [] if any(one[1:]) else list(rewards)
        return (obs, *one, infos)


class OldTeam(Team):
    def step(self, actions: Any) -> Any:
        obs, reward, ended, cut, infos = super().step(actions)
        return obs, reward, ended or cut, infos


@pytest.mark.parametrize("kind", [Team, OldTeam])
def test_one_reward_and_flag_are_each_live_agents_if_lenient(kind: Any) -> None:
    env = kind()
    rig = Rig(adapt(env, lenient=True))
    rig.reset(seed=0)
    twin = kind()
    twin.reset(seed=0)
    while not rig.done:
        rig.step([0] * len(env.possible_agents))
        _, reward, ended, *cut, _ = twin.step(dict.fromkeys(twin.agents, 0))
        assert rig.reward_A.tolist() == [reward] * len(env.possible_agents)
        assert rig.terminated_A.tolist() == [ended] * len(env.possible_agents)
        assert rig.truncated_A.tolist() == [any(cut)] * len(env.possible_agents)
    strict = Rig(adapt(kind()))
    strict.reset(seed=0)
    with pytest.raises(ContractError, match="expected a dict, got"):
        strict.step([0] * len(env.possible_agents))


class IntAgents(ParallelEnv[int, Any, Any]):
    """`CounterEnv` with agents 0, 1 and 2, whose spaces are dicts in attributes."""

    def __init__(self) -> None:
        self.env = CounterEnv()
        self.names = self.env.possible_agents
        self.possible_agents = [0, 1, 2]
        self.observation_spaces = {a: self.env.observation_space(name) for a, name in enumerate(self.names)}
        self.action_spaces = {a: self.env.action_space(name) for a, name in enumerate(self.names)}

    def observation_space(self, agent: int) -> Any:
        raise NotImplementedError

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        return self._numbered(self.env.reset(seed=seed, options=options))

    def step(self, actions: dict[int, Any]) -> Any:
        return self._numbered(self.env.step({self.names[a]: action for a, action in actions.items()}))

    def _numbered(self, result: Any) -> Any:
        self.agents = [self.names.index(name) for name in self.env.agents]
        return tuple({self.names.index(name): value for name, value in table.items()} for table in result)


def test_agents_may_be_ints_and_spaces_dicts_beside_a_method_that_raises() -> None:
    rig, twin = Rig(adapt(IntAgents())), Rig(adapt(CounterEnv()))
    assert rig.env.agents == ("0", "1", "2")
    for one in (rig, twin):
        one.reset(seed=0)
    while not twin.done:
        for one in (rig, twin):
            one.step([1, 0, 1])
        assert rig.reward_A.tolist() == twin.reward_A.tolist()
        assert [rig.row(a).tolist() for a in range(3)] == [twin.row(a).tolist() for a in range(3)]
    assert rig.done


# --- RLlib-style envs through their adapter, against rules written by hand over whole episodes


KEYED_EPISODES = 3


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
    scripts = [draw_script(rng, agent_num, 9) for _ in range(KEYED_EPISODES)]
    options: dict[str, Any] = {"agent_num": agent_num, "waits": waits, "int_ids": int_ids, "last_obs": last_obs}
    plain = KeyedEnv(scripts, **options)
    rig = Rig(adapt(KeyedEnv(scripts, **options, old_api=old_api, reuse_buffer=reuse)))
    ids = plain.possible_agents
    assert rig.spec.agents == tuple(map(str, ids))
    for episode in range(KEYED_EPISODES):
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
    for episode in range(KEYED_EPISODES):
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
    for _ in range(KEYED_EPISODES):
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
    for _ in range(KEYED_EPISODES):
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
    for _ in range(KEYED_EPISODES):
        rig.reset(seed=0)
        rig.step([1, 2])
        assert [rig.row(a).tolist() for a in range(2)] == [[1.0, 1.0], [2.0, 2.0]]
        assert rig.terminated_A.all()
        assert rig.done

"""Gymnasium envs through their adapters, of one agent and of several, over whole episodes."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Space, Text, Tuple

import marlvec
from marlvec.envs import COMMON, GymnasiumAdapter, JointAdapter, adapt
from marlvec.errors import ArgumentError, ContractError, EnvRaised
from marlvec.testing import check_env
from marlvec.testing.scripted import CounterEnv, SingleEnv
from marlvec.vector import SyncVectorEnv
from tests.envs.support import Rig
from tests.vector.support.drivers import JointEnv

# --- Gymnasium envs through their adapter, against loops written by hand over whole episodes


EPISODES = 3


@pytest.mark.parametrize("end", ["terminated", "truncated"])
@pytest.mark.parametrize("old_api", [False, True])
@pytest.mark.parametrize("reuse", [False, True])
def test_whole_episodes(end: Any, old_api: bool, reuse: bool) -> None:
    """Four and five values, with and without an info at the reset, tell the same story."""
    plain = SingleEnv([3, 1, 6], end=end, info_every=2)
    rig = Rig(adapt(SingleEnv([3, 1, 6], end=end, info_every=2, old_api=old_api, reuse_buffer=reuse)))
    rng = np.random.default_rng(0)
    for episode in range(EPISODES):
        obs, info = plain.reset(seed=episode)
        got = rig.reset(seed=episode)
        assert got == (None if old_api else {COMMON: info})  # an old reset has no info to give
        np.testing.assert_array_equal(rig.row(0), obs)
        over = False
        while not over:
            assert rig.flags() == {"terminated": [False], "truncated": [False], "alive": [True], "acting": [True]}
            action = int(rng.integers(5))
            obs, reward, terminated, truncated, info = plain.step(action)
            over = terminated or truncated
            got = rig.step([action])
            expected = {**info, "TimeLimit.truncated": True} if truncated and old_api else info
            assert got == ({COMMON: expected} if expected else None)
            np.testing.assert_array_equal(rig.row(0), obs)
            assert (rig.reward_A[0], rig.done) == (reward, over)
            assert (bool(rig.terminated_A[0]), bool(rig.truncated_A[0])) == (terminated, truncated)
        assert rig.flags()["alive"] == rig.flags()["acting"] == [False]


def test_cart_pole() -> None:
    plain, rig = gymnasium.make("CartPole-v1"), Rig(adapt(gymnasium.make("CartPole-v1")))
    assert rig.spec.agents == ("agent_0",)
    assert rig.spec.name == "CartPole-v1"
    rng = np.random.default_rng(0)
    for episode in range(EPISODES):
        obs, _ = plain.reset(seed=episode)
        rig.reset(seed=episode)
        over = False
        while not over:
            np.testing.assert_array_equal(rig.row(0), obs)
            action = int(rng.integers(2))
            obs, reward, terminated, truncated, _ = plain.step(action)
            rig.step([action])
            over = terminated or truncated
            assert rig.done is over
            assert rig.reward_A.tolist() == [reward]
        np.testing.assert_array_equal(rig.row(0), obs)
    plain.close()
    rig.env.close()


def test_a_masked_env() -> None:
    rig = Rig(adapt(SingleEnv(6, masked=True)))
    assert isinstance(rig.spec.observation_spaces[0], Box)
    for _ in range(EPISODES):
        rig.reset(seed=0)
        while not rig.done:
            mask = rig.mask(0)
            assert mask is not None
            assert 0 < mask.sum() < 5
            rig.step([int(np.flatnonzero(mask)[0])])
        assert rig.mask(0) is not None
        assert np.all(rig.mask(0))


@pytest.mark.parametrize("with_info", [False, True])
def test_a_pair_of_observations_is_not_an_observation_and_its_info(with_info: bool) -> None:
    class Pair(gymnasium.Env[Any, Any]):
        observation_space = Tuple([Discrete(3), Dict({"x": Box(0, 9, (1,))})])
        action_space = Discrete(2)

        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            obs = (2, {"x": np.array([7], np.float32)})
            return (obs, {"y": 1}) if with_info else obs

        def step(self, action: Any) -> Any:
            return (1, {"x": np.array([8], np.float32)}), 0.0, True, False, {}

    rig = Rig(adapt(Pair()))
    for _ in range(EPISODES):
        assert rig.reset(seed=0) == ({COMMON: {"y": 1}} if with_info else None)
        assert (int(rig.row(0)[0]), rig.row(0)[1]["x"].tolist()) == (2, [7.0])
        rig.step([0])
        assert (int(rig.row(0)[0]), rig.row(0)[1]["x"].tolist()) == (1, [8.0])


def test_what_of_the_metadata_is_plain_is_kept() -> None:
    class Described(SingleEnv):
        def __init__(self) -> None:
            super().__init__()
            self.metadata = {
                "name": "described",
                "render_fps": np.int64(30),
                "render_modes": ["human"],
                "nested": {"a": (1, 2.0), "bad": object()},
                "mode": gymnasium.vector.AutoresetMode.NEXT_STEP,
                "hook": lambda: None,
                3: True,
            }

    env = GymnasiumAdapter(Described())
    assert env.name == "described"
    assert env.spec().metadata == {
        "name": "described",
        "render_fps": 30,
        "render_modes": ["human"],
        "nested": {"a": (1, 2.0)},
        "3": True,
    }


def test_a_reward_may_be_an_array_without_axes_where_spaces_have_a_part_an_agent() -> None:
    """As of envs that might be of several agents, by their spaces: a reward of each would have an axis."""

    class OneKey(gymnasium.Env[Any, Any]):
        observation_space = Dict({"x": Discrete(2)})
        action_space = Dict({"x": Discrete(2)})

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return {"x": 0}, {}

        def step(self, action: Any) -> Any:
            return {"x": 1}, np.array(0.5), False, False, {}

    with SyncVectorEnv([OneKey]) as envs:
        envs.reset(seed=0)
        assert envs.step(envs.action_space.sample())[1].tolist() == [[0.5]]


# --- Which Gymnasium envs are of several agents, and what such an env may not say


BOX = Box(-9, 9, (2,), np.float64)


class Spaces(gymnasium.Env[Any, Any]):
    """Two steps of an env with these spaces; it says what it is told to.

    Args:
        observation_space, action_space: Its spaces.
        said: What its steps return after the observation.
        attributes: What else it has.
    """

    def __init__(self, observation_space: Any, action_space: Any, *said: Any, **attributes: Any) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        self.said = said or (1.0, False, False, {})
        self.given: list[Any] = []
        vars(self).update(attributes)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.observation_space.seed(0)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        self.given.append(action)
        said = self.said[0] if len(self.said) == 1 else self.said
        return (self.observation_space.sample(), *said)


def pair(space: Space[Any]) -> Tuple:
    return Tuple([space, space])


JOINT = [
    Spaces(pair(BOX), pair(Discrete(3)), n_agents=2),
    Spaces(pair(BOX), pair(Discrete(3)), num_agents=np.int64(2)),
    Spaces(Tuple([BOX]), Tuple([Discrete(3)]), n_agents=1),
    Spaces(Tuple([BOX, Discrete(4)]), Tuple([Discrete(3), BOX]), n_agents=2),
    Spaces(Dict({0: BOX, 1: BOX}), Dict({0: Discrete(3), 1: Discrete(3)})),
    Spaces(Dict({"a": BOX, "b": BOX}), Dict({"a": BOX, "b": BOX}), num_agents=2),
]
SINGLE = [
    Spaces(pair(BOX), pair(Discrete(3))),  # it does not say that it has agents
    Spaces(pair(BOX), pair(Discrete(3)), n_agents=3),
    Spaces(pair(BOX), MultiDiscrete([3, 3]), n_agents=2),
    Spaces(pair(BOX), Tuple([Discrete(3)]), n_agents=2),
    Spaces(Box(-9, 9, (2, 2)), pair(Discrete(3)), n_agents=2),
    Spaces(Dict({"a": BOX, "b": BOX}), Dict({"a": BOX, "b": BOX})),
    Spaces(Dict({0: BOX, 1: BOX}), Discrete(3)),
    Spaces(Tuple([]), Tuple([]), n_agents=0),
]


@pytest.mark.parametrize("env", JOINT)
def test_spaces_of_agents_make_an_env_of_agents(env: Spaces) -> None:
    for layer in (env, gymnasium.wrappers.OrderEnforcing(env)):
        adapter = adapt(layer)
        assert type(adapter) is JointAdapter
        assert len(adapter.agents) == len(env.observation_space.spaces)
    assert type(adapt(env, agents="single")) is GymnasiumAdapter


class Market(gymnasium.Env[Any, Any]):
    """Declares its spaces as plain dicts by agent, of no space's class; ends after four steps."""

    def __init__(self) -> None:
        self.observation_space: Any = {"seller": BOX, "buyer": Box(0, 9, (1,), np.float64)}
        self.action_space: Any = {"seller": Discrete(3), "buyer": Discrete(2)}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self.seen(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        over = dict.fromkeys(action, self.t == 4)
        return self.seen(), {a: float(x) for a, x in action.items()}, over, dict.fromkeys(action, False), {}

    def seen(self) -> Any:
        return {"seller": self.np_random.random(2), "buyer": np.full(1, self.t, np.float64)}


def test_plain_dicts_of_spaces_by_agent_make_an_env_of_agents() -> None:
    plain, ends = Market(), 0
    with marlvec.make(Market, 1, backend="sync", autoreset_mode="next_step") as envs:
        assert envs.agents == ("buyer", "seller")  # as Gymnasium's Dict orders them
        envs.reset(seed=[5])
        plain.reset(seed=5)
        for t in range(12):
            actions = envs.random_action(seed=t)
            obs, rewards, terminated, _, infos = envs.step(actions)
            if infos["reset_mask"][0]:
                seen = plain.reset()[0]
            else:
                chosen = {agent: int(actions[name][0, 0]) for agent, name in zip(envs.agents, envs.groups, strict=True)}
                seen, paid, over, *_ = plain.step(chosen)
                assert rewards[0].tolist() == [paid[agent] for agent in envs.agents]
                assert terminated[0].tolist() == [over[agent] for agent in envs.agents]
                ends += over["seller"]
            expected = [seen[agent].tolist() for agent in envs.agents]
            assert [obs[name][0, 0].tolist() for name in envs.groups] == expected
    assert ends == 3 - 1
    assert type(adapt(Market(), agents="dict")) is JointAdapter
    with pytest.raises(ArgumentError, match="expected observation and action spaces that are Tuples"):
        adapt(Market(), agents="tuple")


@pytest.mark.parametrize("env", SINGLE)
def test_a_compound_env_of_one_agent_stays_one(env: Spaces) -> None:
    assert type(adapt(env)) is GymnasiumAdapter


def test_gymnasiums_own_compound_env_is_one_agent() -> None:
    with marlvec.make("Blackjack-v1", num_envs=2, backend="sync") as envs:
        assert envs.agents == ("agent_0",)


def test_agents_argument_sets_the_kind_of_env() -> None:
    tuples, dicts = SINGLE[0], SINGLE[5]
    assert adapt(tuples, agents="tuple").agents == ("agent_0", "agent_1")
    assert adapt(dicts, agents="dict").agents == ("a", "b")
    assert adapt(JOINT[4]).agents == ("0", "1")
    with marlvec.make(lambda: tuples, 1, backend="sync", agents="tuple") as envs:
        assert envs.agents == ("agent_0", "agent_1")
    with marlvec.make(lambda: JOINT[0], 1, backend="sync", agents="single") as envs:
        assert envs.agents == ("agent_0",)


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_mismatches_are_refused(backend: str) -> None:
    for build, agents, words in (
        (lambda: Spaces(BOX, Discrete(3)), "tuple", "Tuples of one length, got Box"),
        (lambda: Spaces(pair(BOX), Tuple([BOX])), "tuple", "Tuples of one length, got Tuple"),
        (lambda: Spaces(pair(BOX), pair(BOX)), "dict", "Dicts of the same keys"),
        (CounterEnv, "single", "CounterEnv names its agents itself"),
        (lambda: adapt(Spaces(BOX, BOX)), "single", "Spaces has an adapter already"),
    ):
        with pytest.raises(ArgumentError, match=words):
            marlvec.make(build, 1, backend=backend, agents=agents)
    with pytest.raises(ArgumentError, match="agents must be one of .* got 3; .* goes into env_kwargs"):
        marlvec.make(CounterEnv, 1, backend=backend, agents=3)  # type: ignore[arg-type]  # that is the mistake
    with pytest.raises(ArgumentError, match="one of 'auto', 'tuple', 'dict', 'single'"):
        adapt(CounterEnv(), agents="pair")


def test_compiled_envs_and_pools_have_agents_of_their_own() -> None:
    with pytest.raises(ArgumentError, match="agents='single'"):
        marlvec.make("simple_spread", 2, backend="native", agents="single")
    with pytest.raises(ArgumentError, match="agents='single'"):
        marlvec.make("CartPole-v1", 2, backend="pool", agents="single")


ONE, TWO = Spaces(BOX, Discrete(3)), JOINT[0]


@pytest.mark.parametrize("keys", [None, ("north", "south")])
def test_what_the_env_is_given_is_a_member_of_its_action_space(keys: tuple[str, str] | None) -> None:
    """A tuple, and no list: highway-env asks for one."""
    spaces = [pair(BOX), pair(Discrete(3))]
    if keys is not None:
        spaces = [Dict(dict(zip(keys, space, strict=True))) for space in spaces]
    env = Spaces(*spaces, n_agents=2)
    with marlvec.make(lambda: env, 1, backend="sync") as envs:
        envs.reset(seed=0)
        envs.step(np.array([[2, 1]]))
    assert env.given == [(2, 1) if keys is None else {"north": 2, "south": 1}]
    assert type(env.given[0]) is (tuple if keys is None else dict)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (([1.0], False, False, {}), "rewards: expected one for each agent, 2 in all, got 1"),
        (([1.0, 2.0, 3.0], False, False, {}), "rewards: expected one for each agent, 2 in all, got 3"),
        ((None, False, False, {}), "reward of agent 'agent_0': expected a real number, got NoneType"),
        (([1.0, [2.0, 3.0]], False, False, {}), "reward of agent 'agent_1': .* one number for the team, or one for"),
        ((1.0, [False], False, {}), "terminations: expected one for each agent, 2 in all, got 1"),
        ((1.0, False, [False, 0], {}), "truncation of agent 'agent_1': expected a bool, got int"),
        ((1.0, False, False, 3), "info: expected a dict, got int"),
        ((1.0, False, False, [{}]), "infos: expected one for each agent, 2 in all, got 1"),
        (({"agent_0": 1.0}, False, False, {}), "rewards: expected one for each agent, got none for .'agent_1'"),
        (({"x": 1.0}, False, False, {}), "rewards: expected agents of .*, got the unknown agent 'x'"),
        ((1.0, False), "a tuple of 5, or of the old API's 4, got a tuple of 3"),
    ],
)
def test_invalid_step_results_raise(said: tuple[Any, ...], words: str) -> None:
    rig = Rig(adapt(Spaces(TWO.observation_space, TWO.action_space, *said, n_agents=2)))
    rig.reset(seed=0)
    with pytest.raises(ContractError, match=words):
        rig.step([0, 0])


def test_observations_are_one_per_agent() -> None:
    class Few(Spaces):
        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            return self.said[0]

    for obs, words in (((BOX.sample(),), "2 in all, got 1"), (3.0, "2 in all, got float")):
        rig = Rig(adapt(Few(TWO.observation_space, TWO.action_space, obs, n_agents=2)))
        with pytest.raises(ContractError, match=words):
            rig.reset(seed=0)


def test_ended_agents_get_no_reward() -> None:
    rig = Rig(adapt(Spaces(TWO.observation_space, TWO.action_space, [1.0, 2.0], [True, False], False, {}, n_agents=2)))
    rig.reset(seed=0)
    rig.step([0, 0])
    assert rig.flags()["alive"] == [False, True]
    with pytest.raises(ContractError, match="reward of agent 'agent_0': expected 0, for it has ended, got 1.0"):
        rig.step([0, 0])


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (Discrete(3), 0),
        (Discrete(3, start=4), "a member"),
        (Box(1, 2, (2,)), "a member"),
        (Dict(x=Discrete(2), y=BOX), {"x": 0, "y": np.zeros(2)}),
        (Text(3), "a member"),
    ],
)
def test_the_env_gets_valid_actions_for_ended_agents(space: Any, expected: Any) -> None:
    env = Spaces(pair(BOX), pair(space), [0.0, 0.0], [True, False], False, {}, n_agents=2)
    adapter = adapt(env)
    rig = Rig(adapter)
    rig.reset(seed=0)
    for _ in range(3):
        rig.step([space.sample(), space.sample()])
    for joint in env.given[1:]:
        assert space.contains(joint[0])
        if expected != "a member":
            np.testing.assert_equal(joint[0], expected)
        np.testing.assert_equal(joint[0], env.given[1][0])


@pytest.mark.parametrize(
    ("masks", "words"),
    [
        ([[1, 1], [1, 1]], r"action mask of agent 'agent_0': expected shape \(3,\), got \(2,\)"),
        ([[1, 1, 1]], "'avail_actions' of the info: expected one for each agent, 2 in all, got 1"),
        (None, "'avail_actions' of the info: expected one for each agent, 2 in all, got NoneType"),
        ([[0, 0, -np.inf]] * 2, "'avail_actions': action mask of agent 'agent_0': .*got -inf.*pass `mask == 0`"),
    ],
)
def test_masks_that_fit_no_agent_are_refused(masks: Any, words: str) -> None:
    env = Spaces(pair(BOX), pair(Discrete(3)), 0.0, False, False, {"avail_actions": masks}, n_agents=2)
    rig = Rig(adapt(env))
    rig.reset(seed=0)
    with pytest.raises(ContractError, match=words):
        rig.step([0, 0])


def test_a_mask_may_be_longer_than_the_choices_of_an_agent() -> None:
    env = Spaces(pair(BOX), Tuple([Discrete(3), Discrete(2)]), n_agents=2)
    env.said = (0.0, False, False, {"avail_actions": np.array([[0, 1, 1], [0, 1, 0]], float), "x": 1})
    rig = Rig(adapt(env))
    rig.reset(seed=0)
    assert rig.step([0, 0]) == {COMMON: {"x": 1}}
    masks = [rig.mask(a) for a in range(2)]
    assert [None if mask is None else mask.tolist() for mask in masks] == [[False, True, True], [False, True]]


def test_a_self_resetting_env_returns_final_observations() -> None:
    class Again(Spaces):
        metadata = {"autoreset_mode": "same_step"}

        def step(self, action: Any) -> Any:
            self.given.append(action)
            last = len(self.given) % 2 == 0
            finals = {"final_observation": [np.full(2, 3.0), np.full(2, 4.0)]} if last else {}
            return (np.full(2, 1.0), np.full(2, 2.0)), [1.0, 2.0], last, False, {**finals, "n": len(self.given)}

    with marlvec.make(lambda: Again(pair(BOX), pair(Discrete(3)), n_agents=2), 2, backend="sync") as envs:
        envs.reset(seed=0)
        for t in range(1, 7):
            obs, rewards, terminated, _, infos = envs.step(np.zeros((2, 2), int))
            assert rewards.tolist() == [[1.0, 2.0]] * 2
            assert terminated.tolist() == [[t % 2 == 0] * 2] * 2
            assert obs.tolist() == [[[1.0] * 2, [2.0] * 2]] * 2
            if t % 2 == 0:
                assert infos["final_observation"].tolist() == [[[3.0] * 2, [4.0] * 2]] * 2


def test_saved_states_include_ended_agents() -> None:
    with marlvec.make(lambda: JointEnv(3), 2, backend="sync", env_state="deepcopy") as envs:
        envs.reset(seed=1)
        rng = np.random.default_rng(0)
        for _ in range(30):
            saved, actions = envs.get_state(), rng.integers(0, 5, (6, 2, 3))
            first = [envs.step(a)[:4] for a in actions]
            envs.set_state(saved)
            for a, expected in zip(actions, first, strict=True):
                np.testing.assert_equal(envs.step(a)[:4], expected)


def test_rewards_of_agents_and_of_objectives_are_told_apart_in_words() -> None:
    env = lambda: Spaces(pair(BOX), pair(Discrete(3)), [1.0, 2.0], False, False, {})  # noqa: E731  # two uses
    with marlvec.make(env, 1, backend="sync") as envs:
        envs.reset(seed=0)
        with pytest.raises(EnvRaised, match=r"make\(…, agents='tuple'\).*adapt\(env, reward_weights="):
            envs.step(envs.random_action())


@pytest.mark.parametrize("said", [([1.0, 2.0], [False, False], False, {}), (1.0, False, (False, True), {})])
def test_flags_of_agents_are_told_from_those_of_one_in_words(said: tuple[Any, ...]) -> None:
    with marlvec.make(lambda: Spaces(pair(BOX), pair(Discrete(3)), *said), 1, backend="sync") as envs:
        envs.reset(seed=0)
        with pytest.raises(EnvRaised, match=r"expected a bool, got .* make\(…, agents='tuple'\)"):
            envs.step(envs.random_action())
    with marlvec.make(lambda: Spaces(pair(BOX), pair(Discrete(3)), *said), 1, backend="sync", agents="tuple") as envs:
        envs.reset(seed=0)
        envs.step(envs.random_action())


# --- Rewards of several objectives, and a weight for each


class Vector(Spaces):
    """Rewards as told, beside the spaces of two agents or of one."""

    def __init__(self, reward: Any, *, single: bool = False) -> None:
        spaces = (BOX, Discrete(3)) if single else (pair(BOX), pair(Discrete(3)))
        super().__init__(*spaces, reward, False, False, {}, n_agents=2)


def weighed(env: Any, weights: Any) -> list[float]:
    with marlvec.make(lambda: adapt(env(), reward_weights=weights), 1, backend="sync") as envs:
        envs.reset(seed=0)
        return envs.step(envs.random_action())[1][0].tolist()


def test_weights_make_one_number_of_each_agents_objectives_or_of_the_teams() -> None:
    assert weighed(lambda: Vector([[1.0, 2.0, 0.0], [3.0, 0.0, 5.0]]), [1, 10, 100]) == [21.0, 503.0]
    assert weighed(lambda: Vector(np.array([1.0, 2.0, 3.0])), [1, 10, 100]) == [321.0, 321.0]
    assert weighed(lambda: Vector([1.0, 2.0]), {"agent_0": [1, 10], "agent_1": [0, 1]}) == [21.0, 2.0]
    assert weighed(lambda: Vector(np.array([2.0, 3.0]), single=True), [1, -1]) == [-1.0]


@pytest.mark.parametrize("reward", [1.0, np.float64(1), [1.0, 2.0], [[1.0], [2.0]], "ab"])
@pytest.mark.parametrize("single", [True, False])
def test_rewards_of_another_number_of_objectives_than_weights_are_refused(reward: Any, single: bool) -> None:
    with pytest.raises(ContractError, match="expected 3 numbers, as many as reward_weights, got"):
        weighed(lambda: Vector(reward, single=single), [1, 2, 3])


@pytest.mark.parametrize("weights", [[], 1.0, [[1.0]], "x", [float("nan")], {"agent_0": [1.0]}, [None]])
def test_weights_are_lists_of_finite_numbers(weights: Any) -> None:
    with pytest.raises(ArgumentError, match="reward_weights: expected a list of finite numbers, one for each"):
        adapt(Vector(0.0), reward_weights=weights)
    with pytest.raises(ArgumentError, match="reward_weights: expected an env without an adapter"):
        adapt(adapt(Vector(0.0)), reward_weights=[1.0])


# --- marlenv's API: arrays of all agents, one reward for the team


class Seen(NamedTuple):
    """Stands for marlenv's Observation."""

    data: Any
    available_actions: Any
    extras: Any


class MARLEnv:
    """The name by which an env of marlenv is known, in the module that it has there."""

    __module__ = "marlenv.models.env"


class Walk(MARLEnv):
    """Two agents on a line, until one is 3 steps from the start; cut after 5 steps. No agent may step back to 0."""

    n_agents, state_shape, state_extras_size = 2, (3,), 0
    observation_shape = (2,)

    def __init__(self, *, extras: int = 0, continuous: bool = False, objectives: int = 1) -> None:
        self.extras_size, self.extras_shape, self.objectives = extras, (extras,), objectives
        self.action_space: Any = SimpleNamespace(is_discrete=True, spaces=[SimpleNamespace(size=2)] * 2)
        if continuous:
            bounds = np.ones((2, 1), np.float32)
            self.action_space = SimpleNamespace(is_discrete=False, low=-bounds, high=bounds)
        self.draws = np.random.default_rng()

    def reset(self, *, seed: int | None = None) -> Any:
        if seed is not None:
            self.draws = np.random.default_rng(seed)
        self.places, self.t = self.draws.integers(-1, 2, 2).astype(np.float32), 0
        return self.seen(), self.get_state()

    def step(self, actions: Any) -> Any:
        moves = np.asarray(actions, np.float32).reshape(2)
        self.places += moves if self.action_space.is_discrete else np.rint(moves)
        self.t += 1
        reward = np.full(self.objectives, self.places.sum(), np.float32)
        done = bool((np.abs(self.places) >= 3).any())
        return self.seen(), self.get_state(), reward, done, not done and self.t == 5, {"t": self.t}

    def seen(self) -> Seen:
        data = np.stack([self.places, self.places[::-1]], 1)
        may = np.array([[True, place < 2] for place in self.places])
        return Seen(data, may, np.full((2, self.extras_size), self.t, np.float32))

    def get_state(self) -> Any:
        return SimpleNamespace(data=np.array([*self.places, self.t], np.float32))


@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize("mode", ["same_step", "next_step"])
def test_marlenvs_rows_are_those_of_a_plain_loop(backend: str, mode: str) -> None:
    plain, ends = [Walk(), Walk()], [0, 0]
    with marlvec.make(Walk, 2, backend=backend, autoreset_mode=mode, state=True) as envs:
        assert envs.agents == ("agent_0", "agent_1")
        obs, infos = envs.reset(seed=[3, 4])
        now = [env.reset(seed=seed)[0] for env, seed in zip(plain, (3, 4), strict=True)]
        over = [False, False]
        for t in range(40):
            for i, seen in enumerate(now):
                assert obs[i].tolist() == seen.data.tolist()
                if not over[i]:
                    assert infos["action_mask"][i].tolist() == seen.available_actions.tolist()
                    assert infos["state"][i].tolist() == plain[i].get_state().data.tolist()
            actions = envs.random_action(seed=t)
            obs, rewards, terminated, truncated, infos = envs.step(actions)
            for i, env in enumerate(plain):
                if over[i]:
                    now[i], over[i] = env.reset()[0], False
                    continue
                now[i], _, reward, done, cut, _ = env.step(actions[i])
                assert rewards[i].tolist() == [reward.item()] * 2
                assert terminated[i].tolist() == [done] * 2
                assert truncated[i].tolist() == [cut] * 2
                if done or cut:
                    ends[i] += 1
                    assert infos["final_observation"][i].tolist() == now[i].data.tolist()
                    over[i] = mode == "next_step"
                    now[i] = now[i] if over[i] else env.reset()[0]
    assert min(ends) > 2


def test_marlenvs_extras_actions_and_objectives() -> None:
    with marlvec.make(partial(Walk, extras=2, continuous=True), 1, backend="sync") as envs:
        assert envs.single_action_space.shape == (2, 1)
        obs, infos = envs.reset(seed=0)
        assert "action_mask" not in infos
        obs, *_ = envs.step(np.ones((1, 2, 1), np.float32))
        assert obs["extras"].tolist() == [[[1.0, 1.0]] * 2]
    with marlvec.make(partial(Walk, objectives=2), 1, backend="sync") as envs:
        envs.reset(seed=0)
        with pytest.raises(ContractError, match=r"adapt\(env, reward_weights="):
            envs.step(envs.random_action())
    (first, second) = weighed(partial(Walk, objectives=2), [1.0, 1.0])
    assert first == second
    broken = Walk()
    broken.seen = lambda: np.zeros(2)  # type: ignore[assignment,return-value]  # wrong on purpose
    with pytest.raises(ContractError, match="expected marlenv's Observation of 2 agents, got ndarray"):
        Rig(adapt(broken)).reset()
    assert check_env(Walk, raise_first=False) == []

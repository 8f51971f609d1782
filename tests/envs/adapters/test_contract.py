"""What an env may not return: each breach is one ContractError naming the agent, what was expected and what came."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Tuple

from marlvec.envs import GymnasiumAdapter, RLlibAdapter, adapt
from marlvec.errors import ContractError
from marlvec.testing.scripted import CounterEnv, KeyedEnv, SampledEnv, Script, ScriptedParallelEnv, SingleEnv, TurnEnv
from tests.checklist import stable_id
from tests.envs.support import Rig

Spoil = Callable[[Any], Any]
REWARDS = [None, "1.0", np.zeros(1), np.zeros(2), 1 + 0j, np.complex128(1), 10**400, [1.0], b"1"]
FLAGS = ["no", 2, 0, 1, None, np.zeros(1, bool), np.array(True), 1.0]


def spoiled(spoil: Spoil, at: int = 3, **options: Any) -> Rig:
    """A rig on a Parallel env whose step ``at`` of the second episode passes through ``spoil``; played up to there."""

    class Spoiled(CounterEnv):
        def step(self, actions: dict[str, Any]) -> Any:
            result = super().step(actions)
            return spoil(result) if (self.world.episode, self.world.t) == (1, at) else result

    rig = Rig(adapt(Spoiled(length=5, **options)))
    rig.reset(seed=0)
    while not rig.done:
        rig.step([0, 1, 2])
    rig.reset()
    for _ in range(at - 1):
        rig.step([0, 1, 2])
    return rig


def replace(place: int, agent: str, value: Any) -> Spoil:
    """Put a value for one agent into one of the five dicts."""

    def spoil(result: Any) -> Any:
        result[place][agent] = value
        return result

    return spoil


def drop(place: int, agent: str) -> Spoil:
    def spoil(result: Any) -> Any:
        del result[place][agent]
        return result

    return spoil


def refuses(rig: Rig, *words: str) -> None:
    with pytest.raises(ContractError) as caught:
        rig.step([0, 1, 2])
    for word in words:
        assert word in str(caught.value)


@pytest.mark.fault("C9")
@pytest.mark.parametrize("reward", REWARDS, ids=repr)
def test_a_reward_is_a_real_scalar(reward: Any) -> None:
    refuses(
        spoiled(replace(1, "agent_1", reward)), "reward", "agent_1", "expected a real number", type(reward).__name__
    )


@pytest.mark.parametrize(
    ("reward", "expected"),
    [(3, 3.0), (True, 1.0), (np.float16(0.5), 0.5), (np.int8(-3), -3.0), (np.array(2.5), 2.5), (np.inf, np.inf)],
)
def test_other_real_scalars_are_rewards(reward: Any, expected: float) -> None:
    rig = spoiled(replace(1, "agent_1", reward))
    rig.step([0, 1, 2])
    assert rig.reward_A[1] == expected


def test_nan_observations_are_passed_on() -> None:
    rig = spoiled(replace(1, "agent_1", float("nan")))
    rig.step([0, 1, 2])
    assert np.isnan(rig.reward_A).tolist() == [False, True, False]


@pytest.mark.fault("C10")
@pytest.mark.parametrize("place", [2, 3])
@pytest.mark.parametrize("value", FLAGS, ids=repr)
def test_a_flag_is_a_bool(place: int, value: Any) -> None:
    refuses(spoiled(replace(place, "agent_2", value)), "agent_2", "expected a bool", type(value).__name__)


@pytest.mark.fault("D1")
@pytest.mark.parametrize(
    ("place", "what"), [(0, "observations"), (1, "rewards"), (2, "terminations"), (3, "truncations")]
)
def test_a_live_agent_is_in_every_dict(place: int, what: str) -> None:
    refuses(spoiled(drop(place, "agent_0")), "agent_0", what, "missing")


@pytest.mark.fault("D1")
def test_a_live_agent_is_in_the_first_observations() -> None:
    class Forgetful(CounterEnv):
        def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            obs, infos = super().reset(seed, options)
            del obs["agent_2"]
            return obs, infos

    with pytest.raises(ContractError, match=r"agent_2.*no observation"):
        Rig(adapt(Forgetful())).reset(seed=0)


@pytest.mark.fault("D1")
def test_a_defaultdict_does_not_hide_a_missing_reward() -> None:
    def spoil(result: Any) -> Any:
        obs, rewards, *rest = result
        del rewards["agent_1"]
        return obs, defaultdict(int, rewards), *rest

    rig = spoiled(spoil)
    refuses(rig, "agent_1", "missing", "rewards")


@pytest.mark.fault("D2")
@pytest.mark.parametrize("place", [0, 1, 2, 3])
@pytest.mark.parametrize("agent", ["agent_3", "__all__", 7, ("a", 1)])
def test_unknown_agents_in_dicts_raise(place: int, agent: Any) -> None:
    value = {0: np.zeros(7), 1: 0.0, 2: False, 3: False}[place]
    refuses(spoiled(replace(place, agent, value)), repr(agent), "unknown", "agent_0")


def test_unknown_keys_of_infos_are_the_whole_envs() -> None:
    rig = spoiled(replace(4, "weather", {"rain": 1}))
    assert rig.step([0, 1, 2]) == {"__common__": {"weather": {"rain": 1}}}


@pytest.mark.fault("D2")
@pytest.mark.parametrize("name", ["__all__", "__common__"])
def test_reserved_words_name_no_agent(name: str) -> None:
    class Named(CounterEnv):
        def __init__(self) -> None:
            super().__init__()
            self.possible_agents = ["agent_0", name, "agent_2"]

    with pytest.raises(ContractError, match="reserved"):
        adapt(Named())


@pytest.mark.fault("D4")
@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_an_agent_that_ended_gets_no_more_data(place: int) -> None:
    class Haunted(ScriptedParallelEnv):
        def step(self, actions: dict[str, Any]) -> Any:
            result = super().step(actions)
            if self.world.t == 4:
                result[place]["agent_0"] = {0: np.zeros(7), 1: 1.0, 2: True, 3: False}[place]
            return result

    rig = Rig(adapt(Haunted(Script([0, 0], [2, 6], ["terminated"] * 2), agent_num=2)))
    rig.reset(seed=0)
    for _ in range(3):
        rig.step([0, 0])
    with pytest.raises(ContractError, match=r"agent_0.*ended"):
        rig.step([0, 0])


@pytest.mark.fault("D3")
def test_no_agent_returns() -> None:
    class Revived(ScriptedParallelEnv):
        def step(self, actions: dict[str, Any]) -> Any:
            result = super().step({agent: action for agent, action in actions.items() if agent in self.agents})
            if self.world.t == 3:
                self.agents.append("agent_0")
                for table, value in zip(result, (np.zeros(7), 0.0, False, False, {}), strict=True):
                    table["agent_0"] = value
            return result

    rig = Rig(adapt(Revived(Script([0, 0], [1, 6], ["truncated"] * 2), agent_num=2)))
    rig.reset(seed=0)
    rig.step([0, 0])
    assert rig.alive_A.tolist() == [False, True]
    rig.step([0, 0])
    with pytest.raises(ContractError, match=r"agent_0.*cannot come back"):
        rig.step([0, 0])


def test_an_agent_that_leaves_without_a_flag_raises() -> None:
    class Leaky(CounterEnv):
        def step(self, actions: dict[str, Any]) -> Any:
            result = super().step(actions)
            if self.world.t == 2:
                self.agents.remove("agent_1")
            return result

    rig = Rig(adapt(Leaky()))
    rig.reset(seed=0)
    rig.step([0, 0, 0])
    with pytest.raises(ContractError, match=r"agent_1.*env\.agents"):
        rig.step([0, 0, 0])


@pytest.mark.fault("C11")
@pytest.mark.parametrize("result", [(), (1, 2, 3), tuple(range(6)), None, "step", {}], ids=repr)
def test_a_step_of_another_length_quotes_the_api(result: Any) -> None:
    """Four values, and observations alone from a reset, are no breach: they are the older API (checklist 8)."""
    refuses(
        spoiled(lambda _: result), "expected a tuple of 5", "observations, rewards, terminations, truncations, infos"
    )
    single = Rig(GymnasiumAdapter(SingleEnv()))
    single.reset(seed=0)
    single.env.unwrapped.step = lambda action: result
    with pytest.raises(ContractError, match="expected a tuple of 5"):
        single.step([0])


@pytest.mark.fault("C5")
@pytest.mark.parametrize(
    "row", [np.zeros(7, complex), np.zeros(7, object), np.zeros(7, "U3"), np.array(["x"] * 7, object)], ids=str
)
def test_an_observation_of_another_kind_of_number(row: Any) -> None:
    refuses(spoiled(replace(0, "agent_1", row)), "agent_1", "dtype")


@pytest.mark.fault("C5")
def test_floats_are_no_integers() -> None:
    class Floats(SampledEnv):
        def step(self, actions: dict[str, Any]) -> Any:
            obs, *rest = super().step(actions)
            return {agent: np.float32(value) + 0.5 for agent, value in obs.items()}, *rest

    rig = Rig(adapt(Floats(Discrete(4), Discrete(2))))
    rig.reset(seed=0)
    refuses(rig, "agent_0", "int64", "float32")


@pytest.mark.fault("C6")
@pytest.mark.parametrize(
    "row", [np.zeros(1), np.float64(0), 0.0, np.zeros((7, 1)), np.zeros((1, 7)), np.zeros(6), np.zeros(0)], ids=str
)
def test_an_observation_of_another_shape(row: Any) -> None:
    refuses(spoiled(replace(0, "agent_1", row)), "agent_1", "expected shape (7,)", str(np.shape(row)))


@pytest.mark.fault("C7")
@pytest.mark.parametrize("value", [None, {}, [], [1, [2]], "text", object()], ids=lambda value: stable_id(repr(value)))
def test_no_observation_at_all(value: Any) -> None:
    refuses(spoiled(replace(0, "agent_1", value)), "agent_1", "expected")


@pytest.mark.fault("C7")
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda obs: {"pos": obs["pos"]}, ["keys", "pair", "pos"]),
        (lambda obs: {**obs, "extra": 1}, ["extra"]),
        (lambda obs: {**obs, "pair": obs["pair"][0]}, ["/pair", "tuple of length 2"]),
        (lambda obs: {**obs, "pair": (*obs["pair"], 0)}, ["/pair", "length 3"]),
        (lambda obs: {**obs, "pair": (None, obs["pair"][1])}, ["pair/0"]),
        (lambda obs: obs["pos"], ["expected a dict"]),
    ],
)
def test_a_tree_with_another_structure_names_the_path(spoil: Spoil, words: list[str]) -> None:
    class Spoiled(SampledEnv):
        def step(self, actions: dict[str, Any]) -> Any:
            obs, *rest = super().step(actions)
            if self._t == 3:
                obs["agent_1"] = spoil(obs["agent_1"])
            return obs, *rest

    space = Dict({"pos": Box(-1, 1, (2,)), "pair": Tuple([Discrete(3), Box(0, 1, (1,))])})
    rig = Rig(adapt(Spoiled(space, Discrete(2))))
    rig.reset(seed=0)
    rig.step([0, 0])
    rig.step([0, 0])
    refuses(rig, "agent_1", *words)


@pytest.mark.fault("C12")
def test_an_info_is_a_dict() -> None:
    refuses(spoiled(replace(4, "agent_1", 5)), "info of agent 'agent_1'", "int")
    single = Rig(adapt(SingleEnv()))
    single.reset(seed=0)
    single.env.unwrapped.step = lambda action: (np.zeros(7), 0.0, False, False, None)
    with pytest.raises(ContractError, match="info: expected a dict, got NoneType"):
        single.step([0])


@pytest.mark.fault("D12")
@pytest.mark.parametrize(
    ("selected", "words"),
    [("player_1", "agent_selection: expected a live agent"), ("nobody", "unknown agent 'nobody'")],
)
def test_the_selected_agent_is_live(selected: str, words: str) -> None:
    class Confused(TurnEnv):
        def step(self, action: Any) -> None:
            super().step(action)
            if self.world.t == 4 and len(self.agents) < 3:
                self.agent_selection = selected

    script = Script([0, 0, 0], [8, 2, 8], ["terminated"] * 3)
    rig = Rig(adapt(Confused(script, agent_num=3)))
    rig.reset(seed=0)
    for _ in range(3):
        rig.step([0, 0, 0])
    with pytest.raises(ContractError, match=words):
        rig.step([0, 0, 0])


@pytest.mark.fault("D12")
def test_a_dead_step_that_removes_no_agent_does_not_hang() -> None:
    class Undead(TurnEnv):
        def step(self, action: Any) -> None:
            if action is not None:
                super().step(action)

    rig = Rig(adapt(Undead(Script.together(2, 3))))
    rig.reset(seed=0)
    rig.step([0, 0])
    rig.step([0, 0])
    with pytest.raises(
        ContractError, match=r"env.agents: expected the dead agent 'player_\d' to leave it in step\(None\)"
    ):
        rig.step([0, 0])


@pytest.mark.fault("D5")
@pytest.mark.parametrize("kind", [ScriptedParallelEnv, TurnEnv, KeyedEnv])
def test_an_episode_without_anyone(kind: Any) -> None:
    """Checklist 53: an error, never a hang."""

    class Empty(kind):  # type: ignore[misc]  # the class is a parameter
        def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            result = super().reset(seed=seed, options=options)
            self.agents = []
            return result if result is None else ({}, {})

    with pytest.raises(ContractError, match="at least one"):
        Rig(adapt(Empty(Script.together(2, 3), agent_num=2))).reset(seed=0)


def test_an_rllib_step_says_all() -> None:
    class Silent(KeyedEnv):
        def step(self, actions: dict[Any, Any]) -> Any:
            obs, rewards, terminateds, truncateds, infos = super().step(actions)
            del terminateds["__all__"]
            return obs, rewards, terminateds, truncateds, infos

    rig = Rig(RLlibAdapter(Silent(Script.together(3, 4))))
    rig.reset(seed=0)
    refuses(rig, "__all__", "ParallelAdapter")


def test_a_seed_that_cannot_be_given_is_not_dropped() -> None:
    class Seedless(gymnasium.Env[Any, Any]):
        observation_space = Box(0, 1, (1,))
        action_space = Discrete(2)

        def reset(self) -> Any:  # type: ignore[override]  # that is the point
            return np.zeros(1, np.float32), {}

    rig = Rig(adapt(Seedless()))
    rig.reset()
    with pytest.raises(ContractError, match="takes no seed"):
        rig.reset(seed=1)
    with pytest.raises(ContractError, match="expected no options, since it takes none"):
        rig.reset(options={"a": 1})

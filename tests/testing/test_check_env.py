"""check_env: good envs of all forms pass it, and each kind of broken one is caught, and told exactly."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Sequence, Text, Tuple
from pettingzoo import ParallelEnv

import marlvec
from marlvec.envs import TimeLimit, adapt
from marlvec.errors import ArgumentError, ContractError, UnknownEnvError
from marlvec.spaces import AnyText
from marlvec.testing import (
    CounterEnv,
    KeyedEnv,
    NoOpEnv,
    SampledEnv,
    Script,
    ScriptedParallelEnv,
    SingleEnv,
    TurnEnv,
    check_env,
)
from tests.envs.adapters.test_self_resetting import (
    SelfResettingKeyedEnv,
    SelfResettingParallelEnv,
    SelfResettingSingleEnv,
)
from tests.vector.support.drivers import JOINT, JointEnv

OBSERVATION = Dict(camera=Dict(left=Box(0.0, 1.0, (2,), np.float32)), clock=Discrete(100))


def waits(t: int, a: int) -> bool:
    return (t + a) % 3 == 0


def rewound(build: Callable[[], Any]) -> Callable[[], Any]:
    """Scripted envs number their episodes for life; a seed makes these begin again at the first."""

    def make() -> Any:
        env = build()
        reset = env.reset

        def reset_and_rewind(seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            if seed is not None:
                env.world.episode = -1
            return reset(seed=seed, options=options)

        env.reset = reset_and_rewind
        return env

    return make


EVERY_SPACE = Dict(
    a=Tuple((Box(-1, 1, (2, 1)), Discrete(3, start=-1), Box(0, 255, (), np.uint8))),
    b=MultiBinary(2),
    c=MultiDiscrete([2, 3]),
    d=Text(4),
    e=Sequence(Discrete(2)),
)
SCRIPTED: dict[str, Callable[[], Any]] = {
    "parallel": partial(ScriptedParallelEnv, state=True),
    "parallel, reused buffer": partial(ScriptedParallelEnv, reuse_buffer=True, masked=True),
    "parallel, old": partial(ScriptedParallelEnv, old_api=True, dtype="float32"),
    "counter": CounterEnv,
    "turns": partial(TurnEnv, state=True),
    "turns, masked": partial(TurnEnv, masked=True, dead_first=False, agent_num=3),
    "keyed": partial(KeyedEnv, waits=waits),
    "keyed, old": partial(KeyedEnv, waits=waits, last_obs=False, int_ids=True, old_api=True),
    "single": partial(SingleEnv, [3, 1, 5], info_every=2),
    "single, old": partial(SingleEnv, [2, 4], old_api=True, masked=True),
    **{f"joint, {name}": partial(JointEnv, **options) for name, options in JOINT.items()},
}
PLAIN: dict[str, Any] = {
    "noop": partial(NoOpEnv, length=4),
    "every space": partial(SampledEnv, EVERY_SPACE, EVERY_SPACE),
    **{name: name for name in ("simple_spread", "simple_tag", "connect_four", "tictactoe", "CartPole-v1")},
}


@pytest.mark.mostly_slow("checks whole envs or connectors many times", quick=8)
@pytest.mark.parametrize("build", SCRIPTED.values(), ids=SCRIPTED)
def test_scripted_envs_of_all_forms_pass(build: Callable[[], Any]) -> None:
    options: dict[str, Any] = getattr(build, "keywords", {})
    expected = 2 if options.get("old_api") else 0  # what reset() returns, and what step() does
    for seed in range(5):
        findings = check_env(rewound(build), episodes=4, seed=seed, raise_first=False)
        assert [one.severity for one in findings if "the old API" in one.got] == ["minor"] * expected
        assert len(findings) == expected


@pytest.mark.mostly_slow("checks whole envs or connectors many times", quick=3)
@pytest.mark.parametrize("build", SCRIPTED.values(), ids=SCRIPTED)
def test_and_so_do_envs_that_write_into_slots(build: Callable[[], Any]) -> None:
    check_env(lambda: TimeLimit(adapt(rewound(build)()), 3), episodes=4)


@pytest.mark.mostly_slow("checks whole envs or connectors many times", quick=2)
@pytest.mark.parametrize("env", PLAIN.values(), ids=PLAIN)
def test_envs_as_they_are_pass(env: Any) -> None:
    check_env(env, episodes=2)


@pytest.mark.parametrize("style", ["own", "common"])
def test_envs_that_reset_themselves_pass(style: str) -> None:
    own = "final_observation" if style == "common" else "final_obs"
    check_env(rewound(partial(SelfResettingSingleEnv, [3, 1], style=own)), episodes=4)
    check_env(rewound(partial(SelfResettingParallelEnv, style=style)), episodes=4)
    check_env(rewound(partial(SelfResettingKeyedEnv, style=style, waits=waits)), episodes=4)
    check_env(lambda: TimeLimit(adapt(rewound(partial(SelfResettingKeyedEnv, style=style))()), 30), episodes=4)


class Forgetful(CounterEnv):
    def __init__(self) -> None:
        super().__init__(3)
        self.has_auto_reset = True

    def step(self, actions: dict[str, Any]) -> Any:
        obs, rewards, ended, cut, infos = super().step(actions)
        if not self.agents:
            obs, infos = self.reset()
        return obs, rewards, ended, cut, infos


def test_and_must_hand_out_what_they_saw_last() -> None:
    with pytest.raises(ContractError, match="final observation of agent 'agent_0': expected one in its info under"):
        check_env(Forgetful)


def test_an_env_that_numbers_its_episodes_does_not_begin_again() -> None:
    with pytest.raises(ContractError, match="from the same instance, reset again"):
        check_env(CounterEnv)


class Good(ParallelEnv):  # type: ignore[misc]  # pettingzoo has no type information
    """Two agents with trees of observations; ``a_0`` ends in step 3, ``a_1`` in step 5."""

    ends = (3, 5)
    observation = OBSERVATION
    action: Any = Discrete(3)

    def __init__(self) -> None:
        self.possible_agents = ["a_0", "a_1"]
        self.agents: list[str] = []
        self.episode, self.t = 0, 0
        self.rng = np.random.default_rng()

    def observation_space(self, agent: str) -> Any:
        return self.observation

    def action_space(self, agent: str) -> Any:
        return self.action

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if seed is not None:
            self.rng, self.episode = np.random.default_rng(seed), 0
        self.episode += 1
        self.t = 0
        self.agents = self.possible_agents[:]
        return {agent: self.see(agent) for agent in self.agents}, self.infos()

    def step(self, actions: dict[str, Any]) -> Any:
        self.t += 1
        here = self.agents
        obs = {agent: self.see(agent) for agent in here}
        rewards: dict[str, Any] = {agent: float(actions[agent]) for agent in here}
        over: dict[str, Any] = {agent: self.t >= self.ends[int(agent[-1])] for agent in here}
        infos = self.infos()
        self.agents = [agent for agent in here if not over[agent]]
        return obs, rewards, over, dict.fromkeys(here, False), infos

    def see(self, agent: str) -> Any:
        return {"camera": {"left": self.rng.random(2, np.float32)}, "clock": self.t}

    def infos(self) -> Any:
        return {agent: {} for agent in self.agents}


def test_the_env_they_are_made_of_is_good() -> None:
    check_env(Good)
    check_env(GoodJoint)


class RememberingOneSeed(Good):
    """Begins seed 5 by what was played before; all others as it should."""

    before = 0

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        obs, infos = super().reset(seed, options)
        for one in obs.values():
            one["clock"] = self.before if seed == 5 else 0
        self.before = self.before if seed is None else seed
        return obs, infos


def test_a_seed_that_depends_on_what_was_played_before_is_found_though_others_do_not() -> None:
    (found,) = check_env(RememberingOneSeed, raise_first=False)
    assert (found.check, found.severity, found.times) == ("reset", "serious", 1)
    assert found.got == "int 45 from a second instance, which had played other episodes before (seed 5)"
    assert check_env(RememberingOneSeed, skip="reset", raise_first=False) == []


# --- broken in one thing each; from episode 2 or step 2 on where that can be ---


class WrongDtype(Good):
    def see(self, agent: str) -> Any:
        late = agent == "a_1" and self.t == 4
        return {"camera": {"left": self.rng.random(2, np.float64 if late else np.float32)}, "clock": self.t}


class WrongShape(Good):
    def see(self, agent: str) -> Any:
        return {"camera": {"left": np.zeros(3 if self.t == 2 else 2, np.float32)}, "clock": self.t}


class OutOfBounds(Good):
    def see(self, agent: str) -> Any:
        return {"camera": {"left": np.array([0.0, 1.5 if self.t == 2 else 1.0], np.float32)}, "clock": self.t}


class NotANumber(Good):
    def see(self, agent: str) -> Any:
        return {"camera": {"left": np.array([0.0, np.nan if self.t == 5 else 1.0], np.float32)}, "clock": self.t}


class ListForArray(Good):
    def see(self, agent: str) -> Any:
        return {"camera": {"left": [0.0, 1.0]}, "clock": self.t}


class FloatForChoice(Good):
    def see(self, agent: str) -> Any:
        return {"camera": {"left": np.zeros(2, np.float32)}, "clock": float(self.t)}


class ListOfAnotherShape(Good):
    def see(self, agent: str) -> Any:
        return {"camera": {"left": [0.0, 1.0, 1.0]}, "clock": self.t}


class FloatsForInts(Good):
    observation = Dict(camera=Dict(left=Box(0, 9, (2,), np.uint8)), clock=Discrete(100))

    def see(self, agent: str) -> Any:
        return {"camera": {"left": np.ones(2, np.float32)}, "clock": self.t}


class IntsForBytes(FloatsForInts):
    def see(self, agent: str) -> Any:
        return {"camera": {"left": np.full(2, 5 if self.t < 5 else 300, np.int64)}, "clock": self.t}


class MissingLeaf(Good):
    def see(self, agent: str) -> Any:
        return {"camera": {}, "clock": self.t}


class NewSpaces(Good):
    def action_space(self, agent: str) -> Any:
        return Discrete(3)


class SpaceAfterReset(Good):
    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        result = super().reset(seed, options)
        if self.episode == 2:
            self.action = Discrete(4)
        return result


class SpaceThatGrows(Good):
    def __init__(self) -> None:
        super().__init__()
        self.action = Discrete(3)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.action.n += 1
        return super().reset(seed, options)


class Step(Good):
    """Broken in what a step returns, or in what is left behind."""

    def step(self, actions: dict[str, Any]) -> Any:
        return self.spoil(*super().step(actions))

    def spoil(self, obs: Any, rewards: Any, ended: Any, cut: Any, infos: Any) -> Any:
        raise AssertionError("for subclasses")


class ArrayReward(Step):
    def spoil(self, obs: Any, rewards: Any, ended: Any, cut: Any, infos: Any) -> Any:
        return obs, {agent: np.array([value]) for agent, value in rewards.items()}, ended, cut, infos


class NoAxesReward(Step):
    def spoil(self, obs: Any, rewards: Any, ended: Any, cut: Any, infos: Any) -> Any:
        return obs, {agent: np.array(value) for agent, value in rewards.items()}, ended, cut, infos


class HugeReward(Step):
    def spoil(self, obs: Any, rewards: Any, ended: Any, cut: Any, infos: Any) -> Any:
        return obs, dict.fromkeys(rewards, 10**400), ended, cut, infos


class InfiniteReward(Step):
    def spoil(self, obs: Any, rewards: Any, ended: Any, cut: Any, infos: Any) -> Any:
        return obs, dict.fromkeys(rewards, np.inf if self.t == 4 else 0.0), ended, cut, infos


class NoReward(Step):
    def spoil(self, obs: Any, rewards: Any, ended: Any, cut: Any, infos: Any) -> Any:
        del rewards["a_1"]
        return obs, rewards, ended, cut, infos


class IntFlag(Step):
    def spoil(self, obs: Any, rewards: Any, ended: Any, cut: Any, infos: Any) -> Any:
        return obs, rewards, ended, dict.fromkeys(cut, 0), infos


class UnknownAgent(Step):
    def spoil(self, obs: Any, rewards: Any, ended: Any, cut: Any, infos: Any) -> Any:
        return obs, rewards | {"a_9": 0.0}, ended, cut, infos


class DataAfterDeath(Step):
    def spoil(self, obs: Any, rewards: Any, ended: Any, cut: Any, infos: Any) -> Any:
        return {**obs, "a_0": self.see("a_0")}, rewards, ended, cut, infos


class Rebirth(Step):
    def spoil(self, obs: Any, rewards: Any, ended: Any, cut: Any, infos: Any) -> Any:
        if self.t == 4:
            self.agents = ["a_0", "a_1"]
        return obs, rewards, ended, cut, infos


class Lingers(Step):
    def spoil(self, obs: Any, rewards: Any, ended: Any, cut: Any, infos: Any) -> Any:
        self.agents = list(obs)
        return obs, rewards, ended, cut, infos


class LeavesInSilence(Step):
    def spoil(self, obs: Any, rewards: Any, ended: Any, cut: Any, infos: Any) -> Any:
        return obs, rewards, dict.fromkeys(ended, False), cut, infos


class InfoIsNone(Step):
    def spoil(self, obs: Any, rewards: Any, ended: Any, cut: Any, infos: Any) -> Any:
        return obs, rewards, ended, cut, dict.fromkeys(infos)


class FourValues(Step):
    def spoil(self, obs: Any, rewards: Any, ended: Any, cut: Any, infos: Any) -> Any:
        return obs, rewards, ended, infos


class NoInfos(Good):
    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return super().reset(seed, options)[0]


class NoObservations(Good):
    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed, options)


class SameSeed(Good):
    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return super().reset(0, options)


class SameSeedOfNumpy(SameSeed):
    """It draws in its resets alone."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        np.random.seed(0)  # noqa: NPY002  # that is the fault
        self.left = np.random.random(2).astype(np.float32)  # noqa: NPY002  # that is the fault
        return Good.reset(self, seed, options)

    def see(self, agent: str) -> Any:
        return {"camera": {"left": self.left}, "clock": self.t}


class SpaceNotMethod(Good):
    action_space: Any = Discrete(3)


class MultiAgentEnv:
    """JaxMARL's base class is called as RLlib's is."""


class Functional(MultiAgentEnv):
    agents = ["a_0", "a_1"]
    observation_space = action_space = Good.observation_space

    def reset(self, key: Any) -> Any:
        raise AssertionError("not called")

    def step(self, key: Any, state: Any, actions: Any, reset_state: Any = None) -> Any:
        raise AssertionError("not called")


class SixValues(Step):
    def spoil(self, obs: Any, rewards: Any, ended: Any, cut: Any, infos: Any) -> Any:
        return obs, rewards, ended, cut, infos, {}


class NeverEnds(Good):
    ends = (9_000, 10_000)

    def see(self, agent: str) -> Any:
        return {"camera": {"left": np.zeros(2, np.float32)}, "clock": self.t % 100}


class EatsActions(Good):
    def step(self, actions: dict[str, Any]) -> Any:
        result = super().step(actions)
        if self.episode == 3:
            actions.popitem()
        return result


class ScalesActions(Good):
    action = Box(-1.0, 1.0, (1,))

    def step(self, actions: dict[str, Any]) -> Any:
        for action in actions.values():
            action *= 0.5
        return super().step(dict.fromkeys(actions, 0))


class FillsOptions(Good):
    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if options is not None:
            options.setdefault("size", 3)
        return super().reset(seed, options)


class Raises(Good):
    def step(self, actions: dict[str, Any]) -> Any:
        if self.episode == 3:
            actions = dict.fromkeys(actions, 1 // (4 - self.t))
        return super().step(actions)


class RandomFromStepTwo(Good):
    """PettingZoo's own seed test took one step."""

    def see(self, agent: str) -> Any:
        left = self.rng.random(2, np.float32)
        if self.t >= 2:
            left = np.array([random.random(), 0.0], np.float32)
        return {"camera": {"left": left}, "clock": self.t}


class RandomInEpisodeThree(Good):
    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        result = super().reset(seed, options)
        if self.episode == 3:
            self.rng = np.random.default_rng()
        return result


class RemembersBeforeTheSeed(Good):
    """Two fresh ones agree; one that has played does not begin again."""

    def __init__(self) -> None:
        super().__init__()
        self.played = 0

    def step(self, actions: dict[str, Any]) -> Any:
        obs, rewards, ended, cut, infos = super().step(actions)
        self.played += 1
        return obs, dict.fromkeys(rewards, float(self.played)), ended, cut, infos


class NobodyMay(Good):
    def infos(self) -> Any:
        return {agent: {"action_mask": np.full(3, self.t != 2, np.int8)} for agent in self.agents}


class ShortMask(Good):
    def infos(self) -> Any:
        return {agent: {"action_mask": np.ones(2, np.int8)} for agent in self.agents}


class WrongState(Good):
    def __init__(self) -> None:
        super().__init__()
        self.state_space = Box(0.0, 9.0, (1,), np.float64)

    def state(self) -> Any:
        return np.array([self.t], np.float64 if self.t < 3 else np.float32)


class TurnBroken(TurnEnv):
    """A game of eight moves; `spoil` breaks it after the third."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Script.together(2, 8), **options)

    def step(self, action: Any) -> None:
        super().step(action)
        if self.world.t == 3:
            self.spoil()

    def spoil(self) -> None:
        raise AssertionError("for subclasses")


class SelectsAStranger(TurnBroken):
    def spoil(self) -> None:
        self.agent_selection = "player_9"


class PaysInText(TurnBroken):
    def spoil(self) -> None:
        self.rewards["player_1"] = "3"  # type: ignore[assignment]  # that is the fault


class DropsAPlayer(TurnBroken):
    def spoil(self) -> None:
        self.agents = [agent for agent in self.agents if agent == self.agent_selection]


class OldFlags(TurnBroken):
    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        super().reset(seed, options)
        self.dones = self.__dict__.pop("terminations")


class DeadStay(TurnEnv):
    def __init__(self) -> None:
        super().__init__(Script.together(2, 4))

    def _was_dead_step(self, action: Any) -> None:
        assert action is None


class PaysTwice(TurnEnv):
    """Pays in its fourth move, which ends the game for all, and leaves that standing in the dead steps."""

    def __init__(self) -> None:
        super().__init__(Script.together(2, 4))

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        self.world.episode = -1
        super().reset(seed, options)

    def _was_dead_step(self, action: Any) -> None:
        paid = dict(self.rewards)
        super()._was_dead_step(action)
        self.rewards.update({agent: paid[agent] for agent in self.agents})


class PaysTheLeaverTwice(PaysTwice):
    def _was_dead_step(self, action: Any) -> None:
        agent, paid = self.agent_selection, dict(self.rewards)
        super(PaysTwice, self)._was_dead_step(action)
        self.rewards[agent] = paid[agent]


class Single(SingleEnv):
    def __init__(self) -> None:
        super().__init__(5)
        self.world.episode = -1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.world.episode = -1
        return super().reset(seed=seed, options=options)


class SingleTextReward(Single):
    def step(self, action: Any) -> Any:
        obs, _, ended, cut, info = super().step(action)
        return obs, "1.0", ended, cut, info


class SingleNoInfo(Single):
    def step(self, action: Any) -> Any:
        return *super().step(action)[:4], None


class SingleStateAfterReset(Single):
    def __init__(self) -> None:
        super().__init__()
        self.state_space = Box(0.0, 9.0, (1,), np.float64)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if self.world.t:
            self.state_space = Box(0.0, 10.0, (1,), np.float64)
        return super().reset(seed=seed, options=options)

    def state(self) -> Any:
        return np.ones(1)


class SingleNoisy(gymnasium.Wrapper[Any, Any, Any, Any]):
    def __init__(self) -> None:
        super().__init__(Single())

    def step(self, action: Any) -> Any:
        obs, reward, ended, cut, info = super().step(action)
        return obs, reward, ended, cut or random.random() < 0.3, info


class NoAll(KeyedEnv):
    def step(self, actions: Any) -> Any:
        obs, rewards, ended, cut, infos = super().step(actions)
        del ended["__all__"]
        return obs, rewards, ended, cut, infos


class KeyedAfterDeath(KeyedEnv):
    def __init__(self) -> None:
        super().__init__(Script([0, 0], [2, 6], ["terminated"] * 2), agent_num=2)

    def step(self, actions: Any) -> Any:
        obs, rewards, ended, cut, infos = super().step(actions)
        return obs, rewards | {"agent_0": 1.0}, ended, cut, infos


class Slotted(TimeLimit):
    """Writes into slots: two agents, of whom ``agent_0`` ends in step 2 of 4."""

    def __init__(self) -> None:
        script = Script([0, 0], [2, 4], ["terminated"] * 2)
        super().__init__(adapt(rewound(partial(ScriptedParallelEnv, script, agent_num=2))()), 100)

    def step(self, slot: Any) -> Any:
        told = super().step(slot)
        self.spoil(slot)
        return told

    def spoil(self, slot: Any) -> None:
        raise AssertionError("for subclasses")


class ActsWhenDead(Slotted):
    def spoil(self, slot: Any) -> None:
        slot.acting[0] = True


class DoneTooSoon(Slotted):
    def spoil(self, slot: Any) -> None:
        slot.done = True


class PaysTheDead(Slotted):
    def spoil(self, slot: Any) -> None:
        slot.reward[0] = 1.0


class VanishesFromSlot(Slotted):
    def spoil(self, slot: Any) -> None:
        slot.alive[1] = slot.acting[1] = False


class GoodJoint(gymnasium.Env[Any, Any]):
    """Two agents in one Gymnasium env; the first ends in step 2, the second in step 4."""

    n_agents = 2
    seen = Box(0.0, 9.0, (2,), np.float32)
    observation_space, action_space = Tuple([seen, seen]), Tuple([Discrete(3), Discrete(3)])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self.spoil({"obs": self.see(), "infos": {}})["obs"], {}

    def step(self, action: Any) -> Any:
        self.t += 1
        whole = {
            "obs": self.see(),
            "rewards": [float(self.t < 3), 1.0],
            "ended": [self.t >= 2, self.t >= 4],
            "cut": False,
            "infos": {"avail_actions": [[1, 0, 1], [0, 1, 1, 0]]},
        }
        return tuple(self.spoil(whole).values())

    def see(self) -> Any:
        return [np.full(2, self.t + a, np.float32) for a in range(2)]

    def spoil(self, whole: dict[str, Any]) -> dict[str, Any]:
        return whole


class JointDtype(GoodJoint):
    def spoil(self, whole: dict[str, Any]) -> dict[str, Any]:
        return {**whole, "obs": [whole["obs"][0], whole["obs"][1].astype(np.float64)]}


class JointOneObservation(GoodJoint):
    def spoil(self, whole: dict[str, Any]) -> dict[str, Any]:
        return {**whole, "obs": whole["obs"][: 1 if self.t == 1 else 2]}


class JointObjectives(GoodJoint):
    def spoil(self, whole: dict[str, Any]) -> dict[str, Any]:
        return {**whole, "rewards": np.ones(3)} if "rewards" in whole else whole


class JointPaysTheDead(GoodJoint):
    def spoil(self, whole: dict[str, Any]) -> dict[str, Any]:
        return {**whole, "rewards": (1.0, 1.0)} if "rewards" in whole else whole


class JointIntFlags(GoodJoint):
    def spoil(self, whole: dict[str, Any]) -> dict[str, Any]:
        return {**whole, "ended": np.array(whole["ended"], int)} if "ended" in whole else whole


class JointInfo(GoodJoint):
    def spoil(self, whole: dict[str, Any]) -> dict[str, Any]:
        return {**whole, "infos": None}


class JointMask(GoodJoint):
    def spoil(self, whole: dict[str, Any]) -> dict[str, Any]:
        return {**whole, "infos": {"action_mask": np.eye(2, 3) if self.t < 3 else np.zeros((2, 3))}}


class JointMaskNumber(GoodJoint):
    def spoil(self, whole: dict[str, Any]) -> dict[str, Any]:
        return {**whole, "infos": {"action_mask": 7}}


class JointFillsTheAction(GoodJoint):
    action_space = Tuple([Box(0, 1, (1,)), Box(0, 1, (1,))])

    def step(self, action: Any) -> Any:
        action[1][...] = 7
        obs, *rest, _ = super().step(action)
        return obs, *rest, {}


BROKEN: list[tuple[Any, str]] = [
    (
        WrongDtype,
        "WrongDtype.step(), episode 1, step 4: observation of agent 'a_1', leaf 'camera/left': "
        "expected dtype float32, got float64",
    ),
    (
        WrongShape,
        "WrongShape.step(), episode 1, step 2: observation of agent 'a_0', leaf 'camera/left': "
        "expected shape (2,), got (3,)",
    ),
    (OutOfBounds, "step 2: observation of agent 'a_0', leaf 'camera/left': expected a number from 0.0 to 1.0 at index"),
    (NotANumber, "step 5: observation of agent 'a_1', leaf 'camera/left': expected numbers, got NaN at index (1,)"),
    (ListForArray, "leaf 'camera/left': expected a numpy array of dtype float32, got list [0.0, 1.0]"),
    (FloatForChoice, "leaf 'clock': expected an int, got float 0.0"),
    (ListOfAnotherShape, "leaf 'camera/left': expected a numpy array of dtype float32, got list [0.0, 1.0, 1.0]"),
    (FloatsForInts, "observation of agent 'a_0', leaf 'camera/left': expected dtype uint8, got float32"),
    (MissingLeaf, "observation of agent 'a_0', leaf 'camera': expected keys ['left'], got []"),
    (NewSpaces, "NewSpaces.action_space('a_0'): the space: expected the same object on each call, got another one"),
    (SpaceAfterReset, "SpaceAfterReset.action_space('a_0'), episode 2: the space: expected the same object"),
    (SpaceThatGrows, "action_space('a_0'), episode 1: the space: expected no change while the env lives, got a change"),
    (ArrayReward, "step 1: reward of agent 'a_0': expected a real number, got ndarray of shape (1,)"),
    (NoAxesReward, "step 1: reward of agent 'a_0': expected a real number, got ndarray of shape () array("),
    (HugeReward, "step 1: reward of agent 'a_0': expected a real number that a float can hold, got int 100000"),
    (InfiniteReward, "episode 1, step 4: reward of agent 'a_1': expected a finite number, got inf"),
    (NoReward, "step 1: rewards: expected one of the live agent 'a_1', got none: it is missing"),
    (IntFlag, "step 1: truncation of agent 'a_0': expected a bool, got int 0"),
    (UnknownAgent, "step 1: rewards: expected agents of 'a_0', 'a_1', got the unknown agent 'a_9'"),
    (
        DataAfterDeath,
        "step 4: observations: expected nothing of agent 'a_0', which has ended and cannot come back, got data",
    ),
    (Rebirth, "step 4: env.agents: expected no agent 'a_0', which has ended and cannot come back, got it again"),
    (
        Lingers,
        "step 3: env.agents: expected agent 'a_0', which has ended, to leave it, got it still there\n"
        "  To change: leave those that have ended out of env.agents: self.agents = ",
    ),
    (LeavesInSilence, "step 3: env.agents: expected agent 'a_0', whose flags are False, got it has left"),
    (InfoIsNone, "step 1: info of agent 'a_0': expected a dict, got NoneType None"),
    (SixValues, "step 1: the result: expected a tuple of 5, or of the old API's 4, got a tuple of 6"),
    (FourValues, "FourValues.step(), episode 1, step 1: the result: expected a tuple of 5, got a tuple of 4 with one"),
    (NoInfos, "NoInfos.reset(), episode 1: the result: expected a tuple of 2, got dict without infos: the old API"),
    (NoObservations, "the result: expected a tuple of 2, got NoneType None\n  To change: return (observations, infos)"),
    (SameSeed, "the same one for the seeds 0 and 1: after both, self.rng is in the same state"),
    (SameSeedOfNumpy, "the same one for the seeds 0 and 1: after both, np.random is in the same state"),
    (SpaceNotMethod, "action_space: expected a method, got the space Discrete(3); write def action_space(self, agent)"),
    (Functional, "Functional is a functional JAX env. JaxMARL's are make('jaxmarl/…'), Pgx's make"),
    (
        OldFlags,
        "turns.reset(), episode 1: env.terminations: expected a dict of flags by agent, got none, and env.dones",
    ),
    (NeverEnds, "episode 1, step 201: the episode: expected its end within max_steps=200 steps, got none"),
    (EatsActions, "EatsActions.step(), episode 3, step 1: actions: expected it to be left as it was given, keys"),
    (ScalesActions, "step 1: actions, leaf 'a_0': expected it to be left as it was given, "),
    (FillsOptions, "FillsOptions.reset(), episode 2: options: expected it to be left as it was given, keys []"),
    (Raises, "Raises.step(), episode 3, step 5: the call: expected no exception, got ZeroDivisionError"),
    (RandomFromStepTwo, "step 2: observation of agent 'a_0', leaf 'camera/left': expected the same for the same seed"),
    (RandomInEpisodeThree, "episode 3, step 1: observation of agent 'a_0', leaf 'camera/left': expected the same"),
    (
        RemembersBeforeTheSeed,
        "episode 1, step 1: reward of agent 'a_0': expected the same for the same seed, float 1.0",
    ),
    (NobodyMay, "step 2: action mask of agent 'a_0': expected at least one allowed action"),
    (ShortMask, "action mask of agent 'a_0': expected shape (3,), one entry per choice of Discrete(3), got (2,)"),
    (WrongState, "step 3: the global state: expected dtype float64, got float32"),
    (
        SelectsAStranger,
        "turns.step(), episode 1, step 3: agent_selection: expected agents of 'player_0', 'player_1', got",
    ),
    (PaysInText, "step 3: reward of agent 'player_1': expected a real number, got str '3'"),
    (DropsAPlayer, "step 3: env.agents: expected agent 'player_0', whose flags are False, got it has left"),
    (DeadStay, "env.agents: expected the dead agent 'player_0' to leave it in step(None), got it still there"),
    (PaysTwice, "turns.step(), episode 1, step 4: reward of agent 'player_1': expected 0 after step(None) of the dead"),
    (PaysTwice, "again, which would count twice\n  To change: clear env.rewards in step(None), as AECEnv._was_dead"),
    (PaysTheLeaverTwice, "reward of agent 'player_0': expected 0 after step(None) of the dead agent 'player_0', got"),
    (SingleTextReward, "single.step(), episode 1, step 1: reward of agent 'agent_0': expected a real number, got str"),
    (SingleNoInfo, "single.step(), episode 1, step 1: info: expected a dict, got NoneType None"),
    (SingleStateAfterReset, "single.state_space, episode 2: the space: expected the same object on each call, got"),
    (SingleNoisy, "flags of agent 'agent_0'"),
    (NoAll, "NoAll.step(), episode 1, step 1: terminateds: expected a flag of '__all__'"),
    (ActsWhenDead, "step 2: acting of agent 'agent_0': expected False, for it is not alive, got True"),
    (DoneTooSoon, "step 1: slot.done: expected False, as alive says, got True"),
    (PaysTheDead, "step 3: agent 'agent_0': expected nothing, for it has ended, got a flag or reward"),
    (VanishesFromSlot, "step 1: alive of agent 'agent_1': expected True, for its flags are False, got False"),
    (JointDtype, "JointDtype.reset(), episode 1: observation of agent 'agent_1': expected dtype float32, got float64"),
    (JointOneObservation, "step 1: observations: expected one for each agent, 2 in all, got 1"),
    (
        JointObjectives,
        "one for each agent, 2 in all, got 3\n  To change: return one number for the team, or",
    ),
    (JointPaysTheDead, "step 3: reward of agent 'agent_0': expected 0, for it has ended, got 1.0"),
    (JointIntFlags, "step 1: termination of agent 'agent_0': expected a bool, got int64 "),
    (JointInfo, "step 1: info: expected a dict, got NoneType None"),
    (JointMask, "step 3: action mask of agent 'agent_1': expected at least one allowed action"),
    (JointMaskNumber, "step 1: 'action_mask' of the info: expected one for each agent, 2 in all, got int 7"),
    (JointFillsTheAction, "step 1: actions, leaf '1': expected it to be left as it was given, "),
    (
        KeyedAfterDeath,
        "step 3: agent 'agent_0': expected no data, for it has ended and cannot come back, got an observation or a",
    ),
]


LINES = {SpaceAfterReset: "B14", NewSpaces: "B14"} | dict.fromkeys(
    (RandomFromStepTwo, RandomInEpisodeThree, RemembersBeforeTheSeed), "C18"
)
CASES = [
    pytest.param(build, told, marks=[pytest.mark.fault(LINES[build])] if build in LINES else [])
    for build, told in BROKEN
]


@pytest.mark.mostly_slow("checks whole envs or connectors many times", quick=3)
@pytest.mark.checklist(14)
@pytest.mark.parametrize(("build", "told"), CASES, ids=[build.__name__ for build, _ in BROKEN])
def test_what_is_broken_is_caught_and_told(build: Callable[[], Any], told: str) -> None:
    with pytest.raises(ContractError) as caught:
        check_env(build, max_steps=200)
    assert told in str(caught.value)


@pytest.mark.parametrize("build", [Good, RandomFromStepTwo, Raises])
def test_both_envs_are_closed(build: type[Good]) -> None:
    closed: list[Good] = []

    class Closing(build):  # type: ignore[misc, valid-type]  # a parameter as a base
        def close(self) -> None:
            closed.append(self)

    try:
        check_env(Closing)
    except ContractError:
        assert build is not Good
    assert len(closed) == len(set(map(id, closed))) == 2


def test_arguments() -> None:
    with pytest.raises(ArgumentError, match="episodes: expected at least 1, got 0"):
        check_env(Good, episodes=0)
    with pytest.raises(ArgumentError, match="max_steps: expected at least 1, got 0"):
        check_env(Good, max_steps=0)
    with pytest.raises(ArgumentError, match="expected something that builds envs"):
        check_env(Good())
    with pytest.raises(UnknownEnvError, match="simple_spread"):
        check_env("simple_spraed")
    with pytest.raises(ContractError, match="expected an env in one of five forms"):
        check_env(lambda: object())


class Uncopiable(gymnasium.Space[Any]):
    """A space of one's own; neither it nor its members can be copied."""

    def __init__(self) -> None:
        super().__init__((), None)
        self.lock = threading.Lock()

    def contains(self, x: Any) -> bool:
        return True


UNCOPIABLE: dict[str, Callable[[], Any]] = {
    "flatiter": lambda: np.zeros(2, np.float32).flat,
    "memoryview": lambda: memoryview(np.zeros(2, np.float32)),
    "generator": lambda: (number for number in (0.0, 0.0)),
    "lock": threading.Lock,
}


def odd_env(observe: Callable[[], Any], space: gymnasium.Space[Any]) -> Any:
    """Observations of one's own, and a NaN in the third step, which has to be found, too."""

    class Odd(gymnasium.Env[Any, Any]):
        observation_space, action_space = space, Discrete(2)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.steps = 0
            return observe(), {}

        def step(self, action: Any) -> Any:
            self.steps += 1
            return observe(), (0.0 if self.steps < 3 else float("nan")), self.steps == 5, False, {}

    return Odd


@pytest.mark.parametrize("name", UNCOPIABLE)
def test_an_observation_that_cannot_be_copied_hides_no_later_finding(name: str) -> None:
    for space in (Box(-1, 1, (2,), np.float32), Uncopiable()):
        findings = check_env(odd_env(UNCOPIABLE[name], space), raise_first=False)
        texts = [str(one) for one in findings]
        assert any(f"got {name}: copy.deepcopy() raises TypeError" in text for text in texts), texts
        assert any("step 3: reward of agent 'agent_0': expected a finite number, got nan" in text for text in texts)
        assert any("observation_space: the space: expected a value that can be copied" in text for text in texts) == (
            type(space) is Uncopiable
        )


class Incomparable:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no two are comparable")

    __hash__ = None  # type: ignore[assignment]  # as for all classes with an == of their own


def test_a_check_that_cannot_go_on_says_so() -> None:
    class Free(gymnasium.Space[Any]):
        def contains(self, x: Any) -> bool:
            return True

    findings = check_env(odd_env(Incomparable, Free((), None)), raise_first=False)
    assert [one.check for one in findings] == ["runs", "rewards"]
    assert findings[0].subject == "check_env()"
    assert findings[0].got.startswith("RuntimeError: no two are comparable (")


def test_an_error_of_the_check_itself_ends_the_episode_and_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise TypeError("the check is wrong")

    monkeypatch.setattr("marlvec.testing.players.check_reward", broken)
    env = odd_env(lambda: np.zeros(2, np.float32), Box(-1, 1, (2,), np.float32))
    (finding,) = check_env(env, raise_first=False)
    assert (finding.check, finding.subject, finding.expected) == ("runs", "check_env()", "to go on")
    assert "TypeError: the check is wrong" in finding.got


class Talk(marlvec.MultiAgentEnv):
    """Two in turns, who read what was said, and a list of numbers."""

    agents = ("ann", "bob")
    observation_spaces = (Dict({"heard": AnyText(), "numbers": Sequence(Discrete(9))}),) * 2
    action_spaces = (AnyText(),) * 2

    def reset(self, slot: Any, *, seed: int | None = None, options: Any = None) -> None:
        self.t, self.said = 0, ""
        slot.alive[0] = slot.alive[1] = True
        self.turn(slot)

    def turn(self, slot: Any) -> None:
        mover = self.t % 2
        slot.acting[mover], slot.acting[1 - mover] = True, False
        slot.write_obs(mover, {"heard": self.said, "numbers": (self.t, 1)})

    def step(self, slot: Any) -> None:
        self.said += slot.read_actions()[self.t % 2]
        self.t += 1
        self.turn(slot)
        if self.t == 5:
            self.cut_short(slot)


def test_an_env_that_writes_texts_into_its_row_can_be_checked() -> None:
    check_env(Talk)

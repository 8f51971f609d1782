"""check_env: each fault is one finding, all in one run; what instances share is named; advice changes no value."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from pettingzoo import AECEnv

import marlvec
from marlvec.envs import adapt
from marlvec.errors import ArgumentError, ContractError
from marlvec.testing import Finding, check_env
from tests.testing import test_check_env as envs
from tests.testing.own_stream import draw, seed_all
from tests.testing.test_check_env import Good, rewound

# --- check_env: each fault is one finding, all of them in one run, and what instances share is found and named


CHECKS = {
    "observations": "WrongDtype FloatsForInts ListOfAnotherShape WrongShape OutOfBounds NotANumber ListForArray "
    "FloatForChoice MissingLeaf JointDtype",
    "spaces": "NewSpaces SpaceAfterReset SpaceThatGrows SingleStateAfterReset",
    "rewards": "ArrayReward NoAxesReward HugeReward InfiniteReward PaysInText SingleTextReward",
    "keys": "NoReward NoAll",
    "flags": "IntFlag JointIntFlags",
    "agents": "UnknownAgent SelectsAStranger",
    "life": "DataAfterDeath Rebirth Lingers LeavesInSilence DropsAPlayer DeadStay ActsWhenDead PaysTheDead "
    "VanishesFromSlot KeyedAfterDeath JointPaysTheDead",
    "infos": "InfoIsNone SingleNoInfo JointInfo",
    "form": "SpaceNotMethod Functional",
    "results": "SixValues FourValues NoInfos NoObservations OldFlags JointOneObservation JointObjectives",
    "ends": "NeverEnds DoneTooSoon",
    "arguments": "EatsActions ScalesActions FillsOptions JointFillsTheAction",
    "runs": "Raises",
    "shared_state": "RandomFromStepTwo SingleNoisy",
    "seed": "RandomInEpisodeThree SameSeed SameSeedOfNumpy",
    "reset": "RemembersBeforeTheSeed",
    "masks": "NobodyMay ShortMask JointMask JointMaskNumber",
    "state": "WrongState",
    "rewards_once": "PaysTwice PaysTheLeaverTwice",
}
ONE_EACH = [(check, name) for check, names in CHECKS.items() for name in names.split()]
MINOR = {"WrongDtype", "JointDtype", "ListForArray", "NoAxesReward", "WrongState", "NewSpaces", "FourValues", "NoInfos"}
NUMBERS_EPISODES = {"SelectsAStranger", "PaysInText", "DropsAPlayer", "DeadStay", "NoAll", "KeyedAfterDeath"}


def found(build: Any, **options: Any) -> list[Finding]:
    return check_env(build, max_steps=200, raise_first=False, **options)


@contextmanager
def kept_generators() -> Iterator[None]:
    """Put the process's random generators back, which a faulty env draws from."""
    state, global_state = random.getstate(), np.random.get_state()  # noqa: NPY002  # of the one that envs draw from
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(global_state)  # noqa: NPY002  # of the one that envs draw from


def names(findings: list[Finding]) -> list[str]:
    return [one.check for one in findings]


def test_every_broken_env_is_here() -> None:
    assert {name for _, name in ONE_EACH} == {build.__name__ for build, _ in envs.BROKEN}


@pytest.mark.mostly_slow("checks whole envs or connectors many times", quick=2)
@pytest.mark.parametrize(("check", "name"), ONE_EACH, ids=[name for _, name in ONE_EACH])
def test_one_fault_is_one_finding(check: str, name: str) -> None:
    build: Callable[[], Any] = getattr(envs, name)
    random.seed(0)  # envs whose fault is to draw from it: in 1 of 100 runs another check is the first to see that
    (one,) = found(rewound(build) if name in NUMBERS_EPISODES else build)
    assert one.check == check
    assert one.severity == ("minor" if name in MINOR else "serious")
    assert one.change
    assert str(one).endswith(f"\n  To change: {one.change}")


def test_a_good_env_has_none() -> None:
    assert found(Good) == []


@pytest.mark.parametrize("name", [name for _, name in ONE_EACH if name in MINOR])
def test_what_is_minor_is_put_right(name: str) -> None:
    with marlvec.make(getattr(envs, name), num_envs=2, backend="sync") as vectorizer:
        vectorizer.reset(seed=0)
        for _ in range(8):
            vectorizer.step(vectorizer.random_action(seed=0))


def test_what_is_put_right_at_first_and_refused_later_is_serious() -> None:
    by_severity = {one.severity: one for one in found(envs.IntsForBytes)}
    assert by_severity.keys() == {"serious"}
    assert by_severity["serious"].where.endswith("episode 1, step 5")


# --- what instances share ---


class ClassGenerator(Good):
    """Whoever was reset last has seeded it for all."""

    rng = np.random.default_rng(0)

    def __init__(self) -> None:
        super().__init__()
        del self.rng

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        result = super().reset(seed, options)
        if seed is not None:
            type(self).rng = self.__dict__.pop("rng")
        return result


class ClassList(Good):
    """The steps of all instances are in one list."""

    steps: list[int] = []

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.steps.clear()
        return super().reset(seed, options)

    def step(self, actions: dict[str, Any]) -> Any:
        self.steps.append(self.t)
        obs, rewards, ended, cut, infos = super().step(actions)
        return obs, dict.fromkeys(rewards, float(len(self.steps))), ended, cut, infos


steps_of_all = 0


class ModuleGlobal(Good):
    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        global steps_of_all
        steps_of_all = 0
        return super().reset(seed, options)

    def step(self, actions: dict[str, Any]) -> Any:
        global steps_of_all
        steps_of_all += 1
        obs, rewards, ended, cut, infos = super().step(actions)
        return obs, dict.fromkeys(rewards, float(steps_of_all)), ended, cut, infos


class NumpyRandom(Good):
    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if seed is not None:
            np.random.seed(seed)  # noqa: NPY002  # that is the fault
        return super().reset(seed, options)

    def see(self, agent: str) -> Any:
        left = np.random.random(2).astype(np.float32)  # noqa: NPY002  # likewise
        return {"camera": {"left": left}, "clock": self.t}


class PythonRandom(Good):
    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if seed is not None:
            random.seed(seed)
        return super().reset(seed, options)

    def see(self, agent: str) -> Any:
        return {"camera": {"left": np.full(2, random.random(), np.float32)}, "clock": self.t}


class DefaultArgument(Good):
    def __init__(self, board: list[int] = [0]) -> None:  # noqa: B006  # that is the fault
        super().__init__()
        self.board = board

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.board[0] = 0
        return super().reset(seed, options)

    def step(self, actions: dict[str, Any]) -> Any:
        self.board[0] += 1
        obs, rewards, ended, cut, infos = super().step(actions)
        return obs, dict.fromkeys(rewards, float(self.board[0])), ended, cut, infos


class HelperStream(Good):
    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if seed is not None:
            seed_all(seed)
        return super().reset(seed, options)

    def see(self, agent: str) -> Any:
        return {"camera": {"left": np.full(2, draw(), np.float32)}, "clock": self.t}


SHARED = {
    ClassGenerator: "ClassGenerator.rng is an attribute of the class, which all instances share, and changes while "
    "they play: set self.rng = np.random.default_rng(seed) in reset(seed=…)",
    ClassList: "ClassList.steps is an attribute of the class",
    ModuleGlobal: "steps_of_all is a global of the module tests.testing.test_findings",
    HelperStream: "stream is a global of the module tests.testing.own_stream, which all instances share, and changes "
    "while they play: set self.stream = np.random.default_rng(seed) in reset(seed=…)",
    NumpyRandom: "it draws from np.random, the one generator of the whole process: draw from self.np_random",
    PythonRandom: "it draws from the module random",
    DefaultArgument: "self.board is the same object in both instances",
}


@pytest.mark.mostly_slow("checks whole envs or connectors many times", quick=2)
@pytest.mark.parametrize("build", SHARED, ids=lambda build: build.__name__)
def test_what_instances_share_is_found_and_named(build: Any) -> None:
    with kept_generators():
        (one,) = found(build)
    assert (one.check, one.severity) == ("shared_state", "serious")
    assert one.got.endswith("from an instance that takes turns with another one")
    assert one.change.startswith(SHARED[build])
    assert 'marlvec.make(…, num_envs=N, backend="async", num_workers=N)' in one.change


class DrawnOnce(Good):
    """Draws from a generator of the process before it is played."""

    draw: Callable[[], float] = staticmethod(random.random)

    def __init__(self) -> None:
        super().__init__()
        self.drawn = self.draw()

    def see(self, agent: str) -> Any:
        return {"camera": {"left": np.full(2, self.drawn, np.float32)}, "clock": self.t}


class NumpyDrawnOnce(DrawnOnce):
    draw = staticmethod(np.random.random)  # that is the fault


class DrawnLater(Good):
    """Draws from the module random in its second play only."""

    plays = 0

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.plays += seed is not None
        return super().reset(seed, options)

    def see(self, agent: str) -> Any:
        value = random.random() if self.plays > 1 else 0.0
        return {"camera": {"left": np.full(2, value, np.float32)}, "clock": self.t}


@pytest.mark.parametrize(
    ("build", "check", "module"),
    [(DrawnOnce, "seed", "random"), (NumpyDrawnOnce, "seed", "numpy.random"), (DrawnLater, "reset", "random")],
)
def test_the_advice_names_the_module_whose_generator_is_drawn_from(build: Any, check: str, module: str) -> None:
    with kept_generators():
        (one,) = found(build)
    assert one.check in (check, "shared_state")
    assert ("the module random" if module == "random" else "the functions of numpy.random") in one.change
    assert "the one generator of the whole process" in one.change


class CountsForLife(Good):
    """Not even one instance alone begins again."""

    steps_for_life = 0

    def step(self, actions: dict[str, Any]) -> Any:
        CountsForLife.steps_for_life += 1
        obs, rewards, ended, cut, infos = super().step(actions)
        return obs, dict.fromkeys(rewards, float(CountsForLife.steps_for_life)), ended, cut, infos


def test_a_process_of_its_own_is_not_advised_where_it_would_not_help() -> None:
    (one,) = found(CountsForLife)
    assert one.check == "shared_state"
    assert one.change.startswith("CountsForLife.steps_for_life is an attribute of the class")
    assert "backend" not in one.change


class SharedAndUnused(Good):
    """Counts what nobody sees, and holds a generator without a state that nothing is drawn from: no fault."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        self.entropy = random.SystemRandom()

    def see(self, agent: str) -> Any:
        return {"camera": {"left": np.zeros(2, np.float32)}, "clock": self.t}

    def step(self, actions: dict[str, Any]) -> Any:
        SharedAndUnused.made += 1
        return super().step(actions)


def test_what_makes_no_difference_is_no_finding() -> None:
    assert found(SharedAndUnused) == []


def test_a_factory_that_returns_one_env_again_and_again() -> None:
    env = Good()
    (one,) = found(lambda: env)
    assert (one.check, one.got) == ("shared_state", "the very same one")


# --- rewards of turn-based envs ---


class Game(AECEnv):  # type: ignore[misc]  # pettingzoo has no type information
    """Two take six moves in turn; in the third one the other player gets a point, and in the last one each of them."""

    metadata = {"name": "game"}
    seen, moves = Box(0.0, 9.0, (1,), np.float32), Discrete(2)
    clears, begins_anew, times = True, True, 1

    def __init__(self) -> None:
        super().__init__()
        self.possible_agents = ["a", "b"]

    def observation_space(self, agent: str) -> Any:
        return self.seen

    def action_space(self, agent: str) -> Any:
        return self.moves

    def observe(self, agent: str) -> Any:
        return np.full(1, self.t, np.float32)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        self.t, self.agents, self.agent_selection = 0, self.possible_agents[:], "a"
        self.rewards, self._cumulative_rewards = dict.fromkeys("ab", 0.0), dict.fromkeys("ab", 0.0)
        self.terminations, self.truncations = dict.fromkeys("ab", False), dict.fromkeys("ab", False)
        self.infos: dict[str, Any] = {agent: {} for agent in "ab"}

    def step(self, action: Any) -> None:
        mover = self.agent_selection
        if self.terminations[mover]:
            self._was_dead_step(action)
            return
        self.t += 1
        if self.begins_anew:
            self._cumulative_rewards[mover] = 0.0
        if self.clears:
            self._clear_rewards()
        if self.t == 3:
            self.rewards["b"] = 1.0
        if self.t == 6:
            self.rewards["a"] = self.rewards["b"] = 1.0
            self.terminations = dict.fromkeys("ab", True)
        self.agent_selection = "b" if mover == "a" else "a"
        for _ in range(self.times):
            self._accumulate_rewards()


class LeavesThemStanding(Game):
    clears = False


class AccumulatesTwice(Game):
    times = 2


class KeepsTheSum(Game):
    begins_anew = False


class NewDict(LeavesThemStanding):
    """Clears them in its own way."""

    def step(self, action: Any) -> None:
        if not self.terminations[self.agent_selection]:
            self.rewards = dict.fromkeys("ab", 0.0)
        super().step(action)


class EndsForAllAtOnce(Game):
    """No agent has a dead step."""

    def step(self, action: Any) -> None:
        super().step(action)
        if self.t == 5:
            self.truncations, self.agents = dict.fromkeys("ab", True), []


class EachMoveCosts(Game):
    """The same reward in each step, and yet no two are one."""

    def _clear_rewards(self) -> None:
        self.rewards.update(
            dict.fromkeys(self.rewards, -1.0 if self.agents and not any(self.terminations.values()) else 0)
        )


@pytest.mark.parametrize("build", [Game, NewDict, EachMoveCosts, EndsForAllAtOnce])
def test_games_without_a_fault(build: Any) -> None:
    assert found(build) == []


def test_a_reward_that_is_left_standing() -> None:
    (one,) = found(LeavesThemStanding)
    assert (one.check, one.where) == ("rewards_once", "game.step(), episode 1, step 4")
    assert one.subject == "reward of agent 'b'"
    assert one.got == "1.0 again, which an earlier call wrote, and which counts twice"
    assert one.change.startswith("call self._clear_rewards() at the beginning of each step")


@pytest.mark.parametrize("build", [AccumulatesTwice, KeepsTheSum])
def test_last_says_the_sum_of_the_rewards_since_the_agents_turn(build: Any) -> None:
    (one,) = found(build)
    assert one.check == "rewards_once"
    assert one.subject == "reward that last() has of agent 'b'"
    assert "self._cumulative_rewards[agent] = 0" in one.change


# --- all in one run ---


class ManyFaults(Good):
    """A minor one in the second episode, serious ones before and after it."""

    def see(self, agent: str) -> Any:
        left = np.full(2, 0.5 if self.episode < 3 else 7.0, np.float64 if self.episode == 2 else np.float32)
        return {"camera": {"left": left}, "clock": -1 if self.t == 5 else self.t}

    def step(self, actions: dict[str, Any]) -> Any:
        obs, rewards, ended, cut, infos = super().step(actions)
        return obs, dict.fromkeys(rewards, float("nan")), ended, dict.fromkeys(cut, 0), [] if self.t == 4 else infos


def test_all_faults_are_found_in_one_run_serious_ones_first() -> None:
    findings = found(ManyFaults)
    assert names(findings) == ["rewards", "flags", "observations", "observations", "infos", "observations"]
    assert [one.severity for one in findings] == ["serious"] * 5 + ["minor"]
    assert {one.where.partition(",")[2] for one in findings if one.check == "observations"} == {
        " episode 1, step 5",
        " episode 2",
        " episode 3",
    }
    with pytest.raises(ContractError) as caught:
        check_env(ManyFaults)
    listed = str(caught.value).splitlines()
    assert listed[0] == "6 findings, serious ones first"
    assert listed[1::2] == [f"{i}. {one.check}: {one.problem}" for i, one in enumerate(findings, 1)]
    assert listed[2::2] == [f"  To change: {one.change}" for one in findings]


def test_what_follows_from_another_fault_is_not_found_beside_it() -> None:
    class Reborn(envs.Rebirth):
        """Whose step then stumbles over the action that is missing, and says so."""

    (one,) = found(Reborn)
    assert one.check == "life"


def test_skip() -> None:
    wanted = names(found(ManyFaults, skip=("observations", "flags")))
    assert wanted == ["rewards", "infos"]
    assert found(NumpyRandom, skip="shared_state") == []
    assert found(envs.RemembersBeforeTheSeed, skip=["reset"]) == []
    with pytest.raises(
        ArgumentError, match=r"expected names of checks, form, runs, .*; got 'infoss' \(did you mean 'infos'"
    ):
        found(Good, skip=["infoss"])


class RaisesAtOnce(Good):
    def __init__(self, size: int = 3) -> None:
        super().__init__()
        raise OSError(f"no map of size {size}")


def test_what_cannot_be_played_is_a_finding_too() -> None:
    (one,) = found(partial(RaisesAtOnce, size=4))
    assert (one.check, one.got) == ("runs", "OSError: no map of size 4")
    assert "in __init__()" in one.change
    (one,) = found(lambda: object())
    assert one.check == "form"
    assert "expected an env in one of five forms" in one.got


class Words(MultiDiscrete):
    """Texts by number, as multigrid's missions: what it derives from says nothing of its members."""

    def __init__(self) -> None:
        super().__init__([2, 2])

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        return "go there"


class Speaks(Good):
    observation = Dict(camera=Words(), clock=Discrete(100))
    last: Any = "go away"

    def see(self, agent: str) -> Any:
        return {"camera": "go there" if self.t < 5 else self.last, "clock": self.t}


class SpeaksANumber(Speaks):
    last = 5


def test_a_space_that_means_other_values_than_what_it_derives_from() -> None:
    assert found(Speaks) == []
    (one,) = found(SpeaksANumber)
    assert (one.check, one.got) == ("observations", "5")


class LeavesItsAgentsOut(Good):
    """It has no ``possible_agents``, and ``a_0`` leaves without a flag, and without anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.names = self.__dict__.pop("possible_agents")

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.possible_agents = self.names
        try:
            return super().reset(seed, options)
        finally:
            del self.possible_agents

    def step(self, actions: dict[str, Any]) -> Any:
        tables = super().step(actions)
        return tuple(
            {agent: data for agent, data in table.items() if self.t != 3 or agent != "a_0"} for table in tables
        )


class JointTeamArrays(envs.GoodJoint):
    def spoil(self, whole: dict[str, Any]) -> dict[str, Any]:
        return {**whole, "rewards": np.ones(1), "ended": np.array([self.t >= 4])} if "ended" in whole else whole


class SecretlyJoint(envs.GoodJoint):
    n_agents = None

    def spoil(self, whole: dict[str, Any]) -> dict[str, Any]:
        over = {"ended": self.t >= 4, "rewards": [1.0, 1.0], "infos": {}} if "ended" in whole else {}
        return {**whole, "obs": tuple(whole["obs"]), **over}


def test_what_lenient_takes_is_no_finding_where_it_is_said() -> None:
    (one,) = found(LeavesItsAgentsOut)
    assert one.check == "form"
    assert "lenient=True" in one.got
    for build in (LeavesItsAgentsOut, envs.ArrayReward, envs.IntFlag, envs.JointIntFlags, JointTeamArrays):
        assert found(lambda build=build: adapt(build(), lenient=True)) == []
    (one,) = found(SecretlyJoint)
    assert (one.check, one.got) == ("form", "[1.0, 1.0]")
    assert "agents='tuple'" in one.change
    assert found(lambda: adapt(SecretlyJoint(), agents="tuple")) == []


@pytest.mark.parametrize("env", ["mpe/simple_crypto_v3", "cards/kuhn_poker", "pettingzoo/classic/rps_v2"])
def test_envs_that_are_fine_have_none(env: str) -> None:
    assert found(env, episodes=2) == []


# --- Advice of check_env: it never tells users to change a value


PIXELS = Box(0, 255, (2,), np.uint8)
CHANGED: list[tuple[Any, Any, str]] = [
    (PIXELS, np.array([0.0, 0.5], np.float32), "0.5 is no uint8"),
    (PIXELS, np.array([305, 0]), "305 is no uint8"),
    (PIXELS, [-1, 0], "-1 is no uint8"),
    (Box(0, 9, (), np.int64), np.float64(1.7), "1.7 is no int64"),
    (Discrete(3), 1.7, "1.7 is no int64"),
    (Discrete(3), np.float32(0.5), "0.5 is no int64"),
    (Box(-np.inf, np.inf, (2,), np.float32), np.array([0.0, 1e300]), "1e+300 is no float32"),
]
KEPT: list[tuple[Any, Any, str]] = [
    (PIXELS, np.array([0.0, 1.0], np.float32), "return it with .astype(np.uint8)"),
    (PIXELS, [0, 255], "return np.asarray(…, dtype=np.uint8)"),
    (Discrete(3), 2.0, "return int(value)"),
    (Box(-1, 1, (2,), np.float32), np.array([0.1, 0.2]), "return it with .astype(np.float32)"),
]


class OneValueEnv(gymnasium.Env[Any, Any]):
    action_space = Discrete(2)

    def __init__(self, space: Any, value: Any) -> None:
        self.observation_space, self._value, self._t = space, value, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._t = 0
        return self._value, {}

    def step(self, action: Any) -> Any:
        self._t += 1
        return self._value, 0.0, self._t == 3, False, {}


def advice(space: Any, value: Any) -> list[tuple[str, bool]]:
    """Return what check_env says of the observations, and whether it calls that minor."""
    findings = check_env(lambda: OneValueEnv(space, value), max_steps=20, raise_first=False)
    return [(str(one), one.severity == "minor") for one in findings if one.check == "observations"]


@pytest.mark.parametrize(("space", "value", "words"), CHANGED)
def test_value_that_a_cast_would_change_gets_no_advice_to_cast(space: Any, value: Any, words: str) -> None:
    (text, is_minor), *_ = advice(space, value)
    assert words in text
    assert not re.search("astype|asarray|int\\(value", text)
    assert not is_minor


@pytest.mark.parametrize(("space", "value", "words"), KEPT)
def test_value_that_a_cast_keeps_gets_that_advice(space: Any, value: Any, words: str) -> None:
    assert words in advice(space, value)[0][0]

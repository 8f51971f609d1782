"""Action masks that come in infos: the same arrays as those that spaces declare."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple

import marlvec
import marlvec.external
from marlvec.envs.env import MultiAgentEnv, Slot
from marlvec.envs.spec import EnvSpec
from marlvec.errors import ContractError
from marlvec.registry import resolve
from marlvec.testing import check_env
from marlvec.testing.scripted import KeyedEnv, ScriptedParallelEnv, SingleEnv, TurnEnv
from tests.envs.support import Forgetful, play
from tests.families.trace import difference


def waits(t: int, a: int) -> bool:
    return (t + a) % 3 == 0


def split(found: dict[Any, Any], infos: dict[Any, Any]) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Move the mask of everyone's observation into its info."""
    infos = {who: dict(info) for who, info in infos.items()}
    for who, obs in found.items():
        infos.setdefault(who, {})["action_mask"] = obs["action_mask"]
    return {who: obs["observation"] for who, obs in found.items()}, infos


class TellingParallelEnv(ScriptedParallelEnv):
    def observation_space(self, agent: str) -> Any:
        return super().observation_space(agent)["observation"]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return split(*super().reset(seed, options))

    def step(self, actions: dict[str, Any]) -> Any:
        obs, rewards, terminations, truncations, infos = super().step(actions)
        obs, infos = split(obs, infos)
        return obs, rewards, terminations, truncations, infos


class TellingKeyedEnv(KeyedEnv):
    def __init__(self, *, env_index: int = 0, **options: Any) -> None:
        super().__init__(env_index=env_index, **options)
        self.observation_spaces = {who: space["observation"] for who, space in self.observation_spaces.items()}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return split(*super().reset(seed=seed, options=options))

    def step(self, actions: dict[Any, Any]) -> Any:
        obs, rewards, terminateds, truncateds, infos = super().step(actions)
        obs, infos = split(obs, infos)
        return obs, rewards, terminateds, truncateds, infos


class TellingTurnEnv(TurnEnv):
    """As shimmy's OpenSpiel envs do it: the infos of all agents have a mask, whosever turn it is."""

    def observation_space(self, agent: str) -> Any:
        return super().observation_space(agent)["observation"]

    def observe(self, agent: str) -> Any:
        return super().observe(agent)["observation"]

    def _set_infos(self) -> None:
        super()._set_infos()
        for agent, info in self.infos.items():
            self.infos[agent] = {**info, "action_mask": self.world.mask(self._place(agent))}


class TellingSingleEnv(SingleEnv):
    def __init__(self, *, env_index: int = 0, **options: Any) -> None:
        super().__init__(env_index=env_index, **options)
        self.observation_space = self.observation_space["observation"]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        obs, info = super().reset(seed=seed, options=options)
        return obs["observation"], {**info, "action_mask": obs["action_mask"]}

    def step(self, action: Any) -> Any:
        obs, reward, ended, cut, info = super().step(action)
        return obs["observation"], reward, ended, cut, {**info, "action_mask": obs["action_mask"]}


KINDS = {
    "parallel": (ScriptedParallelEnv, TellingParallelEnv, {}),
    "turns": (TurnEnv, TellingTurnEnv, {"agent_num": 3, "dead_first": False}),
    "keyed": (KeyedEnv, TellingKeyedEnv, {"waits": waits}),
    "single": (SingleEnv, TellingSingleEnv, {"length": [3, 1, 5], "info_every": 2}),
}


def check_equal(kind: str, mode: str, backend: str) -> None:
    declaring, telling, options = KINDS[kind]
    settings: dict[str, Any] = {"num_envs": 2, "backend": backend, "autoreset_mode": mode, "masked": True, **options}
    with marlvec.make(declaring, **settings) as envs:
        assert all(group.mask_size == 5 for group in envs.spec.groups)
        expected = play(envs, 40)
    with marlvec.make(telling, **settings) as envs:
        assert all(group.mask_size is None and group.choices == 5 for group in envs.spec.groups)
        for t, (got, wanted) in enumerate(zip(play(envs, 40), expected, strict=True)):
            assert not (differs := difference(got, wanted)), f"call {t}: {differs}"


@pytest.mark.mostly_slow("plays whole episodes of many envs", quick="each")
@pytest.mark.parametrize("mode", ["same_step", "next_step", "disabled"])
@pytest.mark.parametrize("kind", KINDS)
def test_masks_in_infos_are_what_masks_in_observations_are(kind: str, mode: str) -> None:
    """Arrays, other infos, everything: over whole episodes in which agents come, wait and end."""
    check_equal(kind, mode, "sync")


@pytest.mark.mostly_slow("plays whole episodes of many envs", quick=2)
@pytest.mark.parametrize("kind", ["turns", "single"])
def test_masks_in_infos_cross_processes(kind: str) -> None:
    check_equal(kind, "same_step", "async")


@pytest.mark.checklist(63)
@pytest.mark.parametrize("backend", ["sync", "async"])
def test_where_a_mask_is_missing_all_is_allowed_and_other_envs_have_theirs(backend: str) -> None:
    """After a look at masks in observations and in infos, which are the same."""
    check_equal("parallel", "same_step", backend)
    givers = [lambda t, a: True, lambda t, a: False, lambda t, a: (t + a) % 2 == 0]
    with marlvec.make([partial(Forgetful, gives) for gives in givers], backend=backend, validate="off") as envs:
        _, infos = envs.reset(seed=0)
        for t in range(13):
            only = np.arange(3) == t % 4 % 3
            expected = [[only if gives(t % 4, a) else np.ones(3, np.bool_) for a in range(2)] for gives in givers]
            assert infos["action_mask"].dtype == np.bool_
            assert infos["action_mask"].tolist() == np.array(expected).tolist()
            assert marlvec.infos_to_list(infos, envs.agents, 3) == [{}, {}, {}]
            *_, infos = envs.step(np.zeros((3, 2), np.int64))
            assert "final_info" not in infos


@pytest.mark.parametrize("first", [3, 6])
def test_there_is_no_mask_before_some_env_has_given_one(first: int) -> None:
    """And from then on there is, whatever the rows that are asked for."""
    steps = {"n": 0}

    def gives(t: int, a: int) -> bool:
        steps["n"] += a
        return a == 1 and steps["n"] > first

    factories = [partial(Forgetful, gives), partial(Forgetful, lambda t, a: False)]
    with marlvec.make(factories, backend="sync", validate="off") as envs:
        envs.reset(seed=0)
        for _ in range(12):
            envs.send(np.zeros((2, 2), np.int64))
            masks = envs.recv().action_masks
            assert (masks[0] is not None) == (steps["n"] > first)
        envs.send(np.zeros((1, 2), np.int64), [1])
        (mask,) = envs.recv().action_masks
        assert mask is not None
        assert mask.tolist() == [[[True] * 3] * 2]


def test_envs_that_never_give_one_have_none() -> None:
    with marlvec.make("simple_spread", 2, backend="sync") as envs:
        assert "action_mask" not in envs.reset(seed=0)[1]
        envs.send(np.zeros((2, 3), np.int64))
        assert envs.recv().action_masks == [None]


@pytest.mark.mostly_slow("plays whole episodes of many envs", quick=2)
@pytest.mark.parametrize("backend", ["sync", "async"])
def test_taxi_gives_its_mask_in_its_info(backend: str) -> None:
    plain = gymnasium.make(resolve("Taxi").entry.id.removeprefix("gymnasium/"))
    with marlvec.make("Taxi", 1, backend=backend) as envs:
        obs, infos = envs.reset(seed=[3])
        _, info = plain.reset(seed=3)
        envs.random_action(seed=0)
        for _ in range(450):
            assert infos["action_mask"][0, 0].tolist() == info["action_mask"].astype(bool).tolist()
            assert infos["prob"].tolist() == [info["prob"]]
            assert set(marlvec.infos_to_list(infos, envs.agents, 1)[0]["__common__"]) == {"prob"}
            chosen = envs.random_action()
            assert info["action_mask"][chosen[0, 0]]
            obs, *_, infos = envs.step(chosen)
            found, _, ended, cut, info = plain.step(int(chosen[0, 0]))
            if ended or cut:
                assert infos["final_observation"].tolist() == [[found]]
                found, info = plain.reset()
            assert obs.tolist() == [[found]]
    plain.close()


@pytest.mark.parametrize(
    ("space", "mask", "expected"),
    [
        (MultiDiscrete([2, 3]), (np.array([1, 0]), np.array([0, 1, 1])), [True, False, False, True, True]),
        (MultiDiscrete([2, 3]), [[1, 0], [0, 1, 1]], [True, False, False, True, True]),
        (MultiDiscrete([2, 3]), np.array([0, 1, 1, 0, 0], np.float32), [False, True, True, False, False]),
        (Discrete(2, start=7), [True, False], [True, False]),
        (Discrete(2), np.array([0, 1], np.uint8), [False, True]),
        (Discrete(2), np.array([1, 0], np.float64), [True, False]),
    ],
)
def test_masks_come_in_many_forms(space: Any, mask: Any, expected: list[bool]) -> None:
    with marlvec.make(partial(MaskEnv, space, mask), 1, backend="sync") as envs:
        envs.reset(seed=0)
        *_, infos = envs.step(envs.random_action(seed=0))
        assert infos["action_mask"].tolist() == [[expected]]
        assert marlvec.infos_to_list(infos, envs.agents, 1) == [{}]


class MaskEnv(gymnasium.Env[Any, Any]):
    """Gives one mask in each step, in the infos or beside the observation."""

    def __init__(self, space: Any, mask: Any, *, declared: bool = False) -> None:
        size = int(space.n) if isinstance(space, Discrete) else int(space.nvec.sum())
        own = Box(0, 1, (1,))
        self.action_space, self._mask, self._declared = space, mask, declared
        self.observation_space = Dict(observation=own, action_mask=MultiBinary(size)) if declared else own
        self._all = np.ones(size, np.int8)

    def _told(self, mask: Any) -> tuple[Any, dict[str, Any]]:
        obs = np.zeros(1, np.float32)
        return ({"observation": obs, "action_mask": mask}, {}) if self._declared else (obs, {"action_mask": mask})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self._told(self._all)

    def step(self, action: Any) -> Any:
        obs, info = self._told(self._mask)
        return obs, 0.0, False, False, info


FORMS = "expected bools, or zeros and ones, one per choice, got "
ADVICE = "; for a mask that is added to logits, pass `mask == 0`"
NO_MASKS: list[tuple[Any, str]] = [
    (np.array([0, -np.inf, 0]), f"{FORMS}-inf at choice 1{ADVICE}"),
    (np.array([-1e9, 0, 0], np.float32), f"{FORMS}-1000000000.0 at choice 0{ADVICE}"),
    (np.array([0, np.nan, 1]), f"{FORMS}nan at choice 1"),
    (np.array([0, 2, 1]), f"{FORMS}2 at choice 1"),
    (np.array([0, 0.5, 1]), f"{FORMS}0.5 at choice 1"),
    (np.ones((1, 3)), f"{FORMS}an array of shape (1, 3)"),
    (np.array([1, 0, 1], object), f"{FORMS}ndarray array([1, 0, 1], dtype=object)"),
    (np.array(["1", "0", "1"]), f"{FORMS}ndarray array(['1', '0', '1']"),
    (None, f"{FORMS}NoneType None"),
    (3, f"{FORMS}int 3"),
    ("none", f"{FORMS}str 'none'"),
]


@pytest.mark.mostly_slow("plays whole episodes of many envs", quick=4)
@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize(("mask", "words"), NO_MASKS)
def test_an_invalid_mask_is_refused(mask: Any, words: str, declared: bool) -> None:
    """In the infos, beside the observation, and by check_env."""
    make = partial(MaskEnv, Discrete(3), mask, declared=declared)
    with marlvec.make(make, 2, backend="sync") as envs:
        envs.reset(seed=0)
        with pytest.raises(ContractError, match=re.escape(f"env 0, step(): action mask of agent 'agent_0': {words}")):
            envs.step(np.zeros((2, 1), np.int64))
    findings = check_env(make, max_steps=20, raise_first=False)
    assert any("mask" in str(one) for one in findings)


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_a_mask_of_another_length_is_refused(backend: str) -> None:
    class Wrong(SingleEnv):
        def step(self, action: Any) -> Any:
            return *super().step(action)[:4], {"action_mask": np.ones(4)}

    with marlvec.make(Wrong, 2, backend=backend) as envs:
        envs.reset(seed=0)
        words = "env 0, step(): action mask of agent 'agent_0': expected shape (5,), got (4,)"
        with pytest.raises(ContractError, match=re.escape(words)):
            envs.step(np.zeros((2, 1), np.int64))


def test_where_actions_are_no_choices_it_is_an_info_like_others() -> None:
    build = partial(Forgetful, lambda t, a: True, action_space=Box(0, 1, (2,)))
    with marlvec.make(build, 1, backend="sync") as envs:
        _, infos = envs.reset(seed=0)
        assert "action_mask" not in infos
        (info,) = marlvec.infos_to_list(infos, envs.agents, 1)
        assert info["ann"]["action_mask"].tolist() == [True, False, False]


def test_a_mask_beside_a_declared_one_is_an_info_like_others() -> None:
    class Both(SingleEnv):
        def _info(self) -> dict[str, Any]:
            return {"action_mask": "see the observation"}

    with marlvec.make(Both, 1, backend="sync", masked=True) as envs:
        _, infos = envs.reset(seed=0)
        assert infos["action_mask"].shape == (1, 1, 5)
        assert marlvec.infos_to_list(infos, envs.agents, 1) == [{"__common__": {"action_mask": "see the observation"}}]


COMPOSITE: list[tuple[Any, Any]] = [  # action spaces, with masks in the form of Gymnasium's sample(mask=…)
    (Tuple((Discrete(3), Discrete(2))), (np.array([1, 0, 0], np.int8), np.array([0, 1], np.int8))),
    (Dict(a=Discrete(3), b=Box(0, 1, (2,))), {"a": np.array([0, 1, 0], np.int8), "b": None}),
    (MultiBinary(3), np.array([0, 1, 2], np.int8)),
    (Text(4), (np.array(2), None)),
]
NAMES = ["Tuple", "Dict", "MultiBinary", "Text"]


class CompositeEnv(gymnasium.Env[Any, Any]):
    """One agent, whose info has a mask from step `since` on: `reset` is step 0."""

    observation_space = Box(0, 1, (1,))

    def __init__(self, space: Any, mask: Any, since: int = 0) -> None:
        self.action_space, self._mask, self._since = space, mask, since

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._t = 0
        return np.zeros(1, np.float32), self._info()

    def step(self, action: Any) -> Any:
        self._t += 1
        return np.zeros(1, np.float32), 0.0, self._t == 3, False, self._info()

    def _info(self) -> dict[str, Any]:
        return {"action_mask": self._mask} if self._t >= self._since else {}


class JointCompositeEnv(CompositeEnv):
    """Two agents with such actions; the second may have other actions than the first."""

    n_agents = 2

    def __init__(
        self, space: Any, mask: Any, key: str = "action_mask", other: Any = None, other_mask: Any = None
    ) -> None:
        super().__init__(Tuple((space, space if other is None else other)), mask)
        self.observation_space = Tuple((Box(0, 1, (1,)),) * 2)  # type: ignore[assignment]
        self._key, self._masks = key, [mask, mask if other is None else other_mask]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return (np.zeros(1, np.float32),) * 2, {self._key: self._masks}


REFUSAL = r"action mask of agent '{agent}': expected none, got one for {space}.*put it under another key"


def refusal(space: Any, agent: str) -> str:
    return REFUSAL.format(agent=agent, space=re.escape(str(space)))


@pytest.mark.parametrize("validate", ["strict", "off"])
@pytest.mark.parametrize(("space", "mask"), COMPOSITE, ids=NAMES)
def test_a_mask_of_composite_actions_is_refused(space: Any, mask: Any, validate: str) -> None:
    """Never dropped: in infos of a reset or a step, of one agent or of several."""
    with (
        marlvec.make(partial(CompositeEnv, space, mask), 2, backend="sync", validate=validate) as envs,
        pytest.raises(ContractError, match=refusal(space, "agent_0")),
    ):
        envs.reset(seed=0)
    with marlvec.make(partial(CompositeEnv, space, mask, since=1), 2, backend="sync", validate=validate) as envs:
        envs.reset(seed=0)
        with pytest.raises(ContractError, match=r"env 0, step\(\): " + refusal(space, "agent_0")):
            envs.step(envs.random_action(seed=0))
    build = partial(Forgetful, lambda t, a: True, action_space=space)
    with (
        marlvec.make(build, 1, backend="sync", validate=validate) as envs,
        pytest.raises(ContractError, match=refusal(space, "ann")),
    ):
        envs.reset(seed=0)


@pytest.mark.parametrize("backend", ["async", "thread"])
def test_a_mask_of_composite_actions_is_refused_in_workers(backend: str) -> None:
    space, mask = COMPOSITE[0]
    with (
        marlvec.make(partial(CompositeEnv, space, mask), 2, backend=backend) as envs,
        pytest.raises(ContractError, match=refusal(space, "agent_0")),
    ):
        envs.reset(seed=0)


@pytest.mark.parametrize("key", ["action_mask", "avail_actions"])
@pytest.mark.parametrize(("space", "mask"), COMPOSITE, ids=NAMES)
def test_joint_masks_of_composite_actions_are_refused(space: Any, mask: Any, key: str) -> None:
    with (
        marlvec.make(partial(JointCompositeEnv, space, mask, key), 1, backend="sync") as envs,
        pytest.raises(ContractError, match=refusal(space, "agent_0")),
    ):
        envs.reset(seed=0)
    one = partial(JointCompositeEnv, Discrete(2), np.array([1, 0]), key, space, mask)
    with marlvec.make(one, 1, backend="sync") as envs, pytest.raises(ContractError, match=refusal(space, "agent_1")):
        envs.reset(seed=0)


def test_joint_masks_of_discrete_agents_hold_beside_a_box() -> None:
    build = partial(JointCompositeEnv, Discrete(2), np.array([1, 0]), "action_mask", Box(0, 1, (2,)), None)
    with marlvec.make(build, 1, backend="sync") as envs:
        _, infos = envs.reset(seed=0)
        assert infos["action_mask"]["agent_0"].tolist() == [[[True, False]]]


@pytest.mark.parametrize(("space", "mask"), COMPOSITE, ids=NAMES)
def test_a_mask_declared_beside_composite_actions_is_refused(space: Any, mask: Any) -> None:
    class Declared(CompositeEnv):
        observation_space = Dict(observation=Box(0, 1, (1,)), action_mask=MultiBinary(3))  # type: ignore[assignment]

    words = f"observation space of agent 'agent_0': 'action_mask': expected none, got one for {re.escape(str(space))}"
    with pytest.raises(ContractError, match=words):
        marlvec.make(partial(Declared, space, mask), 1, backend="sync")
    with pytest.raises(ContractError, match=words.replace("agent_0", "a")):
        marlvec.external.make({"a": (Declared.observation_space, space)}, 1)
    assert any(words[:60] in str(one) for one in check_env(partial(Declared, space, mask), raise_first=False))


@pytest.mark.parametrize(("space", "mask"), COMPOSITE, ids=NAMES)
def test_check_env_finds_a_mask_of_composite_actions(space: Any, mask: Any) -> None:
    for build in (partial(CompositeEnv, space, mask), partial(JointCompositeEnv, space, mask, "avail_actions")):
        findings = [one for one in check_env(build, raise_first=False, max_steps=5) if one.check == "masks"]
        assert [one.expected for one in findings] == [f"none: marlvec takes no masks of {type(space).__name__} actions"]
        assert "under another key" in findings[0].change


def test_none_and_other_keys_are_infos_like_others() -> None:
    """The way out: a mask under another key reaches the caller; None forbids nothing."""
    space, mask = COMPOSITE[2]

    class Renamed(CompositeEnv):
        def _info(self) -> dict[str, Any]:
            return {"my_mask": self._mask, "action_mask": None}

    with marlvec.make(partial(Renamed, space, mask), 2, backend="sync", validate="strict") as envs:
        _, infos = envs.reset(seed=0)
        assert infos["my_mask"].tolist() == [[0, 1, 2]] * 2
        envs.step(envs.random_action(seed=0))


def test_an_undeclared_mask_of_very_many_choices_is_refused() -> None:
    build = partial(CompositeEnv, Discrete(70_000), np.ones(70_000, np.int8))
    with marlvec.make(build, 1, backend="sync") as envs, pytest.raises(ContractError, match=r"MultiBinary\(70000\)"):
        envs.reset(seed=0)


def test_a_declared_mask_size_of_composite_actions_is_refused() -> None:
    """As a native env, a JaxWorld and an env with a slot declare it."""
    with pytest.raises(ContractError, match="game: mask size of agent 'a': expected none, got one for MultiBinary"):
        EnvSpec("game", ("a",), (Box(0, 1, (1,)),), (MultiBinary(3),), (3,))


class MaskingEnv(MultiAgentEnv):
    """Writes its own slot, and gives a mask in its infos from step `since` on, where nothing reads it."""

    name, agents = "masking", ("a", "b")
    observation_spaces = (Box(0, 1, (1,)),) * 2

    def __init__(self, space: Any, mask: Any, since: int = 0, *, who: str = "b", sizes: Any = (), begins: bool = False):
        self.action_spaces, self.mask_sizes, self.resets_itself = (Box(0, 1, (1,)), space), sizes, begins
        self._mask, self._since, self._who, self._t = mask, since, who, 0

    def reset(self, slot: Slot, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._t = 0
        return self._write(slot)

    def step(self, slot: Slot) -> Any:
        self._t += 1
        if self._t < 3:
            return self._write(slot)
        for a in range(2):
            slot.terminated[a], slot.alive[a], slot.acting[a] = True, self.resets_itself, self.resets_itself
        slot.done, slot.begun = True, self.resets_itself
        if self.resets_itself:
            for a in range(2):
                slot.write_final(a, np.ones(1, np.float32))
            slot.final_info = self._info()
            return None
        return self._info()

    def _write(self, slot: Slot) -> Any:
        for a in range(2):
            slot.write_obs(a, np.zeros(1, np.float32))
            slot.alive[a] = slot.acting[a] = True
        return self._info()

    def _info(self) -> Any:
        return {self._who: {"action_mask": self._mask}} if self._t >= self._since else None


IN_INFOS = r"info of {who}: 'action_mask': expected none.*{space}.*put it under another key"


@pytest.mark.parametrize("who", ["b", "__common__"])
@pytest.mark.parametrize(("space", "mask"), [*COMPOSITE, (Discrete(2), [True, False])], ids=[*NAMES, "Discrete"])
def test_a_mask_in_infos_of_an_env_with_a_slot_is_refused(space: Any, mask: Any, who: str) -> None:
    """It would forbid nothing: such an env writes masks into its slot."""
    named = "the env" if who == "__common__" else "agent 'b'"
    words = IN_INFOS.format(who=named, space=re.escape(str(space)))
    for since, call in enumerate(("reset", "step", "step", "step")):
        with marlvec.make(partial(MaskingEnv, space, mask, since, who=who), 2, backend="sync") as envs:
            if since:
                envs.reset(seed=0)
                for _ in range(since - 1):
                    envs.step(envs.random_action(seed=0))
            with pytest.raises(ContractError, match=rf"env 0, {call}\(\): " + words):
                envs.reset(seed=0) if not since else envs.step(envs.random_action(seed=0))
    build = partial(MaskingEnv, space, mask, since=3, who=who, begins=True)
    with marlvec.make(build, 1, backend="sync") as envs:
        envs.reset(seed=0)
        for _ in range(2):
            envs.step(envs.random_action(seed=0))
        with pytest.raises(ContractError, match=words):
            envs.step(envs.random_action(seed=0))
    findings = check_env(partial(MaskingEnv, space, mask, who=who), raise_first=False, max_steps=5)
    assert {(one.check, one.subject) for one in findings} == {("masks", "action_mask in infos")}


def test_a_mask_in_infos_of_a_padded_env_with_a_slot_is_refused() -> None:
    """Padding declares a mask of its own, which the env did not."""

    class Two(MaskingEnv):
        def __init__(self) -> None:
            super().__init__(Discrete(2), [True, False])
            self.action_spaces = (Discrete(3), Discrete(2))

    with (
        marlvec.make(Two, 1, backend="sync", pad=True) as envs,
        pytest.raises(ContractError, match="info of agent 'b'"),
    ):
        envs.reset(seed=0)


def test_infos_beside_declared_masks_and_boxes_may_have_that_name() -> None:
    declared = partial(MaskingEnv, Discrete(2), [True, False], sizes=(None, 2))
    box = partial(MaskingEnv, Box(0, 1, (1,)), [True, False])
    none = partial(MaskingEnv, MultiBinary(2), None)
    for build in (declared, box, none):
        assert not [one for one in check_env(build, raise_first=False, max_steps=5) if one.check == "masks"]
        with marlvec.make(build, 1, backend="sync") as envs:
            _, infos = envs.reset(seed=0)
            assert marlvec.infos_to_list(infos, envs.agents, 1)[0]["b"].keys() == {"action_mask"}


def test_a_mask_in_common_infos_of_rllib_and_parallel_envs_is_refused() -> None:
    """Infos of the whole env: a table of masks by agent, or one mask for all."""

    class Shared(KeyedEnv):
        def reset(self, **given: Any) -> Any:
            obs, infos = super().reset(**given)
            return obs, {**infos, "__common__": {"action_mask": np.array([1, 0])}}

    class Table(ScriptedParallelEnv):
        def reset(self, *args: Any, **given: Any) -> Any:
            obs, infos = super().reset(*args, **given)
            return obs, {**infos, "action_mask": {agent: [1, 0] for agent in obs}}

    for build in (Shared, Table):
        with (
            marlvec.make(build, 1, backend="sync") as envs,
            pytest.raises(ContractError, match="info of the env: 'action_mask': expected none in infos"),
        ):
            envs.reset(seed=0)

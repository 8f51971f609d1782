"""Text, Sequence, Graph, OneOf and spaces of users' own: values without a fixed size, good ones and bad ones."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Sequence, Space, Text, Tuple

from marlvec import AsyncVectorEnv, VectorEnv
from marlvec.envs import PaddedEnv, adapt
from marlvec.errors import ActionError, ArgumentError, ContractError, EnvContractError, UnsupportedSpaceError
from marlvec.spaces import MAX_BYTES, ObjectArray
from marlvec.testing import SampledEnv
from marlvec.vector.buffers import Buffers
from tests.faults.harness.programs import run
from tests.vector.support.drivers import LivesEnv
from tests.vector.support.kinds import BACKENDS, HERE_AND_AWAY, OBJECTS, Card, Hands, ObjectEnv, at, is_blank
from tests.vector.support.kinds import make_envs as make
from tests.vector.support.reference import assert_trees_equal, refused

# Text, Sequence, Graph, OneOf and spaces of users' own: values without a fixed size, on every backend.


def objects(backend: str, observation: str, action: str, n: int = 2, late: bool = False, **options: Any) -> VectorEnv:
    return make(backend, [partial(ObjectEnv, observation, action, late=late, env_index=i) for i in range(n)], **options)


@pytest.mark.slow("plays whole episodes in worker processes")
@pytest.mark.checklist(58)
def test_fixed_size_leaves_stay_in_shared_memory_and_objects_can_be_refused() -> None:
    name = "inside Dict and Tuple"
    with objects("async", name, "text") as envs:
        rows = Buffers.nbytes(envs.spec, 2)
        arrays = 3 * 64 + 5 * 64 + 2 * 64  # obs and final obs of pixels and n; rewards, flags
        assert rows <= arrays
    with pytest.raises(UnsupportedSpaceError) as caught:
        AsyncVectorEnv([partial(ObjectEnv, name, "text")], shared_memory="require", context="fork")
    for leaf in ("observation of agent 'ann', leaf 'hand' (Hands)", "leaf 'words/0' (Text)", "leaf 'words/1/deep'"):
        assert leaf in str(caught.value)
    assert "action of agent 'ann' (Text)" in str(caught.value)
    assert "pixels" not in str(caught.value)
    plain = partial(SampledEnv, Box(0, 1, (2,)), Discrete(2))
    with AsyncVectorEnv([plain], shared_memory="require", context="fork") as envs:
        envs.reset()


@pytest.mark.checklist(59)
@pytest.mark.parametrize("grouped", [False, True])
def test_spaces_of_one_agent_one_env_and_all(grouped: bool) -> None:
    with objects("sync", "inside Dict and Tuple", "one of", grouped=grouped) as envs:
        obs, _ = envs.reset(seed=1)
        batched, single = envs.observation_space, envs.single_observation_space
        if grouped:
            obs, batched, single = obs["agents"], batched["agents"], single["agents"]
        assert batched["hand"] == ObjectArray(Hands(2), (2, 3))
        assert single["words"][0] == ObjectArray(Text(3), (3,))
        assert batched["pixels"].shape == (2, 3, 2, 2)
        for i in range(2):
            row = {"pixels": obs["pixels"][i], "hand": obs["hand"][i]}
            row["words"] = obs["words"][0][i], {key: part[i] for key, part in obs["words"][1].items()}
            assert single.contains(row)
            for a in range(3):
                assert envs.agent_observation_space(a).contains(at(envs.agent_observation_space(a), obs, i, a))


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=5)
@pytest.mark.parametrize("backend", BACKENDS)
def test_spaces_without_an_equality_of_their_own_make_one_group(backend: str) -> None:
    """Each agent of each env has built its own, and so has each process."""
    with objects(backend, "custom", "custom") as envs:
        assert list(envs.groups) == ["agents"]
    other = partial(SampledEnv, Hands(3), Hands(3), agent_num=3)
    with pytest.raises(ContractError, match=r"env 1\b.*agents: expected \('ann'"):
        make(backend, [partial(ObjectEnv, "custom", "custom"), other])
    differs = [partial(SampledEnv, Hands(n), Discrete(2)) for n in (3, 4)]
    refused(ContractError, "env 1.*observation space of agent 'agent_0' at /: expected <", make, backend, differs)


class Reusing(LivesEnv):
    """Hands out one list that it changes, keeps the actions it was given, and ends agent b early."""

    def __init__(self) -> None:
        super().__init__({"a": (0, 4), "b": (0, 2)}, Hands(9), Hands(9))
        self.hand: list[Card] = []
        self.kept: list[Any] = []

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.hand.clear()
        self.kept.clear()
        return super().reset(seed, options)

    def step(self, actions: dict[str, Any]) -> Any:
        self.kept += actions.values()
        assert [card.rank for card in self.kept[0]] == [7], "nobody changes an action that was given"
        self.hand.append(Card("c", self.t + 1))
        return super().step(actions)

    def look(self, agents: list[str]) -> Any:
        return dict.fromkeys(agents, self.hand), {}


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=3)
@pytest.mark.parametrize("backend", ["sync", "thread", "async"])
def test_neither_side_sees_the_others_changes(backend: str) -> None:
    def ranks(cell: Any) -> Any:
        return None if cell is None else [card.rank for card in cell]

    with make(backend, [Reusing, Reusing]) as envs:
        for _ in range(3):
            obs, _ = envs.reset()
            for t in range(1, 4):
                actions = np.empty((2, 2), object)
                for i in np.ndindex(2, 2):
                    actions[i] = [Card("h", 7)]
                envs.step_send(actions)
                for cell in actions.flat:
                    cell[0].rank = -1
                before, (obs, *_, infos) = obs, envs.step_fetch()
                assert [ranks(cell) for cell in obs[:, 0]] == [list(range(1, t + 1))] * 2
                assert [ranks(cell) for cell in obs[:, 1]] == [list(range(1, t + 1)) if t < 3 else None] * 2
                assert all(ranks(cell) == list(range(1, t)) for cell in before[:, 0])
                for cell in (*obs[:, 0], *infos.get("final_observation", np.empty(0, object)).flat):
                    if cell is not None:
                        cell.append(Card("x", 99))
                again = envs.reset(env_ids=[])[0]
                assert [ranks(cell) for cell in again[:, 0]] == [list(range(1, t + 1))] * 2
                obs = again


def test_a_class_of_the_users_own_that_narrows_a_space_of_arrays() -> None:
    with make("sync", [partial(SampledEnv, Even(9), Tuple([Even(9), Discrete(2)]))], validate="strict") as envs:
        envs.reset()
        good = np.zeros((1, 2), np.int64)
        assert envs.step((good + 4, good))[0].dtype == np.int64
        refused(ActionError, "agent 'agent_0': leaf '0': expected a member of", envs.step, (good + 3, good))


class Even(Discrete):
    """Even numbers only."""

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        return super().sample() // 2 * 2

    def contains(self, x: Any) -> bool:
        return super().contains(x) and int(x) % 2 == 0


SCRIPT = """
from gymnasium.spaces import Space
from pettingzoo import ParallelEnv

class Coin:
    def __init__(self, side):
        self.side = side

class Coins(Space):
    def sample(self, mask=None, probability=None):
        return Coin(int(self.np_random.integers(2)))
    def contains(self, x):
        return isinstance(x, Coin)

class Env(ParallelEnv):
    metadata = {"name": "coins"}
    possible_agents = ["a", "b"]
    def observation_space(self, agent):
        return Coins()
    def action_space(self, agent):
        return Coins()
    def reset(self, seed=None, options=None):
        self.agents, self.t = ["a", "b"], 0
        return {agent: Coin(9) for agent in self.agents}, {}
    def step(self, actions):
        assert all(isinstance(coin, Coin) for coin in actions.values())
        self.t += 1
        over = dict.fromkeys(actions, self.t == 3)
        self.agents = [] if self.t == 3 else self.agents
        return actions, dict.fromkeys(actions, 0.0), over, dict.fromkeys(actions, False), {}

for backend in ("sync", "thread", "async"):
    with marlvec.make(Env, num_envs=2, backend=backend) as envs:
        envs.reset(seed=0)
        for t in range(7):
            actions = envs.random_action(seed=t)
            obs, _, terminated, _, infos = envs.step(actions)
            obs = infos["final_observation"] if terminated.all() else obs
            assert [type(coin) is Coin for coin in obs.flat] == [True] * 4
            assert [coin.side for coin in obs.flat] == [coin.side for coin in actions.flat]
print("fine")
"""


@pytest.mark.slow("plays whole episodes in worker processes")
def test_classes_of_a_script(tmp_path: Path) -> None:
    """Spaces and values of classes that the main script defines, which workers do not import."""
    assert run(SCRIPT, tmp_path) == ["fine"]


class Speaker(gymnasium.Env[Any, Any]):
    """One agent that hears what it said."""

    observation_space = Dict({"heard": Text(9, min_length=0), "t": Discrete(9)})
    action_space = Text(9)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return {"heard": "", "t": 0}, {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return {"heard": action, "t": self.t}, 0.0, self.t == 3, False, {}


def test_objects_of_a_gymnasium_env() -> None:
    with make("sync", [Speaker, Speaker]) as envs:
        obs, _ = envs.reset()
        assert obs["heard"].tolist() == [[""], [""]]
        for t in range(1, 9):
            obs, *_, infos = envs.step([[f"say{t}"], ["nothing"]])
            last = infos["final_observation"] if t % 3 == 0 else obs
            assert last["heard"].tolist() == [[f"say{t}"], ["nothing"]]


def test_objects_beside_arrays_that_are_padded() -> None:
    spaces = [Dict({"word": Text(4), "row": Box(1, 2, (n,))}) for n in (2, 3)]
    action = Tuple([OBJECTS["graph"](), Discrete(2)])
    factory = partial(padded, spaces, action)
    with make("sync", [factory, factory], validate="strict") as envs:
        obs, _ = envs.reset(seed=0)
        for t in range(9):
            assert obs["row"].shape == (2, 2, 3)
            assert all(Text(4).contains(word) for word in obs["word"].flat)
            obs, rewards, *_ = envs.step(envs.random_action(seed=t))
            assert (rewards > 0).all()


def padded(spaces: list[Any], action: Any) -> Any:
    return PaddedEnv(adapt(SampledEnv(spaces, action)))


class Stated(Speaker):
    """Has a state of words, for which there is no array."""

    state_space = Text(9)

    def state(self) -> str:
        return "fine"


def test_a_state_of_objects_is_none_that_could_be_asked_for() -> None:
    with make("sync", [Stated]) as envs:
        envs.reset()
        assert envs.state_space is None
    refused(ArgumentError, "has no global state", make, "sync", [Stated], state=True)


# Objects that are none: values outside of their space, too large, unpicklable, or in no form of actions.


MIXED = Dict({"say": Text(5), "go": Box(-1, 1, (2,), np.float64)})


class Faulty(SampledEnv):
    """Env 1 hands out something else in step 2 of episodes that it is told to spoil."""

    def __init__(self, space: Space[Any], wrong: Any, action: Any = None, env_index: int = 0) -> None:
        super().__init__(space, action or Discrete(2), env_index=env_index)
        self.wrong, self.spoils, self.at_fault = wrong, False, env_index == 1

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.spoils = bool(options)
        return super().reset(seed=seed, options=options)

    def step(self, actions: Any) -> Any:
        obs, *rest = super().step(actions)
        if self.at_fault and self.spoils and self._t == 2:
            obs["agent_1"] = self.wrong() if callable(self.wrong) else self.wrong
        return obs, *rest


def graph_of(nodes: Any) -> Any:
    return OBJECTS["graph"]().sample()._replace(nodes=nodes)


def locked() -> Card:
    """A card that cannot be pickled."""
    card = Card("x", 1)
    vars(card)["lock"] = threading.Lock()
    return card


WRONG: list[tuple[str, Any, Any, str]] = [
    ("too long a text", Text(3), "abcd", r"expected a member of Text\(1, 3,.*got 'abcd'"),
    ("too short a text", Text(3), "", "got ''"),
    ("no text", Text(3), np.array(["a"]), "got array"),
    ("none", Text(3), None, "got None"),
    (
        "a sequence of others",
        Sequence(Discrete(3)),
        (np.int64(1), np.int64(3)),
        r"got \(np.int64\(1\), np.int64\(3\)\)",
    ),
    ("no sequence", Sequence(Discrete(3), stack=True), 7, r"contains\(\) raised"),
    ("a graph of other nodes", OBJECTS["graph"](), graph_of(np.zeros((2, 9), np.float32)), "member of Graph"),
    ("no graph", OBJECTS["graph"](), {"nodes": 1}, "member of Graph"),
    ("custom", Hands(2), [1], r"got \[1\]"),
    ("unpicklable", Hands(2), lambda: [locked()], "a list that cannot be pickled"),
    ("in a Dict", MIXED, {"say": "abcdef", "go": np.zeros(2)}, "leaf 'say': expected a member of Text"),
]


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=8)
@pytest.mark.fault("C16")
@pytest.mark.parametrize("case", WRONG, ids=[case[0] for case in WRONG])
def test_a_value_that_its_space_does_not_contain(case: Any) -> None:
    """Only that env loses its episode; what was in the slot is still there."""
    _, space, wrong, words = case
    for backend in {"sync", BACKENDS[WRONG.index(case) % 3]}:
        factories = [partial(Faulty, space, wrong, env_index=i) for i in range(3)]
        with make(backend, factories, validate="off") as envs:
            for _ in range(2):
                envs.reset(seed=0, options={"spoil": True})
                envs.step(np.zeros((3, 2), np.int64))
                with pytest.raises(EnvContractError, match=f"env 1, step.*agent 'agent_1'.*{words}") as caught:
                    envs.step(np.zeros((3, 2), np.int64))
                assert caught.value.env_ids == (1,)
                assert caught.value.result.env_ids.tolist() == [0, 2]
                envs.reset(env_ids=[1])
                for _ in range(5):
                    envs.step(np.zeros((3, 2), np.int64))


@pytest.mark.fault("C16")
@pytest.mark.parametrize("case", WRONG, ids=[case[0] for case in WRONG])
def test_a_slot_is_untouched_by_what_it_refuses(case: Any) -> None:
    _, space, wrong, words = case
    if space is MIXED:  # its other leaf is fine, and comes first
        wrong = wrong | {"go": np.ones(2)}
    wrong = wrong() if callable(wrong) else wrong
    with make("sync", [partial(SampledEnv, space, Discrete(2))]) as envs:
        buffers = Buffers(envs.spec, 1)
    slot, tree, good = buffers.slot(0), buffers.spec.groups[0].observation_tree, space.sample()
    slot.write_obs(1, good)
    refused(ContractError, f"observation of agent 'agent_1': .*{words}", slot.write_obs, 1, wrong)
    assert_trees_equal(at(space, tree.unflatten(buffers.obs[0]), 0, 1), good, "slot")
    slot.zero_obs(1)
    assert is_blank(space, at(space, tree.unflatten(buffers.obs[0]), 0, 1))


class Blobs(Space[bytes]):
    """Any bytes at all."""

    def sample(self, mask: Any = None, probability: Any = None) -> bytes:
        return self.np_random.bytes(3)

    def contains(self, x: Any) -> bool:
        return isinstance(x, bytes)


class Heavy(Faulty):
    """Both agents of env 1 hand out so many bytes."""

    def step(self, actions: Any) -> Any:
        obs, *rest = super().step(actions)
        return (dict.fromkeys(obs, self.wrong) if self.at_fault else obs), *rest


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=3)
@pytest.mark.fault("C16")
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_objects_are_bounded(backend: str) -> None:
    half = bytes(MAX_BYTES // 2 - 1000)
    with make(backend, [partial(Heavy, Blobs(), half, Blobs(), i) for i in range(2)]) as envs:
        envs.reset()
        large = np.full((2, 2), half, object)
        for _ in range(2):
            assert envs.step(large)[0].tolist()[1] == [half, half]
        with pytest.raises(ActionError, match=r"env 0, agent 'agent_1': the value: a value of 8,390,608 bytes"):
            envs.step([[half, half + bytes(3000)], [b"", b""]])
        envs.step(large)
    with make(backend, [partial(Heavy, Blobs(), half + bytes(3000), env_index=i) for i in range(2)]) as envs:
        envs.reset()
        with pytest.raises(EnvContractError, match=r"env 1.*agent 'agent_1': the value.*at most 16,777,216 bytes"):
            envs.step(np.zeros((2, 2), np.int64))


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=3)
@pytest.mark.parametrize("backend", ["sync", "async"])
def test_what_is_taken_for_actions_of_objects(backend: str) -> None:
    factories = [partial(SampledEnv, Discrete(2), MIXED, env_index=i) for i in range(2)]
    go = np.zeros((2, 2, 2))
    with make(backend, factories, validate="warn") as envs:
        envs.reset(seed=0)
        words = [["a", "bb"], ["ccc", "dd"]]
        array = np.array(words, object)
        forms = (words, array, tuple(map(tuple, words)), np.array(words), list(array))
        rewards = []
        for form in forms:
            envs.reset(seed=0)
            rewards.append(envs.step({"say": form, "go": go})[1].tolist())
        assert rewards == [rewards[0]] * len(forms)
        wrong: list[tuple[Any, str]] = [
            (words[:1], "leaf 'say': expected an array of objects, or a list of lists, with 2 rows, one per env; got"),
            ([["a"], ["b", "c"]], "with rows of 2 values, one per agent; got 1"),
            (["ab", "cd"], "with rows of 2 values, one per agent; got str"),
            ("ab", "got str"),
            (None, "got NoneType"),
            (np.array(words, object).T[:1], "got 1"),
            ([["a", "b"], ["c", "toolong"]], "env 1, agent 'agent_1': leaf 'say': expected a member of Text"),
            ([["a", None], ["c", "d"]], "env 0, agent 'agent_1': .*got None"),
            ([["a", 5], ["c", "d"]], "got 5"),
        ]
        for say, message in wrong:
            refused(ActionError, message, envs.step, {"say": say, "go": go})
        assert envs.step({"say": words, "go": go})[1].shape == (2, 2), "none of those was sent"
    with make(backend, [partial(ObjectEnv, "text", "custom")]) as envs:
        envs.reset()
        with pytest.raises(ActionError, match="env 0, agent 'bob': the value: a list that cannot be pickled"):
            envs.step([[[], [locked()], []]])
        for _ in range(2):
            envs.step([[[], [], []]])
        lock = threading.Lock()  # bob is dead by now, and anything will do
        for _ in range(2):
            envs.step([[[], lock, []]])

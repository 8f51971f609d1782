"""Objects that are none: values outside of their space, too large, unpicklable, or in no form of actions."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Sequence, Space, Text

from marlvec.errors import ActionError, ContractError, EnvContractError
from marlvec.spaces import MAX_BYTES
from marlvec.testing.scripted import SampledEnv
from marlvec.vector.buffers import Buffers
from tests.vector.support.kinds import BACKENDS, HERE_AND_AWAY
from tests.vector.support.object_envs import OBJECTS, Card, Hands, ObjectEnv, at, is_blank
from tests.vector.support.object_envs import make_envs as make
from tests.vector.support.reference import assert_trees_equal

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
    with pytest.raises(ContractError, match=f"observation of agent 'agent_1': .*{words}"):
        slot.write_obs(1, wrong)
    assert_trees_equal(at(space, tree.unflatten(buffers.obs[0]), 0, 1), good, "slot")
    slot.zero_obs(1)
    assert is_blank(space, at(space, tree.unflatten(buffers.obs[0]), 0, 1))


class Blobs(Space[bytes]):
    """Any bytes at all."""

    def __init__(self) -> None:
        super().__init__()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Blobs)

    __hash__ = None  # type: ignore[assignment]  # as all of Gymnasium's

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
            (
                words[:1],
                "leaf 'say': expected an array of objects, or a list of lists, with 2 rows, one per env; got",
            ),
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
            with pytest.raises(ActionError, match=message):
                envs.step({"say": say, "go": go})
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

"""Spaces that derive from Gymnasium's: those that hold what theirs hold are arrays, all others objects."""

from __future__ import annotations

import pickle
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space

import marlvec
from marlvec.spaces import SpaceTree, batch_space, snapshot
from marlvec.spaces.action_masks import count_choices


class Mission(np.ndarray[Any, Any]):
    """A text with a number, as multigrid has it."""

    text: str

    @classmethod
    def of(cls, text: str, number: int) -> Mission:
        mission = np.array(number).view(cls)
        mission.text = text
        return mission


class Missions(MultiDiscrete):
    """Members are texts, not vectors."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts
        super().__init__([len(texts)])

    def sample(self, mask: Any = None, probability: Any = None) -> Any:
        number = int(super().sample()[0])
        return Mission.of(self.texts[number], number)

    def contains(self, x: Any) -> bool:
        return getattr(x, "text", None) in self.texts


class Tolerant(Box):
    """Members are those of a Box, and it says so itself."""

    def contains(self, x: Any) -> bool:
        return isinstance(x, np.ndarray) and x.shape == self.shape


class Named(Discrete):
    """It has a name, and nothing else is different."""


class Ragged(MultiBinary):
    """Members are of any length."""

    def sample(self, mask: Any = None, probability: Any = None) -> Any:
        return super().sample()[:-1]

    def contains(self, x: Any) -> bool:
        return True


class Unsampled(Box):
    def sample(self, mask: Any = None, probability: Any = None) -> Any:
        raise NotImplementedError

    def contains(self, x: Any) -> bool:
        return True


@pytest.mark.parametrize(
    ("space", "is_object"),
    [
        (Missions(["go", "stop"]), True),
        (Tolerant(0, 1, (2,)), False),
        (Named(3), False),
        (Ragged(4), True),
        (Unsampled(0, 1, (2,)), True),
        (Box(0, 1, (2,)), False),
    ],
)
def test_what_a_space_holds_decides(space: Space[Any], is_object: bool) -> None:
    space.seed(5)
    before = str(space.np_random.bit_generator.state)
    (leaf,) = SpaceTree(space).leaves
    assert leaf.is_object is is_object
    assert (leaf.dtype == object) is is_object
    assert (count_choices(space) is not None) is (isinstance(space, Named))
    assert str(space.np_random.bit_generator.state) == before  # nobody drew from the user's own stream
    batched = batch_space(space, 3)
    assert (batched.dtype == object) is is_object


def test_arrays_of_ones_own_class_keep_their_attributes() -> None:
    space = Missions(["go", "stop"])
    (leaf,) = SpaceTree(space).leaves
    copy, _ = snapshot(leaf, Mission.of("stop", 1))
    assert (type(copy), copy.text, int(copy)) == (Mission, "stop", 1)
    assert pickle.loads(pickle.dumps(copy)).text == "stop"

    class Knows(np.ndarray[Any, Any]):
        def __reduce__(self) -> Any:
            return int, (7,)

    assert snapshot(leaf, np.zeros(()).view(Knows))[0] == 7  # it says itself how it is pickled


class MissionEnv(gymnasium.Env[Any, Any]):
    def __init__(self) -> None:
        self.observation_space = Dict(mission=Missions(["go", "stop"]), place=Discrete(3))
        self.action_space = Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self._obs(), 0.0, self.t == 4, False, {}

    def _obs(self) -> dict[str, Any]:
        number = int(self.np_random.integers(2))
        return {"mission": Mission.of(["go", "stop"][number], number), "place": self.t % 3}


@pytest.mark.parametrize("backend", ["sync", "thread", "async"])
def test_texts_by_number_come_through_every_backend(backend: str) -> None:
    plain = [MissionEnv(), MissionEnv()]
    with marlvec.make(MissionEnv, 2, backend=backend) as envs:
        obs, _ = envs.reset(seed=[1, 2])
        expected = [env.reset(seed=seed)[0] for env, seed in zip(plain, [1, 2], strict=True)]
        for _ in range(12):
            assert [str(m.text) for m in obs["mission"][:, 0]] == [str(e["mission"].text) for e in expected]
            assert [int(m) for m in obs["mission"][:, 0]] == [int(e["mission"]) for e in expected]
            assert obs["place"][:, 0].tolist() == [e["place"] for e in expected]
            obs, *_ = envs.step(np.zeros((2, 1), int))
            steps = [env.step(0) for env in plain]
            expected = [env.reset()[0] if s[2] else s[0] for env, s in zip(plain, steps, strict=True)]

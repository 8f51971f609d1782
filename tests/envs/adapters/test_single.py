"""Gymnasium envs through their adapter, against loops written by hand over whole episodes."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Tuple

from marlvec.envs import COMMON, GymnasiumAdapter, adapt
from marlvec.testing.scripted import SingleEnv
from marlvec.vector import SyncVectorEnv
from tests.envs.support.rig import Rig

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

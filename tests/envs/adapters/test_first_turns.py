"""Turn-based envs that know what an agent sees only from its first turn on, as SuperSuit's wrappers have it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Text
from hypothesis import given
from hypothesis import strategies as st
from pettingzoo import AECEnv
from pettingzoo.utils.wrappers import BaseWrapper, OrderEnforcingWrapper

import marlvec
from marlvec.envs import adapt
from marlvec.errors import EnvContractError
from marlvec.testing import check_env
from marlvec.testing.scripted import Script, TurnEnv, draw_script
from tests.envs.adapters.test_turns import assert_same, last_says, rig_says
from tests.envs.support.rig import Rig

BACKENDS = ("sync", "thread", "async")


class LastSeen(BaseWrapper):  # type: ignore[misc]  # pettingzoo has no type information
    """Observes whoever is selected and remembers it; of all others in this game it knows nothing."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        super().reset(seed, options)
        self.seen: dict[str, Any] = {}
        self.look()

    def step(self, action: Any) -> None:
        super().step(action)
        if self.agents:
            self.look()

    def look(self) -> None:
        self.seen[self.agent_selection] = self.env.observe(self.agent_selection)

    def observe(self, agent: str) -> Any:
        return self.seen[agent]


def build(scripts: list[Script], agent_num: int, outside: Callable[[Any], Any], **options: Any) -> Any:
    return outside(LastSeen(TurnEnv(scripts, agent_num=agent_num, **options)))


def bare(env: Any) -> Any:
    return env


@pytest.mark.slow("plays whole episodes of many envs")
@given(seed=st.integers(0, 10_000), agent_num=st.integers(1, 4), dead_first=st.booleans(), masked=st.booleans())
@pytest.mark.parametrize("outside", [bare, OrderEnforcingWrapper])
def test_games_are_those_of_a_loop_over_last(
    outside: Callable[[Any], Any], seed: int, agent_num: int, dead_first: bool, masked: bool
) -> None:
    rng = np.random.default_rng(seed)
    scripts = [draw_script(rng, agent_num, 12) for _ in range(3)]
    make = partial(build, scripts, agent_num, outside, dead_first=dead_first, masked=masked)
    plain, rig = make(), Rig(adapt(make()))
    for game in range(seed, seed + 3):
        expected = last_says(plain, np.random.default_rng(game), game)
        assert_same(rig_says(rig, np.random.default_rng(game), game), expected)


@pytest.mark.mostly_slow("plays whole episodes of many envs", quick=2)
@pytest.mark.parametrize("mode", ["same_step", "next_step", "disabled"])
@pytest.mark.parametrize("limit", [None, 1, 2, 5])
def test_backends_agree_and_who_had_no_turn_has_zeros(mode: str, limit: int | None) -> None:
    """Agent 2 is born late, agent 1 dies before its second turn; and the next game begins with nothing of this one."""
    script = Script([0, 0, 2, 0], [9, 4, 9, 9], ["terminated", "truncated", "both", "terminated"])
    factories = [partial(build, [script], 4, OrderEnforcingWrapper)] * 3
    vectorizers = [
        marlvec.make(factories, backend=backend, autoreset_mode=mode, max_episode_steps=limit) for backend in BACKENDS
    ]
    try:
        had_turn = np.zeros((3, 4), np.bool_)
        told = [envs.reset(seed=0) for envs in vectorizers]
        for _ in range(30):
            for obs, infos in told[1:]:
                np.testing.assert_equal((obs, infos), told[0])
            obs, infos = told[0]
            had_turn |= infos["acting"]
            assert not obs[infos["alive"] & ~had_turn].any()
            assert obs[infos["acting"]].any(axis=1).all()
            if mode == "disabled" and not infos["alive"].any():
                had_turn[...] = False
                told = [envs.reset() for envs in vectorizers]
                continue
            results = [envs.step(np.ones((3, 4), np.int64)) for envs in vectorizers]
            for result in results[1:]:
                np.testing.assert_equal(result[1:4], results[0][1:4])
            told = [(result[0], result[4]) for result in results]
            infos = told[0][1]
            if infos.get("_final_observation", np.False_).any():
                if limit == 1:  # agents 0 and 1 were selected; agent 3 was not
                    assert infos["final_observation_missing"].tolist() == [[False, False, False, True]] * 3
                    assert not infos["final_observation"][:, 2:].any()
                had_turn[...] = False
    finally:
        for envs in vectorizers:
            envs.close()


def test_check_env_observes_nobody_before_its_turn() -> None:
    class Again(LastSeen):
        def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
            self.env.world.episode = -1
            super().reset(seed, options)

    check_env(lambda: Again(TurnEnv(Script.together(3, 7), agent_num=3)))


class Tall(AECEnv):  # type: ignore[misc]  # pettingzoo has no type information
    """Two agents, whose observations cannot be zero; the second one's first one may be told too tall."""

    metadata = {"name": "tall"}

    def __init__(self, height: float = 1.5) -> None:
        super().__init__()
        self.possible_agents = ["a", "b"]
        self.height = height

    def observation_space(self, agent: str) -> Any:
        return Dict({"height": Box(1, 2, (1,), np.float32), "name": Text(3)})

    def action_space(self, agent: str) -> Any:
        return Discrete(2)

    def observe(self, agent: str) -> Any:
        height = self.height if agent == "b" else 1.5
        return {"height": np.array([height], np.float32), "name": agent}

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        self.agents = list(self.possible_agents)
        self.agent_selection = "a"
        self.rewards = self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations, self.truncations = (dict.fromkeys(self.agents, False) for _ in range(2))
        self.infos: dict[str, Any] = {agent: {} for agent in self.agents}

    def step(self, action: Any) -> None:
        self.agent_selection = "b" if self.agent_selection == "a" else "a"


def test_zeros_that_no_space_has_are_no_observation() -> None:
    with marlvec.make(Tall, 2, backend="sync", validate="strict", max_episode_steps=3) as envs:
        obs, _ = envs.reset()
        assert obs["name"].tolist() == [["a", None]] * 2
        assert obs["height"].tolist() == [[[1.5], [0.0]]] * 2
        for _ in range(7):
            obs, *_ = envs.step(np.zeros((2, 2), np.int64))
    with (
        marlvec.make(partial(Tall, 3.0), 2, backend="sync", validate="strict") as envs,
        pytest.raises(EnvContractError, match="step.*observation of agent 'b', leaf 'height'"),
    ):
        envs.reset()
        envs.step(np.zeros((2, 2), np.int64))

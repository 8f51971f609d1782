"""Observations and actions that are Python objects, through a whole collect()."""

from __future__ import annotations

from functools import partial
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Space, Text
from pettingzoo import ParallelEnv

from marlvec import Collector
from marlvec.connectors import FlattenObs, FrameStack, NormalizeObs
from marlvec.errors import ContractError, UnsupportedSpaceError
from marlvec.policies import FunctionPolicy, RandomPolicy
from marlvec.sampling import SpaceSampler
from marlvec.spaces import SpaceTree
from tests.vector.support.object_envs import OBJECTS, ObjectEnv, at, make_envs

BACKENDS = ("sync", "async")


class Teller(ParallelEnv):  # type: ignore[misc]  # pettingzoo has no type information
    """Tells every agent in words where it is; agent b leaves in step 2, c comes in step 1."""

    metadata: dict[str, Any] = {"name": "teller"}
    possible_agents = ["a", "b", "c"]
    render_mode = None

    def __init__(self, env_index: int) -> None:
        self.env_index, self.episode = env_index, -1

    def observation_space(self, agent: str) -> Space[Any]:
        return Dict({"where": Text(20, charset="abc0123456789 "), "t": Box(0, 9, (1,), np.float64)})

    def action_space(self, agent: str) -> Space[Any]:
        return Discrete(3)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.t, self.episode = ["a", "b"], 0, self.episode + 1
        return self._look(self.agents), {}

    def step(self, actions: dict[str, Any]) -> Any:
        self.t += 1
        here = [*self.agents, "c"] if self.t == 1 else self.agents
        self.agents = [agent for agent in here if self.t < 4 and not (agent == "b" and self.t == 2)]
        ended = {agent: agent not in self.agents for agent in here}
        return self._look(here), {a: float(actions.get(a, 0)) for a in here}, ended, dict.fromkeys(here, False), {}

    def _look(self, agents: list[str]) -> dict[str, Any]:
        return {
            agent: {"where": f"{self.env_index} {self.episode} {self.t} {agent}", "t": np.array([self.t], np.float64)}
            for agent in agents
        }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("autoreset_mode", ["same_step", "next_step"])
def test_texts_that_are_observed(backend: str, autoreset_mode: str) -> None:
    """Each row tells who saw it, in which episode and when; what was seen next stands beside it."""
    factories = [partial(Teller, i) for i in range(2)]
    with make_envs(backend, factories, autoreset_mode=autoreset_mode) as envs:
        collector = Collector(envs, {"main": RandomPolicy()}, seed=1)
        episodes: dict[tuple[int, int], int] = {}
        rows = 0
        for _ in range(3):
            batch = collector.collect(env_steps=17)["main"]
            rows += len(batch)
            assert batch.obs["where"].dtype == batch.next_obs["where"].dtype == object
            for k in range(len(batch)):
                env, agent = int(batch.env_id[k]), int(batch.agent_index[k])
                t = int(batch.t[k]) + (agent == 2)
                episode = episodes.setdefault((env, int(batch.eps_id[k])), sum(e == env for e, _ in episodes))
                assert batch.obs["where"][k] == f"{env} {episode} {t} {'abc'[agent]}"
                assert batch.next_obs["where"][k] == f"{env} {episode} {t + 1} {'abc'[agent]}"
                assert batch.obs["t"][k] == t
        assert rows > 60
        assert len(episodes) > 6


@pytest.mark.parametrize("name", ["sequence", "graph", "text", "custom", "inside Dict and Tuple"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_actions_that_are_objects(backend: str, name: str) -> None:
    """The env checks each against its space, and pays a checksum of what it was handed."""
    space = OBJECTS[name]()
    rng, sampler = np.random.default_rng(0), SpaceSampler(SpaceTree(space))
    policy = FunctionPolicy(lambda rows: sampler.sample(rng, len(rows)))
    with make_envs(backend, [partial(ObjectEnv, name, name, late=True, env_index=i) for i in range(2)]) as envs:
        collector = Collector(envs, {"main": policy}, seed=1)
        for _ in range(2):
            batch = collector.collect(env_steps=12)["main"]
            for k in range(len(batch)):
                assert space.contains(at(space, batch.obs, k))
                assert space.contains(at(space, batch.next_obs, k))
                action = at(space, batch.actions_for_env, k)
                assert space.contains(action)
                if name != "inside Dict and Tuple":  # whose numbers the env is handed in other types
                    assert batch.actions[k] is batch.actions_for_env[k]
                    assert batch.rewards[k] == crc32(repr(action).encode()) % 9973


def test_texts_may_come_as_an_array_of_texts_and_nothing_else_may() -> None:
    answers: list[Any] = [
        lambda n: np.array(["a"] * n),
        lambda n: np.array(["abc"] * n),
        lambda n: np.full(n, "x", object),
    ]
    turn = iter(answers * 2)
    with make_envs("sync", [partial(ObjectEnv, "text", "text", env_index=i) for i in range(2)]) as envs:
        collector = Collector(envs, {"main": FunctionPolicy(lambda rows: next(turn)(len(rows)))}, seed=0)
        batch = collector.collect(env_steps=6)["main"]
        assert batch.actions.dtype == object
        assert set(batch.actions.tolist()) == {"a", "abc", "x"}
        for wrong in (lambda n: np.zeros(n), lambda n: np.full((n, 1), "a", object)):
            turn = iter([wrong])
            with pytest.raises(ContractError, match=r"policy 'main' gave 'actions' as .*needs object of shape \(\d,\)"):
                collector.collect(env_steps=2)


def test_connectors_let_objects_pass_or_refuse_them_by_name() -> None:
    with make_envs("sync", [partial(Teller, i) for i in range(2)]) as envs:
        for piece in (FlattenObs(), FrameStack(2)):
            with pytest.raises(UnsupportedSpaceError, match="leaf 'where'.* Text, which has no fixed size"):
                Collector(envs, {"main": RandomPolicy()}, agent_connectors=[piece], seed=0).collect(env_steps=2)
        collector = Collector(envs, {"main": RandomPolicy()}, agent_connectors=[NormalizeObs()], seed=0)
        batch = collector.collect(env_steps=8)["main"]
        assert batch.obs["where"].dtype == object
        assert 0 < batch.obs["t"].max() < 3, "which is what it was before"
        dropped = [FlattenObs(drop=["where"]), FrameStack(2)]
        batch = Collector(envs, {"main": RandomPolicy()}, agent_connectors=dropped, seed=0).collect(env_steps=8)["main"]
        assert batch.obs.shape[1:] == (2,)

"""Observations and actions that are Python objects, through a whole collect()."""

from __future__ import annotations

from functools import partial
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from marlvec import Collector
from marlvec.connectors import FlattenObs, FrameStack, NormalizeObs
from marlvec.errors import ContractError, UnsupportedSpaceError
from marlvec.policies import FunctionPolicy, RandomPolicy
from marlvec.sampling import SpaceSampler
from marlvec.spaces import SpaceTree
from tests.collect.storage.test_columns import World
from tests.vector.support.kinds import OBJECTS, ObjectEnv, at, make_envs

BACKENDS = ("sync", "async")


@pytest.mark.mostly_slow("collects whole runs on several backends", quick=12)
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
    with make_envs("sync", [partial(World, "text", "", 99, i) for i in range(2)]) as envs:
        for piece in (FlattenObs(), FrameStack(2)):
            with pytest.raises(UnsupportedSpaceError, match="leaf 'said'.* Text, which has no fixed size"):
                Collector(envs, {"main": RandomPolicy()}, agent_connectors=[piece], seed=0).collect(env_steps=2)
        collector = Collector(envs, {"main": RandomPolicy()}, agent_connectors=[NormalizeObs()], seed=0)
        batch = collector.collect(env_steps=8)["main"]
        assert batch.obs["said"].dtype == object
        assert not np.isin(batch.obs["seen"][8:], [0, 1]).all(), "which is what it was before"
        dropped = [FlattenObs(drop=["said"]), FrameStack(2)]
        batch = Collector(envs, {"main": RandomPolicy()}, agent_connectors=dropped, seed=0).collect(env_steps=8)["main"]
        assert batch.obs.shape[1:] == (6,)

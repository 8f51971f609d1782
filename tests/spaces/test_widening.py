"""`spaces="compatible"`: envs whose spaces differ in nothing but their bounds."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Space, Tuple
from hypothesis import given
from hypothesis import strategies as st

import marlvec
from marlvec.envs import EnvSpec, ParallelAdapter
from marlvec.errors import ContractError
from marlvec.spaces.padding import describe_incompatibility, widen
from marlvec.testing.scripted import SampledEnv

DTYPES = ("float16", "float32", "float64", "uint8", "int64", "bool")


@st.composite
def pairs(draw: Any) -> tuple[Box, Box]:
    """Two Boxes that differ in their bounds, element by element."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3).map(tuple))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    found = []
    for _ in range(2):
        ends = np.sort(rng.integers(0, 2 if dtype == "bool" else 100, (2, *shape)), axis=0).astype(dtype)
        found.append(Box(ends[0, ...], ends[1, ...], shape, np.dtype(dtype).type))
    return found[0], found[1]


@pytest.mark.slow("starts programs of its own")
@given(pair=pairs())
def test_the_wider_space_holds_the_members_of_both(pair: tuple[Box, Box]) -> None:
    for wrap in (lambda box: box, lambda box: Dict({"a": Tuple([box]), "b": Discrete(3)})):
        one, other = map(wrap, pair)
        assert describe_incompatibility(one, other) is None
        wide = widen(one, other)
        assert wide == widen(other, one)
    for space in pair:
        assert all(widen(*pair).contains(np.asarray(space.sample())) for _ in range(3))
    box = widen(*pair)
    assert (box.shape, box.dtype) == (pair[0].shape, pair[0].dtype)
    assert box.low.tobytes() == np.minimum(pair[0].low, pair[1].low).tobytes()
    assert box.high.tobytes() == np.maximum(pair[0].high, pair[1].high).tobytes()


def test_equal_spaces_stay_as_they_are() -> None:
    space = Dict({"a": Box(0, 1, (2,))})
    assert widen(space, Dict({"a": Box(0, 1, (2,))})) is space


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (Box(0, 1, (2,)), Box(0, 1, (3,)), "(2,)"),
        (Box(0, 1, (2,)), Box(0, 1, (2,), np.float64), "float64"),
        (Box(0, 9, (2,), np.uint8), Box(0, 9, (2,), np.int64), "int64"),
        (Discrete(2), Discrete(3), "expected Discrete(2), got Discrete(3)"),
        (MultiDiscrete([2]), MultiDiscrete([3]), "at /"),
        (Dict({"a": Box(0, 1)}), Dict({"b": Box(0, 1)}), "expected keys ['a'], got ['b']"),
        (Dict({"a": Box(0, 1), "b": Discrete(2)}), Dict({"a": Box(0, 5), "b": Discrete(3)}), "at /b"),
        (Tuple([Box(0, 1)]), Tuple([Box(0, 1)] * 2), "expected length 1, got 2"),
    ],
)
def test_what_differs_in_more_than_bounds_is_named(one: Space[Any], other: Space[Any], words: str) -> None:
    assert words in (describe_incompatibility(one, other) or "")
    specs = [ParallelAdapter(SampledEnv(space, Discrete(2))).spec() for space in (one, other)]
    assert "observation space of agent 'agent_0'" in (specs[0].difference(specs[1], "compatible") or "")


def spec_of(high: float, **fields: Any) -> EnvSpec:
    spaces = [Box(0, high, (2,)), Box(0, 1, (2,))]
    return replace(ParallelAdapter(SampledEnv(spaces, Box(-high, 0, (1,)))).spec(), **fields)


def test_specs_are_widened_field_by_field() -> None:
    one, other = spec_of(1, state_space=Box(0, 1, (3,))), spec_of(4, state_space=Box(-1, 0, (3,)))
    assert one.difference(other) == (
        "observation space of agent 'agent_0' at /: expected Box(0.0, 1.0, (2,), float32), "
        "got Box(0.0, 4.0, (2,), float32)"
    )
    assert one.difference(other, "compatible") is None
    wide = one.widened(other)
    assert wide.observation_spaces == (Box(0, 4, (2,)), Box(0, 1, (2,)))
    assert wide.action_spaces == (Box(-4, 0, (1,)),) * 2
    assert wide.state_space == Box(-1, 1, (3,))
    assert [group.agents for group in one.groups] == [(0, 1)]
    assert [group.agents for group in wide.groups] == [(0,), (1,)]  # so all workers must go by the common spec
    assert wide.difference(other, "compatible") is None
    assert "state space" in (one.difference(spec_of(4), "compatible") or "")
    assert "action mask sizes" in (one.difference(replace(other, mask_sizes=(3, 3)), "compatible") or "")
    assert "agents" in (one.difference(replace(other, agents=("a", "b")), "compatible") or "")


def test_what_was_padded_is_widened_too() -> None:
    builds = [
        partial(SampledEnv, [Box(0, high, (2,)), Box(0, high, (3,))], [Discrete(2), Discrete(3)]) for high in (1, 2)
    ]
    specs = []
    for build in builds:
        with marlvec.make(build, 1, backend="sync", pad=True) as envs:
            specs.append(envs.spec)
    assert specs[0].difference(specs[1], "compatible") is None
    wide = specs[0].widened(specs[1])
    assert wide.own_observation_spaces == (Box(0, 2, (2,)), Box(0, 2, (3,)))
    assert wide.observation_spaces == (Box(0, 2, (3,)),) * 2
    assert [None if mask is None else mask.tolist() for mask in wide.allowed] == [[True, True, False], None]


@pytest.mark.checklist(61)
@pytest.mark.parametrize("backend", ["sync", "thread", "async"])
def test_bounds_may_differ_where_that_was_asked_for(backend: str) -> None:
    def factories(*boxes: Any) -> list[Any]:
        return [partial(SampledEnv, box, Box(-1, 1, (1,)), length=3) for box in boxes]

    settings: dict[str, Any] = {"backend": backend} | ({} if backend == "sync" else {"num_workers": 2})
    bounds = [Box(0, 1, (2,)), Box(0, 1, (2,)), Box(-3, 0, (2,)), Box(0, 7, (2,))]
    # Two workers look at two envs each, so it may be env 2 that differs from env 0, or env 3 from env 2.
    words = "env [23].*observation space of agent 'agent_0' at /: expected Box.* got Box"
    with pytest.raises(ContractError, match=words):
        marlvec.make(factories(*bounds), **settings)
    for others in (Box(0, 1, (3,)), Box(0, 1, (2,), np.float64)):
        with pytest.raises(
            ContractError, match=r"env 3.*observation space of agent 'agent_0'.*" + re.escape(str(others.shape))
        ):
            marlvec.make(factories(*bounds[:3], others), **settings, spaces="compatible")
    with marlvec.make(factories(*bounds), **settings, spaces="compatible") as envs:
        assert envs.single_observation_space == Box(-3, 7, (2, 2))
        assert envs.agent_observation_space("agent_1") == Box(-3, 7, (2,))
        found = envs.exec_func(lambda env: env.observation_space("agent_0"))
        assert list(found) == bounds
        obs, _ = envs.reset(seed=0)
        for _ in range(8):
            for i, box in enumerate(bounds):
                assert all(box.contains(row) for row in obs[i])
            assert envs.observation_space.contains(obs)
            obs, *_ = envs.step(envs.random_action(seed=1))


@pytest.mark.parametrize("backend", ["sync", "thread", "async"])
def test_agents_that_are_alike_in_one_env_only_are_in_groups_of_their_own(backend: str) -> None:
    one = partial(SampledEnv, Box(0, 1, (2,)), Discrete(2), length=3)
    other = partial(SampledEnv, [Box(0, 1, (2,)), Box(0, 5, (2,))], Discrete(2), length=3)
    settings: dict[str, Any] = {"backend": backend} | ({} if backend == "sync" else {"num_workers": 2})
    for factories in ([one, other], [other, one]):
        with marlvec.make(factories, **settings, spaces="compatible") as envs:
            assert envs.groups == {"agent_0": (0,), "agent_1": (1,)}
            twins = [factory() for factory in factories]
            found = [twin.reset(seed=3)[0] for twin in twins]
            obs, _ = envs.reset(seed=[3, 3])
            for _ in range(3):
                for i, own in enumerate(found):
                    for agent, row in own.items():
                        assert obs[agent][i, 0].tobytes() == row.tobytes()
                found = [twin.step(dict.fromkeys(twin.agents, 1))[0] for twin in twins]
                obs, *_, infos = envs.step({agent: np.ones((2, 1), np.int64) for agent in envs.groups})
            final = infos["final_observation"]
            assert all(final[agent][i, 0].tolist() == row.tolist() for i in (0, 1) for agent, row in found[i].items())

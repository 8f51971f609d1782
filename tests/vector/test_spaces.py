"""Every space, dtype and depth goes through every backend unchanged, and the public spaces say what comes out."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Graph, MultiBinary, MultiDiscrete, Sequence, Space, Text, Tuple
from hypothesis import given, settings
from hypothesis import strategies as st

from marlvec import AsyncVectorEnv, VectorEnv
from marlvec.envs.testing import SampledEnv
from marlvec.errors import ContractError, UnsupportedSpaceError
from tests.vector.kinds import BACKENDS, REAL, SCRIPTED, factories_of, vectorize
from tests.vector.reference import MODES, record, replay
from tests.vector.trees import flatten

N, A = 3, 2

DTYPES = ("bool", "uint8", "int64", "float16", "float32", "float64")


def box(dtype: str, shape: tuple[int, ...] = (3,)) -> Box:
    high = {"bool": 1, "uint8": 255, "int64": 2**62}.get(dtype, 8.5)
    low = 0 if dtype in ("bool", "uint8") else -high
    return Box(low, high, shape, np.dtype(dtype).type)


SPACES: dict[str, Space[Any]] = {
    **{f"box {dtype}": box(dtype) for dtype in DTYPES},
    **{f"image {dtype}": box(dtype, (4, 3, 2)) for dtype in ("uint8", "float32")},
    **{f"scalar {dtype}": box(dtype, ()) for dtype in ("bool", "int64", "float32")},
    **{f"empty {dtype}": box(dtype, (2, 0)) for dtype in ("uint8", "float64")},
    "unbounded": Box(-np.inf, np.inf, (2,), np.float64),
    "discrete": Discrete(5),
    "discrete from -3": Discrete(4, start=-3),
    "multi discrete": MultiDiscrete([3, 7, 2]),
    "multi discrete, two axes": MultiDiscrete(np.array([[3, 2], [5, 9]])),
    "multi binary": MultiBinary(5),
    "multi binary, two axes": MultiBinary((2, 3)),
    "dict": Dict({"b": box("float16"), "a": Discrete(3, start=2), "c": MultiBinary(2)}),
    "tuple": Tuple([Discrete(3), box("uint8", (2, 2)), MultiDiscrete([2, 2])]),
    "nested": Dict(
        {
            "x": Tuple([Dict({"deep": box("float32", ()), "flat": box("int64", (0,))}), Discrete(2)]),
            "y": Dict({"mask": MultiBinary(3), "z": Tuple([box("bool"), box("float64")])}),
        }
    ),
}


def sampled(observation: Any, action: Any, n: int = N, **options: Any) -> list[Any]:
    return [partial(SampledEnv, observation, action, agent_num=A, length=4, env_index=i, **options) for i in range(n)]


@pytest.mark.checklist(55)
@pytest.mark.checklist(57)
@pytest.mark.parametrize("name", list(SPACES))
@pytest.mark.parametrize("backend", BACKENDS)
def test_observations_and_actions_of_every_space(backend: str, name: str) -> None:
    """The env draws observations from the space and checks actions against it; bytes must be those of the raw env."""
    mode = MODES[(list(SPACES).index(name) + BACKENDS.index(backend)) % 3]
    factories = sampled(SPACES[name], SPACES[name])
    options = {} if backend == "sync" else {"context": "fork"}
    with vectorize(backend, factories, autoreset_mode=mode, **options) as envs:
        replay(envs, record(factories, mode, seed=1))


def leaf_spaces() -> st.SearchStrategy[Space[Any]]:
    shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
    boxes = st.builds(box, st.sampled_from(DTYPES), shapes)
    discretes = st.builds(lambda n, start: Discrete(n, start=start), st.integers(1, 9), st.integers(-5, 5))
    multi = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(MultiDiscrete)
    return st.one_of(boxes, discretes, multi, st.integers(1, 4).map(MultiBinary))


def any_space() -> st.SearchStrategy[Space[Any]]:
    def deeper(inner: st.SearchStrategy[Space[Any]]) -> st.SearchStrategy[Space[Any]]:
        names = st.sampled_from(["a", "b", "c", "obs", "x/y"])
        return st.one_of(
            st.dictionaries(names, inner, min_size=1, max_size=3).map(Dict),
            st.lists(inner, min_size=1, max_size=3).map(Tuple),
        )

    return st.recursive(leaf_spaces(), deeper, max_leaves=5)


@pytest.mark.checklist(55)
@pytest.mark.time_limit(600)  # shrinking a counterexample takes its time
@settings(max_examples=40)
@given(observation=any_space(), action=any_space(), mode=st.sampled_from(MODES), backend=st.sampled_from(BACKENDS))
def test_any_space(observation: Space[Any], action: Space[Any], mode: str, backend: str) -> None:
    factories = sampled(observation, action, n=2)
    calls = record(factories, mode)
    options = {} if backend == "sync" else {"context": "fork"}
    with vectorize(backend, factories, autoreset_mode=mode, validate="strict", **options) as envs:
        replay(envs, calls)


@pytest.mark.checklist(56)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_discrete_observations_have_no_axis_of_their_own(backend: str, mode: str) -> None:
    with vectorize(backend, sampled(Discrete(7, start=2), Discrete(2)), autoreset_mode=mode) as envs:
        for shared_call in ("reset", "step"):
            obs = envs.reset(seed=0)[0] if shared_call == "reset" else envs.step(np.zeros((N, A), np.int64))[0]
            assert obs.shape == (N, A)
            assert obs.dtype == np.int64
        for t in range(2, 13):
            if mode == "disabled" and t % 4 == 1:
                envs.reset()
            obs, _, _, truncated, infos = envs.step(np.zeros((N, A), np.int64))
            assert obs.shape == (N, A)
            if truncated.any():
                assert infos["final_observation"].shape == (N, A)
                assert infos["final_observation"].min() >= 2
            if mode == "next_step" and truncated.any():
                envs.step(np.zeros((N, A), np.int64))


def assert_contains(space: Space[Any], value: Any) -> None:
    assert space.contains(value), (space, value)


@pytest.mark.checklist(59)
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("name", ["discrete from -3", "box uint8", "multi discrete", "nested", "scalar float32"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_spaces_for_one_agent_one_env_and_all(backend: str, name: str, grouped: bool) -> None:
    space = SPACES[name]
    with vectorize(backend, sampled(space, space), grouped=grouped) as envs:
        check_spaces(envs)


@pytest.mark.checklist(59)
@pytest.mark.parametrize("kind", [*REAL, "parallel", "masked", "turns"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_spaces_of_real_envs(backend: str, kind: str) -> None:
    with vectorize(backend, factories_of(kind, N)) as envs:
        check_spaces(envs, play=kind != "masked" and "tictactoe" not in kind)


def check_spaces(envs: VectorEnv, *, play: bool = True) -> None:
    n = envs.num_envs
    before = repr(envs)
    spaces = [envs.observation_space, envs.action_space, envs.single_observation_space, envs.single_action_space]
    again = [envs.observation_space, envs.action_space, envs.single_observation_space, envs.single_action_space]
    assert spaces == again
    assert repr(envs) == before, "reading them asks no env anything"
    obs, _ = envs.reset(seed=1)
    envs.action_space.seed(5)
    for _ in range(40 if play else 1):
        for i in range(n):
            row = rows(obs, i)
            assert_contains(envs.single_observation_space, row)
            for group in envs.spec.groups:
                part = row[group.name] if envs.grouped else row
                for j, a in enumerate(group.agents):
                    assert envs.agent_observation_space(a) == envs.agent_observation_space(envs.agents[a])
                    assert_contains(envs.agent_observation_space(a), scalars(group.observation_space, rows(part, j)))
        assert_contains(envs.observation_space, obs)
        if not play:
            return
        actions = envs.action_space.sample()
        assert_contains(envs.action_space, actions)
        one = envs.single_action_space.sample()
        assert_contains(envs.single_action_space, one)
        envs.step_send(actions)
        with_pending = envs.observation_space, envs.agent_action_space(0), envs.state_space
        assert with_pending[0] == spaces[0]
        obs = envs.step_fetch()[0]
    with pytest.raises(ValueError, match="no agent 'nobody'"):
        envs.agent_action_space("nobody")


def rows(tree: Any, i: int) -> Any:
    if isinstance(tree, dict):
        return {key: rows(part, i) for key, part in tree.items()}
    return tuple(rows(part, i) for part in tree) if isinstance(tree, tuple) else np.asarray(tree[i])


def scalars(space: Space[Any], value: Any) -> Any:
    """Discrete values as numpy scalars: gymnasium holds 0-d arrays for no members."""
    if isinstance(space, Dict):
        return {key: scalars(sub, value[key]) for key, sub in space.spaces.items()}
    if isinstance(space, Tuple):
        return tuple(scalars(sub, part) for sub, part in zip(space.spaces, value, strict=True))
    return value[()] if isinstance(space, Discrete) else value


@pytest.mark.checklist(59)
def test_reading_spaces_changes_no_randomness() -> None:
    """Two runs, of which one reads and samples every space all the time."""
    factories = sampled(SPACES["nested"], Discrete(3))
    calls = record(factories, "same_step")
    with vectorize("sync", factories) as envs:
        for call in calls:
            replay(envs, [call])
            envs.observation_space.sample()
            envs.single_action_space.sample()
            envs.agent_observation_space(0).sample()
            deepcopy(envs.action_space)


@pytest.mark.parametrize("kind", list(SCRIPTED))
def test_scripted_envs_leave_their_observation_space_never(kind: str) -> None:
    calls = record(factories_of(kind, 2), "same_step")
    with vectorize("sync", factories_of(kind, 2)) as envs:
        for call in calls:
            replay(envs, [call])
            for leaves in call.expected.obs:
                for leaf, space in zip(leaves, flatten(envs.agent_observation_space(0)), strict=True):
                    assert (leaf >= space.low).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "space",
    [Text(5), Sequence(Discrete(2)), Graph(Box(0, 1, (1,)), None), Dict({"a": Discrete(2), "name": Text(3)})],
    ids=["text", "sequence", "graph", "inside a dict"],
)
def test_a_space_without_a_fixed_size_is_refused_by_name(backend: str, space: Any) -> None:
    where = "leaf 'name' of the space is Text" if isinstance(space, Dict) else f"the space is {type(space).__name__}"
    with pytest.raises(UnsupportedSpaceError, match=where):
        vectorize(backend, sampled(space, Discrete(2)))


@pytest.mark.fault("B13")
@pytest.mark.parametrize("odd", [0, 1, 4])
@pytest.mark.parametrize("workers", [0, 1, 2, 5])
def test_envs_whose_spaces_differ(workers: int, odd: int) -> None:
    cases: list[tuple[Any, Any, str]] = [
        (Discrete(2), Discrete(4), r"action space of agent 'agent_0'.*Discrete\(.\).*Discrete\(.\)"),
        (Box(0, 1, (2,), np.float32), Discrete(3), r"observation space of agent 'agent_0'.*Box.*Box"),
    ]
    plain = Box(0, 1, (3,), np.float32)
    for observation, action, words in cases:
        factories: list[Any] = sampled(plain, Discrete(3), n=5)
        strange = observation if isinstance(observation, Box) else plain
        factories[odd] = partial(SampledEnv, strange, action, agent_num=A)
        first_stranger = odd or 1  # the others are measured by env 0
        with pytest.raises(ContractError, match=rf"env {first_stranger}\b.*{words}"):
            if workers:
                AsyncVectorEnv(factories, num_workers=workers)
            else:
                vectorize("sync", factories)
    factories = sampled(plain, Discrete(3), n=4)
    factories[3] = partial(SampledEnv, plain, Discrete(3), agent_num=4)
    with pytest.raises(ContractError, match=r"env 3\b.*agents: expected \('agent_0', 'agent_1'\), got"):
        vectorize("async", factories) if workers else vectorize("sync", factories)

"""Every space, dtype and depth goes through every backend unchanged, and the public spaces say what comes out."""

from __future__ import annotations

import tempfile
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple
from hypothesis import given, settings
from hypothesis import strategies as st

from marlvec import AsyncVectorEnv, VectorEnv
from marlvec.errors import ContractError
from marlvec.interop.gymnasium import GymnasiumVectorEnv
from marlvec.testing.scripted import SampledEnv
from tests.vector.support.kinds import BACKENDS, HERE_AND_AWAY, REAL, SCRIPTED, factories_of, vectorize
from tests.vector.support.reference import MODES, assert_trees_equal, record, replay
from tests.vector.support.trees import flatten

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
    "empty dict": Dict({}),
    "empty tuple": Tuple([]),
    "an empty dict inside": Dict({"a": Dict({}), "b": Tuple([Tuple([]), Discrete(3)])}),
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


@pytest.mark.slow("plays whole episodes in worker processes")
@pytest.mark.checklist(55)
@pytest.mark.checklist(57)
@pytest.mark.fault("C15")
@pytest.mark.parametrize("name", list(SPACES))
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
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


@pytest.mark.slow("plays whole episodes in worker processes")
@pytest.mark.checklist(55)
@pytest.mark.time_limit(600)  # shrinking a counterexample takes its time
@settings(max_examples=20)
@given(observation=any_space(), action=any_space(), mode=st.sampled_from(MODES), backend=st.sampled_from(BACKENDS))
def test_any_space(observation: Space[Any], action: Space[Any], mode: str, backend: str) -> None:
    factories = sampled(observation, action, n=2)
    calls = record(factories, mode)
    options = {} if backend == "sync" else {"context": "fork"}
    with vectorize(backend, factories, autoreset_mode=mode, validate="strict", **options) as envs:
        replay(envs, calls)


@pytest.mark.checklist(56)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
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


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=12)
@pytest.mark.checklist(59)
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("name", ["discrete from -3", "box uint8", "multi discrete", "nested", "scalar float32"])
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_spaces_for_one_agent_one_env_and_all(backend: str, name: str, grouped: bool) -> None:
    space = SPACES[name]
    with vectorize(backend, sampled(space, space), grouped=grouped) as envs:
        check_spaces(envs)


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=3)
@pytest.mark.checklist(59)
@pytest.mark.parametrize("kind", [*REAL, "parallel", "masked", "turns"])
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
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


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=2)
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


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=2)
@pytest.mark.checklist(60)
@pytest.mark.parametrize("name", list(SPACES))
def test_samples_of_every_space_are_seeded_members_that_step_takes(name: str) -> None:
    """As trees of (N, A, …); the env checks what each agent is handed."""
    with vectorize("sync", sampled(Discrete(2), SPACES[name]), validate="strict") as envs:
        envs.reset(seed=0)
        for seed in range(3):
            drawn = []
            for _ in range(2):
                envs.action_space.seed(seed)
                envs.single_action_space.seed(seed)
                drawn.append([(envs.action_space.sample(), envs.single_action_space.sample()) for _ in range(3)])
            assert_trees_equal(drawn[0], drawn[1], "samples")
            for actions, one in drawn[0]:
                assert_contains(envs.action_space, actions)
                assert_contains(envs.single_action_space, one)
                assert all(leaf.shape[:2] == (N, A) for leaf in flatten(actions))
                envs.step(actions)


class Tensor:
    """What torch, jax and others hand out: no array, but willing to become one."""

    def __init__(self, array: Any, refusal: Exception | None = None) -> None:
        self.array, self.refusal = array, refusal

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        if self.refusal is not None:
            raise self.refusal
        return np.array(self.array, dtype)


class Subclass(np.ndarray[Any, Any]):
    """An array of a class of the user's own."""


def on_disk(array: Any) -> Any:
    with tempfile.TemporaryFile() as file:
        mapped = np.memmap(file, array.dtype, "w+", shape=array.shape) if array.size else array
    mapped[...] = array
    return mapped


def read_only(array: Any) -> Any:
    array = array.copy()
    array.flags.writeable = False
    return array


FOREIGN: dict[str, Any] = {
    "strided": lambda x: np.repeat(x, 2, axis=-1)[..., ::2] if x.ndim else x,
    "backwards": lambda x: x[..., ::-1].copy()[..., ::-1] if x.ndim else x,
    "Fortran": lambda x: x.copy("F"),
    "byte-swapped": lambda x: x.astype(x.dtype.newbyteorder()),
    "read-only": read_only,
    "subclass": lambda x: x.view(Subclass),
    "memmap": on_disk,
    "list": lambda x: x.tolist(),
    "tensor": Tensor,
}
REFUSED = {
    "tensor that needs a gradient": RuntimeError("Can't call numpy() on Tensor that requires grad."),
    "tensor on a device": TypeError("can't convert cuda:0 device type tensor to numpy."),
    "tensor that was deleted": ReferenceError("Array has been deleted."),
}


def change_leaves(change: Any, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: change_leaves(change, part) for key, part in value.items()}
    return tuple(change_leaves(change, x) for x in value) if isinstance(value, tuple) else change(np.asarray(value))


class ForeignEnv(SampledEnv):
    """Hands out its observations as arrays of another kind, or, once, as something that will not become one."""

    def __init__(self, space: Any, kind: str, env_index: int) -> None:
        super().__init__(space, Discrete(2), agent_num=A, length=4, env_index=env_index)
        self.change = FOREIGN.get(kind, lambda x: x)
        self.refusal = REFUSED.get(kind)

    def step(self, actions: Any) -> Any:
        obs, *rest = super().step(actions)
        if self.refusal is not None and self._t == 2:
            return obs | {"agent_1": change_leaves(lambda x: Tensor(x, self.refusal), obs["agent_1"])}, *rest
        return change_leaves(self.change, obs), *rest


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=2)
@pytest.mark.fault("C17")
@pytest.mark.parametrize("name", ["discrete", "box float32", "box float16", "image uint8", "scalar float32", "nested"])
@pytest.mark.parametrize("kind", list(FOREIGN))
def test_arrays_of_other_kinds_are_converted_exactly(kind: str, name: str) -> None:
    calls = record(sampled(SPACES[name], Discrete(2)), "same_step")
    foreign: list[Any] = [partial(ForeignEnv, SPACES[name], kind, i) for i in range(N)]
    with vectorize("sync", foreign) as envs:
        replay(envs, calls)


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=8)
@pytest.mark.fault("C17")
@pytest.mark.parametrize("kind", list(REFUSED))
@pytest.mark.parametrize("backend", ["sync", "async"])
def test_what_does_not_become_an_array_is_refused(backend: str, kind: str) -> None:
    for name in ("discrete", "box float32", "nested"):
        with vectorize(backend, [partial(ForeignEnv, SPACES[name], kind, i) for i in range(2)]) as envs:
            for _ in range(2):
                envs.reset()
                envs.step(np.zeros((2, A), np.int64))
                with pytest.raises(ContractError, match=r"env 0, step.*agent 'agent_1'.*got no array at all"):
                    envs.step(np.zeros((2, A), np.int64))


@pytest.mark.parametrize("backend", HERE_AND_AWAY)
@pytest.mark.parametrize("space", [Discrete(5, start=1), Dict({"a": Discrete(3), "b": Box(0, 1, (2,))})], ids=str)
def test_final_observations_have_the_type_that_observations_have(backend: str, space: Any) -> None:
    """Those of Discrete spaces too: arrays of the same dtype and axes, here and in Gymnasium's form of rows."""

    def form(value: Any) -> Any:
        return {k: form(v) for k, v in value.items()} if isinstance(value, dict) else (type(value), value.dtype)

    with vectorize(backend, [partial(SampledEnv, space, Discrete(2), length=2, env_index=i) for i in range(3)]) as envs:
        envs.reset(seed=0)
        envs.step(np.zeros((3, 2), np.int64))
        obs, *_, infos = envs.step(np.zeros((3, 2), np.int64))
        final = infos["final_observation"]
        assert form(final) == form(obs)
        shapes = [[leaf.shape for leaf in flatten(tree)] for tree in (obs, final)]
        assert shapes[0] == shapes[1]
        rows = GymnasiumVectorEnv(envs)
        rows.reset(seed=0)
        rows.step(np.zeros(6, np.int64))
        obs, *_, infos = rows.step(np.zeros(6, np.int64))
        first = {k: v[0] for k, v in obs.items()} if isinstance(obs, dict) else obs[0]
        assert form(infos["final_obs"][0]) == form(first)

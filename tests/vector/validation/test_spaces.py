"""Every space, dtype and depth goes through every backend unchanged, and the public spaces say what comes out."""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple

from marlvec import VectorEnv
from marlvec.errors import ContractError
from marlvec.interop.gymnasium import GymnasiumVectorEnv
from marlvec.testing.scripted import SampledEnv
from tests.vector.support.kinds import HERE_AND_AWAY, REAL, factories_of, vectorize
from tests.vector.support.object_envs import OBJECTS
from tests.vector.support.reference import assert_trees_equal, record, replay
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


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=2)
@pytest.mark.checklist(60)
@pytest.mark.parametrize("name", [*SPACES, *OBJECTS])
def test_samples_of_every_space_are_seeded_members_that_step_takes(name: str) -> None:
    """As trees of (N, A, …); the env checks what each agent is handed."""
    space = SPACES[name] if name in SPACES else OBJECTS[name]()
    with vectorize("sync", sampled(Discrete(2), space), validate="strict") as envs:
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

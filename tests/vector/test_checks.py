"""Observations: values that no space contains are found, and every space goes through every backend unchanged."""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple
from hypothesis import given
from hypothesis import strategies as st

from marlvec import VectorEnv
from marlvec.envs.spec import EnvSpec
from marlvec.errors import ContractError, ContractWarning, EnvContractError
from marlvec.interop.gymnasium import GymnasiumVectorEnv
from marlvec.spaces import SpaceTree
from marlvec.spaces.members import membership
from marlvec.testing import SampledEnv
from marlvec.vector.buffers import Buffers
from marlvec.vector.checks import ObservationValidator
from marlvec.vector.shard import ShardReport
from marlvec.vector.vector_step import VectorStep
from tests.vector.support.drivers import LivesEnv
from tests.vector.support.kinds import BACKENDS, HERE_AND_AWAY, OBJECTS, REAL, factories_of, vectorize
from tests.vector.support.reference import (
    MODES,
    assert_trees_equal,
    flatten,
    leaf_spaces,
    pick,
    record,
    refused,
    replay,
)

# Values that no space contains: found by env, agent and leaf, whatever the backend, and only where agents are.


N = 3
A = 3
LENGTH = 6
NAN, INF = np.nan, np.inf
SPACE = Dict(
    {
        "camera": Box(0, 200, (2, 2), np.uint8),
        "deep": Tuple([Box(-INF, INF, (2, 2)), Discrete(3, start=2)]),
        "x": Box(np.float32([1, -INF, 0]), np.float32([2, 2, INF])),  # does not contain the zeros of absent agents
    }
)


class Problem(NamedTuple):
    """What agent ``agent`` gets at time ``t`` instead of something good, and what is said of it."""

    t: int
    agent: int
    leaf: str
    value: Any
    words: str
    kind: str = "value"

    @property
    def where(self) -> str:
        if self.leaf == "reward":
            return f"reward of agent 'agent_{self.agent}': {self.words}"
        final = "final " if self.t == LENGTH or (self.agent == 1 and self.t == 3) else ""
        joined = ": " if self.kind == "form" else ", "
        return f"{final}observation of agent 'agent_{self.agent}'{joined}leaf '{self.leaf}': {self.words}"


def floats(*values: float, shape: tuple[int, ...] = (3,)) -> Any:
    return np.array(values, np.float32).reshape(shape)


VALUES = [
    Problem(
        1,
        0,
        "x",
        floats(1, NAN, 0),
        "expected values in [-inf, 2.0], got nan at index (1,); wrong: 1 of 3 values",
        "nan",
    ),
    Problem(
        2,
        0,
        "deep/0",
        floats(0, 0, 0, NAN, shape=(2, 2)),
        "expected values in [-inf, inf], got nan at index (1, 1); wrong: 1 of 4 values",
        "nan",
    ),
    Problem(
        2, 1, "x", floats(-1.5, 0, 0), "expected values in [1.0, 2.0], got -1.5 at index (0,); wrong: 1 of 3 values"
    ),
    Problem(2, 2, "x", floats(1, 3, -1), "expected values in [-inf, 2.0], got 3.0 at index (1,); wrong: 2 of 3 values"),
    Problem(5, 0, "x", floats(INF, 0, 0), "expected values in [1.0, 2.0], got inf at index (0,); wrong: 1 of 3 values"),
    Problem(
        1,
        1,
        "camera",
        np.uint8([[9, 201], [202, 0]]),
        "expected values in [0, 200], got 201 at index (0, 1); wrong: 2 of 4 values",
    ),
    Problem(3, 1, "deep/1", 5, "expected values in [2, 4], got 5"),
    Problem(0, 1, "deep/1", -1, "expected values in [2, 4], got -1"),
    Problem(LENGTH, 2, "deep/1", 1, "expected values in [2, 4], got 1"),
    Problem(4, 0, "reward", NAN, "expected a finite number, got nan", "nan"),
    Problem(LENGTH, 2, "reward", -INF, "expected a finite number, got -inf"),
]
FORMS = [
    Problem(1, 0, "x", floats(0, 0, shape=(2,)), "expected shape (3,), got (2,)", "form"),
    Problem(2, 1, "x", [[0], [0, 1]], "expected shape (3,), got no array at all", "form"),
    Problem(4, 2, "camera", np.zeros((2, 2), np.float32), "expected dtype uint8, got float32", "form"),
]


class SpoiltEnv(LivesEnv):
    """One problem an episode, in the order given, then none. Agent 1 ends at 3, agent 2 comes at 2.

    An episode that was cut off before its problem leaves it to the next.
    """

    def __init__(self, problems: list[Problem]) -> None:
        lives = {"agent_0": (0, LENGTH), "agent_1": (0, 3), "agent_2": (2, LENGTH)}
        super().__init__(lives, SPACE, Discrete(2))
        self._problems, self._shown = problems, 0

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._problem = self._problems[self._shown] if self._shown < len(self._problems) else None
        return super().reset(seed, options)

    def step(self, actions: dict[str, Any]) -> Any:
        obs, rewards, *rest = super().step(actions)
        return obs, {agent: self._unless_spoilt(agent, "reward", 1.0) for agent in rewards}, *rest

    def _unless_spoilt(self, agent: str, leaf: str, value: Any) -> Any:
        problem = self._problem
        if problem is None or (problem.t, f"agent_{problem.agent}", problem.leaf) != (self.t, agent, leaf):
            return value
        self._shown += 1
        return problem.value

    def look(self, agents: list[str]) -> Any:
        return {agent: self._observe(agent) for agent in agents}, {}

    def _observe(self, agent: str) -> Any:
        return {
            "camera": self._unless_spoilt(agent, "camera", np.full((2, 2), 200, np.uint8)),
            "deep": (
                self._unless_spoilt(agent, "deep/0", floats(-INF, 0, 0, INF, shape=(2, 2))),
                self._unless_spoilt(agent, "deep/1", 2),
            ),
            "x": self._unless_spoilt(agent, "x", floats(1, -INF, INF)),
        }


def play(backend: str, mode: str, validate: str, problems: list[Problem], steps: int) -> list[str]:
    """Play on, whatever is reported, and return that. Only env 1 has problems; the others' rows come all the same."""
    raised: list[EnvContractError] = []
    options = {} if backend == "sync" else {"context": "fork"}
    factories = [partial(SpoiltEnv, problems if i == 1 else []) for i in range(N)]
    actions = np.zeros((N, A), np.int64)
    with vectorize(backend, factories, validate=validate, autoreset_mode=mode, **options) as envs:
        again: Callable[[], Any] | None = partial(envs.reset, seed=0)
        done = np.zeros(N, np.bool_)
        for _ in range(steps):
            if again is None and mode == "disabled" and done.any():
                again = partial(envs.reset, env_ids=done)
            call, again = again or partial(envs.step, actions), None
            try:
                call()
            except EnvContractError as error:
                raised.append(error)
                again = partial(envs.reset, env_ids=[1])
                done = np.isin(np.arange(N), error.result.env_ids[error.result.done])
            else:
                done = np.array([not envs.agents_at(i) for i in range(N)])
    assert {error.env_ids for error in raised} <= {(1,)}
    assert {i for error in raised for i in error.result.env_ids} <= {0, 2}
    return [str(error).splitlines()[0] for error in raised]


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=12)
@pytest.mark.checklist(62)
@pytest.mark.fault("C8")
@pytest.mark.parametrize("validate", ["strict", "warn", "off"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_that_is_wrong_is_reported_with_env_agent_and_leaf(backend: str, validate: str) -> None:
    """Form always, by an error; values as ``validate`` says: by an error, a warning, or not at all."""
    problems = VALUES[:4] + FORMS[:2] + VALUES[4:] + FORMS[2:]
    mode = MODES[(BACKENDS.index(backend) + len(validate)) % 3]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        told = play(backend, mode, validate, problems, 10 * len(problems))
    expected = [p for p in problems if validate == "strict" or p.kind == "form"]
    for text, problem in zip(told, expected, strict=True):
        assert text.startswith("env 1, ")
        assert problem.where in text
    found = [w for w in caught if w.category is ContractWarning]
    first_of_a_kind = {(p.agent, p.leaf, p.kind): p for p in reversed(VALUES)} if validate == "warn" else {}
    assert sorted(str(w.message) for w in found) == sorted(f"env 1: {p.where}" for p in first_of_a_kind.values())
    assert {w.filename for w in found} <= {__file__}, "the caller's line, not one of marlvec's"


# --- on its own ---


class Simplex(Box):
    """A space of a user's own: a Box whose members add up to no more than one."""

    def __init__(self) -> None:
        super().__init__(0, 1, (2,), np.float64)

    def contains(self, value: Any) -> bool:
        return bool(super().contains(value) and value.sum() <= 1)


class Even(Discrete):
    def contains(self, value: Any) -> bool:
        return bool(super().contains(value) and int(value) % 2 == 0)


LEAVES: list[Space[Any]] = [
    Box(-INF, INF, (3,)),
    Box(-INF, INF, (2, 2), np.float16),
    Box(-1, 1, (), np.float64),
    Box(0, INF, (3,)),
    Box(-INF, 5, (3,)),
    Box(np.float32([-4.8, -INF]), np.float32([4.8, INF])),
    Box(np.float32([-4.8, -INF]), np.float32([INF, INF])),
    Box(np.float32([-INF, -INF]), np.float32([INF, 7])),
    Box(-np.finfo(np.float32).max, np.finfo(np.float32).max, (2,)),
    Box(0, 255, (2, 2), np.uint8),
    Box(3, 250, (2,), np.uint8),
    Box(np.int16([-5, 0]), np.int16([5, 32767]), dtype=np.int16),
    Box(np.iinfo(np.int64).min, np.iinfo(np.int64).max, (2,), np.int64),
    Box(0, 1, (2,), np.bool_),
    Box(np.bool_([1, 0]), np.bool_([1, 1]), dtype=np.bool_),
    Box(-1, 1, (2, 0)),
    Discrete(4, start=-2),
    Discrete(3, start=np.int8(5), dtype=np.int8),
    MultiDiscrete([2, 3]),
    MultiDiscrete([[2, 3], [1, 4]], start=[[0, -1], [5, 2]]),
    MultiBinary([2, 2]),
    Simplex(),
    Even(4, start=1),
]
spaces = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3).map(Dict),
        st.lists(inner, min_size=1, max_size=3).map(Tuple),
    ),
    max_leaves=4,
)


def spec_of(*spaces: Space[Any]) -> EnvSpec:
    agents = tuple(f"agent_{a}" for a in range(len(spaces)))
    return EnvSpec("x", agents, spaces, (Discrete(2),) * len(agents), (None,) * len(agents))


def all_rows(buffers: Buffers) -> VectorStep:
    n = buffers.num_envs
    return VectorStep(buffers, np.arange(n), slice(None), ShardReport(), grouped=True, copy=False)


def fill(leaf_space: Any, array: Any, rng: np.random.Generator) -> None:
    """Members, half of them spoilt in one place by a value that may be one or not."""
    leaf_space.seed(int(rng.integers(2**31)))
    kind = array.dtype.kind
    for i, a in np.ndindex(*array.shape[:2]):
        cell = array[i, a, ...]
        cell[...] = leaf_space.sample()
        if not cell.size or rng.random() < 0.5:
            continue
        near = [leaf_space.low, leaf_space.high] if isinstance(leaf_space, Box) else [-3, 0, 1, 2, 5]
        values = [v for bound in near for v in np.ravel(bound).tolist() if np.isfinite(v)]
        if kind == "f":
            values += [NAN, INF, -INF, *(v + step for v in values for step in (-0.5, 0.5)), 1e4]
        elif kind in "iu":
            info = np.iinfo(array.dtype)
            values += [info.min, info.max, *(v + step for v in values for step in (-1, 1))]
            values = [v for v in values if info.min <= v <= info.max]
        with np.errstate(over="ignore"):
            cell.reshape(-1)[rng.integers(cell.size)] = values[rng.integers(len(values))]


@pytest.mark.slow("plays whole episodes in worker processes")
@pytest.mark.fault("C8")
@given(one=spaces, other=spaces, seed=st.integers(0, 2**32 - 1))
def test_the_verdict_is_that_of_the_space(one: Space[Any], other: Space[Any], seed: int) -> None:
    """Of each agent in each env, for observations and final ones, of those agents alone that have one."""
    rng = np.random.default_rng(seed)
    spec = spec_of(one, other, one)
    buffers = Buffers(spec, 3)
    for g, group in enumerate(spec.groups):
        for sets in (buffers.obs, buffers.final_obs):
            for space, array in zip(leaf_spaces(group.observation_space), sets[g], strict=True):
                fill(space, array, rng)
    members = {
        final: np.array([[_contains(spec, sets, i, a) for a in range(3)] for i in range(3)])
        for final, sets in ((False, buffers.obs), (True, buffers.final_obs))
    }
    validator = ObservationValidator(spec, "strict")
    for a in range(3):  # one agent at a time: a report is of an env
        buffers.flags[...] = False
        buffers.alive[:, a] = buffers.acting[:, a] = rng.random(3) < 0.7
        buffers.terminated[:, a] = rng.random(3) < 0.5
        bad = (buffers.alive[:, a] & ~members[False][:, a]) | (buffers.terminated[:, a] & ~members[True][:, a])
        found = validator.check(all_rows(buffers))
        assert [env_id for env_id, _ in found] == np.flatnonzero(bad).tolist()
        assert all(f"observation of agent 'agent_{a}'" in text for _, text in found)


def _contains(spec: EnvSpec, sets: Any, i: int, a: int) -> bool:
    g = next(g for g, group in enumerate(spec.groups) if a in group.agents)
    group = spec.groups[g]
    batch = group.observation_tree.unflatten(sets[g])
    with np.errstate(all="ignore"):
        return bool(group.observation_space.contains(pick(group.observation_space, batch, i, group.agents.index(a))))


def is_due(validator: ObservationValidator) -> bool:
    """Count a call, as the vectorizer does."""
    validator.schedule.countdown -= 1
    if validator.schedule.countdown:
        return False
    validator.schedule.restart()
    return True


def test_which_calls_are_looked_at() -> None:
    spec = spec_of(Box(-1, 1, (2,)))
    buffers = Buffers(spec, 2)
    buffers.alive[...] = True
    buffers.obs[0][0][1, 0, 1] = 7
    words = "expected values in [-1.0, 1.0], got 7.0 at index (1,); wrong: 1 of 2 values"
    told = [(1, f"observation of agent 'agent_0': {words}")]
    strict, off = (ObservationValidator(spec, mode) for mode in ("strict", "off"))
    for _ in range(1, 100):
        assert is_due(strict)
        assert not is_due(off)
    found = [(i, text.partition(". ")[0]) for i, text in strict.check(all_rows(buffers))]
    assert found == told
    nobody = VectorStep(buffers, np.zeros(0, np.int64), np.zeros(0, np.int64), ShardReport(), grouped=False, copy=True)
    assert strict.check(nobody) == []


def test_a_sample_of_calls_is_looked_at_and_warned_of() -> None:
    """Each problem here is of another env, so that each is told, if its call is looked at."""
    spec = spec_of(Box(-1, 1, (2,)))
    buffers = Buffers(spec, 100)
    buffers.alive[...] = True
    sample = ObservationValidator(spec, "sample")
    for call in range(1, 100):
        buffers.obs[0][0][...] = 0
        buffers.obs[0][0][call, 0, 1] = 7
        assert is_due(sample) == (call <= 16 or call % 16 == 0)
        if call <= 16 or call % 16 == 0:
            with pytest.warns(ContractWarning, match=f"^env {call}: observation of agent 'agent_0'"):
                assert sample.check(all_rows(buffers)) == []


@pytest.mark.fault("C8")
def test_one_report_an_env_however_much_is_wrong() -> None:
    spec = spec_of(*[Dict(a=Box(-1, 1, (2,)), b=Discrete(2))] * 2)
    buffers = Buffers(spec, 4)
    buffers.alive[...] = True
    buffers.obs[0][0][1:3] = NAN
    buffers.obs[0][1][1] = 9
    buffers.reward[3, 1] = NAN
    (one, first), (two, second), (three, third) = ObservationValidator(spec, "strict").check(all_rows(buffers))
    assert (one, two, three) == (1, 2, 3)
    assert re.match(
        r"observation of agent 'agent_0', leaf 'a': .*: 2 of 2 values \(3 more like it in this env\)\. ", first
    )
    assert re.match(r"observation of agent 'agent_0', leaf 'a': .* \(1 more like it in this env\)\. ", second)
    assert re.match(r"reward of agent 'agent_1': expected a finite number, got nan\. Correct ", third)
    assert ObservationValidator(spec, "strict").check(all_rows(buffers), [0, 2]) == [(2, second)], (
        "the rows of the others are old"
    )


def test_a_warning_can_be_made_an_error_and_the_envs_go_on() -> None:
    problems = [Problem(1, 0, "deep/1", 9, "expected values in [2, 4], got 9")]
    with vectorize("sync", [partial(SpoiltEnv, problems)], validate="warn") as envs:
        envs.reset(seed=0)
        refused(ContractWarning, re.escape(f"env 0: {problems[0].where}"), envs.step, np.zeros((1, A), np.int64))
        for _ in range(2 * LENGTH):
            envs.step(np.zeros((1, A), np.int64))


def test_what_cannot_be_wrong_is_not_looked_at() -> None:
    for space in (
        Box(0, 255, (84, 84), np.uint8),
        Box(-128, 127, (2,), np.int8),
        Box(0, 1, (3,), np.bool_),
        Box(0, 1, (0,)),
    ):
        (leaf,) = SpaceTree(space).leaves
        assert membership(leaf) is None, space


# Every space, dtype and depth goes through every backend unchanged, and the public spaces say what comes out.


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
    return [partial(SampledEnv, observation, action, agent_num=2, length=4, env_index=i, **options) for i in range(n)]


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
    refused(ValueError, "no agent 'nobody'", envs.agent_action_space, "nobody")


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
                assert all(leaf.shape[:2] == (N, 2) for leaf in flatten(actions))
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
        super().__init__(space, Discrete(2), agent_num=2, length=4, env_index=env_index)
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
                envs.step(np.zeros((2, 2), np.int64))
                with pytest.raises(ContractError, match=r"env 0, step.*agent 'agent_1'.*got no array at all"):
                    envs.step(np.zeros((2, 2), np.int64))


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

"""What `VectorEnv` offers beside steps: other libraries' names, seeds, random actions, global states, control calls."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete, MultiDiscrete, Space
from hypothesis import given
from hypothesis import strategies as st
from mpe2 import simple_spread_v3
from pettingzoo.utils import BaseParallelWrapper

import marlvec
from marlvec import PerEnv, VectorEnv, env_seeds, make
from marlvec.envs.spec import EnvSpec
from marlvec.errors import (
    ArgumentError,
    BusyError,
    ClosedError,
    ContractError,
    EnvRaised,
    FetchTimeout,
    NothingPendingError,
    SerialisationError,
    UnsupportedSpaceError,
)
from marlvec.testing import CounterEnv, SampledEnv, Script, ScriptedParallelEnv, SingleEnv, decode, draw
from marlvec.vector.settings import random_actions
from tests.vector.support.kinds import BACKENDS, HERE_AND_AWAY, factories_of, hooked, vectorize
from tests.vector.support.reference import pick, refused
from tests.waiting import Gate

# Names by which users of other libraries ask: each is the same thing as marlvec's own.


SCRIPTS = [Script([0, 0], [2, 4], ["terminated", "truncated"])]


def envs_of(backend: str, **options: Any) -> VectorEnv:
    return vectorize(backend, [partial(ScriptedParallelEnv, SCRIPTS, agent_num=2)] * 3, **options)


@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_agents(backend: str) -> None:
    with envs_of(backend) as envs:
        assert envs.num_agents == envs.agent_num == 2
        assert envs.possible_agents == envs.agents == ("agent_0", "agent_1")
        envs.reset(seed=0)
        for _ in range(3):
            envs.step(np.zeros((3, 2), np.int64))
        assert envs.num_agents == 2, "of all, whoever is alive"


@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_step_async_and_step_wait_are_a_step(backend: str) -> None:
    with envs_of(backend) as one, envs_of(backend) as other:
        one.reset(seed=0)
        other.reset(seed=0)
        refused(NothingPendingError, "", one.step_wait)
        for k in range(10):
            actions = np.full((3, 2), k % 2)
            one.step_async(actions)
            refused(BusyError, "", one.step_async, actions)
            np.testing.assert_equal(one.step_wait(timeout=60), other.step(actions))


@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_reset_and_call_have_such_pairs_too(backend: str) -> None:
    with envs_of(backend) as one, envs_of(backend) as other:
        nothing = refused(NothingPendingError, "", one.reset_wait)
        assert nothing.name == "reset"
        one.reset_async(seed=3)
        busy = refused(BusyError, "", one.call_async, "observation_space", "agent_0")
        assert busy.name == "reset"
        np.testing.assert_equal(one.reset_wait(timeout=60), other.reset(seed=3))
        one.call_async("observation_space", "agent_0")
        busy = refused(BusyError, "", one.reset_async)
        assert busy.name == "call"
        assert one.call_wait(timeout=60) == other.call("observation_space", "agent_0")


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick="each")
@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("mode", ["same_step", "next_step", "disabled"])
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_final_obs_is_the_array_of_final_observation(backend: str, mode: str, copy: bool) -> None:
    told = 0
    with envs_of(backend, autoreset_mode=mode, copy=copy) as envs:
        _, infos = envs.reset(seed=0)
        for _ in range(9):
            if mode == "disabled" and not infos["alive"].any():
                _, infos = envs.reset()
            *_, infos = envs.step(np.zeros((3, 2), np.int64))
            assert ("final_obs" in infos) is ("_final_obs" in infos) is ("final_observation" in infos)
            if "final_obs" in infos:
                told += 1
                assert infos["final_obs"] is infos["final_observation"]
                assert infos["_final_obs"] is infos["_final_observation"]
            assert not any(key.startswith("final") for own in lists(infos, envs) for key in own)
    assert told >= 3


def lists(infos: dict[str, Any], envs: VectorEnv) -> list[dict[str, Any]]:
    """All infos of agents and envs, as dicts."""
    told = marlvec.infos_to_list(infos, envs.agents, envs.num_envs)
    return [own for info in told for own in info.values()]


def test_an_envs_own_final_obs_is_not_lost() -> None:
    listed = [{"agent_0": {"final_obs": 3, "x": 1.5}, "__common__": {"final_obs": 4}}, {}]
    infos = marlvec.infos_from_list(listed, ["agent_0", "agent_1"])
    assert "final_obs" not in infos
    assert marlvec.infos_to_list(infos, ["agent_0", "agent_1"], 2) == listed
    infos["final_obs"] = infos["final_observation"] = np.zeros((2, 2))
    assert marlvec.infos_to_list(infos, ["agent_0", "agent_1"], 2) == listed


# Seeds: one int for all, one each, or none; in the parent everything that is no seed is refused.


N = 4


def counters(backend: str, lengths: Any = 3, n: int = N, **options: Any) -> VectorEnv:
    own = lengths if isinstance(lengths, dict) else dict.fromkeys(range(n), lengths)
    return vectorize(backend, [partial(CounterEnv, own[i], agent_num=2, env_index=i) for i in range(n)], **options)


def draws(obs: Any) -> list[int]:
    return [draw(row[0]) for row in obs]


@pytest.mark.checklist(20)
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_an_int_is_spread_and_a_list_is_taken_as_it_is(backend: str) -> None:
    with counters(backend) as envs:
        first = draws(envs.reset(seed=5)[0])
        assert first == draws(envs.reset(seed=env_seeds(5, N))[0]), "one int is env_seeds of it"
        assert first == [int(np.random.default_rng(s).integers(65_536)) for s in env_seeds(5, N)]
        for number in (np.int64(5), np.uint8(5), np.int32(5)):
            assert first == draws(envs.reset(seed=number)[0])
        assert first == draws(envs.reset(seed=np.array(env_seeds(5, N), np.uint64))[0])
        assert not set(first) & set(draws(envs.reset(seed=6)[0]))
        with_none = draws(envs.reset(seed=[7, None, np.int64(7), None])[0])
        assert with_none[0] == with_none[2] == int(np.random.default_rng(7).integers(65_536))
        # None goes on with the env's own stream: the second number of the one that seed 6 began.
        rng = np.random.default_rng(env_seeds(6, N)[1])
        assert with_none[1] == [int(rng.integers(65_536)) for _ in range(2)][1]
        assert draws(envs.reset(seed=9, env_ids=[2, 0])[0])[2] == draws(envs.reset(seed=9)[0])[2], "by env, not place"


@pytest.mark.checklist(20)
@given(seed=st.integers(0, 2**64 - 2), n=st.integers(1, 64))
def test_seeds_of_neighbours_do_not_overlap(seed: int, n: int) -> None:
    mine, next_ones = env_seeds(seed, n), env_seeds(seed + 1, n)
    assert len(set(mine)) == len(mine) or n > 40  # 64 words of 32 bits may collide once in a while
    assert env_seeds(seed, n + 3)[:n] == mine, "the number of envs does not matter"
    assert len(set(mine) & set(next_ones)) <= 1
    assert all(0 <= s < 2**32 and type(s) is int for s in mine)


@pytest.mark.checklist(20)
def test_no_two_of_many_base_seeds_share_an_env_seed() -> None:
    seeds = [s for base in range(200) for s in env_seeds(base, 16)]
    assert len(set(seeds)) >= len(seeds) - 1


@pytest.mark.checklist(20)
@pytest.mark.fault("B10")
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_what_is_no_seed_is_refused_in_the_parent(backend: str) -> None:
    wrong: list[tuple[Any, str]] = [
        (-1, "-1"),
        (2**64, str(2**64)),
        (1.5, r"1\.5 \(float\)"),
        (True, r"True \(bool\)"),
        (np.float64(1), "float64"),
        (np.bool_(True), "bool"),
        ("1", "'1'"),
        ([1], "a list of 1 for 4 envs"),
        ([1] * 5, "a list of 5 for 4 envs"),
        ([], "a list of 0"),
        (np.arange(3), "a list of 3"),
        ([1, 2, -1, 3], r"seed\[2\].*-1"),
        ([1, 2, 3, 2**64], r"seed\[3\]"),
        ((1, None, 1.5, 3), r"seed\[2\].*1\.5"),
        ([1, False, 2, 3], r"seed\[1\].*False"),
    ]
    with counters(backend) as envs:
        envs.reset(seed=1)
        for t in range(1, 10):
            for seed, words in wrong:
                refused(ArgumentError, words, envs.reset, seed=seed)
                refused(ValueError, words, envs.reset_send, seed=seed)
            refused(ArgumentError, "a list of 4 for 2 envs", envs.reset, seed=[1, 2, 3, 4], env_ids=[0, 1])
            obs, *_ = envs.step(np.ones((N, 2), np.int64))
            assert {decode(row).t for row in obs[:, 0]} == {t % 3}, "the envs know nothing of it"


# Random actions: always allowed, the same on every backend, and fixed by a seed.


OBSERVATION = Box(-1, 1, (2,))


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return (a.dtype, a.shape, repr(a.tolist())) == (b.dtype, b.shape, repr(b.tolist()))


def played(envs: VectorEnv, steps: int = 25) -> Iterator[Any]:
    """Random actions of whole episodes. The envs raise on what is not allowed; so does the vectorizer."""
    _, infos = envs.reset(seed=7)
    for _ in range(steps):
        if envs.autoreset_mode == "disabled" and not infos["alive"].any(axis=1).all():
            _, infos = envs.reset(env_ids=~infos["alive"].any(axis=1))
        actions = envs.random_action()
        yield actions
        infos = envs.step(actions)[4]


def test_the_vectorizers_own_stream_begins_with_the_seed_of_a_reset() -> None:
    with vectorize("sync", factories_of("parallel", 3)) as envs:
        envs.reset(seed=1)
        first = [envs.random_action() for _ in range(3)]
        envs.random_action(seed=9)
        further = envs.random_action()
        envs.reset(seed=1)
        again = [envs.random_action() for _ in range(3)]
        assert all(equal(a, b) for a, b in zip(first, again, strict=True))
        assert equal(further, envs.random_action()), "a seed of its own leaves the stream alone"
        envs.reset(seed=2)
        assert not equal(first, [envs.random_action() for _ in range(3)])


def test_some_envs_alone() -> None:
    with vectorize("sync", factories_of("turns, masked", 5)) as envs:
        envs.reset(seed=1)
        for _ in range(20):
            envs.send(envs.random_action(env_ids=[4, 1]), [4, 1])
            assert sorted(envs.recv().env_ids.tolist()) == [1, 4]
        assert envs.random_action(env_ids=np.array([True, False, False, True, True])).shape == (3, 3)
        refused(ArgumentError, "from 0 to 4", envs.random_action, env_ids=[5])
        refused(ArgumentError, "seed must be", envs.random_action, seed=-1)


def spec_of(spaces: list[Space[Any]], mask_sizes: list[int | None]) -> EnvSpec:
    agents = tuple(f"agent_{a}" for a in range(len(spaces)))
    return EnvSpec("x", agents, (OBSERVATION,) * len(agents), tuple(spaces), tuple(mask_sizes))


@given(
    allowed=st.lists(st.lists(st.booleans(), min_size=10, max_size=10), min_size=1, max_size=4),
    acting=st.integers(0, 15),
    seed=st.integers(0, 999),
)
def test_masks_bind_those_who_act(allowed: list[list[bool]], acting: int, seed: int) -> None:
    n = len(allowed)
    spec = spec_of([Discrete(5, start=1), MultiDiscrete([3, 2], start=[0, 7]), Discrete(5, start=1)], [5, 5, 5])
    bits = np.array(allowed).reshape(n, 2, 5)
    masks = [np.stack([bits[:, 0], bits[:, 1]], axis=1), bits[:, :1]]
    possible = np.stack([m.any(-1) for m in (bits[:, 0], bits[:, 0], bits[:, 1])], axis=1)
    possible[:, 1] = bits[:, 0, :3].any(-1) & bits[:, 0, 3:].any(-1)
    who = possible & ((acting >> np.arange(3)) & 1).astype(np.bool_)
    draw = partial(random_actions, spec, acting=who, masks=masks, env_ids=np.arange(n), grouped=True)
    actions, again = draw(np.random.default_rng(seed)), draw(np.random.default_rng(seed))
    assert equal(actions, again)
    for g, group in enumerate(spec.groups):
        for i in range(n):
            for j, a in enumerate(group.agents):
                action = pick(group.action_space, actions[group.name], i, j)
                assert group.action_space.contains(action)
                if who[i, a]:
                    choices = np.ravel(action - group.action_space.start)
                    offsets = [0, 3][: len(choices)]
                    assert all(masks[g][i, j, offset + c] for offset, c in zip(offsets, choices, strict=True))


def test_an_agent_that_may_do_nothing_is_named() -> None:
    spec = spec_of([Discrete(2)] * 3, [2, 2, 2])
    mask = np.ones((2, 3, 2), np.bool_)
    mask[1, 2] = False
    acting = np.ones((2, 3), np.bool_)
    draw = partial(
        random_actions, spec, np.random.default_rng(0), masks=[mask], env_ids=np.array([4, 7]), grouped=False
    )
    refused(ContractError, "action mask of env 7, agent 'agent_2' allows nothing", draw, acting=acting)
    acting[1, 2] = False
    assert draw(acting=acting).shape == (2, 3)


def test_padded_choices_are_never_drawn() -> None:
    """With padding all agents share one action space, and what an agent lacks counts as masked."""
    own = [Discrete(2), Discrete(6), Discrete(4)]
    factories = [partial(SampledEnv, OBSERVATION, own, agent_num=3, length=4, env_index=i) for i in range(3)]
    with make(factories, backend="sync", pad=True, validate="strict") as envs:
        drawn = np.stack(list(played(envs, 60)))
    assert [int(drawn[:, :, a].max()) for a in range(3)] == [1, 5, 3]


class Undrawable(Space[Any]):
    """Has no sample of its own."""

    def contains(self, x: Any) -> bool:
        return True


class Unruly(Discrete):
    def sample(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("not today")


@pytest.mark.parametrize(("space", "why"), [(Undrawable(), "NotImplementedError"), (Unruly(3), "RuntimeError: not")])
def test_a_space_that_cannot_be_drawn_from_says_so(space: Any, why: str) -> None:
    with vectorize("sync", [partial(SampledEnv, Discrete(2), space, env_index=i) for i in range(2)]) as envs:
        envs.reset(seed=0)
        words = rf"expected a space that can be drawn from, got {type(space).__name__}, whose sample\(\) raised {why}"
        refused(UnsupportedSpaceError, words, envs.random_action)


# Global states: where they are asked for, who has none, and what fails.
#
# That they are those of the envs themselves is held by tests/properties.


def spread(length: int) -> Any:
    return simple_spread_v3.parallel_env(max_cycles=length)


def test_without_being_asked_for_no_state_is_written() -> None:
    with vectorize("sync", [partial(spread, 5)] * 2) as envs:
        _, infos = envs.reset(seed=0)
        assert "state" not in infos
        *_, infos = envs.step(envs.random_action())
        assert "state" not in infos
        assert envs.state().shape == (2, 54)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_env_without_a_state_is_refused(backend: str) -> None:
    words = r"env 0, __init__\(\): state=True: scripted_parallel has no global state"
    refused(ArgumentError, words, vectorize, backend, [ScriptedParallelEnv] * 2, state=True)
    with vectorize(backend, [ScriptedParallelEnv] * 2) as envs:
        envs.reset(seed=0)
        refused(ArgumentError, "has no global state", envs.state)


def fail_at_fourth(calls: list[Any], env: Any, state: Any) -> Any:
    calls.append(env)
    if len(calls) == 4:
        raise RuntimeError("no state today")
    return state()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_that_fails_is_a_fault_of_that_env(backend: str) -> None:
    hooks = {"state": partial(fail_at_fourth, [])}
    factories = [
        partial(ScriptedParallelEnv, state=True),
        partial(hooked, ScriptedParallelEnv, state=True, hooks=hooks),
    ]
    with vectorize(backend, factories, state=True) as envs:
        envs.reset(seed=0)
        with pytest.raises(EnvRaised, match=r"env 1 raised in state\(\): RuntimeError: no state today") as caught:
            for _ in range(4):
                envs.step(envs.random_action())
        assert caught.value.env_ids == (1,)
        assert caught.value.result.env_ids.tolist() == [0]
        envs.reset(env_ids=[1])
        envs.step(envs.random_action())


# Control calls: they reach the layer that owns the name, on chosen envs, and leave the episodes alone.


A = 2


class Tagged(BaseParallelWrapper):
    """A PettingZoo wrapper: passes on the reading of attributes, not their setting."""

    def __init__(self, env: Any, tag: str = "tag") -> None:
        super().__init__(env)
        self.tag = tag

    def greet(self, name: str, *, mark: str = "!") -> str:
        return f"hello {name}{mark} from {self.tag}"


class Outer(BaseParallelWrapper):
    pass


class Never(BaseParallelWrapper):
    pass


class Knobs(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A Gymnasium wrapper: passes on nothing."""

    knob = 3

    def turn(self, by: int) -> int:
        self.knob += by
        return self.knob


def wrapped(env_index: int) -> Any:
    env: Any = CounterEnv(5, agent_num=A, env_index=env_index)
    env.bag = [env_index]
    env.index = env_index
    return Outer(Tagged(env, f"tag {env_index}")) if env_index != 2 else Tagged(env, "tag 2")


def knobs(env_index: int) -> Any:
    env: Any = SingleEnv(5, env_index=env_index)
    env.level = env_index
    return gymnasium.wrappers.TransformReward(Knobs(env), float)


@pytest.fixture(params=BACKENDS)
def envs(request: pytest.FixtureRequest) -> Iterator[VectorEnv]:
    with vectorize(request.param, [partial(wrapped, i) for i in range(N)]) as made:
        yield made


def seen(obs: Any) -> list[Any]:
    """What a `CounterEnv` shows of env, time and agent; the number of its episode never comes again."""
    return [(stamp.env, stamp.t, stamp.agent) for row in obs.reshape(-1, obs.shape[-1]) for stamp in [decode(row)]]


def play(envs: VectorEnv, steps: int) -> list[Any]:
    return [seen(envs.step(np.full((N, A), t % 5))[0]) for t in range(steps)]


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=2)
@pytest.mark.checklist(27)
@pytest.mark.parametrize("backend", BACKENDS)
def test_names_are_found_on_the_layer_that_owns_them(backend: str) -> None:
    """In PettingZoo's wrappers and in Gymnasium's, read, called and set; on all envs and on chosen ones."""
    with vectorize(backend, [partial(wrapped, i) for i in range(N)]) as envs:
        assert envs.get_attr("tag") == tuple(f"tag {i}" for i in range(N))
        assert envs.get_attr("index", [3, 1]) == (3, 1), "in the order asked for"
        assert envs.get_attr("index", np.array([False, True, True, False])) == (1, 2)
        assert envs.get_attr("index", []) == ()
        assert all(map(callable, envs.get_attr("render"))), "read, and not called"
        assert envs.call("greet", "Ann", mark="?") == tuple(f"hello Ann? from tag {i}" for i in range(N))
        assert envs.call("greet", "Bob", indices=[2]) == ("hello Bob! from tag 2",)

        envs.set_attr("tag", "same")
        assert envs.get_attr("tag") == ("same",) * N
        envs.set_attr("bag", [1, 2, 3, 4])  # as long as there are envs, and still one value for all
        assert envs.get_attr("bag") == ([1, 2, 3, 4],) * N
        envs.set_attr("bag", PerEnv(["a", "b", "c", "d"]))
        assert envs.get_attr("bag") == ("a", "b", "c", "d")
        envs.set_attr("bag", PerEnv([7, 8]), indices=[3, 0])
        assert envs.get_attr("bag") == (8, "b", "c", 7)
        owners = envs.exec_func(lambda env: [name for name in ("bag", "tag") if name in vars(env.unwrapped)])
        assert owners == (["bag"],) * N, "set where it lives, not on the outermost wrapper"
        assert envs.exec_func(lambda env: "bag" in vars(env)) == (False,) * N

    with vectorize(backend, [partial(knobs, i) for i in range(N)]) as envs:
        assert envs.get_attr("level") == (0, 1, 2, 3)
        assert envs.get_attr("knob") == (3,) * N
        envs.set_attr("knob", 10, indices=[1])
        assert envs.call("turn", 2) == (5, 12, 5, 5)
        envs.set_attr("level", PerEnv(range(4, 8)))
        assert envs.exec_func(lambda env: env.unwrapped.level) == (4, 5, 6, 7)


def test_a_value_is_nobody_elses(envs: VectorEnv) -> None:
    bag = [0]
    envs.set_attr("bag", bag)
    envs.exec_func(lambda env, more: env.unwrapped.bag.append(more.pop()), None, [9, 8])
    assert envs.get_attr("bag") == ([0, 8],) * N
    assert bag == [0]


@pytest.mark.checklist(28)
def test_functions_of_any_kind_run_where_the_env_lives(envs: VectorEnv) -> None:
    factor = 10

    def scaled(env: Any, plus: int = 0, *, times: int = 1) -> int:
        return (env.unwrapped.index * factor + plus) * times

    assert envs.exec_func(scaled) == (0, 10, 20, 30)
    assert envs.exec_func(scaled, [3, 1]) == (30, 10)
    assert envs.exec_func(scaled, None, 1, times=2) == (2, 22, 42, 62)
    assert envs.exec_func(functools.partial(scaled, plus=5), np.array([True, False, False, True])) == (5, 35)
    assert envs.exec_func(lambda env: type(env).__name__) == ("Outer", "Outer", "Tagged", "Outer")
    envs.reset(seed=0)
    before = envs.exec_func(lambda env: env.unwrapped.agents)
    envs.exec_func_send(lambda env: (yield env))  # a generator crosses no process
    if envs.backend == "async":
        with pytest.raises(SerialisationError, match="the answer of env 0 cannot be pickled, so it cannot be returned"):
            envs.exec_func_fetch()
    else:
        assert all(isinstance(made, Iterator) for made in envs.exec_func_fetch())
    assert envs.exec_func(lambda env: env.unwrapped.agents) == before


def test_indices_of_exec_func_go_by_name_too(envs: VectorEnv) -> None:
    def read(env: Any, plus: int = 0, *, times: int = 1) -> int:
        return (int(env.unwrapped.index) + plus) * times

    assert envs.exec_func(read, indices=[2, 0]) == (2, 0)
    assert envs.exec_func(read, indices=[3], times=5) == (15,)
    assert envs.exec_func(read, [3], 1, times=5) == (20,)
    envs.exec_func_send(read, indices=[1])
    assert envs.exec_func_fetch() == (1,)


def test_an_attribute_that_is_not_there_yet_is_made(envs: VectorEnv) -> None:
    """As Gymnasium's vectorizers do: on the env itself, where its own code finds it, whatever it is wrapped in."""
    envs.set_attr("difficulty", 3)
    envs.set_attr("difficulty", PerEnv([5, 6]), indices=[0, 2])
    assert envs.get_attr("difficulty") == (5, 3, 6, 3)
    assert envs.exec_func(lambda env: env.unwrapped.difficulty) == (5, 3, 6, 3)
    assert envs.exec_func(lambda env: "difficulty" in vars(env)) == (False,) * N
    envs.set_attr("difficulty", 4)
    assert envs.get_attr("difficulty") == (4,) * N


class Slotted:
    """An env without a dict of attributes."""

    __slots__ = ("_env", "level")

    def __init__(self) -> None:
        self._env, self.level = SingleEnv(5), 1

    @property
    def observation_space(self) -> Any:
        return self._env.observation_space

    @property
    def action_space(self) -> Any:
        return self._env.action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self._env.reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        return self._env.step(action)

    def close(self) -> None:
        self._env.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_env_with_slots_takes_no_new_attribute(backend: str) -> None:
    with vectorize(backend, [Slotted]) as envs:
        envs.set_attr("level", 2)
        assert envs.get_attr("level") == (2,)
        refused(EnvRaised, "attribute 'other' of Slotted cannot be set: .*without __slots__", envs.set_attr, "other", 1)


@pytest.mark.checklist(29)
def test_every_env_tells_what_it_is_wrapped_in(envs: VectorEnv) -> None:
    assert envs.env_is_wrapped(Outer) == (True, True, False, True)
    assert envs.env_is_wrapped(Tagged) == (True,) * N
    assert envs.env_is_wrapped(BaseParallelWrapper) == (True,) * N
    assert envs.env_is_wrapped(Never) == (False,) * N
    assert envs.env_is_wrapped(CounterEnv) == (False,) * N, "the env itself is no wrapper"
    assert envs.env_is_wrapped(Outer, indices=[2, 0]) == (False, True)

    class Local(BaseParallelWrapper):
        pass

    with vectorize(envs.backend, [lambda: Local(CounterEnv(3)), lambda: CounterEnv(3)]) as others:
        assert others.env_is_wrapped(Local) == (True, False)


CONTROLS: dict[str, Callable[[VectorEnv], Any]] = {
    "call": lambda envs: envs.call("greet", "x"),
    "get_attr": lambda envs: envs.get_attr("index"),
    "set_attr": lambda envs: envs.set_attr("index", 1),
    "exec_func": lambda envs: envs.exec_func(lambda env: 1),
    "env_is_wrapped": lambda envs: envs.env_is_wrapped(Outer),
    "render": lambda envs: envs.render(),
    "reset": lambda envs: envs.reset(env_ids=[0]),
    "agents_at": lambda envs: envs.agents_at(0),
    "random_action": lambda envs: envs.random_action(),
}


@pytest.mark.checklist(68)
def test_what_fails_is_told_and_costs_nothing(envs: VectorEnv) -> None:
    envs.reset(seed=0)

    def fails(env: Any) -> int:
        if env.unwrapped.index % 2:
            raise ValueError(f"odd {env.unwrapped.index}")
        return int(env.unwrapped.index)

    caught = refused(EnvRaised, r"env 1 raised in exec_func\(\): ValueError: odd 1", envs.exec_func, fails)
    assert caught.env_ids == (1, 3), "all that failed"
    assert caught.result == {0: 0, 2: 2}, "and what the others answered"
    assert isinstance(caught.__cause__, ValueError)
    refused(EnvRaised, r"no layer of the env has an attribute 'nme'; its layers are .*CounterEnv", envs.get_attr, "nme")
    with pytest.raises(EnvRaised, match=r"attribute 'unwrapped' of \w+ cannot be set: .*expected a writable attribute"):
        envs.set_attr("unwrapped", 1)
    refused(EnvRaised, r"call\('tag'\): str is not a method; pass no arguments", envs.call, "tag", 1)
    assert envs.call("tag") == envs.get_attr("tag")
    play(envs, 6)


def test_wrong_arguments_reach_no_env(envs: VectorEnv) -> None:
    for name in ("reset", "step", "close", "seed"):
        refused(ArgumentError, "only the vectorizer may call this", envs.call, name)
    refused(ArgumentError, "one value for each of 4 envs, got 3", envs.set_attr, "bag", PerEnv([1, 2, 3]))
    refused(ArgumentError, "env_ids must be from 0 to 3", envs.get_attr, "bag", [4])
    with pytest.raises(ArgumentError, match="expected a function of an env, got int"):
        envs.exec_func(3)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(ArgumentError, match="expected a wrapper class, got 'Outer'"):
        envs.env_is_wrapped("Outer")  # type: ignore[arg-type]  # on purpose
    assert envs.get_attr("bag") == ([0], [1], [2], [3])


@pytest.mark.checklist(35)
def test_wrong_order_is_told_apart_and_names_the_pending_call(envs: VectorEnv) -> None:
    refused(NothingPendingError, r"call_fetch\(\): nothing is pending; call_send\(\) first", envs.call_fetch)
    refused(NothingPendingError, r"recv\(\) with nothing sent", envs.recv)
    envs.exec_func_send(lambda env: 1)
    refused(NothingPendingError, r"call_fetch\(\): exec_func\(\) is pending", envs.call_fetch)
    with pytest.raises(BusyError, match=r"exec_func_send\(\)|exec_func\(\) while exec_func\(\) is pending"):
        envs.exec_func_send(lambda env: 2)
    refused(BusyError, r"recv\(\) while exec_func\(\) is pending; exec_func_fetch\(\) first", envs.recv)
    refused(BusyError, r"drain\(\) while exec_func\(\) is pending", envs.drain)
    assert envs.exec_func_fetch() == (1,) * N
    envs.close()
    for control in (*CONTROLS.values(), lambda made: made.drain(), lambda made: made.call_fetch()):
        refused(ClosedError, "closed", control, envs)


@pytest.mark.checklist(36)
@pytest.mark.parametrize("backend", ["thread", "async"])
def test_a_fetch_that_times_out_loses_no_answer(backend: str, tmp_path: Path) -> None:
    """Of calls as of steps: the next fetch brings the answer to that request, and never an older one."""
    with Gate(tmp_path) as gate, vectorize(backend, [partial(wrapped, i) for i in range(N)]) as envs:
        numbers = itertools.count()
        envs.reset(seed=0)
        for _ in range(3):
            number = next(numbers)

            def slow(env: Any, number: int = number) -> int:
                gate.wait()
                return number * 10 + int(env.unwrapped.index)

            envs.exec_func_send(slow)
            with pytest.raises(FetchTimeout, match=r"exec_func_fetch\(\): envs \[.*\] did not reply within 0.01 s"):
                envs.exec_func_fetch(timeout=0.01)
            refused(BusyError, "", envs.step, np.zeros((N, A), np.int64))
            gate.let_through(N)
            assert envs.exec_func_fetch() == tuple(number * 10 + i for i in range(N))
        play(envs, 6)


def test_who_is_alive(envs: VectorEnv) -> None:
    envs.reset(seed=0)
    assert envs.agents_at(1) == envs.agents
    refused(ArgumentError, "from 0 to 3", envs.agents_at, 4)

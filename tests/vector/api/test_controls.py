"""Control calls: they reach the layer that owns the name, on chosen envs, and leave the episodes alone."""

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
from pettingzoo.utils import BaseParallelWrapper

from marlvec import PerEnv, VectorEnv
from marlvec.errors import (
    ArgumentError,
    BusyError,
    ClosedError,
    EnvRaised,
    FetchTimeout,
    NothingPendingError,
    SerialisationError,
)
from marlvec.testing.scripted import CounterEnv, SingleEnv, decode
from tests.vector.support.kinds import BACKENDS, vectorize
from tests.waiting import Gate

N, A = 4, 2


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
        with pytest.raises(EnvRaised, match="attribute 'other' of Slotted cannot be set: .*without __slots__"):
            envs.set_attr("other", 1)


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

    with pytest.raises(EnvRaised, match=r"env 1 raised in exec_func\(\): ValueError: odd 1") as caught:
        envs.exec_func(fails)
    assert caught.value.env_ids == (1, 3), "all that failed"
    assert caught.value.result == {0: 0, 2: 2}, "and what the others answered"
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(EnvRaised, match=r"no layer of the env has an attribute 'nme'; its layers are .*CounterEnv"):
        envs.get_attr("nme")
    with pytest.raises(EnvRaised, match=r"attribute 'unwrapped' of \w+ cannot be set: .*expected a writable attribute"):
        envs.set_attr("unwrapped", 1)
    with pytest.raises(EnvRaised, match=r"call\('tag'\): str is not a method; pass no arguments"):
        envs.call("tag", 1)
    assert envs.call("tag") == envs.get_attr("tag")
    play(envs, 6)


def test_wrong_arguments_reach_no_env(envs: VectorEnv) -> None:
    for name in ("reset", "step", "close", "seed"):
        with pytest.raises(ArgumentError, match="only the vectorizer may call this"):
            envs.call(name)
    with pytest.raises(ArgumentError, match="one value for each of 4 envs, got 3"):
        envs.set_attr("bag", PerEnv([1, 2, 3]))
    with pytest.raises(ArgumentError, match="env_ids must be from 0 to 3"):
        envs.get_attr("bag", [4])
    with pytest.raises(ArgumentError, match="expected a function of an env, got int"):
        envs.exec_func(3)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(ArgumentError, match="expected a wrapper class, got 'Outer'"):
        envs.env_is_wrapped("Outer")  # type: ignore[arg-type]  # on purpose
    assert envs.get_attr("bag") == ([0], [1], [2], [3])


@pytest.mark.checklist(35)
def test_wrong_order_is_told_apart_and_names_the_pending_call(envs: VectorEnv) -> None:
    with pytest.raises(NothingPendingError, match=r"call_fetch\(\): nothing is pending; call_send\(\) first"):
        envs.call_fetch()
    with pytest.raises(NothingPendingError, match=r"recv\(\) with nothing sent"):
        envs.recv()
    envs.exec_func_send(lambda env: 1)
    with pytest.raises(NothingPendingError, match=r"call_fetch\(\): exec_func\(\) is pending"):
        envs.call_fetch()
    with pytest.raises(BusyError, match=r"exec_func_send\(\)|exec_func\(\) while exec_func\(\) is pending"):
        envs.exec_func_send(lambda env: 2)
    with pytest.raises(BusyError, match=r"recv\(\) while exec_func\(\) is pending; exec_func_fetch\(\) first"):
        envs.recv()
    with pytest.raises(BusyError, match=r"drain\(\) while exec_func\(\) is pending"):
        envs.drain()
    assert envs.exec_func_fetch() == (1,) * N
    envs.close()
    for control in (*CONTROLS.values(), lambda made: made.drain(), lambda made: made.call_fetch()):
        with pytest.raises(ClosedError, match="closed"):
            control(envs)


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
            with pytest.raises(BusyError):
                envs.step(np.zeros((N, A), np.int64))
            gate.let_through(N)
            assert envs.exec_func_fetch() == tuple(number * 10 + i for i in range(N))
        play(envs, 6)


def test_who_is_alive(envs: VectorEnv) -> None:
    envs.reset(seed=0)
    assert envs.agents_at(1) == envs.agents
    with pytest.raises(ArgumentError, match="from 0 to 3"):
        envs.agents_at(4)

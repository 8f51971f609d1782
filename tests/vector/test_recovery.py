"""Faults of envs: errors told in full, defects that other vectorizers had, and random generators that envs share."""

from __future__ import annotations

import inspect
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from marlvec import SyncVectorEnv, VectorEnv, infos_to_list, make
from marlvec.errors import (
    ArgumentError,
    ContractError,
    ContractWarning,
    EnvArgumentError,
    EnvRaised,
    NotResetError,
    RemoteCause,
)
from marlvec.testing import CounterEnv, RaisingEnv, ScriptedParallelEnv, TurnEnv, check_env, decode, draw, reward_of
from tests.interop.envs import parallel_seed_test
from tests.testing.test_check_env import Good
from tests.vector.support.drivers import LivesEnv
from tests.vector.support.kinds import BACKENDS, acts, vectorize
from tests.vector.support.reference import refused

# Envs that raise: who did it is told in full, nothing of the others is lost, and everybody else goes on.


A = 3


class ManyArguments(Exception):
    def __init__(self, code: int, place: str, *, hint: str) -> None:
        super().__init__(f"code {code} at {place}")
        self.code, self.hint = code, hint


class KeywordsOnly(ValueError):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class Locked(Exception):
    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class PickyNew(Exception):
    def __new__(cls, code: int, extra: str) -> PickyNew:
        return super().__new__(cls, code, extra)


class Late(RuntimeError, TimeoutError):
    def __init__(self, message: str, value: int) -> None:
        super().__init__(message)
        self.value = value


def huge() -> Exception:
    return ValueError("x" * 10_000_000)


def local() -> Exception:
    class Local(Exception):
        pass

    return Local("of a function")


def chained() -> Exception:
    error = RuntimeError("outer")
    error.__cause__ = KeyError("inner")
    error.add_note("a note")
    return error


# What is raised, its first line as the message shows it, and whether it can cross to another process.
ERRORS: dict[str, tuple[Callable[[], BaseException], str, bool]] = {
    "plain": (partial(ValueError, "plain", 7), "ValueError: ('plain', 7)", True),
    "many arguments": (partial(ManyArguments, 3, "home", hint="go"), "ManyArguments: code 3 at home", True),
    "keyword-only": (partial(KeywordsOnly, code=5), "KeywordsOnly: code 5", True),
    "file": (partial(FileNotFoundError, 2, "No such file", "a.txt"), "[Errno 2] No such file: 'a.txt'", True),
    "decode": (partial(UnicodeDecodeError, "utf-8", b"\xff", 0, 1, "bad"), "can't decode byte 0xff", True),
    "group": (partial(ExceptionGroup, "both", [ValueError(1), KeyError(2)]), "ExceptionGroup: both", True),
    "key": (partial(KeyError, "k"), "KeyError: 'k'", True),
    "stop": (partial(StopIteration, 4), "StopIteration: 4", True),
    "own __new__": (partial(PickyNew, 1, "b"), "PickyNew: (1, 'b')", True),
    "two layouts": (partial(Late, "too late", 3), "Late: too late", True),
    "unpicklable": (Locked, "Locked: holds a lock", False),
    "mute": (Mute, "Mute: (its __str__ raised RuntimeError)", True),
    "huge": (huge, "ValueError: xxx", False),
    "local": (local, "Local: of a function", True),
    "chained": (chained, "RuntimeError: outer", True),
    "of memory": (MemoryError, "MemoryError", True),
}


class Series:
    """Makes one error after the other."""

    def __init__(self) -> None:
        self.names = iter(list(ERRORS))

    def __call__(self) -> BaseException:
        return ERRORS[next(self.names)][0]()


def same_attributes(one: BaseException, other: BaseException) -> bool:
    names = ("code", "hint", "errno", "strerror", "filename", "reason", "start", "value", "message")
    return all(getattr(one, name, None) == getattr(other, name, None) for name in names)


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=5)
@pytest.mark.checklist(65)
@pytest.mark.fault("C1")
@pytest.mark.fault("C2")
@pytest.mark.fault("C3")
@pytest.mark.parametrize("operation", ["init", "reset", "step"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_exception_arrives_whatever_it_is(backend: str, operation: str) -> None:
    def factories(error: Callable[[], BaseException]) -> list[Any]:
        return [partial(RaisingEnv, env_index=i, where=operation, at=None, only_env=1, error=error) for i in range(2)]

    with ExitStack() as stack:
        envs = None if operation == "init" else stack.enter_context(vectorize(backend, factories(Series())))
        for name in ERRORS:
            with pytest.raises(EnvRaised) as caught:
                if envs is None:
                    vectorize(backend, factories(ERRORS[name][0]))
                elif operation == "reset":
                    envs.reset(seed=0)
                else:
                    envs.reset(seed=0)
                    envs.step(acts(envs))
            check(caught.value, name, backend, operation)


def check(fault: EnvRaised, name: str, backend: str, operation: str) -> None:
    error, summary, can_cross = ERRORS[name]
    text, cause, original = str(fault), fault.__cause__, error()
    public = {"init": "__init__"}.get(operation, operation)
    assert f"env 1 raised in {public}(): " in text, name
    assert summary in text, name
    assert "Traceback (most recent call last)" in text
    assert "scripted/envs.py" in text, "the remote traceback"
    assert len(text) < 100_000, "bounded"
    assert fault.env_ids == (1,)
    (failure,) = fault.failures
    assert (failure.env_id, failure.operation, failure.exception) == (1, public, cause)
    if backend in ("sync", "thread") or can_cross:
        assert type(cause).__name__ == type(original).__name__, name
        if name != "group":  # exceptions in it are equal to themselves alone
            assert cause.args == original.args, name
        assert same_attributes(cause, original), name
    else:
        assert type(cause) is RemoteCause, name
        assert summary in str(cause)
        assert len(str(cause)) < 1000
    if name == "group":
        assert [type(part) for part in cause.exceptions] == [ValueError, KeyError]  # type: ignore[union-attr]  # seen above
    if name == "huge":
        assert len(failure.summary) < 600
        assert 60_000 < len(failure.traceback) <= 66_000
        assert "characters left out" in failure.traceback
    if name == "chained":
        assert "KeyError: 'inner'" in text
        assert "a note" in text


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=2)
@pytest.mark.checklist(65)
@pytest.mark.fault("C1")
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_error_of_close_and_of_state_says_which_env(backend: str) -> None:
    class Stateless(CounterEnv):
        def state(self) -> Any:
            raise LookupError("no state today")

    factories = [partial(CounterEnv, env_index=0, state=True), partial(Stateless, env_index=1, state=True)]
    with vectorize(backend, factories) as envs:
        envs.reset()
        caught = refused(EnvRaised, r"env 1 raised in state\(\): LookupError: no state today", envs.state)
        assert type(caught.__cause__) is LookupError
        envs.step(acts(envs))  # its episode is none the worse
    envs = vectorize(backend, [partial(RaisingEnv, env_index=i, where="close", only_env=0) for i in range(3)])
    envs.reset()
    refused(EnvRaised, r"env 0 raised in close\(\): ValueError: scripted failure", envs.close)
    assert envs.closed
    envs.close()


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=2)
@pytest.mark.checklist(66)
@pytest.mark.parametrize("operation", ["reset", "step"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_failure_of_a_call_is_listed(backend: str, operation: str) -> None:
    def error(i: int) -> BaseException:
        return (ValueError, KeyError, ContractError, Mute)[i % 4](f"number {i}")

    factories: list[Any] = [
        partial(RaisingEnv, env_index=i, where=operation, error=partial(error, i))
        if i in (0, 2, 3, 5)
        else partial(CounterEnv, env_index=i)
        for i in range(7)
    ]
    options = {} if backend == "sync" else {"num_workers": 4}
    with vectorize(backend, factories, **options) as envs:
        if operation == "step":
            envs.reset(seed=0)
        with pytest.raises(EnvRaised) as caught:
            envs.reset(seed=0) if operation == "reset" else envs.step(acts(envs, 2))
        fault, text = caught.value, str(caught.value)
        assert fault.env_ids == (0, 2, 3, 5)
        assert [type(f.exception) for f in fault.failures] == [ValueError, ContractError, Mute, KeyError]
        for i, summary in ((0, "ValueError: number 0"), (2, "ContractError: number 2"), (3, "Mute"), (5, "number 5")):
            assert f"env {i} raised in {operation}(): " in text
            assert summary in text
            assert "Traceback" in fault.failures[fault.env_ids.index(i)].traceback
        # What the others did is not lost.
        assert fault.result.env_ids.tolist() == [1, 4, 6]
        obs = fault.result.obs
        for k, i in enumerate((1, 4, 6)):
            for a in range(A):
                assert decode(obs[k, a]) == (i, 0, 0, int(operation == "step"), a)
                assert fault.result.rewards[k, a] == (reward_of(0, 1, a, 2) if operation == "step" else 0)
        assert fault.result.alive.all()


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=3)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_contract_error_first_does_not_choke_on_its_neighbour(backend: str) -> None:
    factories = [
        partial(RaisingEnv, env_index=0, error=partial(ContractError, "wrong shape")),
        partial(RaisingEnv, env_index=1, error=Mute),
        partial(RaisingEnv, env_index=2, error=huge),
    ]
    with vectorize(backend, factories) as envs:
        envs.reset()
        caught = refused(ContractError, r"env 0, step\(\): wrong shape", envs.step, acts(envs))
        assert caught.env_ids == (0, 1, 2)
        assert "env 1, step(): Mute" in str(caught)
        assert len(str(caught)) < 100_000


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick="each")
@pytest.mark.fault("C1")
@pytest.mark.parametrize("env_ids", [None, [1]])
@pytest.mark.parametrize("mode", ["same_step", "next_step"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_env_that_raised_is_reset_and_its_neighbours_never_notice(
    backend: str, mode: str, env_ids: list[int] | None
) -> None:
    """Bit for bit what they do beside an env that never raised."""
    lengths, n, others = [3, 5, 2], 4, [0, 2, 3]
    faulty: list[Any] = [partial(RaisingEnv, lengths, env_index=i, at=3, only_env=1) for i in range(n)]
    with (
        vectorize(backend, faulty, autoreset_mode=mode) as envs,
        SyncVectorEnv([partial(CounterEnv, lengths, env_index=i) for i in range(n)], autoreset_mode=mode) as twin,
    ):
        for vec in (envs, twin):
            vec.reset(seed=5)
        failed: Any = None
        for t in range(16):
            actions = acts(envs, t % 5)
            twin.send(actions)
            expected = twin.recv()
            envs.send(actions)
            try:
                got, rows = envs.recv(), others
            except EnvRaised as error:
                got, rows, failed = error.result, [0, 1, 2], error.env_ids
            for name in ("rewards", "terminated", "truncated", "done", "alive", "acting", "reset_mask", "obs"):
                np.testing.assert_array_equal(getattr(got, name)[rows], getattr(expected, name)[others], name)
            ended = expected.ended[others]
            np.testing.assert_array_equal(got.final_obs[rows][ended], expected.final_obs[others][ended])
            if len(got) < n:
                assert got.env_ids.tolist() == others
                for call in (lambda: envs.step(actions), lambda: envs.send(actions[:1], [1])):  # noqa: B023  (called here)
                    refused(NotResetError, r"envs \[1\]", call)
                obs, _ = envs.reset(env_ids=env_ids)
                beside = twin.reset()[0] if env_ids is None else expected.obs
                np.testing.assert_array_equal(obs[others], beside[others])
                assert decode(obs[1, 0])[2:4] == (2, 0)
        assert failed == (1,)


class Empty(CounterEnv):
    def __init__(self) -> None:
        super().__init__()
        self.possible_agents = []


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_make_raises_when_an_env_cannot_be_built(backend: str) -> None:
    def built(factories: list[Any]) -> VectorEnv:
        return vectorize(backend, factories)

    good = partial(CounterEnv, 3)
    with pytest.raises(EnvRaised, match=r"env 2 raised in __init__\(\): ValueError: scripted failure") as raised:
        built([good, good, partial(RaisingEnv, where="init"), good])
    assert (type(raised.value.__cause__), raised.value.result, raised.value.env_ids) == (ValueError, None, (2,))
    with pytest.raises(EnvArgumentError, match=r"env 1 raised in __init__\(\).*unexpected keyword argument") as caught:
        built([good, partial(CounterEnv, 3, colour="red")])
    assert isinstance(caught.value, TypeError)
    refused(ContractError, "env 1", built, [good, lambda: None])
    refused(ContractError, "env 1.*agent", built, [good, Empty])
    refused(ContractError, "env 3.*differ", built, [good, good, good, partial(CounterEnv, 3, agent_num=2)])
    refused(ContractError, "env 1", built, [good, partial(TurnEnv, agent_num=2)])
    if backend != "sync":  # which stops at its first env
        for factory, words in (
            (partial(RaisingEnv, where="init"), r"raised in __init__\(\): ValueError: scripted failure\n\n"),
            (Empty, r", __init__\(\): .*at least one agent\. "),
        ):
            with pytest.raises(EnvRaised, match=rf"^all envs \(the first of each of 2 workers was tried\),? ?{words}"):
                vectorize(backend, [factory] * 4, num_workers=2)


# Every defect that was shown in the vectorizers before this one has a test that would catch it here.
#
# They were found by running OpenRL, Gymnasium, PettingZoo and SuperSuit. `DEFECTS` names the test for each; the ones
# that nothing else covers are below.


DEFECTS = {
    # OpenRL, sync and async
    "Discrete observations fail, or have another shape with shared memory": (
        "tests.properties.test_programs:test_in_this_process"
    ),
    # OpenRL, async
    "agents that end in a mixture of ways never reset": (
        "test_shard:test_an_episode_is_over_when_every_agent_has_ended_in_any_mixture"
    ),
    "a reset that gives the observation alone fails": (
        "tests.faults.test_returns:test_four_values_and_observations_alone_are_the_older_api"
    ),
    "the final observation is overwritten by an env that reuses its buffer": "test_shard:test_same_step",
    "a timeout, and the next fetch brings a stale reply": (
        "test_calls:test_a_fetch_that_times_out_loses_nothing_and_brings_nothing_stale"
    ),
    "a short batch of actions is taken": "test_actions:test_wrong_actions_raise_before_anything_is_sent",
    "get_attr calls what it finds": "test_vector_env:test_names_are_found_on_the_layer_that_owns_them",
    "exec_func takes no lambda": "test_vector_env:test_functions_of_any_kind_run_where_the_env_lives",
    "a numpy integer is no seed": "test_vector_env:test_an_int_is_spread_and_a_list_is_taken_as_it_is",
    "seed() does nothing": "test_recovery:test_there_is_one_way_to_seed_and_it_works",
    "an exception with two arguments becomes a TypeError": ("test_recovery:test_an_exception_arrives_whatever_it_is"),
    "one error of an env, and nothing works any more": (
        "test_recovery:test_an_env_that_raised_is_reset_and_its_neighbours_never_notice"
    ),
    "a worker is killed, and close() raises": ("test_workers:test_a_worker_that_dies_in_a_step_is_reported_at_once"),
    # OpenRL, sync
    "the env's name is None": "test_recovery:test_envs_have_a_name",
    # Gymnasium, vector envs
    "a step after a timeout returns the rewards of the step before": (
        "test_calls:test_a_fetch_that_times_out_loses_nothing_and_brings_nothing_stale"
    ),
    "an explicit reset leaves an autoreset pending without shared memory": (
        "tests.properties.test_programs:test_in_this_process"
    ),
    "a worker's death is an EOFError without env or exit code": (
        "test_workers:test_a_worker_killed_while_idle_is_noticed_by_the_next_call"
    ),
    "the caller's options are altered": "tests.properties.test_programs:test_in_this_process",
    "one bad get_attr, and nothing works any more": "test_vector_env:test_what_fails_is_told_and_costs_nothing",
    # PettingZoo
    "the seed test passes an env that does not keep to its seed": (
        "test_recovery:test_an_env_that_strays_after_its_first_step_is_found_out"
    ),
    # SuperSuit
    "infos of all envs are one dict": "test_recovery:test_infos_of_envs_share_nothing",
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_the_test_is_there(defect: str) -> None:
    module, _, name = DEFECTS[defect].partition(":")
    test = getattr(import_module(module if module.startswith("tests.") else f"tests.vector.{module}"), name)
    assert inspect.isfunction(test)
    assert not [mark for mark in getattr(test, "pytestmark", ()) if mark.name in ("skip", "skipif", "xfail", "soak")]


@pytest.mark.parametrize("backend", BACKENDS)
def test_there_is_one_way_to_seed_and_it_works(backend: str) -> None:
    with vectorize(backend, [partial(CounterEnv, 3, agent_num=2, env_index=i) for i in range(2)]) as envs:
        assert not hasattr(envs, "seed")
        refused(ArgumentError, r"use reset\(seed=", envs.call, "seed", 3)
        drawn = [[draw(row[0]) for row in envs.reset(seed=seed)[0]] for seed in (3, 3, 4)]
        assert drawn[0] == drawn[1] != drawn[2]


class Plain(gymnasium.Env[Any, Any]):
    """Says nothing of its name."""

    observation_space = gymnasium.spaces.Discrete(2)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return 0, {}

    def step(self, action: Any) -> Any:
        return 1, 0.0, False, False, {}


@pytest.mark.parametrize("backend", BACKENDS)
def test_envs_have_a_name(backend: str) -> None:
    names = {
        "scripted_parallel": partial(ScriptedParallelEnv, agent_num=2),  # from its metadata
        "CartPole-v1": partial(gymnasium.make, "CartPole-v1"),  # from its spec
        "Plain": Plain,  # from its class
    }
    for name, factory in names.items():
        with vectorize(backend, [factory, factory]) as envs:
            assert envs.spec.name == name
            assert name in repr(envs)


def containers(value: Any) -> Iterator[Any]:
    """Everything that can be changed in a tree of infos, itself included."""
    if isinstance(value, (dict, list, np.ndarray)):
        yield value
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from containers(part)


class Chatty(CounterEnv):
    """Has one and the same info for everyone, all the time."""

    said = {"marks": np.arange(3), "nested": {"list": [1, [2]]}}

    def _infos(self, agents: list[str]) -> dict[str, Any]:
        return {**dict.fromkeys(agents, self.said), "common": self.said}


@pytest.mark.parametrize("backend", BACKENDS)
def test_infos_of_envs_share_nothing(backend: str) -> None:
    """What one does to one env's infos is not seen in another's, nor in those of another step."""
    with vectorize(backend, [partial(Chatty, 3, agent_num=2, env_index=i) for i in range(3)]) as envs:
        results = [envs.reset(seed=0)[1]] + [envs.step(np.ones((3, 2), np.int64))[4] for _ in range(7)]
        lists = [infos_to_list(infos, envs.agents, 3) for infos in results]
        lists += [infos_to_list(infos["final_info"], envs.agents, 3) for infos in results if "final_info" in infos]
        rows = [row for rows in lists for row in rows if row]
        assert len(rows) == 8 * 3 + 2 * 3
        owners: dict[int, int] = {}
        for k, row in enumerate(rows):
            for part in containers(row):
                assert owners.setdefault(id(part), k) == k
        for part in containers(rows[0]):
            part.clear() if isinstance(part, dict) else part.__setitem__(0, 99)
        assert not rows[0]
        for row in rows[1:]:
            assert row["agent_1"]["nested"] == {"list": [1, [2]]}
            assert row["__common__"]["common"]["marks"].tolist() == [0, 1, 2]


class StrayingEnv(LivesEnv):
    """Keeps to its seed up to some step of some episode, and not a bit longer.

    Args:
        episode: In which it strays, counted from 0; None: in none.
        t: In which step of it, counted from 1.
    """

    def __init__(self, episode: int | None, t: int) -> None:
        lives = dict.fromkeys(["red", "blue"], (0, 4))
        spaces = [
            {who: space() for who in lives} for space in (lambda: Box(0, 1, (2,), np.float64), lambda: Discrete(3))
        ]
        super().__init__(lives, *spaces, "truncated")
        self._strays = episode, t
        self._rng = np.random.default_rng()
        self._episode = -1

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if seed is not None:
            self._rng, self._episode = np.random.default_rng(seed), -1
        self._episode += 1
        return super().reset(seed, options)

    def look(self, agents: list[str]) -> Any:
        strays = (self._episode, self.t) == self._strays
        rng = np.random.default_rng() if strays else self._rng
        return {who: rng.random(2) for who in agents}, {who: {} for who in agents}


@pytest.mark.fault("C18")
@pytest.mark.parametrize(("episode", "t"), [(0, 2), (0, 4), (1, 0), (1, 3), (2, 4)])
def test_an_env_that_strays_after_its_first_step_is_found_out(episode: int, t: int) -> None:
    """PettingZoo's test ends after one step: it looks at the keys of the flags, and names are true."""
    parallel_seed_test(partial(StrayingEnv, episode, t))
    with pytest.raises(ContractError, match=rf"episode {episode + 1}.*expected the same for the same seed"):
        check_env(partial(StrayingEnv, episode, t))


@pytest.mark.fault("C18")
def test_an_env_that_keeps_to_its_seed_passes() -> None:
    check_env(partial(StrayingEnv, None, 0))


# make() warns of a random generator in the envs' class that several envs of a process draw from, and of no other.


PLACES: list[dict[str, Any]] = [
    {"backend": "sync"},
    {"backend": "thread", "num_workers": 3},
    {"backend": "async", "num_workers": 2},
]
APART = {"backend": "async", "num_workers": 3}


class InTheClass(Good):
    dice = np.random.default_rng(0)

    def see(self, agent: str) -> Any:
        return {"camera": {"left": self.dice.random(2, np.float32)}, "clock": self.t}


class Inherited(InTheClass):
    """One generator more, of another kind, which a class method makes anew for all."""

    coin = random.Random(0)

    @classmethod
    def shuffle(cls) -> None:
        cls.coin = random.Random(1)


class OnlyDefault(Good):
    """Has one in the class, and sets its own in each reset."""

    rng = np.random.default_rng(0)


class FromTheSystem(Good):
    entropy = random.SystemRandom()


class Wrapped(gymnasium.Wrapper[Any, Any, Any, Any]):
    noise = np.random.RandomState(0)


def warned(env: Any, num_envs: int = 3, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make(env, num_envs, **options).close()
    assert all(one.category is ContractWarning and one.filename == __file__ for one in caught)
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("options", PLACES, ids=lambda options: options["backend"])
def test_one_warning_names_it_and_says_what_to_do(options: dict[str, Any]) -> None:
    (text,) = warned(InTheClass, **options)
    assert text.startswith("InTheClass.dice is a random generator in the class of the envs, expected one for each env")
    assert "Set self.dice = np.random.default_rng(seed) in reset(seed=…)" in text
    assert 'make(…, num_envs=3, backend="async", num_workers=3)' in text
    (text,) = warned(Inherited, **options)
    assert text.startswith("InTheClass.dice (and Inherited.coin) is")


def test_wrappers_are_looked_at_too() -> None:
    (text,) = warned(lambda: Wrapped(gymnasium.make("CartPole-v1").unwrapped), backend="sync")
    assert text.startswith("Wrapped.noise is")


def test_with_a_process_or_an_env_alone_there_is_none() -> None:
    assert warned(InTheClass, **APART) == []
    for options in (*PLACES[:1], APART):
        assert warned(InTheClass, 1, **({**options, "num_workers": 1} if "num_workers" in options else options)) == []
    assert warned([InTheClass, Good, OnlyDefault], None, backend="sync") == []


@pytest.mark.parametrize("env", [Good, OnlyDefault, FromTheSystem, "simple_tag", "tictactoe", "CartPole-v1"])
def test_envs_that_are_fine_get_none(env: Any) -> None:
    assert warned(env, backend="sync") == []

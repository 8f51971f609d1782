"""Envs that raise: who did it is told in full, nothing of the others is lost, and everybody else goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import pytest

from marlvec import SyncVectorEnv, VectorEnv
from marlvec.errors import (
    ContractError,
    EnvArgumentError,
    EnvRaised,
    NotResetError,
    RemoteCause,
)
from marlvec.testing.scripted import CounterEnv, RaisingEnv, TurnEnv, decode, reward_of
from tests.vector.support.kinds import BACKENDS, vectorize

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


def acts(envs: VectorEnv, k: int = 1) -> Any:
    return np.full((envs.num_envs, A), k, np.int64)


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
        with pytest.raises(EnvRaised, match=r"env 1 raised in state\(\): LookupError: no state today") as caught:
            envs.state()
        assert type(caught.value.__cause__) is LookupError
        envs.step(acts(envs))  # its episode is none the worse
    envs = vectorize(backend, [partial(RaisingEnv, env_index=i, where="close", only_env=0) for i in range(3)])
    envs.reset()
    with pytest.raises(EnvRaised, match=r"env 0 raised in close\(\): ValueError: scripted failure"):
        envs.close()
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
        with pytest.raises(ContractError, match=r"env 0, step\(\): wrong shape") as caught:
            envs.step(acts(envs))
        assert caught.value.env_ids == (0, 1, 2)
        assert "env 1, step(): Mute" in str(caught.value)
        assert len(str(caught.value)) < 100_000


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
                    with pytest.raises(NotResetError, match=r"envs \[1\]"):
                        call()
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
    with pytest.raises(EnvArgumentError, match=r"env 1 raised in __init__\(\).*unexpected keyword argument") as refused:
        built([good, partial(CounterEnv, 3, colour="red")])
    assert isinstance(refused.value, TypeError)
    with pytest.raises(ContractError, match="env 1"):
        built([good, lambda: None])
    with pytest.raises(ContractError, match="env 1.*agent"):
        built([good, Empty])
    with pytest.raises(ContractError, match="env 3.*differ"):
        built([good, good, good, partial(CounterEnv, 3, agent_num=2)])
    with pytest.raises(ContractError, match="env 1"):
        built([good, partial(TurnEnv, agent_num=2)])
    if backend != "sync":  # which stops at its first env
        for factory, words in (
            (partial(RaisingEnv, where="init"), r"raised in __init__\(\): ValueError: scripted failure\n\n"),
            (Empty, r", __init__\(\): .*at least one agent\. "),
        ):
            with pytest.raises(EnvRaised, match=rf"^all envs \(the first of each of 2 workers was tried\),? ?{words}"):
                vectorize(backend, [factory] * 4, num_workers=2)

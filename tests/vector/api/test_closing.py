"""`close()` from another thread while a call waits: that call ends with ClosedError, and nothing stays behind."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from marlvec import Collector, RandomPolicy, VectorEnv
from marlvec.errors import ClosedError
from tests.vector.support.kinds import BACKENDS, vectorize
from tests.waiting import Gate, GatedEnv, until

N = 2


def step(envs: VectorEnv) -> None:
    envs.step(envs.random_action(seed=0))


def step_and_fetch(envs: VectorEnv) -> None:
    envs.step_send(envs.random_action(seed=0))
    envs.step_fetch()


def send_and_receive(envs: VectorEnv) -> None:
    envs.send(envs.random_action(seed=0), np.arange(N))
    envs.recv(min_envs=N)


def drain(envs: VectorEnv) -> None:
    envs.send(envs.random_action(seed=0), np.arange(N))
    envs.drain()


def exec_func(envs: VectorEnv) -> None:
    envs.exec_func(lambda env: env.strike())


def collect(envs: VectorEnv) -> None:
    Collector(envs, RandomPolicy()).collect(env_steps=8)


CALLS: list[Callable[[VectorEnv], None]] = [step, step_and_fetch, send_and_receive, drain, exec_func, collect]


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick="each")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_call_that_waits_ends_when_another_thread_closes(
    backend: str, call: Callable[[VectorEnv], None], tmp_path: Path
) -> None:
    with Gate(tmp_path) as gate, ThreadPoolExecutor(2) as threads:
        envs = vectorize(backend, [partial(GatedEnv, gate, env_index=i) for i in range(N)])
        envs.reset(seed=0)
        waiting = threads.submit(call, envs)
        until(lambda: "pending" in str(envs))
        closing = threads.submit(envs.close, 60.0)
        until(lambda: envs.closed)
        if backend == "async":  # its call ends although no env has replied
            assert isinstance(waiting.exception(), ClosedError)
        gate.let_through(100)
        assert isinstance(waiting.exception(), ClosedError)
        closing.result()


def test_call_ends_whatever_step_timeout_says(tmp_path: Path) -> None:
    """The thread that waits looks for hanging envs, too, and notices the end all the same."""
    with Gate(tmp_path) as gate, ThreadPoolExecutor(2) as threads:
        factories = [partial(GatedEnv, gate, env_index=i) for i in range(N)]
        envs = vectorize("async", factories, step_timeout=600.0)
        envs.reset(seed=0)
        waiting = threads.submit(step, envs)
        until(lambda: "pending" in str(envs))
        closing = threads.submit(envs.close, 60.0)
        error = waiting.exception(timeout=30.0)
        gate.let_through(100)
        closing.result()
    assert isinstance(error, ClosedError)


def test_close_does_not_wait_for_ever_for_a_thread_that_cannot_leave(tmp_path: Path) -> None:
    """An env of the sync backend hangs in its step; what its thread gets later is ClosedError, too."""
    with Gate(tmp_path) as gate, ThreadPoolExecutor(1) as threads:
        envs = vectorize("sync", [partial(GatedEnv, gate)])
        envs.reset(seed=0)
        waiting = threads.submit(step, envs)
        until(lambda: "pending" in str(envs))
        envs.close(timeout=0.1)
        gate.let_through(100)
        assert isinstance(waiting.exception(), ClosedError)


def test_call_of_a_closed_vectorizer_in_another_thread_is_refused() -> None:
    envs = vectorize("sync", [partial(GatedEnv, None)])
    envs.close()
    with ThreadPoolExecutor(1) as threads:
        assert isinstance(threads.submit(step, envs).exception(), ClosedError)

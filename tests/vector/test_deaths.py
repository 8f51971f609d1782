"""Workers that die: it is told at once, with the envs that are lost, and what is left can be closed."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from marlvec import AsyncVectorEnv, VectorEnv
from marlvec.envs.testing import CounterEnv, ExitingEnv, RaisingEnv, SlowEnv, decode_reward
from marlvec.errors import BrokenError, WorkerDied

CONTEXTS = ("forkserver", "spawn", "fork")
A = 3


def acts(envs: VectorEnv, k: int = 1) -> Any:
    return np.full((envs.num_envs, A), k, np.int64)


# Exit codes, and how the env ends its worker.
DEATHS: dict[str, tuple[int, dict[str, int]]] = {
    "SIGKILL": (-9, {"signal": 9}),
    "SIGSEGV": (-11, {"signal": 11}),
    "SIGABRT": (-6, {"signal": 6}),
    "exit 0": (0, {"code": 0}),
    "exit 3": (3, {"code": 3}),
}
PLACES = [
    *(("forkserver", death, True) for death in DEATHS),
    *((context, death, True) for context in ("spawn", "fork") for death in ("SIGKILL", "exit 0")),
    *(("forkserver", death, False) for death in ("SIGSEGV", "exit 0")),
]


@pytest.mark.checklist(67)
@pytest.mark.parametrize(("context", "death", "shared_memory"), PLACES)
def test_a_worker_that_dies_in_a_step_is_reported_at_once(context: str, death: str, shared_memory: bool) -> None:
    code, how = DEATHS[death]
    factories: list[Any] = [
        partial(SlowEnv, env_index=0, seconds=1.5, at=1),
        partial(CounterEnv, env_index=1),
        partial(ExitingEnv, env_index=2, where="step", at=1, **how),
        partial(CounterEnv, env_index=3),
    ]
    envs = AsyncVectorEnv(factories, num_workers=2, context=context, shared_memory=shared_memory)
    try:
        envs.reset(seed=0)
        envs.step(acts(envs))
        pids = envs.worker_pids
        start = time.monotonic()
        with pytest.raises(WorkerDied, match=rf"worker 1 \(pid {pids[1]}, envs 2 to 3\) .* during step\(\)") as caught:
            envs.step(acts(envs))
        assert time.monotonic() - start < 1, "not after the slow sibling"
        died = caught.value
        assert (died.pid, died.exitcode, died.env_ids, died.lost_env_ids) == (pids[1], code, (2, 3), (2, 3))
        assert ("exited with code" in str(died)) == (code >= 0)
        assert str(code).lstrip("-") in str(died)
        again = pickle.loads(pickle.dumps(died))
        assert (str(again), again.pid, again.exitcode, again.env_ids) == (str(died), died.pid, code, (2, 3))
        for call in (envs.reset, lambda: envs.step(acts(envs)), envs.step_fetch, envs.recv, lambda: envs.step_send(1)):
            with pytest.raises(BrokenError, match=rf"only close\(\) is left.*pid {pids[1]}") as broken:
                call()
            assert broken.value.__cause__ is died
        assert "broken" in repr(envs)
    finally:
        start = time.monotonic()
        envs.close(timeout=0.2)
    assert time.monotonic() - start < 2
    envs.close()


@pytest.mark.fault("A2")
@pytest.mark.parametrize("context", CONTEXTS)
def test_a_worker_killed_while_idle_is_noticed_by_the_next_call(context: str) -> None:
    calls: list[Callable[[VectorEnv], Any]] = [lambda envs: envs.step(acts(envs)), lambda envs: envs.reset()]
    for call in calls:
        with AsyncVectorEnv(
            [partial(CounterEnv, env_index=i) for i in range(2)], num_workers=2, context=context
        ) as envs:
            envs.reset()
            envs.step(acts(envs))
            os.kill(envs.worker_pids[0], signal.SIGKILL)
            time.sleep(0.05)
            start = time.monotonic()
            with pytest.raises(WorkerDied, match="SIGKILL.*out-of-memory") as caught:
                call(envs)
            assert time.monotonic() - start < 1
            assert (caught.value.env_ids, caught.value.exitcode) == ((0,), -9)


@pytest.mark.fault("A6")
@pytest.mark.parametrize("context", CONTEXTS)
def test_exits_of_every_kind_in_a_step_are_deaths(context: str) -> None:
    for error, code in ((partial(SystemExit, 3), 3), (partial(SystemExit, 0), 0), (SystemExit, 0)):
        with AsyncVectorEnv([partial(RaisingEnv, error=error)], context=context) as envs:
            envs.reset()
            with pytest.raises(WorkerDied, match=f"exited with code {code}") as caught:
                envs.step(acts(envs))
            assert caught.value.exitcode == code
    for code in (0, 3):
        with AsyncVectorEnv([partial(ExitingEnv, code=code)], context=context) as envs:
            envs.reset()
            with pytest.raises(WorkerDied, match=f"exited with code {code}"):
                envs.step(acts(envs))


def test_all_workers_die_at_once() -> None:
    envs = AsyncVectorEnv([partial(SlowEnv, env_index=i, seconds=0.3) for i in range(4)], num_workers=4)
    envs.reset()
    envs.step_send(acts(envs))
    for pid in envs.worker_pids:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match="SIGKILL"):
        envs.step_fetch()
    with pytest.raises(BrokenError):
        envs.reset()
    start = time.monotonic()
    envs.close()
    assert time.monotonic() - start < 2


class ExitsAfterReply(CounterEnv):
    """Ends its process a moment after its second step's reply is out."""

    def step(self, actions: dict[str, Any]) -> Any:
        result = super().step(actions)
        if self.world.t == 2:
            threading.Timer(0.05, os._exit, (4,)).start()
        return result


@pytest.mark.fault("A16")
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("fetch_late", [False, True])
def test_the_last_reply_of_a_worker_is_delivered_before_its_death(context: str, fetch_late: bool) -> None:
    factories = [partial(ExitsAfterReply, env_index=0), partial(CounterEnv, env_index=1)]
    with AsyncVectorEnv(factories, num_workers=2, context=context) as envs:
        envs.reset()
        envs.step(acts(envs))
        pid = envs.worker_pids[0]
        envs.step_send(acts(envs, 4))
        if fetch_late:
            time.sleep(0.2)
        rewards = envs.step_fetch()[1]
        assert {decode_reward(reward) for reward in rewards.ravel()} == {(0, 2, a, 4) for a in range(A)}
        time.sleep(0 if fetch_late else 0.2)
        with pytest.raises(WorkerDied, match=f"pid {pid}, env 0.*exited with code 4"):
            envs.step(acts(envs))

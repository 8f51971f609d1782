"""Workers that die: it is told at once, with the envs that are lost, and what is left can be closed."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from marlvec import AsyncVectorEnv, VectorEnv
from marlvec.errors import BrokenError, WorkerDied
from marlvec.testing.scripted import CounterEnv, ExitingEnv, HangingEnv, RaisingEnv, decode_reward
from tests.faults.harness.programs import wait_gone
from tests.waiting import LONG, Gate, until, within

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
    *(("forkserver", death) for death in DEATHS),
    *((context, death) for context in ("spawn", "fork") for death in ("SIGKILL", "exit 0")),
]


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=12)
@pytest.mark.checklist(67)
@pytest.mark.parametrize(("context", "death"), PLACES)
def test_a_worker_that_dies_in_a_step_is_reported_at_once(context: str, death: str) -> None:
    code, how = DEATHS[death]
    factories: list[Any] = [
        partial(HangingEnv, env_index=0, at=1),  # it is not waited for
        partial(CounterEnv, env_index=1),
        partial(ExitingEnv, env_index=2, where="step", at=1, **how),
        partial(CounterEnv, env_index=3),
    ]
    envs = AsyncVectorEnv(factories, num_workers=2, context=context)
    try:
        envs.reset(seed=0)
        envs.step(acts(envs))
        pids = envs.worker_pids
        with pytest.raises(WorkerDied, match=rf"worker 1 \(pid {pids[1]}, envs 2 to 3\) .* during step\(\)") as caught:
            envs.step(acts(envs))
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
        with within(4.5, usual=0.3):  # and not the five seconds of its default
            envs.close(timeout=0.2)
    envs.close()


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=3)
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
            wait_gone(envs.worker_pids[:1], LONG)
            with within(4, usual=0.02), pytest.raises(WorkerDied, match="SIGKILL.*out-of-memory") as caught:
                call(envs)
            assert (caught.value.env_ids, caught.value.exitcode) == ((0,), -9)


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=3)
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


class ExitsWhenTold(CounterEnv):
    """Ends its process after its second step, when the gate opens."""

    def __init__(self, gate: Gate, **options: Any) -> None:
        super().__init__(**options)
        self.gate = gate

    def step(self, actions: dict[str, Any]) -> Any:
        result = super().step(actions)
        if self.world.t == 2:
            threading.Thread(target=self.leave).start()
        return result

    def leave(self) -> None:
        self.gate.wait()
        os._exit(4)


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=3)
@pytest.mark.fault("A16")
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("fetch_late", [False, True])
def test_the_last_reply_of_a_worker_is_delivered_before_its_death(
    context: str, fetch_late: bool, tmp_path: Path
) -> None:
    with (
        Gate(tmp_path) as gate,
        AsyncVectorEnv(
            [partial(ExitsWhenTold, gate, env_index=0), partial(CounterEnv, env_index=1)],
            num_workers=2,
            context=context,
        ) as envs,
    ):
        envs.reset()
        envs.step(acts(envs))
        pid = envs.worker_pids[0]
        envs.step_send(acts(envs, 4))
        if fetch_late:
            until(lambda: envs._worker_pool.has_unread(0))  # nothing public tells it without hearing it
            gate.let_through()
            wait_gone([pid], LONG)
        rewards = envs.step_fetch()[1]
        assert {decode_reward(reward) for reward in rewards.ravel()} == {(0, 2, a, 4) for a in range(A)}
        if not fetch_late:
            gate.let_through()
            wait_gone([pid], LONG)
        with pytest.raises(WorkerDied, match=f"pid {pid}, env 0.*exited with code 4"):
            envs.step(acts(envs))

"""How soon it is noticed that something went wrong, and how soon it is over. `benchmarks/recovery.py` in small.

Deadlines are ten times the medians of a quiet machine and more: what is promised in docs/reliability.md is promised of
such a machine, and is measured there.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.recovery import (
    CONTEXTS,
    HANGS,
    bring_back,
    close_takes,
    die_with_parent,
    keep_pace,
    notice_death,
    notice_error,
    notice_hang,
)
from marlvec import AsyncVectorEnv, RestartLimit
from marlvec.errors import EnvTimeout, FetchTimeout, WorkerDied
from marlvec.testing.scripted import CounterEnv, ExitingEnv, RaisingEnv, decode
from marlvec.vector.workers.worker import Watchdog
from tests.faults.harness.programs import run, wait_gone
from tests.waiting import LONG, Gate, overdue, within

ACTIONS = np.ones((2, 3), np.int64)


# --- a worker dies


@pytest.mark.slow("kills, stops or starts many workers")
@pytest.mark.parametrize("context", CONTEXTS)
def test_a_death_is_noticed_at_once(context: str) -> None:
    # Hundredths of a second, as a rule; and not when a sibling is done.
    assert notice_death(context, 3).max() < 2.5
    assert notice_error(context, 2, sibling_seconds=LONG).max() < LONG / 2


@pytest.mark.parametrize("on_fault", ["raise", "restart"])
def test_a_worker_that_has_answered_for_some_of_its_envs_and_is_dead_before_anybody_listens(on_fault: str) -> None:
    factories = [CounterEnv, partial(ExitingEnv, env_index=1)]
    with AsyncVectorEnv(factories, num_workers=1, on_fault=on_fault) as envs:
        envs.reset()
        envs.send(ACTIONS)
        wait_gone(envs.worker_pids, LONG)
        if on_fault == "restart":
            step = envs.recv()
            assert step.fault[step.env_ids.tolist().index(1)]
            return
        with pytest.raises(WorkerDied, match="at work on env 1") as caught:
            envs.recv()
        assert caught.value.result.env_ids.tolist() == [0]
        assert decode(caught.value.result.obs[0, 0]).t == 1


@pytest.mark.fault("A1")
@pytest.mark.parametrize("fetch", [AsyncVectorEnv.step_fetch, AsyncVectorEnv.recv], ids=["step_fetch", "recv"])
def test_a_death_is_heard_of_though_it_is_time_to_look_for_hangs(fetch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed end is reported once: what has been heard must not get lost over the look."""
    monkeypatch.setattr(Watchdog, "is_due", lambda dog: True)
    with AsyncVectorEnv([CounterEnv, CounterEnv], num_workers=2, step_timeout=60) as envs:
        envs.reset()
        send = envs.step_send if fetch is AsyncVectorEnv.step_fetch else envs.send
        os.kill(envs.worker_pids[1], signal.SIGSTOP)
        send(ACTIONS)
        os.kill(envs.worker_pids[1], signal.SIGKILL)
        with pytest.raises(WorkerDied, match="worker 1"):
            fetch(envs)


# --- an env hangs


@pytest.mark.slow("kills, stops or starts many workers")
@pytest.mark.fault("A9")
@pytest.mark.fault("A10")
@pytest.mark.parametrize("kind", HANGS)
def test_a_hang_is_noticed_and_its_worker_gone(kind: str) -> None:
    assert notice_hang("forkserver", kind, 2).max() < 6  # half a second, as a rule


class Sleeping(CounterEnv):
    """Hangs in C, in a sleep that any signal would end, and holds the interpreter lock."""

    def step(self, actions: dict[str, Any]) -> Any:
        if self.world.t == 1:
            ctypes.PyDLL(None).sleep(60)
        return super().step(actions)


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=2)
@pytest.mark.fault("A11")
@pytest.mark.parametrize("on_fault", ["raise", "restart"])
def test_late_replies_of_a_hung_env_are_dropped(on_fault: str) -> None:
    """Being asked for its stacks wakes this one."""
    factories = [CounterEnv, partial(Sleeping, env_index=1)]
    with AsyncVectorEnv(factories, num_workers=2, step_timeout=0.3, on_fault=on_fault) as envs:
        envs.reset()
        envs.step(ACTIONS)
        if on_fault == "restart":
            obs, *_, infos = envs.step(ACTIONS)
            assert infos["fault"].tolist() == [False, True]
            assert (decode(obs[0, 0]).t, decode(obs[1, 0]).t) == (2, 0)
            assert envs.faults[-1].env_ids == (1,)
            assert "step_timeout" in envs.faults[-1].summary
            return
        with pytest.raises(EnvTimeout, match=r"env 1 did not come back within step_timeout=0\.3 s") as caught:
            envs.step(ACTIONS)
        assert caught.value.env_ids == (1,)
        assert caught.value.result.env_ids.tolist() == [0]


class Dying(CounterEnv):
    """Waits at a gate, and takes its process along."""

    def __init__(self, gate: Gate, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.gate = gate

    def step(self, actions: dict[str, Any]) -> Any:
        self.gate.wait()
        os._exit(3)


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=2)
@pytest.mark.parametrize("culprit", [0, 1])
def test_what_the_others_have_said_by_then_comes_with_the_error(culprit: int, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    kinds = [partial(Dying, gate) if w == culprit else CounterEnv for w in (0, 1)]
    factories = [partial(kind, 5, env_index=i) for i, kind in enumerate(kinds)]
    with gate, AsyncVectorEnv(factories, num_workers=2) as envs:
        envs.reset()
        envs.step_send(ACTIONS)
        overdue(envs.step_fetch, [culprit])
        gate.let_through()
        with pytest.raises(WorkerDied) as caught:
            envs.step_fetch()
        assert caught.value.env_ids == (culprit,)
        assert caught.value.result.env_ids.tolist() == [1 - culprit]


# --- and is replaced


@pytest.mark.slow("kills, stops or starts many workers")
@pytest.mark.parametrize(("context", "limit", "share"), [("forkserver", 0.6, 1), ("fork", 0.45, 1), ("spawn", 3.5, 3)])
def test_a_worker_is_back_soon(context: str, limit: float, share: float, tmp_path: Path) -> None:
    """In a program of its own: to fork this one, with all that tests have left in its memory, takes long.

    On a machine where all is slow: within so many times what a new interpreter takes there to import marlvec.
    """
    times = 3 if context != "spawn" else 2
    program = f"""
import logging
from benchmarks.recovery import bring_back
logging.getLogger("marlvec").setLevel(logging.ERROR)  # each fault is a warning
print(import_seconds())
print(bring_back({context!r}, {times}).max())
"""
    start, took = map(float, run(program, tmp_path))
    assert took < max(limit, share * start)


class Late(CounterEnv):
    """Is built anew when the gate opens; not the first time."""

    def __init__(self, gate: Gate, **options: Any) -> None:
        super().__init__(**options)
        if self.world.incarnation:
            gate.wait()


@pytest.mark.slow("kills, stops or starts many workers")
def test_siblings_go_on_meanwhile(tmp_path: Path) -> None:
    """Each makes its fifty steps while a worker comes back, which it does not before. How fast: `keep_pace`."""
    gate = Gate(tmp_path)
    factories = [partial(Late, gate, env_index=i, marks=tmp_path) for i in range(3)]
    with gate, AsyncVectorEnv(factories, num_workers=3, on_fault="restart") as envs:
        envs.reset()
        os.kill(envs.worker_pids[0], signal.SIGKILL)
        envs.send(np.ones((3, 3), np.int64))
        counts = np.zeros(3, int)
        while counts[1:].min() < 50:
            step = envs.recv(1)
            counts[step.env_ids] += 1
            assert not counts[0]
            envs.send(np.ones((len(step), 3), np.int64), step.env_ids)
        gate.let_through()
        while not counts[0]:
            step = envs.recv(1)
            counts[step.env_ids] += 1
        assert envs.incarnations.tolist() == [1, 0, 0]
    assert keep_pace("forkserver", rounds=1, seconds=0.4).min() > 0


@pytest.mark.slow("kills, stops or starts many workers")
@pytest.mark.fault("A15")
def test_a_thousand_restarts_in_a_row() -> None:
    """Of an env in its worker; those of whole workers are for the soak."""
    limit = RestartLimit(count=1000, backoff=0.0)
    factories = [CounterEnv, partial(RaisingEnv, env_index=1, at=None)]
    with AsyncVectorEnv(factories, num_workers=1, on_fault="restart", max_restarts=limit) as envs:
        envs.reset()
        pids = envs.worker_pids
        for k in range(1000):
            obs, *_, infos = envs.step(ACTIONS)
            assert infos["fault"].tolist() == [False, True]
            assert decode(obs[0, 0]).t == (k + 1) % 5
        assert envs.incarnations.tolist() == [0, 1000]
        assert len(envs.faults) == 1000
        assert envs.worker_pids == pids


@pytest.mark.soak
@pytest.mark.fault("A15")
@pytest.mark.time_limit(1800)
@pytest.mark.parametrize("context", CONTEXTS)
def test_a_thousand_workers_in_a_row(context: str) -> None:
    took = bring_back(context, 1000, num_workers=1)
    early, late = np.median(took[:100]), np.median(took[-100:])
    assert late < 1.5 * early, "restarts become slower and slower"


# --- the parent dies, or closes


@pytest.mark.slow("kills, stops or starts many workers")
@pytest.mark.fault("A21")
def test_everybody_goes_with_the_parent() -> None:
    """Of every start method, and whatever they have started: tests/vector/test_scripts.py."""
    for state, seconds in die_with_parent("forkserver", 1).items():
        assert seconds.max() < 10, state  # tenths of a second, as a rule; infinite where they stay


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=3)
@pytest.mark.parametrize("context", CONTEXTS)
def test_closing_takes_no_time(context: str) -> None:
    # Hundredths of a second, as a rule; and less than the five seconds that it has.
    assert close_takes(context, 2).max() < 4
    assert close_takes(context, 1, num_envs=64 if context == "fork" else 8).max() < 4


@pytest.mark.slow("kills, stops or starts many workers")
@pytest.mark.fault("B3")
def test_closing_takes_the_time_it_is_given_where_envs_hang() -> None:
    took = close_takes("forkserver", 2, timeout=0.5)
    assert took.min() >= 0.5
    assert took.max() < 4.5  # 0.55, as a rule; and not the five seconds of its default


def test_closing_while_a_worker_is_on_its_way_back() -> None:
    with AsyncVectorEnv([CounterEnv, CounterEnv], num_workers=2, on_fault="restart") as envs:
        envs.reset()
        for pid in envs.worker_pids:
            os.kill(pid, signal.SIGKILL)
        envs.send(ACTIONS)
        while not envs.faults:
            with contextlib.suppress(FetchTimeout):
                envs.recv(timeout=0.001)
        with within(4, usual=0.1):
            envs.close()

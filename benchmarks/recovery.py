"""How soon marlvec notices that something went wrong, and how soon it is over.

Run ``python benchmarks/recovery.py``, or ``--quick`` for a tenth of the trials. In seconds, as a caller sees it:

* a worker is killed (SIGKILL) while step() waits: until the error, or until it is decided to start a new one;
* an env hangs: how long after ``step_timeout`` that is noticed and its worker is gone;
* a worker is killed: until step() has brought the first rows of the new one; and what the others do meanwhile;
* the parent is killed (SIGKILL): until its workers and their children are gone;
* close().
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

import marlvec
from marlvec.testing import CounterEnv, HangingEnv, SlowEnv

__all__ = [
    "CONTEXTS",
    "HANGS",
    "STATES",
    "bring_back",
    "close_takes",
    "die_with_parent",
    "keep_pace",
    "notice_death",
    "notice_error",
    "notice_hang",
]

CONTEXTS = ("forkserver", "fork", "spawn")
_FOR_EVER = marlvec.RestartLimit(count=10**9, seconds=1.0, backoff=0.0)
_AGENTS = 3

Seconds = NDArray[np.float64]


# --- what hangs


class DeafEnv(HangingEnv):
    """Hangs, and does not listen to SIGTERM."""

    def strike(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        super().strike()


class LockingEnv(HangingEnv):
    """Hangs in C, and holds the interpreter lock meanwhile."""

    def strike(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:  # a signal ends a sleep in C
            ctypes.PyDLL(None).sleep(60)


class StoppedEnv(HangingEnv):
    """Stops its own process."""

    def strike(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        super().strike()


HANGS: dict[str, type[HangingEnv]] = {
    "in Python": HangingEnv,
    "SIGTERM ignored": DeafEnv,
    "in C, interpreter lock held": LockingEnv,
    "process stopped": StoppedEnv,
}


def _make(envs: Sequence[Callable[[], Any]], context: str, **settings: Any) -> marlvec.AsyncVectorEnv:
    """One worker for each env."""
    settings = {"on_fault": "restart", "max_restarts": _FOR_EVER, "num_workers": len(envs), **settings}
    return marlvec.AsyncVectorEnv(envs, context=context, **settings)


def _actions(num_envs: int) -> NDArray[np.int64]:
    return np.ones((num_envs, _AGENTS), np.int64)


# --- measurements


def notice_death(context: str, kills: int) -> Seconds:
    """From SIGKILL to the decision to start a new worker, while the caller waits for it and a slow sibling."""
    found = []
    with _make([partial(SlowEnv, seconds=0.15, env_index=i) for i in range(2)], context) as envs:
        envs.reset(seed=0)
        for k in range(kills):
            with _Killer(envs.worker_pids[k % 2], 0.02 + 0.0001 * (k % 100)) as killer:
                envs.step(_actions(2))
            while len(envs.faults) == k:  # on a busy machine the kill may come too late for that step
                envs.step(_actions(2))
            found.append(envs.faults[-1].time - killer.time)
    return np.array(found)


def notice_error(context: str, trials: int, sibling_seconds: float = 1.0) -> Seconds:
    """From SIGKILL to the error, where that is wanted, likewise."""
    found = []
    for _ in range(trials):
        factories = [partial(SlowEnv, seconds=sibling_seconds, env_index=i) for i in range(2)]
        with _make(factories, context, on_fault="raise") as envs:
            envs.reset(seed=0)
            with _Killer(envs.worker_pids[1], 0.02) as killer:
                try:
                    envs.step(_actions(2))
                except marlvec.errors.WorkerDied:
                    found.append(time.monotonic() - killer.time)
            envs.close(timeout=0.0)
    assert len(found) == trials
    return np.array(found)


class _Killer(threading.Thread):
    """Kills a process in a moment, and notes when."""

    def __init__(self, pid: int, delay: float) -> None:
        super().__init__()
        self._pid, self._delay = pid, delay
        self.time = 0.0

    def run(self) -> None:
        time.sleep(self._delay)
        self.time = time.monotonic()
        os.kill(self._pid, signal.SIGKILL)

    def __enter__(self) -> _Killer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.join()


def notice_hang(context: str, kind: str, trials: int, step_timeout: float = 0.3) -> Seconds:
    """From the end of ``step_timeout`` to the error; by then the worker is gone."""
    found = []
    for _ in range(trials):
        factories = [partial(CounterEnv, env_index=0), partial(HANGS[kind], env_index=1)]
        with _make(factories, context, on_fault="raise", step_timeout=step_timeout) as envs:
            envs.reset(seed=0)
            pid, begin = envs.worker_pids[1], time.monotonic()
            try:
                envs.step(_actions(2))
            except marlvec.errors.EnvTimeout:
                found.append(time.monotonic() - begin - step_timeout)
            assert not _alive([pid])
    assert len(found) == trials
    return np.array(found)


def bring_back(context: str, kills: int, num_workers: int = 2) -> Seconds:
    """From SIGKILL to the first row of the new worker."""
    found = []
    with _make([partial(CounterEnv, env_index=i) for i in range(num_workers)], context) as envs:
        envs.reset(seed=0)
        for k in range(kills):
            envs.step(_actions(num_workers))
            begin = time.perf_counter()
            os.kill(envs.worker_pids[k % num_workers], signal.SIGKILL)
            while "fault" not in envs.step(_actions(num_workers))[4]:
                pass
            found.append(time.perf_counter() - begin)
        assert envs.incarnations.sum() == kills
    return np.array(found)


def keep_pace(context: str, rounds: int, seconds: float = 0.5, env_seconds: float = 0.002) -> NDArray[np.float64]:
    """What the siblings of a worker do, which is killed again whenever it is back, as a share of what they would do.

    Four workers under send() and recv(), each with an env that sleeps for ``env_seconds`` in each step. A round is a
    time without and one with kills; (rounds,) shares.
    """
    found = []
    n = 4
    with _make([partial(SlowEnv, seconds=env_seconds, env_index=i) for i in range(n)], context) as envs:
        envs.reset(seed=0)
        envs.send(_actions(n))
        for _ in range(rounds):
            undisturbed = _pace(envs, seconds, kill=False).sum()
            meanwhile = _pace(envs, seconds, kill=True)[1:].sum()
            found.append(meanwhile / (undisturbed * (n - 1) / n))
        envs.drain()
    return np.array(found)


def _pace(envs: marlvec.AsyncVectorEnv, seconds: float, *, kill: bool) -> NDArray[np.float64]:
    """Steps per second of each env; the worker of the first one is killed whenever it has brought a row."""
    counts = np.zeros(envs.num_envs)
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        step = envs.recv(min_envs=1)
        counts[step.env_ids] += 1
        envs.send(_actions(len(step)), step.env_ids)
        if kill and 0 in step.env_ids:
            os.kill(envs.worker_pids[0], signal.SIGKILL)
    return counts / (time.perf_counter() - begin)


STATES = ("idle", "stepping", "sleeping env", "interpreter lock held", "env with children", "children of envs")
"""What workers are doing when their parent is killed; and, in the end, what their envs have started."""

_PROGRAM = """
import ctypes, json, subprocess, sys, time
import numpy as np
import marlvec
from marlvec.testing import CounterEnv, HangingEnv

class Locking(CounterEnv):
    def step(self, actions):
        ctypes.PyDLL(None).sleep(60)

class Family(CounterEnv):
    def reset(self, seed=None, options=None):
        obs, infos = super().reset(seed, options)
        own = subprocess.Popen(["sleep", "1000"])
        shell = ["sh", "-c", "sleep 1000 & echo $!; wait"]
        away = subprocess.Popen(shell, start_new_session=True, stdout=subprocess.PIPE)
        return obs, {**infos, "pids": np.array([own.pid, away.pid, int(away.stdout.readline())])}

def begin(env):
    envs = marlvec.make([env, env], num_workers=2, context=sys.argv[1])
    return envs, envs.reset(seed=0)[1]

actions = np.ones((2, 3), np.int64)
idle, _ = begin(CounterEnv)
stepping, _ = begin(CounterEnv)
sleeping, _ = begin(HangingEnv)
locking, _ = begin(Locking)
family, infos = begin(Family)
sleeping.step_send(actions)
locking.step_send(actions)
pids = [list(envs.worker_pids) for envs in (idle, stepping, sleeping, locking, family)]
print(json.dumps([*pids, infos["pids"].ravel().tolist()]), flush=True)
while True:
    stepping.step(actions)
"""


def die_with_parent(context: str, trials: int) -> dict[str, Seconds]:
    """From SIGKILL of the parent until the last of its workers is gone, by what these are doing: `STATES`."""
    found = []
    for _ in range(trials):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "program.py"
            path.write_text(_PROGRAM)
            search = os.pathsep.join([str(Path(marlvec.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
            command = [sys.executable, str(path), context]
            with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": search}) as process:
                assert process.stdout
                groups = json.loads(process.stdout.readline())
                time.sleep(0.1)
                assert all(len(_alive(pids)) == len(pids) for pids in groups)
                begin = time.perf_counter()
                process.kill()
                found.append(_wait_gone(groups, begin))
    return dict(zip(STATES, np.array(found).T, strict=True))


def _wait_gone(groups: Sequence[Sequence[int]], begin: float, limit: float = 30.0) -> list[float]:
    """Seconds until each of these groups is gone; infinite if that takes longer than ``limit``."""
    gone = [np.inf] * len(groups)
    while np.inf in gone and time.perf_counter() - begin < limit:
        for k, pids in enumerate(groups):
            if gone[k] == np.inf and not _alive(pids):
                gone[k] = time.perf_counter() - begin
        time.sleep(0.001)
    return gone


def _alive(pids: Iterable[int]) -> list[int]:
    """Those of these processes that are there and are no zombies: such a one is dead, if not yet buried."""
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in "ZX":
            found.append(pid)
    return found


def close_takes(
    context: str, trials: int, *, num_envs: int = 2, num_workers: int = 2, timeout: float | None = None
) -> Seconds:
    """What close() takes; with a ``timeout``, where all envs hang."""
    found = []
    for _ in range(trials):
        env = CounterEnv if timeout is None else HangingEnv
        with _make([partial(env, env_index=i) for i in range(num_envs)], context, num_workers=num_workers) as envs:
            envs.reset(seed=0)
            if timeout is None:
                envs.step(_actions(num_envs))
            else:
                envs.step_send(_actions(num_envs))
                time.sleep(0.05)
            begin = time.perf_counter()
            envs.close() if timeout is None else envs.close(timeout)
            found.append(time.perf_counter() - begin)
    return np.array(found)


# --- the table


def measure(scale: float) -> list[tuple[str, str, Seconds]]:
    """What was measured, of which start method, and the seconds; ``scale`` 1 is the full number of trials."""

    def some(count: int) -> int:
        return max(3, round(scale * count))

    tasks: list[tuple[str, str, Callable[[], Any]]] = []
    for context in CONTEXTS:
        slow = 4 if context == "spawn" else 1  # so that it is not all that is waited for
        tasks += [
            ("death to decision", context, partial(notice_death, context, some(120))),
            ("death to error", context, partial(notice_error, context, some(40 // slow))),
            *(
                (f"hang {kind}, after its time", context, partial(notice_hang, context, kind, some(20)))
                for kind in HANGS
            ),
            ("death to first new row", context, partial(bring_back, context, some(200 // slow))),
            ("share that siblings keep", context, partial(keep_pace, context, some(20))),
            ("parent killed", context, partial(die_with_parent, context, some(20))),
            ("close, idle", context, partial(close_takes, context, some(20))),
            ("close, hung, timeout 0.5", context, partial(close_takes, context, some(20), timeout=0.5)),
            ("close, 64 envs in 2 workers", context, partial(close_takes, context, some(5), num_envs=64)),
            (
                "close, 64 envs in 16 workers",
                context,
                partial(close_takes, context, some(3), num_envs=64, num_workers=16),
            ),
        ]
    tasks.append(("1,000 restarts in a row", "forkserver", partial(bring_back, "forkserver", some(1000), 1)))
    found: list[tuple[str, str, Seconds]] = []
    for name, context, task in track(tasks, description="recovery", transient=True):
        result = task()
        if isinstance(result, dict):
            found += [(f"{name}: {state}", context, seconds) for state, seconds in result.items()]
        else:
            found.append((name, context, result))
    return sorted(found, key=lambda row: [name for name, _, _ in found].index(row[0]))


def report(console: Console, found: Sequence[tuple[str, str, Seconds]]) -> None:
    """Print the table; times in milliseconds, shares in per cent."""
    table = Table(title="Recovery: milliseconds, or per cent where it says share")
    for heading in ("", "start method", "n", "median", "p95", "p99", "max"):
        table.add_column(heading, justify="left" if heading in ("", "start method") else "right")
    before = ""
    for name, context, values in found:
        factor = 100 if "share" in name else 1000
        worst = (50, 5, 1, 0) if "share" in name else (50, 95, 99, 100)  # of shares, the low ones count
        table.add_row(
            name if name != before else "",
            context,
            str(len(values)),
            *(f"{factor * np.percentile(values, at):,.1f}" for at in worst),
        )
        before = name
    console.print(table)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the trials")
    args = parser.parse_args()
    logging.getLogger("marlvec").setLevel(logging.ERROR)  # each fault is a warning, and there are thousands
    console = Console(width=130)
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    console.print(
        f"Python {platform.python_version()}, Linux {platform.release()}, {platform.machine()}, "
        f"{len(os.sched_getaffinity(0))} usable cores, load {load}\n"
    )
    begin = time.perf_counter()
    report(console, measure(0.1 if args.quick else 1.0))
    console.print(f"{time.perf_counter() - begin:.0f} s in all")


if __name__ == "__main__":
    main()

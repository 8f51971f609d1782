"""What an env starts may do as it likes while its worker lives, and is gone when the worker is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from marlvec import AsyncVectorEnv
from marlvec.errors import WorkerDied
from marlvec.testing.scripted import CounterEnv
from marlvec.vector.workers.pool import ensure_server
from tests.faults.harness.programs import alive, start, wait_gone
from tests.waiting import LONG, until

CONTEXTS = ("forkserver", "spawn", "fork")

# Starts a process that leaves its parents' group and session, and outlives its parents.
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    print(os.getpid(), flush=True)
    os.close(1)
    time.sleep(1000)
"""


def fork_daemon() -> int:
    """The same without another program: its environment and command line are the worker's own."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(write, b"%d" % os.getpid())
            os.close(write)
            time.sleep(1000)
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    pid = int(os.read(read, 20))
    os.close(read)
    return pid


class Daemonic(CounterEnv):
    """Starts processes that leave its worker's group at its first reset, and tells their ids in its infos."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        obs, infos = super().reset(seed, options)
        if self.world.episode > 0:
            return obs, infos
        away = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        nested = subprocess.Popen(["sh", "-c", "setsid sh -c 'sleep 1000 & sleep 1000' & wait"], start_new_session=True)
        command = [sys.executable, "-S", "-E", "-c", DAEMON]
        nameless = subprocess.run(command, env={}, stdout=subprocess.PIPE, check=True)
        pids = [away.pid, nested.pid, int(nameless.stdout), fork_daemon()]
        return obs, {**infos, "daemons": np.array(pids)}


def offspring(pids: list[int]) -> list[int]:
    """These and their children and children's children."""
    found = list(pids)
    for pid in found:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def family(pids: list[int]) -> list[int]:
    """Whose last four are one env's daemons: everybody, once the shell among them has started what it starts."""
    *_, nested, _, _ = pids
    until(lambda: len(offspring([nested])) >= 4)
    return offspring(pids)


def begin(envs: AsyncVectorEnv) -> list[list[int]]:
    """What each env has started."""
    families = [family(pids) for pids in envs.reset()[1]["daemons"].tolist()]
    assert all(len(pids) > 6 for pids in families)
    return families


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=3)
@pytest.mark.fault("A17")
@pytest.mark.parametrize("context", CONTEXTS)
def test_daemons_of_an_env_live_as_long_as_its_worker(context: str) -> None:
    """Not a moment less, whoever else dies; and whether or not the parent is looking."""
    factories = [partial(Daemonic, env_index=i) for i in range(2)]
    with (
        AsyncVectorEnv(factories, num_workers=2, context=context) as envs,
        AsyncVectorEnv([Daemonic], context=context) as bystander,
    ):
        first, second = begin(envs)
        (third,) = begin(bystander)
        assert len(alive([*first, *second, *third])) == len(first) + len(second) + len(third)
        os.kill(envs.worker_pids[0], signal.SIGKILL)
        wait_gone(first, LONG)  # while the parent does something else
        time.sleep(0.2)
        assert alive(second) == second
        assert alive(third) == third
        with pytest.raises(WorkerDied, match="SIGKILL"):
            envs.step(np.ones((2, 3), np.int64))
        envs.close()
        wait_gone(second, LONG)
        time.sleep(0.1)
        assert alive(third) == third
        bystander.step(np.ones((1, 3), np.int64))
    wait_gone(third, LONG)
    if context != "fork":  # there it is the machine's own reaper who has to take care of them
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in (*first, *second, *third)))


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=2)
@pytest.mark.fault("A17")
@pytest.mark.parametrize("context", CONTEXTS)
def test_daemons_that_end_by_themselves_do_not_pile_up(context: str) -> None:
    class Passing(CounterEnv):
        def step(self, actions: dict[str, Any]) -> Any:
            command = ["sh", "-c", "setsid sleep 0.05 >&- 2>&- & exit"]
            subprocess.run(command, stdin=subprocess.DEVNULL, check=True)
            return super().step(actions)

    server = ensure_server()._process.pid
    with AsyncVectorEnv([Passing], context=context) as envs:
        envs.reset()
        for _ in range(5):
            envs.step(np.ones((1, 3), np.int64))
        expected = [] if context == "fork" else [str(envs.worker_pids[0])]
        until(lambda: Path(f"/proc/{server}/task/{server}/children").read_text().split() == expected)


class Outer(CounterEnv):
    """Has a vectorizer inside, whose env starts daemons."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = AsyncVectorEnv([Daemonic])

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        obs, infos = super().reset(seed, options)
        daemons = self.inner.reset()[1]["daemons"][0].tolist()
        server = ensure_server()._process.pid
        return obs, {**infos, "pids": np.array([server, *self.inner.worker_pids, *daemons])}


@pytest.mark.slow("kills, stops or starts many workers")
@pytest.mark.fault("A17")
@pytest.mark.fault("A18")
@pytest.mark.parametrize(
    ("context", "inner_server_too"),
    [*((context, False) for context in CONTEXTS), *((context, True) for context in ("forkserver", "spawn"))],
)
def test_daemons_of_a_vectorizer_in_an_env_go_with_that_env(context: str, inner_server_too: bool) -> None:
    with AsyncVectorEnv([Outer], context=context) as envs:
        pids = envs.reset()[1]["pids"][0].tolist()
        everybody = family(pids)
        assert len(everybody) > 8
        if inner_server_too:
            os.kill(pids[0], signal.SIGKILL)
            time.sleep(0.1)
        os.kill(envs.worker_pids[0], signal.SIGKILL)
        wait_gone(everybody, LONG)


DOOMED = """
from tests.faults.test_orphans import Daemonic
envs = marlvec.make([Daemonic, HangingEnv], num_workers=2, context=CONTEXT)
infos = envs.reset()[1]
time.sleep(0.1)
envs.step_send(np.ones((2, 3), np.int64))
print(json.dumps([*envs.worker_pids, *infos["daemons"][0].tolist()]), flush=True)
END
"""
ENDS = {"SIGKILL": "time.sleep(60)", "os._exit": "os._exit(0)", "exit": ""}


@pytest.mark.slow("kills, stops or starts many workers")
@pytest.mark.fault("A17")
@pytest.mark.fault("A21")
@pytest.mark.parametrize(
    ("context", "end"), [*((context, "SIGKILL") for context in CONTEXTS), ("forkserver", "os._exit"), ("fork", "exit")]
)
def test_daemons_go_with_the_parent(context: str, end: str, tmp_path: Path) -> None:
    program = DOOMED.replace("CONTEXT", repr(context)).replace("END", ENDS[end])
    with start(program, tmp_path) as process:
        assert process.stdout
        said = process.stdout.readline()
        assert said, process.communicate()[1]
        pids = family(json.loads(said)) if end == "SIGKILL" else json.loads(said)
        if end == "SIGKILL":
            process.kill()
        assert process.wait(timeout=LONG) == (-9 if end == "SIGKILL" else 0)
        wait_gone(pids, LONG)
        assert process.communicate()[1] == ""


STOPPED = """
from marlvec.vector.workers.pool import ensure_server
envs = marlvec.make([CounterEnv, CounterEnv], num_workers=2, context=CONTEXT)
envs.reset()
server = ensure_server()._process.pid
os.kill(server, signal.SIGSTOP)
print(json.dumps([server, *envs.worker_pids]), flush=True)
time.sleep(60)
"""


@pytest.mark.fault("A21")
@pytest.mark.parametrize("context", ["forkserver", "spawn"])
def test_a_stopped_fork_server_goes_with_the_parent(context: str, tmp_path: Path) -> None:
    with start(STOPPED.replace("CONTEXT", repr(context)), tmp_path) as process:
        assert process.stdout
        said = process.stdout.readline()
        assert said, process.communicate()[1]
        pids = json.loads(said)
        assert alive(pids) == pids
        process.kill()
        wait_gone(pids, LONG)

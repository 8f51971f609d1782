"""What else may happen on a machine: leftovers of others, killed trackers, threads, clocks that jump, and load."""

from __future__ import annotations

import ast
import os
import random
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import marlvec.vector
from marlvec import AsyncVectorEnv
from marlvec.errors import FetchTimeout
from marlvec.testing.scripted import CounterEnv, decode
from marlvec.vector.workers.pool import ensure_server
from tests.faults.harness.programs import mounted, run
from tests.waiting import Gate, GatedEnv, within

CONTEXTS = ("forkserver", "spawn", "fork")


def acts(n: int, k: int = 1) -> Any:
    return np.full((n, 3), k, np.int64)


NOTHING_IS_OPENED = """
import tempfile
shared = ("/dev/shm/", os.path.realpath(tempfile.gettempdir()) + "/")
code = os.path.dirname(os.path.dirname(os.path.realpath(marlvec.__file__))) + "/"  # which may stand there, too
here, opened = os.getpid(), []
def watch(event, arguments):
    path = str(arguments[0]) if arguments else ""
    is_shared = path.startswith(shared) and not path.startswith((code, sys.prefix))
    if event.startswith(("tempfile.", "shm_open")) or event == "open" and is_shared:
        opened.append(arguments[0])
        if os.getpid() != here:
            os.write(2, f"a worker: {event} {arguments}".encode())
# As if many had crashed before, one of them with our own pid.
planted = [f"/dev/shm/{name}" for name in ("marlvec", "stacks", f"marlvec-{here}", f"psm_{here:08x}")]
try:
    for path in planted:
        with open(path, "wb") as file:
            file.write(b"not ours" * 512)
    sys.addaudithook(watch)
    for context in ("forkserver", "spawn", "fork"):
        with marlvec.make(CounterEnv, 3, num_workers=2, context=context) as envs:
            with marlvec.make(CounterEnv, 3, num_workers=2, context=context) as others:
                play(envs, 7)
                play(others, 9)
                play(envs, 3)
    print(opened)
    assert {open(path, "rb").read() for path in planted} == {b"not ours" * 512}
    assert opened == planted, "the hook sees all"
finally:
    for path in planted:
        os.unlink(path)
"""


@pytest.mark.slow("kills, stops or starts many workers")
@pytest.mark.fault("F6")
def test_what_others_left_is_never_opened(tmp_path: Path) -> None:
    """Memory has no name, so none can be taken for another, and nobody can plant any."""
    assert run(NOTHING_IS_OPENED, tmp_path, mounted("mount -t tmpfs tmpfs /dev/shm")) == ["[]"]


TRACKERS = """
from multiprocessing import resource_tracker, shared_memory
tracker = resource_tracker._resource_tracker
def read(pid, what):
    try:
        return open(f"/proc/{pid}/{what}").read()
    except OSError:  # somebody else's, and gone by now
        return ""
for context in ("forkserver", "spawn", "fork"):
    with marlvec.make(CounterEnv, 3, num_workers=2, context=context) as envs:
        play(envs)
        assert tracker._pid is None
        pids = [pid for pid in os.listdir("/proc") if pid.isdigit()]
        ours = [pid for pid in pids if read(pid, "stat").split()[3:4] == [str(os.getpid())]]
        assert not any("resource_tracker" in read(pid, "cmdline") for pid in (*ours, *envs.worker_pids))
print("none of ours")
resource_tracker.ensure_running()
for context in ("forkserver", "spawn", "fork"):
    with marlvec.make(CounterEnv, 3, num_workers=2, context=context) as envs:
        play(envs, 3)
        os.kill(tracker._pid, 9) if context == "forkserver" else None
        play(envs, 8)
print("played on")
"""


@pytest.mark.slow("kills, stops or starts many workers")
@pytest.mark.fault("F8")
def test_no_tracker_of_resources_runs_and_others_keep_theirs(tmp_path: Path) -> None:
    assert run(TRACKERS, tmp_path) == ["none of ours", "played on"]


def threads_of(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.fault("F9")
def test_a_parent_with_threads_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless asked for: workers are forks of a process that never had a thread, or none at all."""

    def forked() -> int:
        raise AssertionError("the parent was forked")

    stop = threading.Event()
    threads = [threading.Thread(target=stop.wait) for _ in range(4)]
    lock = threading.Lock()
    try:
        for thread in threads:
            thread.start()
        monkeypatch.setattr(os, "fork", forked)
        with lock:  # of which a forked child would have a copy that is never released
            for options in ({}, {"context": None}, {"context": "spawn"}, {"context": "forkserver"}):
                with AsyncVectorEnv([CounterEnv, CounterEnv], num_workers=2, **options) as envs:
                    server = ensure_server()._process.pid
                    assert {parent_of(pid) for pid in envs.worker_pids} == {server}
                    assert threads_of(server) == 1
                    assert [threads_of(pid) for pid in envs.worker_pids] == [1, 1]
                    assert threads_of(os.getpid()) > 4
                    envs.reset()
                    envs.step(acts(2))
    finally:
        stop.set()
        for thread in threads:
            thread.join()


class Jumping:
    """A wall clock of a machine whose administrator cannot make up his mind."""

    def __init__(self) -> None:
        self.draw = random.Random(10)

    def __call__(self) -> float:
        return 1.8e9 + self.draw.uniform(-1e9, 1e9)


class InAnotherTime(CounterEnv):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        time.time = Jumping()


@pytest.mark.fault("F10")
@pytest.mark.parametrize("context", ["forkserver", "fork"])
def test_a_clock_that_jumps_changes_nothing(context: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", Jumping())
    gate = Gate(tmp_path)
    factories = [partial(InAnotherTime, env_index=0), partial(GatedEnv, gate, env_index=1, at=2)]
    with gate, AsyncVectorEnv(factories, num_workers=2, context=context) as envs:
        envs.reset()
        for t in range(1, 9):
            envs.step_send(acts(2))
            if t == 3:
                begin = time.monotonic()
                with pytest.raises(FetchTimeout):
                    envs.step_fetch(timeout=0.02)
                assert 0.02 <= time.monotonic() - begin < 60, "the clock has jumped by years"
                gate.let_through()
            obs, *_ = envs.step_fetch(timeout=60)
            assert decode(obs[1, 0])[3] == t % 5
        with within(4, usual=0.02):
            envs.close()


@pytest.mark.fault("F10")
def test_only_clocks_that_cannot_jump_are_asked() -> None:
    (folder,) = marlvec.vector.__path__
    asked = set()
    for path in Path(folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "time":
                asked.add(node.attr)
            assert not (isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime")), path
            assert not (isinstance(node, ast.Import) and "datetime" in [alias.name for alias in node.names]), path
    assert "monotonic" in asked
    assert asked <= {"CLOCK_MONOTONIC", "monotonic", "perf_counter", "perf_counter_ns", "sleep", "thread_time"}


@pytest.mark.slow("kills, stops or starts many workers")
@pytest.mark.fault("F11")
def test_a_machine_under_load_raises_no_false_alarm() -> None:
    """At default settings: nobody is taken for dead or hung."""
    busy = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(4)]
    try:
        for context in CONTEXTS:
            envs = AsyncVectorEnv([partial(CounterEnv, env_index=i) for i in range(6)], num_workers=3, context=context)
            envs.reset()
            for t in range(1, 101):
                obs, *_ = envs.step(acts(6, t % 5))
                assert [decode(obs[i, 1])[3] for i in range(6)] == [t % 5] * 6
            envs.close()
    finally:
        for process in busy:
            process.kill()
            process.wait()

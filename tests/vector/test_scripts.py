"""Whole programs: whatever they are and however they end, they say nothing on stderr and leave nobody behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from marlvec import AsyncVectorEnv, SyncVectorEnv
from marlvec.testing import CounterEnv, decode
from tests.faults.harness.programs import alive, run, wait_gone
from tests.waiting import LONG, within

ROOT = Path(__file__).resolve().parents[2]
CONTEXTS = ("forkserver", "spawn", "fork")

HEAD = """
import json, os, sys, threading, time
import numpy as np
import marlvec
from marlvec.testing.scripted import CounterEnv, HangingEnv, SlowEnv, decode_reward

def play(envs):
    envs.reset(seed=1)
    for t in range(7):
        rewards = envs.step(np.full((envs.num_envs, 2), t % 5))[1]
    print(sorted({decode_reward(r)[1:] for r in rewards.ravel()}), flush=True)

def tell(*many):
    print(json.dumps([pid for envs in many for pid in envs.worker_pids]), flush=True)
"""
PLAYED = "[(1, 0, 1), (1, 1, 1)]"  # the seventh step of episodes of three
PLAIN = """
envs = marlvec.make(CounterEnv, 3, length=3, agent_num=2)
tell(envs)
play(envs)
envs.close()
"""


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Start a Python of its own session, so that signals to its group reach nobody else."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )


def finish(process: subprocess.Popen[str], said: str = "", stdin: str = "") -> tuple[int, list[str], str]:
    """Wait for its end, and that of its workers, whose ids are the first line it says: code, other lines, stderr."""
    out, err = process.communicate(stdin, timeout=150)
    lines = (said + out).splitlines()
    assert lines, err
    pids = json.loads(lines[0])
    assert pids
    wait_gone(pids, LONG)
    return process.returncode, lines[1:], err


def as_file(program: str, folder: Path) -> subprocess.Popen[str]:
    (folder / "program.py").write_text(program)
    return start(str(folder / "program.py"), cwd=folder)


def as_input(program: str, folder: Path) -> subprocess.Popen[str]:
    process = start("-", cwd=folder)
    assert process.stdin
    process.stdin.write(program)
    process.stdin.close()
    process.stdin = None
    return process


def as_cells(program: str, folder: Path) -> subprocess.Popen[str]:
    """As notebooks do: cells that are compiled one by one, run in a ``__main__`` that has no file."""
    kernel = (
        "import sys, types\n"
        "sys.modules['__main__'] = main = types.ModuleType('__main__')\n"
        f"for k, cell in enumerate({program.split('# cell')!r}):\n"
        "    exec(compile(cell, f'<ipython-input-{k}>', 'exec'), main.__dict__)\n"
    )
    return start("-c", kernel, cwd=folder)


def as_module(program: str, folder: Path) -> subprocess.Popen[str]:
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").touch()
    (folder / "package" / "__main__.py").write_text(program)
    return start("-m", "package", cwd=folder)


def as_thread(program: str, folder: Path) -> subprocess.Popen[str]:
    return as_file(
        f"import threading\nthread = threading.Thread(target=exec, args=({program!r}, globals()))\n"
        "thread.start()\nthread.join()\n",
        folder,
    )


WAYS = {"file": as_file, "stdin": as_input, "cells": as_cells, "module": as_module, "thread": as_thread}

DEFINED_HERE = """
# cell
here = os.getpid()
bonus = 4

class Mine(CounterEnv):
    def __init__(self, extra=0, **options):
        assert os.getpid() != here, "built in the parent"
        super().__init__(3, agent_num=2, **options)
        self.extra = extra + bonus

    def reset(self, seed=None, options=None):
        obs, infos = super().reset(seed, options)
        return obs, {**infos, "extra": self.extra}

def build(env_index, extra=1):
    return Mine(extra, env_index=env_index)

def closure(extra):
    def inner():
        return Mine(extra)
    return inner
# cell
pids = []
kinds = [Mine, build, lambda: Mine(2), lambda env_index, num_envs: Mine(num_envs), closure(7)]
for make_it in (*[(kind, 2) for kind in kinds], ("__main__:Mine", 2), ([lambda: Mine(1), closure(5)], None)):
    envs = marlvec.make(*make_it)
    pids += envs.worker_pids
    infos = envs.reset()[1]
    print(infos["extra"].tolist())
    play(envs)
    envs.close()
print(json.dumps(pids))
"""


@pytest.mark.slow("plays whole episodes in worker processes")
@pytest.mark.parametrize("way", WAYS)
def test_a_program_without_guard_and_its_own_classes_lambdas_and_closures(way: str, tmp_path: Path) -> None:
    out, err = WAYS[way](HEAD + DEFINED_HERE, tmp_path).communicate(timeout=150)
    assert err == ""
    *lines, pids = out.splitlines()
    extras = ["[4, 4]", "[5, 5]", "[6, 6]", "[6, 6]", "[11, 11]", "[4, 4]", "[5, 9]"]
    assert lines == [line for extra in extras for line in (extra, PLAYED)]
    assert alive(json.loads(pids)) == []


BUSY_PARENT = """
stop = threading.Event()
threads = [threading.Thread(target=stop.wait) for _ in range(4)]
threads += [threading.Thread(target=lambda: [np.ones((200, 200)) @ np.ones((200, 200)) for _ in range(20)])]
for thread in threads:
    thread.start()
big = np.random.default_rng(0).random((200, 200))
big @ big
np.linalg.svd(big)
"""


@pytest.mark.slow("plays whole episodes in worker processes")
@pytest.mark.parametrize("context", ["forkserver", "spawn"])
def test_the_parent_has_threads_and_warm_blas(context: str, tmp_path: Path) -> None:
    blas = "class Blas(CounterEnv):\n    def step(self, actions):\n        np.ones((200, 200)) @ np.ones((200, 200))\n"
    blas += "        return super().step(actions)\n"
    plain = PLAIN.replace("CounterEnv, 3", f"Blas, 3, context={context!r}")
    process = as_file(HEAD + BUSY_PARENT + blas + plain + "stop.set()\n", tmp_path)
    assert finish(process) == (0, [PLAYED], "")


OPEN = PLAIN.replace("envs.close()\n", "")
# What the program does at its end, its exit code, and what it says on stderr.
ENDINGS = {
    "never closes": ("", 0, ""),
    "step pending": ("envs.step_send(np.zeros((3, 2), np.int64))", 0, ""),
    "env hangs": (
        "more = marlvec.make(HangingEnv, 2); more.reset(); more.step_send(np.zeros((2, 3), np.int64))",
        0,
        "",
    ),
    "raises": ("raise RuntimeError('the end')", 1, r"Traceback \(.*\n(  .*\n)+RuntimeError: the end\n"),
    "sys.exit": ("sys.exit(3)", 3, ""),
    "SIGTERM": ("os.kill(os.getpid(), 15); time.sleep(9)", -15, ""),
    "SIGHUP": ("os.kill(os.getpid(), 1); time.sleep(9)", -1, ""),
    "os._exit": ("os._exit(4)", 4, ""),
    "in a cycle": ("import gc; loop = [envs]; loop.append(loop); del envs, loop; gc.collect(); print(gone())", 0, ""),
    "let go of": ("del envs; print(gone())", 0, ""),
    "let go of, pending": ("envs.step_send(np.zeros((3, 2), int)); del envs; print(gone())", 0, ""),
    "stdio closed": ("sys.stdout.close(); sys.stderr.close()", 0, ""),
}
GONE = "pids = envs.worker_pids\ndef gone():\n    return not any(os.path.exists(f'/proc/{pid}') for pid in pids)\n"


@pytest.mark.slow("plays whole episodes in worker processes")
@pytest.mark.fault("A26")
@pytest.mark.parametrize("context", CONTEXTS)
def test_every_end_of_a_program_is_the_end_of_its_workers(context: str, tmp_path: Path) -> None:
    def run(name: str) -> tuple[int, list[str], str]:
        program = HEAD + OPEN.replace("3, length", f"3, context={context!r}, length") + GONE + ENDINGS[name][0] + "\n"
        (tmp_path / name).mkdir()
        return finish(as_file(program, tmp_path / name))

    names = list(ENDINGS) if context == "forkserver" else ["step pending", "raises", "SIGTERM", "in a cycle"]
    with ThreadPoolExecutor(4) as pool:
        for name, (code, lines, err) in zip(names, pool.map(run, names), strict=True):
            ending, expected, stderr = ENDINGS[name]
            assert code == expected, name
            assert lines == ([PLAYED, "True"] if "gone()" in ending else [PLAYED]), name
            assert re.fullmatch(stderr, err), f"{name}: {err}"


DOOMED = """
import ctypes, signal, subprocess

class Holding(CounterEnv):
    "Sleeps in C without giving the GIL away, and cannot be told to end."
    def step(self, actions):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ctypes.PyDLL(None).sleep(60)

class Parental(CounterEnv):
    "Has children."
    def reset(self, seed=None, options=None):
        obs, _ = super().reset(seed, options)
        child = subprocess.Popen(["sleep", "1000"])
        forked = os.fork()
        if forked == 0:
            time.sleep(1000)
        return obs, {"children": np.array([child.pid, forked])}

envs = marlvec.make([CounterEnv, SlowEnv, HangingEnv, Holding, Parental], num_workers=5, context=CONTEXT,
                    env_kwargs=[{}, {"seconds": 1}, {}, {}, {}])
children = envs.reset()[1]["children"][4].tolist()
envs.send(np.ones((3, 3), np.int64), [1, 2, 3])
time.sleep(0.1)
tell(envs)
print(json.dumps(children), flush=True)
time.sleep(60)
"""


@pytest.mark.slow("plays whole episodes in worker processes")
@pytest.mark.fault("A21")
@pytest.mark.parametrize("context", CONTEXTS)
def test_workers_die_with_a_parent_that_is_killed(context: str, tmp_path: Path) -> None:
    """Idle ones, slow ones, hung ones, with the GIL held; and what they started."""
    kill_and_look(context, os.kill, tmp_path)


@pytest.mark.slow("plays whole episodes in worker processes")
@pytest.mark.fault("A22")
@pytest.mark.parametrize("context", ["forkserver", "fork"])
def test_workers_die_with_a_group_that_is_killed(context: str, tmp_path: Path) -> None:
    kill_and_look(context, os.killpg, tmp_path)


def kill_and_look(context: str, kill: Callable[[int, int], None], folder: Path) -> None:
    shm = set(Path("/dev/shm").iterdir())
    process = as_file(HEAD + DOOMED.replace("CONTEXT", repr(context)), folder)
    assert process.stdout
    first = process.stdout.readline()
    assert first, process.communicate()[1]
    pids, children = json.loads(first), json.loads(process.stdout.readline())
    assert (len(alive(pids)), len(alive(children))) == (5, 2)
    kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_gone([*pids, *children], LONG)
    assert process.communicate()[1] == ""
    assert set(Path("/dev/shm").iterdir()) <= shm


INTERRUPTED = """
envs = marlvec.make([SlowEnv, HangingEnv], num_workers=2, context=CONTEXT)
tell(envs)
envs.reset()
print("stepping", flush=True)
envs.step(np.ones((2, 3), np.int64))
"""


@pytest.mark.slow("plays whole episodes in worker processes")
@pytest.mark.checklist(75)
@pytest.mark.parametrize(
    ("context", "whole_group"), [("forkserver", False), *((context, True) for context in CONTEXTS)]
)
def test_ctrl_c(context: str, whole_group: bool, tmp_path: Path) -> None:
    process = as_file(HEAD + INTERRUPTED.replace("CONTEXT", repr(context)), tmp_path)
    assert process.stdout
    said = process.stdout.readline() + process.stdout.readline()
    assert said.endswith("stepping\n"), process.communicate()[1]
    time.sleep(0.1)
    (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
    with within(15, usual=0.5):
        code, lines, err = finish(process, said)
    assert (code, lines) == (-signal.SIGINT, ["stepping"])
    assert err.count("Traceback") == 1, err
    assert err.endswith("KeyboardInterrupt\n"), err


FORKING = """
envs = marlvec.make(CounterEnv, 3, length=3, agent_num=2, context=CONTEXT)
tell(envs)
for ending in ("let go", "close", "exit", "_exit"):
    child = os.fork()
    if child == 0:
        if ending == "let go":
            import gc
            del envs
            gc.collect()
        elif ending == "close":
            envs.close()
        elif ending == "_exit":
            os._exit(0)
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    play(envs)
child = os.fork()
if child == 0:  # a data loader's child may well have envs of its own
    with marlvec.make(CounterEnv, 2, length=3, agent_num=2, context=CONTEXT) as own:
        play(own)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
play(envs)
"""


@pytest.mark.slow("plays whole episodes in worker processes")
@pytest.mark.fault("A24")
@pytest.mark.parametrize("context", CONTEXTS)
def test_a_fork_of_the_parent_does_not_take_its_workers_along(context: str, tmp_path: Path) -> None:
    options = ["-W", "ignore::DeprecationWarning"]  # Python 3.12 warns of any fork of a process with threads
    process = start(*options, "-c", HEAD + FORKING.replace("CONTEXT", repr(context)), cwd=tmp_path)
    assert finish(process) == (0, [PLAYED] * 6, "")


@pytest.mark.slow("plays whole episodes in worker processes")
def test_what_envs_print_is_seen(tmp_path: Path) -> None:
    program = """
class Talks(CounterEnv):
    def reset(self, seed=None, options=None):
        sys.stdout.write("hello from a worker\\n")  # print() writes the end of the line by itself
        sys.stdout.flush()
        return super().reset(seed, options)

with marlvec.make(Talks, num_envs=2) as envs:
    envs.reset()
"""
    assert run(program, tmp_path) == ["hello from a worker"] * 2


@pytest.mark.slow("plays whole episodes in worker processes")
def test_one_process_may_have_many() -> None:
    """Twenty at once, closed in another order than they were made; the fork server is one for all."""
    made = [AsyncVectorEnv([partial(CounterEnv, 4)] * 2, num_workers=2) for _ in range(10)]
    for k, envs in enumerate(made):
        envs.reset(seed=k)
    for envs in (*made[::2], *made[1::2][::-1]):
        obs, *_ = envs.step(np.ones((2, 3), np.int64))
        assert decode(obs[1, 0])[3] == 1
        envs.close()


def test_a_sync_vectorizer_needs_no_process() -> None:
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = children.read_text()
    with SyncVectorEnv([CounterEnv] * 3) as envs:
        envs.reset()
        assert children.read_text() == before
        assert all(type(env.unwrapped) is CounterEnv for env in envs.envs)

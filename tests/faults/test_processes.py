"""Processes: workers that are killed or kill, crashes that say where, orphans of a caller that is gone."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import faulthandler
import json
import mmap
import os
import random
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import marlvec.vector
from marlvec import AsyncVectorEnv
from marlvec.errors import EnvRaised, ResourceError, WorkerDied
from marlvec.testing import CounterEnv, ExitingEnv, HangingEnv, RaisingEnv, decode, decode_reward
from marlvec.vector import cores as limits
from marlvec.vector.workers import pool as worker_process
from marlvec.vector.workers.channel import StackDump
from marlvec.vector.workers.fork_server import ForkServerClient
from marlvec.vector.workers.pool import WorkerProcess, ensure_server
from tests.faults.harness.programs import alive, run, start, wait_gone
from tests.vector.support.kinds import hooked
from tests.vector.support.reference import refused
from tests.waiting import LONG, until, within

# Workers beside each other: none waits for a dead one, whoever killed it, and none holds what is another's.


CONTEXTS = ("forkserver", "spawn", "fork")


def acts(n: int = 1, k: int = 1) -> Any:
    return np.full((n, 3), k, np.int64)


# --- no locks


LOCKS = {"Lock", "RLock", "Semaphore", "BoundedSemaphore", "Condition", "Event", "Barrier", "Queue", "SimpleQueue"}


@pytest.mark.fault("A4")
def test_no_lock_is_shared_between_processes() -> None:
    """Whoever is killed can hold none: all there are is threading's, which are this process's own."""
    (folder,) = marlvec.vector.__path__
    files = list(Path(folder).rglob("*.py"))
    assert len(files) > 20
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.startswith(("multiprocessing", "posix_ipc", "_multip"))], path
            if isinstance(node, ast.Attribute) and node.attr in LOCKS:
                assert isinstance(node.value, ast.Name), path
                assert node.value.id in ("threading", "queue"), f"{path}:{node.lineno}"


def note_closed(folder: Path, env: Any, close: Any) -> None:
    (folder / f"closed by {os.getpid()}").touch()


@pytest.mark.slow("kills, stops or starts many workers")
@pytest.mark.fault("A4")
@pytest.mark.parametrize("context", ["forkserver", "fork"])
def test_a_worker_killed_at_any_moment_never_blocks_its_peer(context: str, tmp_path: Path) -> None:
    draw = random.Random(4)
    for _ in range(5):
        witness = partial(hooked, CounterEnv, hooks={"close": partial(note_closed, tmp_path)})
        envs = AsyncVectorEnv([witness] * 2, context=context)
        doomed, peer = envs.worker_pids
        envs.reset()
        killer = threading.Timer(draw.uniform(0, 3e-3), os.kill, (doomed, signal.SIGKILL))
        killer.start()
        t = 0
        with pytest.raises(WorkerDied) as caught:
            for t in range(100_000):
                envs.step(acts(2, t % 5))
        assert caught.value.env_ids == (0,)
        with within(4, usual=0.02):  # less than the five seconds that it has
            envs.close()
        assert (tmp_path / f"closed by {peer}").exists(), "it went on as if nothing had happened"
        killer.join()


def kill_in_third_step(order: Path, env: Any, step: Any, actions: Any) -> Any:
    """Kill the worker whose id is in a file."""
    if env.world.t == 2:
        os.kill(int(order.read_text()), signal.SIGKILL)
    return step(actions)


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=4)
@pytest.mark.fault("A13")
@pytest.mark.fault("A12")
@pytest.mark.parametrize("n", [1, 2, 5, 13])
def test_workers_that_kill_each_other(n: int, tmp_path: Path) -> None:
    """Each one its neighbour, all at once. (The fixture around every test looks for zombies.)"""
    draw = random.Random(n)
    for _ in range(1 if n > 5 else 2):
        kills = [{"step": partial(kill_in_third_step, tmp_path / str(i))} for i in range(n)]
        envs = AsyncVectorEnv([partial(hooked, CounterEnv, hooks=hooks) for hooks in kills], num_workers=n)
        pids = envs.worker_pids
        for i, victim in enumerate(draw.sample(pids, n)):
            (tmp_path / str(i)).write_text(str(victim))
        envs.reset()
        envs.step(acts(n))
        envs.step(acts(n))
        refused(WorkerDied, "SIGKILL", envs.step, acts(n))
        with within(4, usual=0.02):
            envs.close()
        assert alive(pids) == []


# --- what is whose


def pipes_of(pid: int) -> set[str]:
    """Pipes that a process has open, its standard streams left out."""
    found = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one by which this folder is read
            if int(path.name) > 2 and (target := str(path.readlink())).startswith("pipe:"):
                found.add(target)
    return found


@pytest.mark.slow("kills, stops or starts many workers")
@pytest.mark.fault("A24")
@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_no_process_holds_the_channel_of_a_worker(context: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many threads start and end workers, and fork: a death is heard at once."""
    before = pipes_of(os.getpid())
    failures: list[BaseException] = []
    standing: list[AsyncVectorEnv] = []
    children: list[int] = []
    go = threading.Barrier(6)
    close = os.close

    def close_slowly(fd: int) -> None:
        close(fd)
        time.sleep(0.001)  # by then another thread may have opened something with the same number

    def start_and_end(lives: int) -> None:
        try:
            go.wait()
            for _ in range(lives):
                with AsyncVectorEnv([CounterEnv, CounterEnv], num_workers=2, context=context) as envs:
                    envs.reset()
            standing.append(AsyncVectorEnv([CounterEnv, CounterEnv], num_workers=2, context=context))
        except BaseException as error:
            failures.append(error)

    def fork() -> None:
        go.wait()
        for _ in range(20):
            pid = os.fork()
            if pid == 0:
                time.sleep(3600)
                os._exit(0)
            children.append(pid)
            time.sleep(0.005)

    threads = [threading.Thread(target=start_and_end, args=(lives,)) for lives in (0, 1, 2, 3, 3)]
    threads.append(threading.Thread(target=fork))
    try:
        monkeypatch.setattr(os, "close", close_slowly)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        monkeypatch.undo()
        assert failures == []
        for pid in children:  # each closes what it has inherited as soon as it runs, before any line of its own
            until(lambda pid=pid: pipes_of(pid) <= before)
        holders = Counter(pipe for envs in standing for pid in envs.worker_pids for pipe in pipes_of(pid) - before)
        assert len(holders) == 5 * 2 * 2
        assert set(holders.values()) == {1}
        for envs in standing:
            envs.reset()
        for envs in standing[:3]:
            os.kill(envs.worker_pids[0], signal.SIGKILL)
            with within(LONG, usual=0.01), pytest.raises(WorkerDied, match="SIGKILL"):
                envs.step(acts(2))
    finally:
        for envs in standing:
            envs.close()
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


@pytest.mark.slow("kills, stops or starts many workers")
@pytest.mark.fault("A24")
def test_forks_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """Others have hooks at forks, too, with locks, as `concurrent.futures` has: all take them in the same order."""
    program = """
    lock, over = threading.Lock(), threading.Event()
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)

    def fork():
        while not over.is_set():
            pid = os.fork()
            if pid == 0:
                os._exit(0)
            os.waitpid(pid, 0)

    thread = threading.Thread(target=fork)
    thread.start()
    for _ in range(8):
        with marlvec.AsyncVectorEnv([CounterEnv, CounterEnv], num_workers=2, context="fork") as envs:
            play(envs, 2)
    over.set()
    thread.join()
    print("no deadlock")
    """
    assert run(textwrap.dedent(program), tmp_path) == ["no deadlock"]


@pytest.mark.mostly_slow("interrupts at many lines", quick=3)
@pytest.mark.fault("A25")
@pytest.mark.parametrize("context", CONTEXTS)
def test_an_interrupt_while_a_worker_is_being_started(context: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer that nobody waits for any more is not taken for that to the next request."""
    factories = [partial(CounterEnv, env_index=i) for i in range(3)]
    answer = ForkServerClient.answer
    for k in range(3) if context == "forkserver" else (1,):
        answers = iter(range(k))

        def interrupted(self: ForkServerClient, answers: Iterator[int] = answers) -> Any:
            if next(answers, None) is None:
                monkeypatch.undo()
                raise KeyboardInterrupt
            return answer(self)

        server = ensure_server()  # which asks nothing
        monkeypatch.setattr(ForkServerClient, "answer", interrupted)
        refused(KeyboardInterrupt, "", AsyncVectorEnv, factories, num_workers=3, context=context)
        with AsyncVectorEnv(factories, num_workers=3, context=context) as envs:
            envs.reset()
            assert decode(envs.step(acts(3))[0][2, 1]) == (2, 0, 0, 1, 1)
            assert len(alive(envs.worker_pids)) == 3
        assert ensure_server() is server


# --- nesting


class Nesting(CounterEnv):
    """Has envs of its own kind inside, in workers of their own."""

    def __init__(self, context: str = "forkserver", log: Path | None = None) -> None:
        super().__init__()
        if log is not None:
            with log.open("a") as file:
                file.write(f"{limits.depth()} {os.getpid()}\n")
        self.inner = AsyncVectorEnv([partial(Nesting, context, log)], context=context)

    def close(self) -> None:
        self.inner.close()


@pytest.mark.slow("kills, stops or starts many workers")
@pytest.mark.fault("A18")
@pytest.mark.parametrize("context", ["forkserver", "fork"])
def test_vectorizers_inside_of_vectorizers_come_to_an_end(context: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises((EnvRaised, ResourceError), match="can be nested 5 deep.*backend='sync'"):
        AsyncVectorEnv([partial(Nesting, context, log)], context=context)
    lines = [tuple(map(int, line.split())) for line in log.read_text().splitlines()]
    assert [level for level, _ in lines] == [1, 2, 3, 4, 5]
    assert limits.depth() == 0
    wait_gone([pid for _, pid in lines], LONG)


def test_too_deep_is_known_before_any_process_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: Any) -> Any:
        raise AssertionError("a process was started")

    monkeypatch.setattr(os, "fork", started)
    monkeypatch.setattr("marlvec.vector.workers.pool.ensure_server", started)
    for text in ("5", "6", "1000"):
        monkeypatch.setenv(limits.DEPTH, text)
        for context in CONTEXTS:
            refused(ResourceError, "worker at that depth", AsyncVectorEnv, [CounterEnv], context=context)
    monkeypatch.undo()
    for text in ("4", "", "deep", "-7"):
        monkeypatch.setenv(limits.DEPTH, text)
        limits.check_depth()


# --- rude envs


class Rude(CounterEnv):
    """Does to its process what no library should, one thing a step."""

    def step(self, actions: dict[str, Any]) -> Any:
        deeds = [self.talk, self.close_streams, self.move, self.take_signals, self.take_limits]
        if self.world.episode == 0:
            deeds[self.world.t]()
        return super().step(actions)

    def talk(self) -> None:
        line = "x" * 1023 + "\n"
        for _ in range(2048):
            sys.stdout.write(line)
            sys.stderr.write(line)
        os.write(1, b"done\n")

    def close_streams(self) -> None:
        for fd in range(3):
            os.close(fd)

    def move(self) -> None:
        os.chdir("/")
        os.umask(0o777)
        os.environ.clear()
        sys.path[:] = []

    def take_signals(self) -> None:
        for number in set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}:
            if number < signal.SIGRTMIN:
                signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())

    def take_limits(self) -> None:
        for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
            resource.setrlimit(which, (0, 0))


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=5)
@pytest.mark.fault("A20")
@pytest.mark.parametrize("context", ["forkserver", "spawn", "fork"])
def test_an_env_that_misuses_its_process_does_not_disturb_others(
    context: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing of it is on the way of requests and replies."""
    factories = [partial(Rude, 5, env_index=0), partial(CounterEnv, 5, env_index=1)]
    folder = Path.cwd()
    for w in (1, 2):  # in one worker, and in two
        envs = AsyncVectorEnv(factories, num_workers=w, context=context)
        try:
            pids = envs.worker_pids
            envs.reset()
            for t in range(1, 13):
                obs, rewards, *_ = envs.step(acts(2, t % 5))
                for i in range(2):
                    assert decode(obs[i, 2]) == (i, 0, t // 5, t % 5, 2)
                    assert decode_reward(rewards[i, 2]) == ((t - 1) // 5, (t - 1) % 5 + 1, 2, t % 5)
        finally:
            envs.close()
        assert alive(pids) == []
    assert Path.cwd() == folder
    out, err = capfd.readouterr()
    assert len(out) > 2 * 2048 * 1024
    assert "done" in out
    assert set(err) <= {"x", "\n"}


CHILDREN_IGNORED = """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
from tests.faults.test_processes import process_of, told
for context in ("forkserver", "spawn", "fork"):
    with marlvec.make(CounterEnv, 3, num_workers=2, context=context) as envs:
        play(envs)
        told(process_of(envs), "in serve")
        os.kill(envs.worker_pids[0], 9)
        begin = time.monotonic()
        try:
            envs.step(np.zeros((3, 3), np.int64))
        except WorkerDied as died:
            print(context, died.exitcode, time.monotonic() - begin < 4)  # 20 ms, as a rule
"""


@pytest.mark.slow("kills, stops or starts many workers")
def test_a_parent_that_ignores_its_children_and_blocks_every_signal(tmp_path: Path) -> None:
    expected = ["forkserver -9 True", "spawn -9 True", "fork None True"]  # whose end nobody can be told
    assert run(CHILDREN_IGNORED, tmp_path) == expected


# What a worker can still say when it crashes, hangs or runs out of memory: where it was, in the parent's hands.


def process_of(envs: AsyncVectorEnv, w: int = 0) -> WorkerProcess:
    (process,) = (process for process in worker_process._workers if process.pid == envs.worker_pids[w])
    return process


def crash_here(how: str, env: Any, step: Any, actions: Any) -> Any:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if how == "null pointer":
        ctypes.string_at(0)
    elif how == "SIGSEGV in C":
        faulthandler._sigsegv(True)  # type: ignore[attr-defined]  # which lets go of the GIL first
    elif how == "SIGBUS":
        fd = os.memfd_create("short")
        os.ftruncate(fd, 4096)
        page = mmap.mmap(fd, 4096)
        os.ftruncate(fd, 0)
        page[0] = 1
    elif how == "abort":
        os.abort()
    else:
        os.kill(os.getpid(), int(how))
    return step(actions)


CRASHES = {
    "null pointer": (-11, "Segmentation fault"),
    "SIGSEGV in C": (-11, "Segmentation fault"),
    "11": (-11, "Segmentation fault"),
    "SIGBUS": (-7, "Bus error"),
    "abort": (-6, "Aborted"),
}
PLACES = [
    *(("forkserver", how) for how in CRASHES),
    ("spawn", "null pointer"),
    ("fork", "null pointer"),
    ("fork", "abort"),
]


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=8)
@pytest.mark.fault("A5")
@pytest.mark.parametrize(("context", "how"), PLACES)
def test_a_crash_says_where(context: str, how: str, capfd: pytest.CaptureFixture[str]) -> None:
    exitcode, words = CRASHES[how]
    factories = [partial(hooked, CounterEnv, hooks={"step": partial(crash_here, how)}), CounterEnv]
    with AsyncVectorEnv(factories, num_workers=2, context=context) as envs:
        process, other = process_of(envs), process_of(envs, 1)
        assert process.crash_report() == ""
        envs.reset()
        caught = refused(WorkerDied, "", envs.step, acts(2))
        assert caught.exitcode == exitcode
        report = str(caught)
        assert f"Fatal Python error: {words}" in report
        assert "test_processes.py" in report
        assert "in crash_here" in report
        assert "in run_worker" in report, "the whole stack"
        assert process.stacks() == "", "who is gone cannot answer"
        assert other.crash_report() == ""
    assert capfd.readouterr().err == ""


def told(process: WorkerProcess, place: str, *also: str, threads: int = 1) -> str:
    """Its stacks, asked for until it has come to this place; on a busy machine an answer may come in pieces."""
    answers = [""]

    def has_come() -> bool:
        until(partial(is_quiet, process.pid, threads))  # a stack that changes while it is read can crash its process
        answers.append(process.stacks(timeout=LONG))
        return all(text in answers[-1] for text in (f"{place}\n", "in run_worker", *also))

    until(has_come)
    return answers[-1]


def is_quiet(pid: int, threads: int) -> bool:
    """Whether the process has at least so many threads, and none of them has run for 20 ms."""

    def runs() -> list[str]:
        texts = [(task / "status").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
        return [line for text in texts for line in text.splitlines() if "ctxt_switches" in line]

    before = runs()
    time.sleep(0.02)
    return runs() == before and len(before) >= 2 * threads


class BusyInC(CounterEnv):
    """Sleeps in C without giving the GIL away, deaf to SIGTERM."""

    def step(self, actions: dict[str, Any]) -> Any:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ctypes.PyDLL(None).sleep(60)
        time.sleep(60)  # the other sleep was interrupted


class Threaded(HangingEnv):
    """Hangs beside threads of its own, once all of them do."""

    def strike(self) -> None:
        there = threading.Semaphore(0)
        for _ in range(30):
            threading.Thread(target=self.wait_a_thousand_years, args=(there,), daemon=True).start()
        for _ in range(30):
            there.acquire()
        self.hang_with_all_there()

    def hang_with_all_there(self) -> None:
        super().strike()

    def wait_a_thousand_years(self, there: threading.Semaphore, depth: int = 12) -> None:
        if depth:
            self.wait_a_thousand_years(there, depth - 1)
        there.release()
        threading.Event().wait()


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=3)
@pytest.mark.fault("A9")
@pytest.mark.fault("A10")
@pytest.mark.parametrize("context", CONTEXTS)
def test_a_worker_that_hangs_says_where(context: str, capfd: pytest.CaptureFixture[str]) -> None:
    for env, place in ((HangingEnv, "in strike"), (BusyInC, "in step")):
        envs = AsyncVectorEnv([partial(env, env_index=0)], context=context)
        process = process_of(envs)
        envs.reset()
        assert place not in told(process, "in serve")
        envs.step_send(acts())
        assert "in run_worker" in told(process, place)
        assert process.crash_report() == ""
        os.kill(process.pid, signal.SIGSTOP)
        until(partial(worker_process._is_stopped, process.pid))
        with within(LONG, usual=0.001):
            assert process.stacks(timeout=2 * LONG) == "", "and it is not waited for"
        envs.close(timeout=0)
    assert capfd.readouterr().err == ""


def test_a_workers_last_output_is_bounded_plain_text() -> None:
    with AsyncVectorEnv([partial(Threaded, env_index=0)]) as envs:
        process = process_of(envs)
        envs.reset()
        envs.step_send(acts())
        stacks = told(process, "in hang_with_all_there", "… left out …", threads=31)
        assert 12_000 < len(stacks.encode()) <= 16 * 1024
        assert stacks.count("wait_a_thousand_years") > 20
        assert "… left out …" in stacks
        assert "in strike\n" in stacks, "what hangs is told, however many threads there are"
        envs.close(timeout=0)
    file = StackDump()
    try:
        assert file.ask(lambda: None, 0.01) == ""
        wild = b"one\x1b[31m\x07\x00 \xff\r\ntwo\t\xe2\x80\xae!\xc2\x9b\n"
        assert file.ask(lambda: os.write(file.fd, wild), 1) == "one[31m \ufffd\ntwo\t!\n"
        assert file.crash() == ""
        os.write(file.fd, b"a late answer\nFatal Python error: \x1b[31mNone\n")
        assert file.crash() == "Fatal Python error: [31mNone\n"
    finally:
        file.close()
    assert (file.crash(), file.ask(lambda: None, 0.01)) == ("", "")


def test_a_worker_that_does_not_listen_has_no_stacks() -> None:
    class Deaf(CounterEnv):
        def step(self, actions: dict[str, Any]) -> Any:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
            return super().step(actions)

    with AsyncVectorEnv([Deaf]) as envs:
        process = process_of(envs)
        envs.reset()
        told(process, "in serve")
        envs.step(acts())
        with within(LONG, usual=0.1):
            assert process.stacks(timeout=0.1) == ""
        envs.step(acts())


class SlowToStart(CounterEnv):
    def __init__(self) -> None:
        time.sleep(0.5)
        super().__init__()


@pytest.mark.slow("kills, stops or starts many workers")
@pytest.mark.parametrize("context", CONTEXTS)
def test_asking_a_worker_that_is_starting_up_does_it_no_harm(context: str) -> None:
    stop, said = threading.Event(), []

    def ask() -> None:
        while not stop.is_set():
            for process in list(worker_process._workers):
                if hasattr(process, "pid"):  # nobody has it before it has one, but for this test
                    said.append(process.stacks(timeout=0.005))
            time.sleep(0.03)  # CPython 3.11 crashes by itself at one of some 100,000 questions, so let them be few

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        lives = 0
        while lives < 2 or len(said) <= 5:
            lives += 1
            with AsyncVectorEnv([SlowToStart, SlowToStart], num_workers=2, context=context) as envs:
                envs.reset()
                envs.step(acts(2))
    finally:
        stop.set()
        thread.join()


@pytest.mark.slow("kills, stops or starts many workers")
@pytest.mark.fault("A7")
@pytest.mark.parametrize("context", CONTEXTS)
def test_an_env_without_memory_raises_and_one_that_is_killed_may_have_had_none(context: str) -> None:
    class Greedy(CounterEnv):
        def step(self, actions: dict[str, Any]) -> Any:
            if self.world.t == 1:
                used = 4096 * int(open("/proc/self/statm").read().split()[0])  # noqa: PTH123, SIM115
                resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), -1))
                np.ones(1 << 30)
            return super().step(actions)

    with AsyncVectorEnv([Greedy, partial(CounterEnv, env_index=1)], num_workers=2, context=context) as envs:
        envs.reset()
        envs.step(acts(2))
        caught = refused(EnvRaised, "MemoryError", envs.step, acts(2))
        assert isinstance(caught.__cause__, MemoryError)
        envs.reset()
        envs.step(acts(2))
    with AsyncVectorEnv([partial(ExitingEnv, signal=9)], context=context) as envs:
        envs.reset()
        refused(WorkerDied, r"SIGKILL.*possibly the kernel's out-of-memory killer", envs.step, acts())
    with AsyncVectorEnv([partial(RaisingEnv, error=MemoryError)], context=context) as envs:
        envs.reset()
        refused(EnvRaised, "MemoryError", envs.step, acts())


# What an env starts may do as it likes while its worker lives, and is gone when the worker is.


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
        refused(WorkerDied, "SIGKILL", envs.step, np.ones((2, 3), np.int64))
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
from tests.faults.test_processes import Daemonic
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

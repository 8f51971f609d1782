"""What a worker can still say when it crashes, hangs or runs out of memory: where it was, in the parent's hands."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import resource
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from marlvec import AsyncVectorEnv
from marlvec.errors import EnvRaised, WorkerDied
from marlvec.testing.scripted import CounterEnv, ExitingEnv, HangingEnv, RaisingEnv
from marlvec.vector.workers import pool as worker_process
from marlvec.vector.workers.channel import StackDump
from marlvec.vector.workers.pool import WorkerProcess
from tests.waiting import LONG, until, within

CONTEXTS = ("forkserver", "spawn", "fork")


def acts(n: int = 1) -> Any:
    return np.ones((n, 3), np.int64)


def process_of(envs: AsyncVectorEnv, w: int = 0) -> WorkerProcess:
    (process,) = (process for process in worker_process._workers if process.pid == envs.worker_pids[w])
    return process


class CrashingEnv(CounterEnv):
    """Crashes in its first step."""

    def __init__(self, how: str, **options: Any) -> None:
        super().__init__(**options)
        self.how = how

    def step(self, actions: dict[str, Any]) -> Any:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        self.crash_here()
        return super().step(actions)

    def crash_here(self) -> None:
        if self.how == "null pointer":
            ctypes.string_at(0)
        elif self.how == "SIGSEGV in C":
            faulthandler._sigsegv(True)  # type: ignore[attr-defined]  # which lets go of the GIL first
        elif self.how == "SIGBUS":
            fd = os.memfd_create("short")
            os.ftruncate(fd, 4096)
            page = mmap.mmap(fd, 4096)
            os.ftruncate(fd, 0)
            page[0] = 1
        elif self.how == "abort":
            os.abort()
        else:
            os.kill(os.getpid(), int(self.how))


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
    factories = [partial(CrashingEnv, how), partial(CounterEnv, env_index=1)]
    with AsyncVectorEnv(factories, num_workers=2, context=context) as envs:
        process, other = process_of(envs), process_of(envs, 1)
        assert process.crash_report() == ""
        envs.reset()
        with pytest.raises(WorkerDied) as caught:
            envs.step(acts(2))
        assert caught.value.exitcode == exitcode
        report = str(caught.value)
        assert f"Fatal Python error: {words}" in report
        assert "test_crashes.py" in report
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
        with pytest.raises(EnvRaised, match="MemoryError") as caught:
            envs.step(acts(2))
        assert isinstance(caught.value.__cause__, MemoryError)
        envs.reset()
        envs.step(acts(2))
    with AsyncVectorEnv([partial(ExitingEnv, signal=9)], context=context) as envs:
        envs.reset()
        with pytest.raises(WorkerDied, match=r"SIGKILL.*possibly the kernel's out-of-memory killer"):
            envs.step(acts())
    with AsyncVectorEnv([partial(RaisingEnv, error=MemoryError)], context=context) as envs:
        envs.reset()
        with pytest.raises(EnvRaised, match="MemoryError"):
            envs.step(acts())

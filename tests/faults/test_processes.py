"""Workers beside each other: none waits for a dead one, whoever killed it, and none holds what is another's."""

from __future__ import annotations

import ast
import contextlib
import os
import random
import resource
import signal
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
from marlvec.testing.scripted import CounterEnv, decode, decode_reward
from marlvec.vector import cores as limits
from marlvec.vector.workers.fork_server import ForkServerClient, ensure_server
from tests.faults.harness.programs import alive, run, wait_gone
from tests.waiting import LONG, until, within

CONTEXTS = ("forkserver", "spawn", "fork")


def acts(n: int, k: int = 1) -> Any:
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


class Witness(CounterEnv):
    """Says at its orderly end that it came to it."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(**options)
        self.folder = folder

    def close(self) -> None:
        (self.folder / f"closed by {os.getpid()}").touch()


@pytest.mark.slow("kills, stops or starts many workers")
@pytest.mark.fault("A4")
@pytest.mark.parametrize("context", ["forkserver", "fork"])
def test_a_worker_killed_at_any_moment_never_blocks_its_peer(context: str, tmp_path: Path) -> None:
    draw = random.Random(4)
    for _ in range(5):
        envs = AsyncVectorEnv([partial(Witness, tmp_path, env_index=i) for i in range(2)], context=context)
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


class Murderous(CounterEnv):
    """Kills the worker whose id is in the file named after it, as soon as its third step begins."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(**options)
        self.order = folder / str(self.world.env_index)

    def step(self, actions: dict[str, Any]) -> Any:
        if self.world.t == 2:
            os.kill(int(self.order.read_text()), signal.SIGKILL)
        return super().step(actions)


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=4)
@pytest.mark.fault("A13")
@pytest.mark.fault("A12")
@pytest.mark.parametrize("n", [1, 2, 5, 13])
def test_workers_that_kill_each_other(n: int, tmp_path: Path) -> None:
    """Each one its neighbour, all at once. (The fixture around every test looks for zombies.)"""
    draw = random.Random(n)
    for _ in range(1 if n > 5 else 2):
        envs = AsyncVectorEnv([partial(Murderous, tmp_path, env_index=i) for i in range(n)], num_workers=n)
        pids = envs.worker_pids
        for i, victim in enumerate(draw.sample(pids, n)):
            (tmp_path / str(i)).write_text(str(victim))
        envs.reset()
        envs.step(acts(n))
        envs.step(acts(n))
        with pytest.raises(WorkerDied, match="SIGKILL"):
            envs.step(acts(n))
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
        with pytest.raises(KeyboardInterrupt):
            AsyncVectorEnv(factories, num_workers=3, context=context)
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
            with pytest.raises(ResourceError, match="worker at that depth"):
                AsyncVectorEnv([CounterEnv], context=context)
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
from tests.faults.test_crashes import process_of, told
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

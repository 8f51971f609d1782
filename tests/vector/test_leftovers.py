"""After the end nothing is left: no process, no open file, no memory; and before it, nothing lies about.

The fixture around every test looks for what is left behind, too.
"""

from __future__ import annotations

import copy
import fcntl
import multiprocessing
import os
import pickle
import re
import signal
import stat
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest

import marlvec
from marlvec import AsyncVectorEnv, Collector, Recorder, RecordVideo, VectorEnv, external
from marlvec.cli.game import PageServer
from marlvec.collect.loggers import JSONLinesLogger, TensorBoardLogger
from marlvec.distributed import Collectors, Place
from marlvec.envs.video import VideoFile, find_ffmpeg
from marlvec.errors import ClosedError, EnvRaised, MarlvecError, NothingPendingError, SerialisationError, WorkerDied
from marlvec.policies import RandomPolicy
from marlvec.testing import CounterEnv, ExitingEnv, HangingEnv, RaisingEnv, decode
from marlvec.vector.workers import channel as memory
from marlvec.vector.workers import pool as worker_process
from tests.faults.harness.programs import alive, wait_gone
from tests.leaks import Snapshot, leaks
from tests.painter import SMALLEST, PainterEnv, frames_of
from tests.vector.support.kinds import BACKENDS, acts, hooked, vectorize
from tests.vector.support.reference import refused
from tests.waiting import LONG, Gate, until, within

CONTEXTS = ("forkserver", "spawn", "fork")


def pids_of(envs: VectorEnv) -> tuple[int, ...]:
    return envs.worker_pids if isinstance(envs, AsyncVectorEnv) else ()


def gone(pids: tuple[int, ...] | list[int]) -> bool:
    """Whether these processes have ended, and have been waited for."""
    return not any(Path("/proc", str(pid)).exists() for pid in pids)


def end(envs: VectorEnv, how: str) -> None:
    """Bring the vectorizer into a state from which it has to be closed."""
    if how == "made":
        return
    envs.reset(seed=0)
    if how == "stepped":
        for _ in range(7):
            envs.step(acts(envs))
    elif how == "env raised":
        refused(EnvRaised, "", envs.step, acts(envs))
    elif how == "worker died":
        refused(WorkerDied, "", envs.step, acts(envs))
    elif how == "step pending":
        envs.step_send(acts(envs))
    elif how == "reset pending":
        envs.reset_send(seed=1)
    elif how == "send pending":
        envs.send(acts(envs)[1:], [1, 2])
    elif how == "half received":
        envs.send(acts(envs))
        envs.recv(1)
    else:
        assert how == "reset"


STRIKING: dict[str, Any] = {"env raised": RaisingEnv, "worker died": ExitingEnv}
ENDS = ("made", "reset", "stepped", "step pending", "reset pending", "send pending", "half received", *STRIKING)
PLACES = [*(("async", context) for context in CONTEXTS), ("file", "forkserver"), ("sync", None)]
CLOSINGS = ("twice", "with", "with an error")


@pytest.mark.many_processes
@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=8)
@pytest.mark.checklist(30)
@pytest.mark.fault("B1")
@pytest.mark.parametrize(
    ("backend", "context", "how", "closing"),
    [
        (*place, how, CLOSINGS[(p + h) % 3])  # each state is closed in each way, somewhere
        for p, place in enumerate(PLACES)
        for h, how in enumerate(ENDS)
        if (how != "worker died" if place[0] == "sync" else place[1] != "spawn" or how == "step pending")
    ],
)
def test_close_leaves_nothing_whatever_came_before(backend: str, context: str | None, how: str, closing: str) -> None:
    before = Snapshot.take()
    striking = {"only_env": 1} if how in STRIKING else {}
    factories = [partial(STRIKING.get(how, CounterEnv), env_index=i, **striking) for i in range(3)]
    options = {} if context is None else {"context": context}
    envs = vectorize(backend, factories, **options)
    pids = pids_of(envs)
    end(envs, how)
    with within(4, usual=0.1):  # less than the five seconds that it has, so nobody had to be killed
        if closing == "with an error":
            with pytest.raises(LookupError, match="mine"), envs:
                raise LookupError("mine")
        elif closing == "with":
            with envs as same:
                assert same is envs
        else:
            envs.close()
        if closing == "twice":
            envs.close()
            with envs:
                assert envs.closed
    assert envs.closed
    assert gone(pids)
    refused(ClosedError, "", envs.reset)
    del envs
    assert leaks(before) == []


@pytest.mark.many_processes
@pytest.mark.slow("kills, stops or starts many workers")
@pytest.mark.checklist(30)
@pytest.mark.fault("B3")
@pytest.mark.parametrize(
    ("where", "context"), [("step", "spawn"), ("step", "fork"), ("reset", "forkserver"), ("close", "forkserver")]
)
def test_close_does_not_wait_for_an_env_that_hangs(where: str, context: str) -> None:
    factories = [partial(HangingEnv, env_index=i, where=where, only_env=1) for i in range(3)]
    envs = AsyncVectorEnv(factories, num_workers=3, context=context)
    pids = envs.worker_pids
    if where == "reset":
        envs.reset_send()
    else:
        envs.reset()
    if where == "step":
        envs.step_send(acts(envs))
    with within(4, usual=0.35):  # and not the five seconds of its default
        envs.close(timeout=0.3)
    assert gone(pids)


@pytest.mark.many_processes
@pytest.mark.checklist(30)
@pytest.mark.fault("B3")
def test_close_of_a_stopped_worker_and_of_one_that_ignores_sigterm() -> None:
    class Deaf(HangingEnv):
        def strike(self) -> None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            super().strike()

    envs = AsyncVectorEnv([partial(CounterEnv, env_index=0), partial(Deaf, env_index=1)], num_workers=2)
    pids = envs.worker_pids
    envs.reset()
    envs.step_send(acts(envs))
    os.kill(pids[0], signal.SIGSTOP)
    with within(4, usual=0.25):
        envs.close(timeout=0.2)
    assert gone(pids)


@pytest.mark.many_processes
@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=2)
@pytest.mark.fault("F5")
@pytest.mark.fault("F7")
@pytest.mark.parametrize("context", CONTEXTS)
def test_shared_memory_has_no_name_is_private_and_cannot_change_its_size(
    context: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # the workers'
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # and ours: others' tests use the common one meanwhile
    seen: list[tuple[int, int, str, int]] = []
    grow = memory.grow

    def spy(fd: int, size: int, **more: Any) -> None:
        grow(fd, size, **more)
        for change in (0, size // 2, size * 2):
            refused(PermissionError, "", os.ftruncate, fd, change)
        status = os.fstat(fd)
        seals, name = fcntl.fcntl(fd, fcntl.F_GET_SEALS), str(Path(f"/proc/self/fd/{fd}").readlink())
        seen.append((stat.S_IMODE(status.st_mode), seals, name, status.st_size))
        assert status.st_blocks * 512 >= size, "allocated for real"

    monkeypatch.setattr(memory, "grow", spy)
    folders = [Path("/dev/shm"), tmp_path]
    before = [set(folder.iterdir()) for folder in folders]
    maps = Path("/proc/self/maps")
    mapped = maps.read_text().count("/memfd:marlvec")
    with AsyncVectorEnv([partial(CounterEnv, env_index=i) for i in range(4)], num_workers=2, context=context) as envs:
        envs.reset()
        envs.step(acts(envs))
        ((mode, seals, name, size),) = seen
        assert mode == 0o600
        assert seals == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        assert (name, size > 0) == ("/memfd:marlvec (deleted)", True)
        for pid in envs.worker_pids:
            lines = [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/memfd:marlvec" in line]
            assert lines, "it is this memory that they write to"
            assert all(" rw-s " in line for line in lines), "shared"
            fds = [fd for fd in Path(f"/proc/{pid}/fd").iterdir() if "/memfd:marlvec" in str(fd.readlink())]
            assert [stat.S_IMODE(fd.stat().st_mode) for fd in fds] in ([], [0o600]), "at most Python's own, of the map"
        assert maps.read_text().count("/memfd:marlvec") == mapped + 1
        for folder, names in zip(folders, before, strict=True):
            new = [path for path in set(folder.iterdir()) - names if "marlvec" in path.name]
            assert new == []
        others = {line.split()[-1] for line in Path(f"/proc/{envs.worker_pids[0]}/maps").read_text().splitlines()}
        assert not [line for line in others if line.startswith(("/dev/shm", "/dev/zero"))]
    assert gone(envs.worker_pids)
    del envs
    assert maps.read_text().count("/memfd:marlvec") == mapped, "unmapped with the last array over it"


def sleep_long() -> None:
    time.sleep(1000)


class Parental(HangingEnv):
    """Starts processes of all kinds, and tells their ids in its infos."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        obs, infos = super().reset(seed, options)
        shell = subprocess.Popen(["sh", "-c", "sleep 1000 & sleep 1000"])
        process = multiprocessing.get_context("fork").Process(target=sleep_long)
        process.start()
        return obs, {**infos, "children": np.array([shell.pid, process.pid or 0])}


@pytest.mark.many_processes
@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=3)
@pytest.mark.fault("A17")
@pytest.mark.parametrize(
    ("context", "ending"),
    [
        *(("forkserver", ending) for ending in ("close", "close, hung", "killed", "killed in a step")),
        ("spawn", "killed"),
        ("fork", "close"),
    ],
)
def test_what_an_env_starts_goes_with_it(context: str, ending: str) -> None:
    envs = AsyncVectorEnv([partial(Parental, env_index=i) for i in range(2)], num_workers=1, context=context)
    children = envs.reset()[1]["children"].ravel().tolist()
    try:
        assert not any(gone([pid]) for pid in children), "it may have them"
        if ending == "close, hung":
            envs.step_send(acts(envs))
        elif ending.startswith("killed"):
            if ending == "killed in a step":
                envs.step_send(acts(envs))
            os.kill(envs.worker_pids[0], signal.SIGKILL)
            with pytest.raises(WorkerDied, match="SIGKILL"):
                envs.step_fetch() if ending == "killed in a step" else envs.step(acts(envs))
    finally:
        envs.close(timeout=0.1 if ending == "close, hung" else 2)
    wait_gone(children, LONG)


def fork_and_step(first: Gate, others: Gate, env: Any, step: Any, actions: Any) -> Any:
    """Fork, and let the child go on as if it were the worker, when it may; the first one last."""
    if os.fork() == 0:
        (others if env.world.t else first).wait()
    return step(actions)


@pytest.mark.many_processes
@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=4)
@pytest.mark.fault("A19")
@pytest.mark.parametrize(
    ("context", "shared_memory"), [("forkserver", True), ("forkserver", False), ("spawn", True), ("fork", False)]
)
def test_a_child_that_comes_back_as_a_worker_ends_without_a_word(
    context: str, shared_memory: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with (
        Gate(tmp_path) as first,
        Gate(tmp_path) as others,
        AsyncVectorEnv(
            [partial(hooked, CounterEnv, hooks={"step": partial(fork_and_step, first, others)})],
            context=context,
            shared_memory=shared_memory,
            copy=False,
        ) as envs,
    ):
        envs.reset()
        for t in range(1, 5):
            obs = envs.step(acts(envs, t))[0]
            assert decode(obs[0, 1]) == (0, 0, 0, t, 1), "one reply to each request"
            refused(NothingPendingError, "", envs.step_fetch, timeout=0.02)
        (worker,) = envs.worker_pids
        children = list(map(int, Path(f"/proc/{worker}/task/{worker}/children").read_text().split()))
        assert len(children) == 4
        others.let_through(3)
        until(lambda: len(alive(children)) == 1)
        first.let_through()
        wait_gone(children, LONG)
        refused(NothingPendingError, "", envs.step_fetch, timeout=0.02)
        assert decode(obs[0, 1]) == (0, 0, 0, 4, 1), "nothing of an earlier step is written over the rows"
        assert decode(envs.step(acts(envs))[0][0, 1]) == (0, 0, 1, 0, 1), "the next ones are right, too"
        (process,) = (process for process in worker_process._workers if process.pid == worker)
        assert process.crash_report() == "", "what became of them is no crash of the worker"
    assert capfd.readouterr().err == ""


@pytest.mark.many_processes
@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=3)
@pytest.mark.fault("A14")
@pytest.mark.parametrize("context", CONTEXTS)
def test_a_death_during_construction_takes_the_other_workers_along(context: str, tmp_path: Path) -> None:
    """The fixture around every test sees to it that no process and no open file is left."""

    class Fails(CounterEnv):
        def __init__(self, how: str, **options: Any) -> None:
            assert os.getpid() != here, "it must never be built in the parent"
            super().__init__(**options)
            (tmp_path / str(os.getpid())).touch()
            if how == "exit":
                os._exit(5)
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "sys.exit":
                raise SystemExit(6)
            if how == "raise":
                raise OSError(28, "No space left on device")

    here = os.getpid()
    deaths = {"exit": 5, "kill": -9, "sys.exit": 6}
    for how in ("exit", "kill", "sys.exit", "raise") if context != "spawn" else ("kill", "raise"):
        factories = [partial(Fails, how if i == 3 else "", env_index=i) for i in range(4)]
        caught = refused(MarlvecError, "", AsyncVectorEnv, factories, num_workers=2, context=context)
        if how == "raise":
            assert isinstance(caught, EnvRaised)
            assert caught.env_ids == (3,)
            assert isinstance(caught.__cause__, OSError)
            assert caught.__cause__.errno == 28
        else:
            assert isinstance(caught, WorkerDied)
            assert caught.env_ids == (2, 3)
            assert caught.exitcode == deaths[how]
            assert "while it built its envs" in str(caught)
        assert not [p for p in tmp_path.iterdir() if Path("/proc", p.name).exists()], "all of them are gone"


# Objects of one process: a fork of it, pickle and copy refuse them with a typed error, at once.


def in_fork(call: Callable[[], Any]) -> str:
    """Return what a call in a forked process gave: its error's class and text, or "no error"."""
    ours, theirs = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks of processes with threads
        child = os.fork()
    if not child:
        text = "no error"
        try:
            signal.alarm(60)  # ends a child that hangs
            call()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        finally:
            os.write(theirs, text.encode())
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as said:
        text = said.read()
    os.waitpid(child, 0)
    return text


@contextmanager
def made(backend: str) -> Iterator[Any]:
    env = "simple_spread" if backend == "native" else "CartPole-v1"
    with marlvec.make(env, num_envs=2, backend=backend) as envs:
        yield envs


@pytest.mark.parametrize("backend", [*BACKENDS, "native", "pool"])
def test_a_fork_can_neither_collect_nor_wait_for_workers_of_its_parent(backend: str) -> None:
    with made(backend) as envs, made("sync" if backend == "native" else backend) as others:
        collector = Collector(envs, RandomPolicy())
        collector.collect(env_steps=4)
        calls: dict[str, Callable[[], Any]] = {
            "collect()": lambda: collector.collect(env_steps=4),
            "evaluate()": lambda: collector.evaluate(1, others),
            "reset()": collector.reset,
            "background()": lambda: collector.background(env_steps=4),
        }
        for name, call in calls.items():
            assert in_fork(call).startswith(f"StateError: {name} in process"), name
        with collector.background(env_steps=4) as batches:
            next(batches)
            assert in_fork(lambda: next(batches)).startswith("StateError: next() in process")
            assert in_fork(batches.close) == "no error"
            next(batches)
        collector.collect(env_steps=4)
        envs.reset()
        actions = envs.random_action()
        for call in (lambda: envs.step(actions), envs.reset, lambda: envs.render()):
            text = in_fork(call)
            if backend in ("sync", "native"):  # they have all that they need
                assert "fork of process" not in text
            else:
                assert text.startswith("StateError: ")
                assert f"a fork of process {os.getpid()}, which made this {type(envs).__name__}" in text
        assert in_fork(envs.close) == "no error"
        envs.step(actions)


def test_a_fork_leaves_recorders_servers_and_clients_to_its_parent(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    with ExitStack() as stack:
        envs = stack.enter_context(made("sync"))
        recorder = stack.enter_context(Recorder(tmp_path / "data"))
        collector = Collector(envs, RandomPolicy(), callbacks=[recorder])
        batch = collector.collect(env_steps=4)
        for call in (lambda: recorder.write(batch), recorder.flush):
            assert in_fork(call).startswith("StateError: Recorder(")
        assert in_fork(recorder.close) == "no error"
        outside = stack.enter_context(external.make("CartPole-v1", num_envs=2))
        driver = external.ExternalEnv(outside)
        server = stack.enter_context(external.Server(outside, token="a" * 32))
        client = stack.enter_context(external.Client(server.url, token="a" * 32, timeout=20))
        texts = {
            "an episode": [client.start_episode, driver.start_episode],
            "publish()": [lambda: server.publish(RandomPolicy())],
            "reset()": [outside.reset],
        }
        for name, calls in texts.items():
            for call in calls:
                assert in_fork(call).startswith(f"StateError: {name} in process"), name
        assert [in_fork(one.close) for one in (client, server)] == ["no error"] * 2
        client.start_episode()  # still connected
        collector.collect(env_steps=4)
    assert marlvec.load_dataset(tmp_path / "data").env_steps == 8


def test_a_fork_writes_nothing_into_its_parents_logs(tmp_path: Path) -> None:
    """Both would write into one file, and a fork's close would repeat what its parent has not written yet."""
    pytest.importorskip("tensorboard")
    board, lines = TensorBoardLogger(tmp_path / "board"), JSONLinesLogger(tmp_path / "lines")
    (events,) = (tmp_path / "board").iterdir()
    with board, lines, made("sync") as envs:
        collector = Collector(envs, RandomPolicy(), callbacks=[board, lines], seed=0)
        batch = collector.collect(episodes=2)
        record = collector.metrics.episodes[0]
        lines.on_episode_end(None, record)  # type: ignore[arg-type]  # a line that waits
        before = events.read_bytes(), (tmp_path / "lines").read_bytes()
        calls: dict[str, Callable[[], Any]] = {
            "TensorBoardLogger": lambda: board.on_sample_end(batch, collector.metrics),
            "JSONLinesLogger": lambda: lines.on_episode_end(None, record),  # type: ignore[arg-type]
        }
        for name, call in calls.items():
            assert re.match(rf"StateError: .*, which made this {name}", in_fork(call)), name
        for again in (lines.on_sample_end, lines.state_dict):
            assert in_fork(again).startswith("StateError: ")
        assert [in_fork(one.close) for one in (board, lines)] == ["no error"] * 2
        assert (events.read_bytes(), (tmp_path / "lines").read_bytes()) == before
        collector.collect(episodes=1)
        assert len((tmp_path / "lines").read_text().splitlines()) == collector.metrics.episodes_total + 1


def test_a_fork_leaves_videos_to_its_parent(tmp_path: Path) -> None:
    """It would give its own the same names."""
    pytest.importorskip("imageio_ffmpeg")
    record = RecordVideo(tmp_path)
    with marlvec.make(
        partial(PainterEnv, length=3), 1, backend="sync", render_mode="rgb_array", wrappers=[record]
    ) as envs:
        envs.reset()
        for k in range(2):  # before there is a file, and while there is one
            for name, call in {"step()": lambda: envs.step(envs.random_action()), "reset()": envs.reset}.items():
                text = in_fork(call)
                assert f"StateError: RecordVideo: {name} in process" in text, k
                assert "call make() in each process, with folders of its own" in text
            assert in_fork(envs.close) == "no error"
            envs.step(envs.random_action())
        for _ in range(2):
            envs.step(envs.random_action())
    complete = tmp_path / "painter-env0-episode0.mp4"
    assert len(frames_of(complete)) == 4
    video = VideoFile(tmp_path / "x.mp4", 30, find_ffmpeg())
    video.write(np.zeros((*SMALLEST, 3), np.uint8))
    for name, call in {
        "write()": lambda: video.write(np.zeros((*SMALLEST, 3), np.uint8)),
        "finish()": video.finish,
    }.items():
        assert in_fork(call).startswith(f"StateError: video x.mp4: {name} in process")
    assert in_fork(video.discard) == "no error"
    video.finish()
    assert len(frames_of(tmp_path / "x.mp4")) == 1


def test_a_fork_leaves_the_page_to_its_parent() -> None:
    """Its thread would never answer a fork that waits for its end."""
    with PageServer("random", "ws://127.0.0.1:8765/") as page:
        assert in_fork(page.close) == "no error"
        assert in_fork(page.__enter__).startswith("StateError: with PageServer in process")
        with urlopen(page.url) as answer:
            assert answer.status == 200


def test_a_fork_leaves_many_collectors_to_its_parent() -> None:
    with Collectors(build_collector, 1, "sync", seed=0) as collectors:
        collectors.collect(env_steps=4)
        assert in_fork(lambda: collectors.collect(env_steps=4)).startswith("StateError: ")
        assert "which made this Collectors" in in_fork(lambda: collectors.collect(env_steps=4))
        assert in_fork(collectors.close) == "no error"
        collectors.collect(env_steps=4)


def build_collector(place: Place) -> Collector:
    return Collector(marlvec.make("CartPole-v1", 1, backend="sync"), RandomPolicy(), seed=place.seed)


@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy], ids=["pickle", "copy", "deepcopy"])
def test_pickle_and_copy_say_what_to_do_instead(how: Callable[[Any], Any], tmp_path: Path) -> None:
    with ExitStack() as stack:
        every = [stack.enter_context(made(backend)) for backend in [*BACKENDS, "native", "pool"]]
        collector = Collector(every[0], RandomPolicy())
        outside = stack.enter_context(external.make("CartPole-v1", num_envs=2))
        others = [collector, collector.background(env_steps=4), outside, external.ExternalEnv(outside)]
        server = stack.enter_context(external.Server(outside, token="a" * 32))
        others += [server, stack.enter_context(external.Client(server.url, token="a" * 32, timeout=20))]
        others += [stack.enter_context(Collectors(build_collector, 1, "sync", seed=0))]
        others += [stack.enter_context(Recorder(tmp_path / "data"))]
        others += [stack.enter_context(JSONLinesLogger(tmp_path / "lines"))]
        others += [stack.enter_context(TensorBoardLogger(tmp_path / "board"))]
        for one in [*every, *others]:
            refused(SerialisationError, f"^{type(one).__name__} cannot be pickled or copied: .*; .* in each", how, one)

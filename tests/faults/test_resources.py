"""Where the machine has not enough: told before anything starts, or after all that was started is gone again.

The fixture around every test looks for processes, files and memory that were left behind.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from marlvec import AsyncVectorEnv, make
from marlvec.errors import ResourceError
from marlvec.testing.scripted import CounterEnv, SampledEnv
from marlvec.vector import cores as limits
from marlvec.vector.workers import channel as shared_memory
from marlvec.vector.workers import fork_server as forkserver
from marlvec.vector.workers import pool as worker_process
from marlvec.vector.workers.pool import ensure_server
from tests.faults.harness.programs import mounted, run

CONTEXTS = ("forkserver", "spawn", "fork")


@contextmanager
def limited(which: int, soft: int) -> Iterator[None]:
    before = resource.getrlimit(which)
    resource.setrlimit(which, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(which, before)


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd")) - 1  # noqa: PTH208  (names are wanted; one is the listing's own)


def limit_that_leaves(free: int) -> int:
    """The limit on descriptors under which so many can be opened."""
    used = set(map(int, os.listdir("/proc/self/fd")))  # noqa: PTH208
    return next(n for n in range(10_000) if n - len([fd for fd in used if fd < n]) == free + 1)


def works(context: str) -> None:
    """After whatever happened: the same fork server starts workers, and they step."""
    server = ensure_server()
    with AsyncVectorEnv([CounterEnv, CounterEnv], num_workers=2, context=context) as envs:
        envs.reset()
        envs.step(np.ones((2, 3), np.int64))
    assert ensure_server() is server


def started(*_: Any, **__: Any) -> Any:
    raise AssertionError("a process was started")


# --- file descriptors


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=3)
@pytest.mark.fault("F3")
@pytest.mark.parametrize("context", CONTEXTS)
def test_too_few_descriptors_are_known_before_anything_starts(context: str, monkeypatch: pytest.MonkeyPatch) -> None:
    works(context)
    known = open_fds()
    with limited(resource.RLIMIT_NOFILE, max(64, known + 40)), monkeypatch.context() as patch:
        patch.setattr(os, "fork", started)
        patch.setattr(worker_process, "pair", started)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        words = rf"64 workers need 3 file descriptors.*: {known + 1 + 3 * 64 + 16}, but this process may have {soft}\."
        with pytest.raises(ResourceError, match=words) as caught:
            AsyncVectorEnv([CounterEnv] * 64, num_workers=64, context=context)
        assert caught.value.errno == errno.EMFILE
        assert f"ulimit -n` or resource.setrlimit, up to {hard}" in str(caught.value)
        assert "num_workers=" in str(caught.value)
    assert open_fds() == known
    works(context)


HARD_LIMIT = """
from marlvec.vector import cores as limits
limit = len(os.listdir("/proc/self/fd")) + 16 + SPARE
resource.setrlimit(resource.RLIMIT_NOFILE, (limit + LESS, limit))
for n in (12, 2):
    try:
        marlvec.make(CounterEnv, n, num_workers=n).close()
        print(n, "started")
    except ResourceError as error:
        print(n, str(error).split(f"have {limit + LESS}. ")[1].replace(str(limit), "HARD"))
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
print(limits._advice(24).split(". ")[1].replace(str(limit), "HARD"))
"""
NOT_BY_US = "The hard limit is HARD: only an administrator, or the settings of a container, can raise it; or "


@pytest.mark.fault("F3")
@pytest.mark.parametrize(("spare", "less"), [(8, 0), (8, -1), (2, 0)])
def test_advice_under_a_hard_limit_that_is_too_low(spare: int, less: int, tmp_path: Path) -> None:
    """No advice to raise a limit to what it is already, or to what does not suffice, and none that cannot work."""
    lines = run(HARD_LIMIT.replace("SPARE", str(spare)).replace("LESS", str(less)), tmp_path)
    if spare == 2:
        close = f"{NOT_BY_US}close files, or use backend='sync', 'thread' or 'native': there is no room for a worker"
        assert lines[:2] == [f"12 {close}", f"2 {close}"]
    else:
        assert lines[:2] == [f"12 {NOT_BY_US}use fewer workers: num_workers=2 at most", "2 started"]
    assert lines[2] == f"{NOT_BY_US}use fewer workers."


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=3)
@pytest.mark.fault("F3")
@pytest.mark.parametrize("context", CONTEXTS)
def test_descriptors_that_run_out_on_the_way(context: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of them is the first that cannot be had."""
    monkeypatch.setattr(limits, "check_descriptors", lambda *_: None)
    works(context)
    for free in (0, 1, 2, 3, 4, 5, 6, 9, 10) if context != "spawn" else (1, 9):
        known = open_fds()
        with limited(resource.RLIMIT_NOFILE, limit_that_leaves(free)):
            with pytest.raises(ResourceError, match=r"may have \d+ files open\. Raise the limit") as caught:
                AsyncVectorEnv([CounterEnv] * 6, num_workers=6, context=context)
            assert isinstance(caught.value.__cause__, OSError)
        assert open_fds() == known
    works(context)


@pytest.mark.fault("F3")
def test_a_fork_server_without_descriptors_says_so(tmp_path: Path) -> None:
    server = ensure_server()._process.pid
    before = resource.prlimit(server, resource.RLIMIT_NOFILE)
    try:
        for limit in (5, 7, 9):
            resource.prlimit(server, resource.RLIMIT_NOFILE, (limit, before[1]))
            with pytest.raises(ResourceError, match="Too many open files"):
                AsyncVectorEnv([CounterEnv] * 2)
    finally:
        resource.prlimit(server, resource.RLIMIT_NOFILE, before)
    works("forkserver")


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=3)
@pytest.mark.fault("F3")
@pytest.mark.parametrize("context", CONTEXTS)
def test_a_worker_takes_three_descriptors(context: str) -> None:
    counts = []
    for n in (1, 5):
        before = open_fds()
        with AsyncVectorEnv([CounterEnv] * n, num_workers=n, context=context):
            counts.append(open_fds() - before)
    assert (counts[1] - counts[0]) / 4 <= 3
    assert counts[0] <= 3 + 16


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=3)
@pytest.mark.fault("F3")
@pytest.mark.fault("F12")
@pytest.mark.parametrize("number", [errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EMFILE])
@pytest.mark.parametrize("call", ["pipe", "memfd_create", "posix_fallocate"])
def test_whatever_the_kernel_refuses(call: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, calls = getattr(os, call), []

    def refuse(*arguments: Any) -> Any:
        calls.append(arguments)
        if call == "posix_fallocate" or len(calls) == 3:
            raise OSError(number, os.strerror(number))
        return whole(*arguments)

    monkeypatch.setattr(os, call, refuse)
    for context in ("forkserver", "fork"):
        calls.clear()
        with pytest.raises(ResourceError, match=os.strerror(number)) as caught:
            AsyncVectorEnv([CounterEnv] * 3, num_workers=3, context=context)
        assert caught.value.errno == number
    monkeypatch.undo()
    works("forkserver")


# --- processes


NO_MORE_PROCESSES = """
from tests.faults.test_resources import bind_to_limits
bind_to_limits()
from marlvec.vector.workers import fork_server as server
def bounded(n):
    resource.setrlimit(resource.RLIMIT_NPROC, (n, resource.getrlimit(resource.RLIMIT_NPROC)[1]))
def fds():
    found = set(os.listdir("/proc/self/fd"))
    return found if server._server is None else found - {str(server._server.sock.fileno())}
def attempt(context, n=12):
    before = fds()
    try:
        marlvec.make(CounterEnv, n, num_workers=n, context=context).close()
    except ResourceError as error:
        print(context, error.errno, "num_workers" in str(error), str(error).split(":")[0])
    else:
        print(context, "started")
    assert fds() == before, (fds(), before)
def children():
    return open(f"/proc/self/task/{os.getpid()}/children").read().split()
bounded(1)
attempt("forkserver")
print(len(children()))
bounded(FREE)
attempt("forkserver")
attempt("spawn")
(first,) = children()
attempt("forkserver", 2)
attempt("fork")
attempt("fork", 2)
assert children() == [first], children()
"""


def bind_to_limits() -> None:
    """RLIMIT_NPROC does not bind root, nor those with certain capabilities: become somebody else, with root's files."""
    import ctypes

    if os.getuid() != 0:
        return
    os.setresuid(10_000 + os.getpid(), 0, 0)  # one that nobody has, as the limit counts all of a user's processes
    libc = ctypes.CDLL(None, use_errno=True)
    head = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable, of the first 32 capabilities; the same of more
    assert libc.capget(head, sets) == 0
    for capability in (21, 24):  # CAP_SYS_ADMIN, CAP_SYS_RESOURCE
        assert libc.prctl(24, capability, 0, 0, 0) == 0  # PR_CAPBSET_DROP: not even after exec
        for k in range(3):
            sets[k] &= ~(1 << capability)
    assert libc.capset(head, sets) == 0


@pytest.mark.slow("kills, stops or starts many workers")
@pytest.mark.fault("F4")
def test_no_more_processes(tmp_path: Path) -> None:
    """In the parent and in the fork server: an error once those that were started are gone; fewer can be started."""
    if os.getuid() != 0:
        pytest.skip("the limit counts all processes of a user, of which there may be any number")
    # The program, the fork server, and three workers.
    lines = run(NO_MORE_PROCESSES.replace("FREE", "5"), tmp_path)
    eagain = f"{errno.EAGAIN} True could not get a"
    assert lines == [
        f"forkserver {eagain} fork server",
        "0",
        f"forkserver {eagain} worker process",
        f"spawn {eagain} worker process",
        "forkserver started",
        f"fork {eagain} worker process",
        "fork started",
    ]


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=2)
@pytest.mark.fault("F4")
@pytest.mark.parametrize("after", [0, 2])
def test_a_fork_that_is_refused(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For whatever reason, and where no limit can be set; the fork server passes on what it was told."""
    whole, calls = os.fork, []

    def refuse() -> int:
        calls.append(1)
        if len(calls) > after:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return whole()

    monkeypatch.setattr(os, "fork", refuse)
    with pytest.raises(
        ResourceError, match=r"temporarily unavailable.*limit of processes is reached.*num_workers="
    ) as told:
        AsyncVectorEnv([CounterEnv] * 4, num_workers=4, context="fork")
    assert told.value.errno == errno.EAGAIN
    fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(6)]
    calls += [1, 1]
    with socket.socket() as sock:
        answer = forkserver._answer(sock, {"do": "start"}, fds, None)  # type: ignore[arg-type]  # not come to
    assert isinstance(answer, BlockingIOError)
    monkeypatch.undo()
    works("fork")


@pytest.mark.fault("F4")
def test_a_fork_server_that_is_killed_is_replaced() -> None:
    server = ensure_server()
    server._process.kill()
    server._process.wait()
    with AsyncVectorEnv([CounterEnv]) as envs:
        envs.reset()
    assert ensure_server() is not server


# --- memory


def pixels(n: int) -> list[Any]:
    return [lambda: SampledEnv(Box(0, 255, (64, 64, 3), np.uint8), Discrete(3))] * n


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=3)
@pytest.mark.fault("F2")
@pytest.mark.parametrize("context", CONTEXTS)
def test_memory_is_looked_at_before_it_is_taken(context: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "available_memory", lambda: (100_000, "this machine"))
    monkeypatch.setattr(os, "posix_fallocate", started)
    with pytest.raises(ResourceError, match=r"need [\d,]{7,} bytes.*this machine has 100,000 left\. Use") as caught:
        AsyncVectorEnv(pixels(4), num_workers=2, context=context)
    assert caught.value.errno == errno.ENOMEM
    monkeypatch.undo()
    with AsyncVectorEnv(pixels(4), num_workers=2, context=context) as envs:
        envs.reset()


@pytest.mark.fault("F2")
def test_more_than_there_is_of_this_machine() -> None:
    there, where = limits.available_memory()
    assert there is not None
    assert 1 << 20 < there < 1 << 50
    assert where
    fd = shared_memory.create()
    try:
        with pytest.raises(ResourceError, match="bytes of memory, but"):
            shared_memory.grow(fd, 1 << 50)
        assert os.fstat(fd).st_blocks == 0
        shared_memory.grow(fd, 1 << 16)
        assert os.fstat(fd).st_size == 1 << 16
    finally:
        os.close(fd)


TOO_MANY = """
from marlvec import external
from marlvec.vector import cores as limits
from gymnasium.spaces import Box, Discrete
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, resource.RLIM_INFINITY))
def attempt(env, **options):
    make = external.make if options.pop("outside", False) else marlvec.make
    try:
        make(env, **options)
    except ResourceError as error:
        print(error.errno, error)
    else:
        print("made")
if PRECHECKED:
    attempt("simple_spread", num_envs=2 * 10**6, backend="native")  # more rows than there is
    attempt("simple_spread", num_envs=10**9, backend="native")
    attempt("simple_spread", num_envs=np.int64(10**18), backend="sync")
    attempt(CounterEnv, num_envs=10**9)
    attempt("simple_spread", num_envs=10**9, outside=True)
else:  # memory that cannot be had although it is there, as with a limit that is not known
    limits.available_memory = lambda: (None, "")
    attempt("simple_spread", num_envs=2 * 10**6, backend="native")
    attempt({"a": (Box(0, 1, (1 << 20,)), Discrete(2))}, num_envs=2000, outside=True)
"""


@pytest.mark.slow("programs of their own")
@pytest.mark.fault("F2")
def test_too_many_envs_are_refused_before_memory_is_taken(tmp_path: Path) -> None:
    rows, *others = run(TOO_MANY.replace("PRECHECKED", "True"), tmp_path)
    left = r"but this process, within its limit of 2,147,483,648 \(`ulimit -v`\), has [\d,]{9,} left\. Use fewer envs"
    assert re.match(rf"12 the rows of 2,000,000 envs of mpe/simple_spread_v3 need 1,890,000,000 bytes .*, {left}", rows)
    for line, digits in zip(others, (9, 18, 9, 9), strict=True):
        need = f"num_envs={10**digits:,}: so many envs of any kind need {200 * 10**digits:,} bytes of memory"
        assert re.match(rf"12 {need}, {left}", line)


@pytest.mark.slow("programs of their own")
@pytest.mark.fault("F2")
def test_memory_that_runs_out_in_the_middle_of_make_is_named(tmp_path: Path) -> None:
    native, outside = run(TOO_MANY.replace("PRECHECKED", "False"), tmp_path)
    assert re.match(r"12 the rows of 2,000,000 envs .*need .*1,890,000,000 bytes .*\(Unable to", native)
    assert re.match(r"12 the rows of 2,000 envs need 16,777,268,032 bytes .*\(Unable to", outside)


GIB = 1 << 30
STAT = "anon 1000\ninactive_file {}\nactive_file {}\ntotal_inactive_file {}\ntotal_active_file {}\n"
# Lines of /proc/self/cgroup, files per cgroup (limit, used, cached files half and half), and what is left.
CGROUPS: dict[str, tuple[str, dict[str, tuple[str, int, int]], int]] = {
    "none": ("0::/\n", {}, 8 * GIB),
    "v2": ("0::/job/step\n", {"job/step": (str(3 * GIB), 2 * GIB, GIB)}, 2 * GIB),
    "v2 without a limit": ("0::/job\n", {"job": ("max", 2 * GIB, GIB)}, 8 * GIB),
    "v2, above": ("0::/job/step\n", {"job": (str(GIB), GIB // 2, 0), "job/step": ("max", 1, 0)}, GIB // 2),
    "v2, full": ("0::/job\n", {"job": (str(GIB), 2 * GIB, 0)}, 0),
    "v2, a container": ("0::/\n", {".": (str(GIB), GIB // 4, 0)}, 3 * GIB // 4),
    "v1": ("3:cpu:/x\n4:memory:/x\n0::/\n", {"memory/x": (str(2 * GIB), GIB, 0)}, GIB),
    "v1, a container": ("4:memory:/docker/1f\n", {"memory": (str(2 * GIB), GIB, GIB // 2)}, 3 * GIB // 2),
    "v1 without a limit": ("4:memory:/\n", {"memory": (str((1 << 63) - 4096), GIB, 0)}, 8 * GIB),
    "nonsense": ("4:memory:/x\n0::/y\n", {"memory/x": ("", 0, 0), "y": ("many", 0, 0)}, 8 * GIB),
}


@pytest.mark.fault("F2")
@pytest.mark.parametrize("name", CGROUPS)
def test_the_limit_of_a_container_counts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, groups, left = CGROUPS[name]
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(
        f"MemTotal: 99 kB\nMemAvailable: {7 << 20} kB\nSwapFree: {1 << 20} kB\nHugePages: 0\n"
    )
    (proc / "self" / "cgroup").write_text(lines)
    for path, (limit, used, cached) in groups.items():
        folder = root / path
        folder.mkdir(parents=True, exist_ok=True)
        one = path.startswith("memory")
        (folder / ("memory.limit_in_bytes" if one else "memory.max")).write_text(f"{limit}\n")
        (folder / ("memory.usage_in_bytes" if one else "memory.current")).write_text(f"{used}\n")
        (folder / "memory.stat").write_text(STAT.format(*[cached // 2] * 4))
    monkeypatch.setattr(limits, "_PROC", proc)
    monkeypatch.setattr(limits, "_CGROUPS", root)
    there, where = limits.available_memory()
    assert there == left
    assert where.startswith("this machine" if left == 8 * GIB else "its memory cgroup")
    limits.check_memory(left)
    with pytest.raises(ResourceError, match=f"has {left:,} left"):
        limits.check_memory(left + 1)
    monkeypatch.setattr(limits, "_PROC", tmp_path / "nowhere")
    limits.check_memory(1 << 60)  # not known is not too little


# --- files


IN_A_SMALL_PLACE = """
import tempfile
try:
    print(tempfile.gettempdir())
except FileNotFoundError:
    print("no folder for temporary files")
with open("/dev/shm/probe", "wb", buffering=0) as file:
    assert file.write(bytes(1 << 20)) < 1 << 20
from marlvec.testing.scripted import SampledEnv
from gymnasium.spaces import Box, Discrete
def pixels():
    return SampledEnv(Box(0, 255, (256, 256, 3), np.uint8), Discrete(3))
for context in ("forkserver", "spawn", "fork"):
    with marlvec.make(CounterEnv, 3, num_workers=2, context=context) as envs:
        play(envs)
    with marlvec.make(pixels, 8, num_workers=2, context=context) as envs:
        envs.reset(seed=0)
        obs, *_ = envs.step(envs.action_space.sample())
        print(obs.nbytes)
"""


@pytest.mark.slow("kills, stops or starts many workers")
@pytest.mark.fault("F1")
@pytest.mark.fault("F12")
def test_a_full_dev_shm_and_disks_that_cannot_be_written_to(tmp_path: Path) -> None:
    """There is nothing there that is needed: all three start methods work as ever."""
    mounts = "mount -t tmpfs -o size=64k tmpfs /dev/shm"
    for path in sorted({"/tmp", "/var/tmp", tempfile.gettempdir()}):
        mounts += f" && mount --rbind {path} {path} && mount -o remount,bind,ro {path}"
    lines = run(IN_A_SMALL_PLACE, tmp_path, mounted(mounts))
    assert lines == ["no folder for temporary files", *[str(8 * 2 * 256 * 256 * 3)] * 3]


def test_make_tells_the_same() -> None:
    with limited(resource.RLIMIT_NOFILE, 64 + open_fds()), pytest.raises(ResourceError, match="file descriptors"):
        make(CounterEnv, 64, num_workers=64)

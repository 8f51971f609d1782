"""What a test may not leave behind: open files, threads, processes, shared memory, a logger that is set otherwise.

    before = Snapshot.take()
    ...
    assert leaks(before) == []

A clean test costs a millisecond or less. Only where something looks left over is there waiting (a worker that was told
to end needs a moment) and a closer look at whose it is: the machine, its processes and /dev/shm are shared with others.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Snapshot", "leaks", "mark_descendants"]

GRACE_SECONDS = 20.0  # milliseconds, as a rule; but the machine may have other things to do
# The one process that outlives a test: every worker is its child, so that a parent with threads is never forked.
FORK_SERVER = "marlvec.vector.workers.fork_server"
# matplotlib keeps the fonts open that it has drawn with, a bounded number of them, for as long as the process lives.
CACHED_FILES = "/matplotlib/mpl-data/fonts/"
PROC = Path("/proc")
SHM = Path("/dev/shm")
_MARK = "MARLVEC_TEST_RUN"


def mark_descendants() -> None:
    """Let every process started from now on carry this run's mark, by which it is known after its parent is gone."""
    os.environ[_MARK] = f"{os.getpid()}-{uuid.uuid4().hex}"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is open and running at one moment.

    Attributes:
        fds: This process's open file descriptors, and what each one is open on.
        threads: This process's Python threads.
        pids: Every process of the machine; whose they are is asked only of those that are new later.
        shm: Names in /dev/shm.
        log: How marlvec's logger is set: tests that come later read what it says.
    """

    fds: dict[int, str]
    threads: frozenset[threading.Thread]
    pids: frozenset[int]
    shm: frozenset[str]
    log: dict[str, object]

    @classmethod
    def take(cls) -> Snapshot:
        """Look at everything now."""
        return cls(
            fds=_open_fds(),
            threads=frozenset(threading.enumerate()),
            pids=frozenset(int(name) for name in os.listdir(PROC) if name.isdigit()),
            shm=frozenset(_shared_memory()),
            log=_log_settings(),
        )


def leaks(before: Snapshot, grace: float = GRACE_SECONDS) -> list[str]:
    """What is there now that was not there before, one line each; an empty list once all of it is gone.

    Args:
        before: The state to compare with.
        grace: Seconds that what is left over has to go away.
    """
    found = _differences(before)
    if not found:
        return found
    # What only a reference cycle holds (a traceback with its frames) is not left behind.
    gc.collect()
    deadline = time.monotonic() + grace
    pause = 0.001
    while (found := _differences(before)) and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return found


def _differences(before: Snapshot) -> list[str]:
    now = Snapshot.take()
    return [
        *_new_fds(before.fds, now.fds),
        *(f"thread {thread.name!r}, daemon={thread.daemon}" for thread in now.threads - before.threads),
        *_new_processes(before.pids, now.pids),
        *(f"shared memory {SHM / name}" for name in sorted(now.shm - before.shm) if not _used_by_others(SHM / name)),
        *(
            f"the logger 'marlvec': {name} was {was!r}, is {now.log[name]!r}"
            for name, was in before.log.items()
            if now.log[name] != was
        ),
    ]


# --- logging


def _log_settings() -> dict[str, object]:
    log = logging.getLogger("marlvec")
    return {
        "level": log.level,
        "disabled": log.disabled,
        "propagate": log.propagate,
        "handlers": list(log.handlers),
        "filters": list(log.filters),
        "manager.disable": log.manager.disable,
    }


# --- file descriptors


def _open_fds() -> dict[int, str]:
    fds: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            fds[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    return fds


def _kind(target: str) -> str:
    """``socket:[4711]`` is a socket, ``/memfd:rows (deleted)`` a memfd; a file is itself."""
    if target.startswith("/memfd:"):
        return "memfd"
    return target.partition(":[")[0]


def _new_fds(before: dict[int, str], now: dict[int, str]) -> Iterator[str]:
    # By kind and number, since one may rightly be replaced by another: a test that kills the fork server gets a new
    # socket to a new server.
    grown = Counter(map(_kind, now.values())) - Counter(map(_kind, before.values()))
    for fd, target in now.items():
        if before.get(fd) != target and grown[_kind(target)] > 0 and CACHED_FILES not in target:
            yield f"file descriptor {fd} -> {target}"


# --- processes


@dataclass(frozen=True, slots=True)
class _Process:
    pid: int
    parent: int
    state: str
    command: str

    @classmethod
    def read(cls, pid: int) -> _Process | None:
        """The process, or None if it is gone."""
        try:
            # The name, in parentheses, may hold anything; the state and the parent's pid follow the last one.
            state, parent = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except (FileNotFoundError, ProcessLookupError):
            return None
        return cls(pid, int(parent), state, command)

    @property
    def is_fork_server(self) -> bool:
        # Its workers are forks of it and show the same command line; only the server itself is our own child.
        return self.parent == os.getpid() and FORK_SERVER in self.command

    @property
    def is_ours(self) -> bool:
        """Whether this process descends from the test run, also where its parent is gone."""
        parent = self.parent
        while parent > 1:
            if parent == os.getpid():
                return True
            above = _Process.read(parent)
            if above is None:
                break
            parent = above.parent
        mark = f"{_MARK}={os.environ.get(_MARK)}".encode()
        try:
            return mark in (PROC / str(self.pid) / "environ").read_bytes().split(b"\0")
        except OSError:  # gone meanwhile, or another user's
            return False


def _new_processes(before: frozenset[int], now: frozenset[int]) -> Iterator[str]:
    new = [process for pid in sorted(now - before) if (process := _Process.read(pid)) and process.is_ours]
    if not new:
        return
    servers = [pid for pid in now if (process := _Process.read(pid)) and process.is_fork_server]
    for process in new:
        if [process.pid] == servers:
            continue
        dead = " (a zombie: nobody waited for it)" if process.state == "Z" else ""
        yield f"process {process.pid}, child of {process.parent}: {process.command or '?'}{dead}"


# --- shared memory


def _shared_memory() -> list[str]:
    # Semaphores have names for a moment only, while somebody makes one; marlvec has none, other programs have hundreds.
    return [name for name in os.listdir(SHM) if not name.startswith("sem.")] if SHM.is_dir() else []


def _used_by_others(path: Path) -> bool:
    """Whether a process outside this test run has the segment open or mapped: then it is that one's."""
    for entry in PROC.iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            mapped = str(path) in (entry / "maps").read_text(errors="replace")
            if not mapped:
                mapped = any(os.readlink(fd) == str(path) for fd in (entry / "fd").iterdir())
        except OSError:  # gone meanwhile, or another user's
            continue
        if mapped and (process := _Process.read(int(entry.name))) and not process.is_ours:
            return True
    return False

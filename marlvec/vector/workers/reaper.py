"""`ProcessReaper`: ends the fork server's workers together with all processes that they started.

A worker leads a process group, which is killed when the worker ends. Processes that have left the group (by ``setsid``,
as daemons do) are found in two ways. Each worker carries a mark that all its descendants inherit: every process that
carries a dead worker's mark is killed. And orphans of a dead worker become children of the fork server, which is a
*subreaper*: so none stays as a zombie, and processes of nested workers, whose marks are unknown here, are found.

Both ways need Linux; on other systems only the group is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import secrets
import select
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

if sys.platform != "win32":
    import resource


_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PROC = Path("/proc")

_PAUSE = 0.01  # seconds before a search for left processes, and between two: many workers may end at once
_PATIENCE = 5.0  # seconds of searching after a worker's end; processes that still exist then cannot be killed


def new_mark() -> int:
    """Return a number that no other process carries."""
    return 1 << 62 | secrets.randbits(61)


def mark_this_process(mark: int) -> None:
    """Set a mark on this process and all its future descendants."""
    # The mark is the limit for real-time scheduling, far above any real time, so it has no other effect. Children
    # inherit it through fork, exec, setsid and a cleared environment, and any process of the same user can read it.
    if sys.platform == "linux":
        hard = resource.getrlimit(resource.RLIMIT_RTTIME)[1]
        with contextlib.suppress(OSError, ValueError):  # the limit is set already, or a sandbox does not support it
            resource.setrlimit(resource.RLIMIT_RTTIME, (mark, hard))


def _mark_of(pid: int) -> int | None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            return resource.prlimit(pid, resource.RLIMIT_RTTIME)[0]
    return None


def become_subreaper() -> None:
    """On Linux: become the parent of orphans among this process's descendants."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with(parent: int) -> None:
    """On Linux: let the kernel kill this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died in the meantime
            os._exit(1)


def go_on_without_parent() -> None:
    """On Linux: have the kernel wake this process, if it is stopped, when its parent ends, so that it can clean up."""
    # The signal is also sent when the thread ends that has started this process; a running process ignores it.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


@dataclass(slots=True)
class _Worker:
    mark: int
    alive: bool = True
    exitcode: int | None = None  # of an ended child of this process
    pidfd: int = -1  # reports the end of a worker that is not a child of this process


class ProcessReaper:
    """Tracks workers from their start until all their processes have ended. Call `reap` when ``poll`` wakes."""

    def __init__(self, poll: select.poll) -> None:
        self._poll = poll
        self._workers: dict[int, _Worker] = {}
        self._dead_marks: set[int] = set()
        self._look_at: float | None = None
        self._look_until = 0.0
        self._wakeup, self._wakeup_write = os.pipe()
        for fd in (self._wakeup, self._wakeup_write):
            os.set_blocking(fd, False)
        poll.register(self._wakeup, select.POLLIN)
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # any handler: the wakeup descriptor needs one

    @property
    def pause_ms(self) -> int | None:
        """Longest time to sleep, in milliseconds; None for ever."""
        if self._look_at is None:
            return None
        return max(0, math.ceil(1000 * (self._look_at - time.monotonic())))

    def add(self, pid: int, mark: int) -> None:
        """Track a worker that is a child of this process."""
        self._workers[pid] = _Worker(mark)

    def watch(self, pid: int, mark: int) -> None:
        """Track a worker that is a child of the user's process, which waits for it and calls `release`."""
        worker = self._workers[pid] = _Worker(mark)
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # no free descriptor, or an old kernel: its end is found later
                worker.pidfd = os.pidfd_open(pid)
                self._poll.register(worker.pidfd, select.POLLIN)

    def release(self, pid: int) -> None:
        """Note that a worker from `watch` has ended, and was waited for by its parent."""
        if worker := self._workers.pop(pid, None):
            self._ended(pid, worker)

    def kill(self, pid: int) -> None:
        """Kill a worker and its group."""
        if (worker := self._workers.get(pid)) and worker.alive:
            _kill_group(pid)

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a worker alone."""
        if (worker := self._workers.get(pid)) and worker.alive:
            _kill(pid, number)

    def take_exitcode(self, pid: int) -> int | None:
        """Return the exit code of an ended child, once; None while it lives."""
        self._reap()
        worker = self._workers.get(pid)
        if worker is None or worker.exitcode is None:
            return None
        return self._workers.pop(pid).exitcode

    def reap(self, ready: Iterable[int] = ()) -> None:
        """Wait for ended children, ``ready`` by poll, and when it is due, kill processes that dead workers left."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._wakeup, 4096)
        self._reap()
        ended = set(ready)
        for pid, worker in self._workers.items():
            if worker.pidfd in ended:
                self._ended(pid, worker)
        now = time.monotonic()
        if self._look_at is not None and now >= self._look_at:
            if self._kill_left() and now < self._look_until:
                self._look_at = now + _PAUSE
            else:
                self._look_at = None
                self._dead_marks.clear()

    def end(self) -> None:
        """Kill all workers, and wait until they have ended."""
        for pid, worker in self._workers.items():
            if worker.alive:
                _kill_group(pid)
            self._dead_marks.add(worker.mark)
        self._workers.clear()  # so that every child counts as left behind
        until = time.monotonic() + _PATIENCE
        while self._kill_left() and time.monotonic() < until:
            time.sleep(_PAUSE)
            self._reap()

    def forget_in_child(self) -> None:
        """In a forked child: drop the workers, which belong to the parent."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in (self._wakeup, self._wakeup_write, *(worker.pidfd for worker in self._workers.values())):
            if fd >= 0:
                os.close(fd)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if worker := self._workers.get(pid):
                    worker.exitcode = os.waitstatus_to_exitcode(status)
                    self._ended(pid, worker)

    def _ended(self, pid: int, worker: _Worker) -> None:
        if worker.pidfd >= 0:
            self._poll.unregister(worker.pidfd)
            os.close(worker.pidfd)
            worker.pidfd = -1
        if not worker.alive:
            return
        worker.alive = False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # processes that its envs started
        self._dead_marks.add(worker.mark)
        now = time.monotonic()
        self._look_until = now + _PATIENCE
        if self._look_at is None:
            self._look_at = now + _PAUSE

    def _kill_left(self) -> bool:
        """Kill processes that dead workers left; return whether there were any: they may have had children."""
        left = sorted(pid for pid in self._left_behind() if _runs(pid))
        # Stop all first, so that none starts others meanwhile, or reports the end of its children.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in left:
                _kill(pid, number)
        return bool(left)

    def _left_behind(self) -> set[int]:
        living = {worker.mark for worker in self._workers.values() if worker.alive}
        left = {pid for pid in _children() if pid not in self._workers and _mark_of(pid) not in living}
        if self._dead_marks:
            left.update(pid for pid in _all_pids() if _mark_of(pid) in self._dead_marks)
        return left


def _children() -> Iterator[int]:
    with contextlib.suppress(OSError):  # not Linux, or a kernel without this file
        yield from map(int, (_PROC / f"self/task/{os.getpid()}/children").read_text().split())


def _all_pids() -> Iterator[int]:
    with contextlib.suppress(OSError):
        yield from (int(name) for name in os.listdir(_PROC) if name.isdecimal())  # noqa: PTH208  (names are needed)


def _runs(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        return (_PROC / f"{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    _kill(pid, signal.SIGKILL)  # a process that was just forked leads no group yet


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)

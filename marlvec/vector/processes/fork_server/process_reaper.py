"""`ProcessReaper`: the fork server's child processes, ended and waited for together with what they started.

A worker leads a process group, and the group is killed when it ends. What has left the group (by ``setsid``, as daemons
do) is found in two ways. Each worker carries a mark that its descendants inherit, whatever they do: what has the mark
of a dead worker is killed. And what a dead worker leaves becomes a child of the fork server, which is a *subreaper*: so
nothing stays behind as a zombie, and what a worker of a worker started comes to light, whose mark is not known here.

Both are of Linux; elsewhere there is the group alone.
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

__all__ = ["ProcessReaper", "become_subreaper", "die_with", "go_on_without_parent", "mark_this_process", "new_mark"]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PROC = Path("/proc")

_PAUSE = 0.01  # seconds before a look at what is left, and between two: many workers may end at once
_PATIENCE = 5.0  # seconds of looking after a worker's end; what is there then cannot be killed


def new_mark() -> int:
    """A number that no other process carries."""
    return 1 << 62 | secrets.randbits(61)


def mark_this_process(mark: int) -> None:
    """Let this process and all its descendants carry a mark.

    There is one number that children inherit through fork, exec, setsid and a cleared environment, that any process of
    the same user can read and that changes nothing: a limit for real-time scheduling, far above any time there is.
    """
    if sys.platform == "linux":
        hard = resource.getrlimit(resource.RLIMIT_RTTIME)[1]
        with contextlib.suppress(OSError, ValueError):  # it is limited already, or a sandbox does not know it
            resource.setrlimit(resource.RLIMIT_RTTIME, (mark, hard))


def _mark_of(pid: int) -> int | None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # it is gone, or another user's
            return resource.prlimit(pid, resource.RLIMIT_RTTIME)[0]
    return None


def become_subreaper() -> None:
    """On Linux: adopt what descendants leave behind when they end."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with(parent: int) -> None:
    """On Linux: let the kernel kill this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died in the meantime
            os._exit(1)


def go_on_without_parent() -> None:
    """On Linux: let the kernel wake this process when its parent ends, if it was stopped, so that it can tidy up.

    The signal comes, too, when the thread ends that has started this process; to one that runs it means nothing.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


@dataclass(slots=True)
class _Worker:
    mark: int
    alive: bool = True
    exitcode: int | None = None  # of a child of ours that has ended
    pidfd: int = -1  # shows the end of one that is no child of ours


class ProcessReaper:
    """Workers from their start to their end, and beyond it.

    Args:
        poll: What the process sleeps on; ends are reported there, and are for `reap`.
    """

    def __init__(self, poll: select.poll) -> None:
        self._poll = poll
        self._workers: dict[int, _Worker] = {}
        self._dead_marks: set[int] = set()
        self._look_at: float | None = None
        self._look_until = 0.0
        self._bell, self._bell_push = os.pipe()
        for fd in (self._bell, self._bell_push):
            os.set_blocking(fd, False)
        poll.register(self._bell, select.POLLIN)
        signal.set_wakeup_fd(self._bell_push, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # what it is set to matters not, as long as it is set

    @property
    def pause_ms(self) -> int | None:
        """How long to sleep at most; None for ever."""
        if self._look_at is None:
            return None
        return max(0, math.ceil(1000 * (self._look_at - time.monotonic())))

    def add(self, pid: int, mark: int) -> None:
        """Take a child of this process in."""
        self._workers[pid] = _Worker(mark)

    def watch(self, pid: int, mark: int) -> None:
        """Take in a worker that is a child of the user's process, which waits for it and calls `release`."""
        worker = self._workers[pid] = _Worker(mark)
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # no descriptor left, or an old kernel: its end is seen late, then
                worker.pidfd = os.pidfd_open(pid)
                self._poll.register(worker.pidfd, select.POLLIN)

    def release(self, pid: int) -> None:
        """An adopted worker has ended, and has been waited for."""
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
        """The exit code of a child that has ended, given once; None while it lives."""
        self._reap()
        worker = self._workers.get(pid)
        if worker is None or worker.exitcode is None:
            return None
        return self._workers.pop(pid).exitcode

    def reap(self, ready: Iterable[int] = ()) -> None:
        """See to those that have ended, and when it is time for it, to what they left.

        Args:
            ready: File descriptors that are ready.
        """
        with contextlib.suppress(BlockingIOError):
            os.read(self._bell, 4096)
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
        """Kill all workers, and wait until they are gone."""
        for pid, worker in self._workers.items():
            if worker.alive:
                _kill_group(pid)
            self._dead_marks.add(worker.mark)
        self._workers.clear()  # from now on every child of ours is left behind
        until = time.monotonic() + _PATIENCE
        while self._kill_left() and time.monotonic() < until:
            time.sleep(_PAUSE)
            self._reap()

    def forget_in_child(self) -> None:
        """In a forked child: these are its parent's."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in (self._bell, self._bell_push, *(worker.pidfd for worker in self._workers.values())):
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
            os.killpg(pid, signal.SIGKILL)  # what an env started goes with its worker
        self._dead_marks.add(worker.mark)
        now = time.monotonic()
        self._look_until = now + _PATIENCE
        if self._look_at is None:
            self._look_at = now + _PAUSE

    def _kill_left(self) -> bool:
        """Kill what dead workers left behind; whether there was anything. What is killed may have had children."""
        left = sorted(pid for pid in self._left_behind() if _runs(pid))
        # All at once: none is to start others meanwhile, or to complain of the end of its children.
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
    with contextlib.suppress(OSError):  # not Linux, or a kernel built without
        yield from map(int, (_PROC / f"self/task/{os.getpid()}/children").read_text().split())


def _all_pids() -> Iterator[int]:
    with contextlib.suppress(OSError):
        yield from (int(name) for name in os.listdir(_PROC) if name.isdecimal())  # noqa: PTH208  (names are wanted)


def _runs(pid: int) -> bool:
    """Whether it is there and no zombie."""
    try:
        return (_PROC / f"{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    _kill(pid, signal.SIGKILL)  # one that has only just been forked leads no group yet


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)

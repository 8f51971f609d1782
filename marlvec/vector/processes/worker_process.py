"""`WorkerProcess`: starts and ends one worker process from the parent.

``"forkserver"`` (default) and ``"spawn"`` go through the fork server, ``"fork"`` starts from this process. With all
three the fork server watches the workers: if this process is killed, all their processes are killed, too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from marlvec.errors import ArgumentError, ResourceError
from marlvec.vector.processes import limits
from marlvec.vector.processes.channel import closer, pair
from marlvec.vector.processes.fork_server.client import ensure_server, no_fork, worker_environ
from marlvec.vector.processes.fork_server.process_reaper import new_mark
from marlvec.vector.processes.fork_server.server import isolate
from marlvec.vector.processes.stack_dump import ASK, StackDump

__all__ = ["START_METHODS", "WorkerProcess", "ensure_server", "start_method"]

START_METHODS = ("forkserver", "spawn", "fork")


def start_method(context: Any) -> str:
    """Return the start method for ``context``: None, a name, or a multiprocessing context."""
    name = context.get_start_method() if hasattr(context, "get_start_method") else context
    if name is None:
        return START_METHODS[0]
    if name not in START_METHODS:
        raise ArgumentError(f"context must be one of {START_METHODS} or a multiprocessing context, got {context!r}")
    return str(name)


_workers: weakref.WeakSet[WorkerProcess] = weakref.WeakSet()
_starting: dict[WorkerProcess, tuple[int, Callable[[], object]]] = {}
"""Workers that are being started: the starting thread, and a function that closes the worker's ends of the channel."""


def _after_fork_in_child() -> None:
    """Close channels in a forked child, unless it is the worker: it must not hold them open."""
    for worker in list(_workers):
        worker.close()
    for worker, (thread, close_theirs) in list(_starting.items()):
        if thread != threading.get_ident():
            worker.close()
            close_theirs()
    _starting.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


class WorkerProcess:
    """One worker process and the channel to it; the worker gets a duplicate of ``memory_fd``.

    `pid` is also its process group's. `exitcode` is valid after `wait` has returned True: minus the signal number if a
    signal killed it; None if unknown. `ResourceError`: too many processes or files, or nested too deep.
    """

    def __init__(self, method: str, memory_fd: int) -> None:
        limits.check_depth()
        limits.check_not_importing()
        self.exitcode: int | None = None
        self._gone = False
        self._method = method
        self._server = ensure_server()
        try:
            with limits.asked_for("a worker process"):
                start = self._fork if method == "fork" else self._request
                self.pid = start(memory_fd)
        except ConnectionError as error:
            raise ResourceError(
                f"{error}: it was killed, or could not start; check the memory and the limit on processes"
            ) from error

    @contextlib.contextmanager
    def _ends(self, memory_fd: int) -> Iterator[tuple[int, ...]]:
        """Make the channel, and yield the worker's descriptors (requests in, replies out, memory, stacks)."""
        # The lock is not held in the block: a thread that forks takes other locks before it, which would be a deadlock.
        with no_fork():
            self._stack_file = StackDump()
            try:
                self.channel, theirs = pair()
            except BaseException:
                self._stack_file.close()
                raise
            close_theirs = closer(*theirs)
            _starting[self] = threading.get_ident(), close_theirs
        try:
            yield (*theirs, memory_fd, self._stack_file.fd)
        except BaseException:
            self.close()
            raise
        finally:
            with no_fork():
                close_theirs()
                _starting.pop(self, None)
                _workers.add(self)

    def _request(self, memory_fd: int) -> int:
        server, mark = self._server, new_mark()
        request = {
            "do": "start",
            "method": self._method,
            "environ": worker_environ(),
            "cwd": _folder(),
            "path": sys.path,
            "mark": mark,
        }
        with server.lock:
            with self._ends(memory_fd) as fds, contextlib.ExitStack() as stack:
                server.send(request, (*fds, *(_open_stream(fd, stack) for fd in (1, 2))))
            try:
                return int(server.answer())
            except BaseException:
                self.close()
                raise

    def _fork(self, memory_fd: int) -> int:
        environ, mark, here = worker_environ(), new_mark(), os.getpid()
        with self._ends(memory_fd) as fds:
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {ASK})
            try:
                pid = os.fork()
            finally:
                if os.getpid() == here:
                    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            if pid == 0:
                try:
                    self.channel.close()
                    # No kernel signal at the parent's death: it would come when the starting thread ends. The closed
                    # channel and the fork server end this worker instead.
                    isolate(None, mark)
                    os.environ.clear()
                    os.environ.update(environ)
                    from marlvec.vector.processes.worker import run_worker

                    run_worker(*fds)
                finally:
                    os._exit(1)
        try:
            self._server.ask({"do": "watch", "pid": pid, "mark": mark})
        except BaseException:
            self.close()
            os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):  # other code has waited for it
                os.waitpid(pid, 0)
            raise
        return pid

    def poll(self) -> bool:
        """Return whether the process has ended; store its exit code."""
        if self._gone:
            return True
        if self._method == "fork":
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.exitcode = os.waitstatus_to_exitcode(status)
                    self._gone = True
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(self.pid, signal.SIGKILL)  # processes that its envs started
                    with contextlib.suppress(OSError):
                        self._server.ask({"do": "release", "pid": self.pid})
            except ChildProcessError:  # other code has waited for it
                self._gone = True
        else:
            try:
                self.exitcode = self._server.ask({"do": "status", "pid": self.pid})
                self._gone = self.exitcode is not None
            except OSError:  # the server has ended, and every worker with it
                self._gone = True
        return self._gone

    def wait(self, timeout: float) -> bool:
        """Wait for the process to end; return whether it has."""
        deadline = time.monotonic() + timeout
        pause = 0.0002
        while not self.poll():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, 0.02)
        return True

    def kill(self) -> None:
        """Kill the process and every process it started, and wait until it has ended."""
        with contextlib.suppress(OSError):
            self._server.ask({"do": "kill", "pid": self.pid})
        if self._method == "fork" and not self.poll():  # also if the server has ended
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self.wait(5.0)

    def crash_report(self) -> str:
        """Return all threads' stacks at a crash, without dumps of `stacks`, at most 16 KiB; empty if none."""
        return self._stack_file.crash()

    def stacks(self, timeout: float = 0.3) -> str:
        """Return the current stacks of a living worker's threads, even if one hangs in C code and holds the GIL.

        The signal may interrupt a system call in the worker. And faulthandler reads stacks while they change, so about
        one dump in 100,000 crashes its process (CPython 3.11): call this only for workers that will be killed. At most
        16 KiB; empty if the process is stopped, or does not answer in ``timeout`` seconds.
        """
        if self.poll() or _is_stopped(self.pid):
            return ""
        try:
            return self._stack_file.ask(self._send_ask, timeout)
        except OSError:  # the worker or the server has ended meanwhile
            return ""

    def _send_ask(self) -> None:
        if self._method == "fork":
            os.kill(self.pid, ASK)
        else:
            self._server.ask({"do": "signal", "pid": self.pid, "signal": ASK})

    def close(self) -> None:
        """Close the channel and the file of stack dumps; may be called again."""
        with no_fork():  # a child forked meanwhile would close other files that reuse these descriptor numbers
            self.channel.close()
            self._stack_file.close()

    def __del__(self) -> None:
        """Close the channel, which ends the process, if Ctrl-C came before this object was stored."""
        if hasattr(self, "channel"):
            self.close()


def _folder() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # it was removed
        return "/"


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] in "Tt"
    except OSError:  # no /proc here
        return False


def _open_stream(fd: int, stack: contextlib.ExitStack) -> int:
    """Return ``fd``, or the null device if the parent has closed it."""
    try:
        os.fstat(fd)
        return fd
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        stack.callback(os.close, null)
        return null

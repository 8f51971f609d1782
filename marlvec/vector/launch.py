"""Starting and ending worker processes, from the parent's side.

Three start methods: ``"forkserver"`` (default) and ``"spawn"`` through `marlvec.vector.forkserver`, ``"fork"`` from
this process itself. With
all three the fork server watches over the workers: should this process be killed, they are too.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from marlvec.errors import ArgumentError
from marlvec.vector.channel import Channel, pair
from marlvec.vector.forkserver import isolate, receive, send

__all__ = ["START_METHODS", "WorkerProcess", "ensure_server", "start_method"]

START_METHODS = ("forkserver", "spawn", "fork")

# An env that starts MPI would take a worker for one rank of the parent's job.
_MPI_PREFIXES = ("OMPI_", "PMI_", "PMIX_", "MPI_", "HYDRA_", "I_MPI_")
# One thread per worker: a worker per core is the parallelism, and a fork server must have no threads.
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def start_method(context: Any) -> str:
    """The start method meant by ``context``: None, a name, or a multiprocessing context.

    Raises:
        ArgumentError: There is no such method.
    """
    name = context.get_start_method() if hasattr(context, "get_start_method") else context
    if name is None:
        return START_METHODS[0]
    if name not in START_METHODS:
        raise ArgumentError(f"context must be one of {START_METHODS} or a multiprocessing context, got {context!r}")
    return str(name)


def worker_environ() -> dict[str, str]:
    """The environment that workers get: this process's, without MPI, with one thread per numeric library."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith(_MPI_PREFIXES)}
    for key in (*_ONE_THREAD, "PYGAME_HIDE_SUPPORT_PROMPT"):
        environ.setdefault(key, "1")
    return environ


class _Server:
    """This process's end of the fork server."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self.sock, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            code = f"import sys; sys.path[:] = {sys.path!r}; from marlvec.vector.forkserver import main; main({fd})"
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.DEVNULL, pass_fds=[fd], env=worker_environ()
            )

    def ask(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> Any:
        """Send a request and wait for its answer.

        Raises:
            OSError: The server is gone, or says why it could not.
        """
        with self._lock:
            try:
                send(self.sock, message, fds)
                answer, _ = receive(self.sock)
            except (EOFError, OSError) as error:
                raise ConnectionError("marlvec's fork server is gone") from error
        if isinstance(answer, OSError):
            raise answer
        return answer

    def alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """Let the server end; it takes its workers along."""
        self.sock.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def forget(self) -> None:
        """In a forked child: this server belongs to the parent."""
        self.sock.close()
        self._process.returncode = 0  # so that no destructor waits for, or warns about, what is not our child


_server: _Server | None = None
_server_lock = threading.Lock()
_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


def ensure_server() -> _Server:
    """The fork server of this process, started if need be."""
    global _server
    with _server_lock:
        if _server is not None and not _server.alive():
            _server.stop()
            _server = None
        if _server is None:
            _server = _Server()
        return _server


@atexit.register
def _stop_server() -> None:
    global _server
    if _server is not None and _server.owner == os.getpid():
        _server.stop()
    _server = None


def _after_fork_in_child() -> None:
    """A child of this process must neither hold its channels open nor speak to its fork server."""
    global _server, _server_lock
    _server_lock = threading.Lock()
    if _server is not None:
        _server.forget()
        _server = None
    for channel in list(_channels):
        channel.close()


os.register_at_fork(after_in_child=_after_fork_in_child)


class WorkerProcess:
    """One worker process and the channel to it.

    Args:
        method: One of `START_METHODS`.
        memory_fd: Shared memory, which the worker gets a copy of.

    Raises:
        OSError: The process could not be started.

    Attributes:
        pid: Its process id, which is its process group too.
        channel: This end of the channel.
        exitcode: Its exit code once `wait` has seen the end, minus the signal number if a signal killed it; None if it
            could not be told.
    """

    def __init__(self, method: str, memory_fd: int) -> None:
        self.exitcode: int | None = None
        self._gone = False
        self._method = method
        server = ensure_server()
        self._server = server
        self.channel, theirs = pair()
        _channels.add(self.channel)
        try:
            if method == "fork":
                self.pid = self._fork(theirs, memory_fd)
                server.ask({"do": "adopt", "pid": self.pid})
            else:
                request = {
                    "do": "start",
                    "method": method,
                    "environ": worker_environ(),
                    "cwd": str(Path.cwd()),
                    "path": sys.path,
                }
                with contextlib.ExitStack() as stack:
                    out, err = (_open_stream(fd, stack) for fd in (1, 2))
                    self.pid = server.ask(request, (*theirs, memory_fd, out, err))
        except BaseException:
            self.channel.close()
            raise
        finally:
            for fd in theirs:
                os.close(fd)

    def _fork(self, theirs: tuple[int, int], memory_fd: int) -> int:
        environ = worker_environ()
        pid = os.fork()
        if pid == 0:
            try:
                # Not bound to the parent's death by the kernel: that would mean the death of the thread that is
                # running now. The channel's end and the fork server tell instead.
                isolate(None)
                os.environ.clear()
                os.environ.update(environ)
                from marlvec.vector.worker import run_worker

                run_worker(*theirs, memory_fd)
            finally:
                os._exit(1)
        return pid

    def poll(self) -> bool:
        """Whether the process has ended; notes its exit code."""
        if self._gone:
            return True
        if self._method == "fork":
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.exitcode = os.waitstatus_to_exitcode(status)
                    self._gone = True
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(self.pid, signal.SIGKILL)  # what an env started goes with its worker
                    with contextlib.suppress(OSError):
                        self._server.ask({"do": "release", "pid": self.pid})
            except ChildProcessError:  # someone else has waited for it
                self._gone = True
        else:
            try:
                self.exitcode = self._server.ask({"do": "status", "pid": self.pid})
                self._gone = self.exitcode is not None
            except OSError:  # the server is gone, and every worker with it
                self._gone = True
        return self._gone

    def wait(self, timeout: float) -> bool:
        """Wait for the process to end; whether it has."""
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
        """Kill the process and every process it started, and wait until it is gone."""
        with contextlib.suppress(OSError):
            self._server.ask({"do": "kill", "pid": self.pid, "signal": signal.SIGKILL})
        if self._method == "fork" and not self.poll():  # also where the server is gone
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self.wait(5.0)

    def close(self) -> None:
        """Let go of the channel."""
        self.channel.close()


def _open_stream(fd: int, stack: contextlib.ExitStack) -> int:
    """``fd``, or the null device if the parent has closed it."""
    try:
        os.fstat(fd)
        return fd
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        stack.callback(os.close, null)
        return null

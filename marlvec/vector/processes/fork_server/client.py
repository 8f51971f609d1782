"""The parent's end of the fork server, which starts worker processes."""

from __future__ import annotations

import atexit
import os
import pickle
import socket
import subprocess
import sys
import threading
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from marlvec.vector.processes import limits
from marlvec.vector.processes.fork_server.server import HEAD, send

__all__ = ["ForkServerClient", "ensure_server", "worker_environ", "no_fork"]

# With these variables, an env that starts MPI would treat a worker as a rank of the parent's job.
_MPI_PREFIXES = ("OMPI_", "PMI_", "PMIX_", "MPI_", "HYDRA_", "I_MPI_")
# One thread per worker: a worker per core is the parallelism, and a fork server must have no threads.
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")

_CHUNK = 1 << 16  # bytes to read at a time

preload: list[str] = []
"""Modules that the server imports once, before any fork, so that workers need not; our tests set some."""


def worker_environ() -> dict[str, str]:
    """Return the workers' environment: this one, without MPI, one thread per numeric library, their nesting depth."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith(_MPI_PREFIXES)}
    for key in (*_ONE_THREAD, "PYGAME_HIDE_SUPPORT_PROMPT"):
        environ.setdefault(key, "1")
    environ[limits.DEPTH] = str(limits.depth() + 1)
    return environ


class ForkServerClient:
    """This process's end of the fork server; ``lock`` is held from a request to its answer, for one thread."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._number = 0
        self._unread = bytearray()
        self.lock = threading.RLock()
        with limits.asked_for("a fork server"):
            self.sock, theirs = socket.socketpair()
            with theirs:
                fd = theirs.fileno()
                server = "marlvec.vector.processes.fork_server.server"
                imports = "".join(f"import {name}; " for name in preload)
                code = f"import sys; sys.path[:] = {sys.path!r}; {imports}from {server} import main; main({fd})"
                try:
                    self._process = subprocess.Popen(
                        [sys.executable, "-c", code], stdin=subprocess.DEVNULL, pass_fds=[fd], env=worker_environ()
                    )
                except BaseException:
                    self.sock.close()
                    raise

    def ask(self, message: dict[str, Any]) -> Any:
        """Send a request and wait for its answer; `OSError`: the server has ended, or its answer is this error."""
        with self.lock:
            self.send(message)
            return self.answer()

    def send(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        """Send a request; the caller must hold `lock`."""
        self._number += 1
        try:
            send(self.sock, (self._number, message), fds)
        except OSError as error:
            raise ConnectionError("marlvec's fork server is gone") from error

    def answer(self) -> Any:
        """Wait for the answer; the caller must hold `lock`."""
        number, answer = 0, None
        try:
            while number != self._number:  # skip answers to earlier requests whose wait was interrupted
                number, answer = self._receive()
        except (EOFError, OSError) as error:
            raise ConnectionError("marlvec's fork server is gone") from error
        if isinstance(answer, OSError):
            raise answer
        return answer

    def _receive(self) -> tuple[int, Any]:
        """Wait for a message. Received parts are kept, so that Ctrl-C in between loses none."""
        unread = self._unread
        while True:
            if len(unread) >= HEAD.size:
                end = HEAD.size + HEAD.unpack_from(unread)[0]
                if len(unread) >= end:
                    number, answer = pickle.loads(unread[HEAD.size : end])
                    del unread[:end]
                    return number, answer
            unread += self.sock.recv(_CHUNK) or _end_of_file()

    def alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """End the server, which kills its workers."""
        self.sock.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def forget(self) -> None:
        """In a forked child: drop the server, which belongs to the parent."""
        self.sock.close()
        self._process.returncode = 0  # so that no destructor waits for, or warns about, the parent's child


def _end_of_file() -> NoReturn:
    raise EOFError


_server: ForkServerClient | None = None
_server_lock = threading.Lock()


def ensure_server() -> ForkServerClient:
    """Return the fork server of this process; start it if there is none."""
    global _server
    with _server_lock:
        if _server is not None and not _server.alive():
            _server.stop()
            _server = None
        if _server is None:
            with no_fork():
                _server = ForkServerClient()
        return _server


@atexit.register
def _stop_server() -> None:
    global _server
    if _server is not None and _server.owner == os.getpid():
        _server.stop()
    _server = None


def _after_fork_in_child() -> None:
    """Drop the fork server in a forked child: it belongs to the parent."""
    global _server, _server_lock
    _server_lock = threading.Lock()
    if _server is not None:
        _server.forget()
        _server = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


_lock = threading.RLock()


def no_fork() -> AbstractContextManager[bool]:
    """Return a lock that keeps other threads from `os.fork`. Hold it only briefly: they wait for it."""
    return _lock


def _before() -> None:
    _lock.acquire()


def _after_in_parent() -> None:
    _lock.release()


def _after_in_child() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)

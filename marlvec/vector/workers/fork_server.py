"""The fork server: a small process that forks workers, and ends with its parent; and the parent's end of it."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from marlvec.vector import cores as limits
from marlvec.vector.workers.channel import ASK
from marlvec.vector.workers.reaper import (
    ProcessReaper,
    become_subreaper,
    die_with,
    go_on_without_parent,
    mark_this_process,
    new_mark,
)

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
                server = "marlvec.vector.workers.fork_server"
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


HEAD = struct.Struct("<QQ")
"""Size of a message, number of file descriptors sent with it."""

_MAX_FDS = 8


def send(sock: socket.socket, message: Any, fds: tuple[int, ...] = ()) -> None:
    """Send one message, with duplicates of these file descriptors, in one piece: Ctrl-C comes before or after it."""
    data = pickle.dumps(message)
    data = HEAD.pack(len(data), len(fds)) + data
    sent = socket.send_fds(sock, [data], list(fds))
    if sent < len(data):
        sock.sendall(data[sent:])


def receive(sock: socket.socket) -> tuple[Any, list[int]]:
    """Wait for one message and its file descriptors, all or, if this process has reached its limit, none."""
    head, fds, _, _ = socket.recv_fds(sock, HEAD.size, _MAX_FDS)
    head += _read(sock, HEAD.size - len(head)) if head else b""
    if not head:
        raise EOFError
    size, count = HEAD.unpack(head)
    message = pickle.loads(_read(sock, size))
    if len(fds) < count:
        _close_all(fds)
        fds = []
    return message, fds


def _read(sock: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        data = sock.recv(size - len(parts))
        if not data:
            raise EOFError
        parts += data
    return bytes(parts)


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def main(fd: int) -> None:
    """Serve until the socket closes, then kill every worker."""
    import marlvec.vector.workers.worker  # noqa: F401  (imported once, here, for all workers)

    os.setsid()  # Ctrl-C in the terminal is for the parent alone
    signal.pthread_sigmask(signal.SIG_SETMASK, {ASK})  # workers unblock it once they have a handler
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    become_subreaper()
    go_on_without_parent()
    mark_this_process(new_mark())  # its own mark: in a worker, the outer server must not kill it before it cleans up
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    reaper = ProcessReaper(poll)
    try:
        while True:
            ready = [fd for fd, _ in poll.poll(reaper.pause_ms)]
            if sock.fileno() in ready:
                (number, message), fds = receive(sock)
                send(sock, (number, _answer(sock, message, fds, reaper)))
            else:  # requests come first: no caller waits for the cleanup
                reaper.reap(ready)
    except (EOFError, OSError):
        reaper.end()


def _answer(sock: socket.socket, message: dict[str, Any], fds: list[int], reaper: ProcessReaper) -> Any:
    try:
        match message["do"]:
            case "start":
                if not fds:
                    raise OSError(errno.EMFILE, "Too many open files in the fork server")
                server, pid = os.getpid(), os.fork()
                if pid == 0:
                    sock.close()
                    reaper.forget_in_child()
                    _become_worker(server, message, fds)
                reaper.add(pid, message["mark"])
                return pid
            case "watch":
                reaper.watch(message["pid"], message["mark"])
            case "release":
                reaper.release(message["pid"])
            case "kill":
                reaper.kill(message["pid"])
            case "signal":
                reaper.signal(message["pid"], message["signal"])
            case "status":
                return reaper.take_exitcode(message["pid"])
        return None
    except OSError as error:
        return error
    finally:
        _close_all(fds)


def _become_worker(server: int, message: dict[str, Any], fds: list[int]) -> NoReturn:
    """In the child: take on the parent's environment, folder and streams, then serve."""
    try:
        isolate(server, message["mark"])
        *ours, out, err = fds
        os.dup2(out, 1)
        os.dup2(err, 2)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        for fd in {out, err, null} - {0, 1, 2}:
            os.close(fd)
        os.environ.clear()
        os.environ.update(message["environ"])
        with contextlib.suppress(OSError):  # the folder may have been removed
            os.chdir(message["cwd"])
        if message["method"] == "spawn":
            for fd in ours:
                os.set_inheritable(fd, True)
            code = (
                f"import sys; sys.path[:] = {message['path']!r}; "
                f"from marlvec.vector.workers.worker import run_worker; run_worker(*{ours!r})"
            )
            os.execv(sys.executable, [sys.executable, "-c", code])
        sys.path[:] = message["path"]
        from marlvec.vector.workers.worker import run_worker

        run_worker(*ours)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(1)


def isolate(parent: int | None, mark: int) -> None:
    """In a new worker: become a process group leader, carry ``mark``, and on Linux die with ``parent``."""
    os.setsid()
    mark_this_process(mark)
    if parent is not None:
        die_with(parent)

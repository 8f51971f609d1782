"""The fork server: a small process that forks workers, and ends with its parent.

One per parent process, in a fresh interpreter: it never imports the caller's main module, and has no threads, so
forking from it is safe even if the parent has threads. It sleeps until the parent sends a request or a worker ends;
then it kills processes that the worker's envs had started. When its socket closes, the parent has ended, and the server
kills every worker, even hung ones.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import select
import signal
import socket
import struct
import sys
from typing import Any, NoReturn

from marlvec.vector.processes.fork_server.process_reaper import (
    ProcessReaper,
    become_subreaper,
    die_with,
    go_on_without_parent,
    mark_this_process,
    new_mark,
)
from marlvec.vector.processes.stack_dump import ASK

__all__ = ["HEAD", "isolate", "main", "receive", "send"]

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
    import marlvec.vector.processes.worker  # noqa: F401  (imported once, here, for all workers)

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
                f"from marlvec.vector.processes.worker import run_worker; run_worker(*{ours!r})"
            )
            os.execv(sys.executable, [sys.executable, "-c", code])
        sys.path[:] = message["path"]
        from marlvec.vector.processes.worker import run_worker

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

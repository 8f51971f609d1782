"""A small process that starts workers, and outlives nobody.

One per parent process, started clean: it never imports the caller's main module, and has no threads, so forking from it
is safe however many threads the parent has. It forks workers on request (``"forkserver"``) or lets them start a fresh
interpreter (``"spawn"``). It waits on one socket; when that closes the parent is gone, and every worker's process group
is killed, hung workers and their own children included.

Runs as ``python -c "from marlvec.vector.forkserver import main; main(fd)"``; `marlvec.vector.launch` is the other side.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import struct
import sys
from typing import Any, NoReturn

__all__ = ["isolate", "main", "receive", "send"]

_SIZE = struct.Struct("<Q")
_MAX_FDS = 8
_PR_SET_PDEATHSIG = 1


def send(sock: socket.socket, message: Any, fds: tuple[int, ...] = ()) -> None:
    """Send one message, with copies of these file descriptors."""
    data = pickle.dumps(message)
    socket.send_fds(sock, [_SIZE.pack(len(data))], list(fds))
    sock.sendall(data)


def receive(sock: socket.socket) -> tuple[Any, list[int]]:
    """Wait for one message and its file descriptors.

    Raises:
        EOFError: The other side is gone.
    """
    head, fds, _, _ = socket.recv_fds(sock, _SIZE.size, _MAX_FDS)
    head += _read(sock, _SIZE.size - len(head)) if head else b""
    if not head:
        raise EOFError
    return pickle.loads(_read(sock, _SIZE.unpack(head)[0])), fds


def _read(sock: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        data = sock.recv(size - len(parts))
        if not data:
            raise EOFError
        parts += data
    return bytes(parts)


def main(fd: int) -> None:
    """Serve until the socket closes, then kill every worker."""
    import marlvec.vector.worker  # noqa: F401  (what workers need is imported once, here)

    os.setsid()  # Ctrl-C in the terminal is the parent's business
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    running: dict[int, int | None] = {}  # pid → exit code, None while it runs or where it is not our child
    try:
        while True:
            message, fds = receive(sock)
            send(sock, _answer(sock, message, fds, running))
    except (EOFError, OSError):
        for pid in [pid for pid, code in running.items() if code is None]:
            _kill_group(pid, signal.SIGKILL)
        _reap(running)


def _answer(sock: socket.socket, message: dict[str, Any], fds: list[int], running: dict[int, int | None]) -> Any:
    try:
        match message["do"]:
            case "start":
                pid = os.fork()
                if pid == 0:
                    _become_worker(sock, message, fds)
                running[pid] = None
                return pid
            case "adopt":
                running[message["pid"]] = None
            case "release":
                running.pop(message["pid"], None)
            case "kill":
                if message["pid"] in running:
                    _kill_group(message["pid"], message["signal"])
            case "status":
                _reap(running)
                code = running.get(message["pid"])
                if code is not None:
                    del running[message["pid"]]
                return code
        return None
    except OSError as error:
        return error
    finally:
        for inherited in fds:
            os.close(inherited)


def _reap(running: dict[int, int | None]) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            running[pid] = os.waitstatus_to_exitcode(status)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # what an env started goes with its worker


def _kill_group(pid: int, number: int) -> None:
    for kill in (os.killpg, os.kill):  # a worker that has only just been forked leads no group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, number)


def _become_worker(sock: socket.socket, message: dict[str, Any], fds: list[int]) -> NoReturn:
    """In the child: take on the parent's surroundings, then serve."""
    try:
        server = os.getppid()
        sock.close()
        isolate(server)
        read_fd, write_fd, memory_fd, out, err = fds
        os.dup2(out, 1)
        os.dup2(err, 2)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        for fd in {out, err, null} - {0, 1, 2}:
            os.close(fd)
        os.environ.clear()
        os.environ.update(message["environ"])
        with contextlib.suppress(OSError):  # the folder may be gone
            os.chdir(message["cwd"])
        if message["method"] == "spawn":
            ours = (read_fd, write_fd, memory_fd)
            for fd in ours:
                os.set_inheritable(fd, True)
            code = (
                f"import sys; sys.path[:] = {message['path']!r}; "
                f"from marlvec.vector.worker import run_worker; run_worker{ours!r}"
            )
            os.execv(sys.executable, [sys.executable, "-c", code])
        sys.path[:] = message["path"]
        from marlvec.vector.worker import run_worker

        run_worker(read_fd, write_fd, memory_fd)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(1)


def isolate(parent: int | None) -> None:
    """In a new worker: lead a process group of its own, and on Linux die with ``parent``."""
    os.setsid()
    if parent is None or sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died in the meantime
        os._exit(1)

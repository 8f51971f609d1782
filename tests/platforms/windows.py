"""Linux without what Windows lacks: run ``python tests/platforms/windows.py FILE`` to try a script there.

What the libraries need of it they have imported before. What marlvec does is to do without.
"""

from __future__ import annotations

import asyncio  # noqa: F401  (these see Linux)
import ctypes  # noqa: F401
import multiprocessing  # noqa: F401
import os
import runpy
import select
import signal
import socket
import stat
import subprocess  # noqa: F401
import sys
import tempfile  # noqa: F401
import threading  # noqa: F401
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium  # noqa: F401
import mpe2.simple_spread_v3  # noqa: F401
import numpy  # noqa: F401  # noqa: ICN001
import pettingzoo.classic  # noqa: F401

MODULES = ("fcntl", "resource", "termios", "pwd", "grp", "tty", "pty")
NAMES: dict[Any, str] = {
    os: "fork forkpty memfd_create pidfd_open sched_getaffinity posix_fallocate register_at_fork killpg setsid getsid "
    "waitid wait getpgid getuid geteuid fchmod fchown chown set_blocking get_blocking uname sysconf statvfs nice pread "
    "pwrite WNOHANG O_DIRECTORY O_NOFOLLOW O_NONBLOCK O_CLOEXEC MFD_CLOEXEC",
    select: "poll epoll",
    signal: "pthread_sigmask pthread_kill sigwait SIGKILL SIGHUP SIGSTOP SIGCONT SIGALRM SIGUSR1 SIGUSR2 SIGQUIT "
    "SIGCHLD setitimer alarm",
    socket: "AF_UNIX send_fds recv_fds",
}
HEAVY = ("torch", "numba", "pyarrow", "stable_baselines3", "websockets", "msgpack", "imageio", "PIL", "rich", "typer")


class Missing:
    """Finds none of the modules that Windows has not."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def take_away() -> None:
    """Take away modules and names, and have what is left behave as it does there."""
    for name in HEAVY:
        if find_spec(name):
            __import__(name)
    sys.meta_path.insert(0, Missing())
    for name in MODULES:
        sys.modules.pop(name, None)
    for module, names in NAMES.items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    _change(os, "kill", _no_signal_0)
    _change(os, "open", _no_folders)
    _change(os, "fstat", _mode_of_all)
    _change(select, "select", _sockets_alone)
    _change(socket, "socketpair", _pair_over_tcp)
    sys.platform = "win32"


def _change(module: Any, name: str, how: Any) -> None:
    before = getattr(module, name)
    setattr(module, name, lambda *args, **options: how(before, *args, **options))


def _no_signal_0(kill: Any, pid: int, number: int) -> None:
    assert number, "this would interrupt that process: 0 is CTRL_C_EVENT"
    kill(pid, number)


def _no_folders(open_: Any, path: Any, *args: Any, **options: Any) -> int:
    if not isinstance(path, int) and Path(os.fsdecode(path)).is_dir():
        raise PermissionError(13, "Permission denied", path)
    return int(open_(path, *args, **options))


def _mode_of_all(fstat: Any, fd: int) -> os.stat_result:
    found = fstat(fd)
    return os.stat_result((found.st_mode | stat.S_IRUSR * 0o11, *found[1:]))


def _sockets_alone(select_: Any, readers: Any, *args: Any) -> Any:
    if any(not isinstance(reader, (int, socket.socket)) for reader in readers):
        raise OSError(10038, "an operation was attempted on something that is not a socket")
    return select_(readers, *args)


def _pair_over_tcp(_: Any) -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


if __name__ == "__main__":
    take_away()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")

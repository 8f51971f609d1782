"""Programs that tests start: one that answers requests, one at a terminal, one that dies in the middle of writing."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

# --- `LineServer`: a program that is started once and answers requests, one line of JSON each


class LineServer:
    """The client of such a program; a context manager, in which the program runs.

    Args:
        arguments: Of the Python interpreter.
        options: Of `subprocess.Popen`.
    """

    def __init__(self, arguments: Sequence[str], **options: Any) -> None:
        self._arguments, self._options = arguments, options

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **self._options,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.communicate()

    def ask(self, request: str | Mapping[str, Any]) -> Any:
        """Send a request and wait for its answer."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{json.dumps(request)}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"{' '.join(self._arguments)} has ended with {self._process.wait()}"
        return json.loads(answer)


# --- A program whose stderr is a terminal, or all three are


_PATIENCE_SECONDS = 60.0  # that a program may say nothing
ROOT = Path(__file__).resolve().parents[1]


def at_a_terminal(command: Sequence[str], cwd: Path | None = None) -> tuple[int, str, str]:
    """Run a program to its end; its exit code, what it printed, and what came to the terminal."""
    here, there = pty.openpty()
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "120"}
    try:
        with subprocess.Popen(
            command, cwd=cwd, stdout=subprocess.PIPE, stderr=there, text=True, env=environ
        ) as process:
            os.close(there)
            seen = b""
            while True:
                try:
                    part = os.read(here, 65536)
                except OSError:  # how Linux says that the other side of a terminal is gone
                    break
                if not part:
                    break
                seen += part
            printed, _ = process.communicate()
    finally:
        os.close(here)
    return process.returncode, printed, seen.decode()


def converse(command: Sequence[str], answers: Sequence[tuple[str, str]], cwd: Path | None = None) -> tuple[int, str]:
    """Run a program that has a terminal for everything; its exit code, and what was to be seen there.

    Args:
        command: The program.
        answers: What to wait for, and what to type then, one after the other.
        cwd: Where it runs.
    """
    here, there = pty.openpty()
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "120"}

    def take_the_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # or Ctrl-C would be a character like any other

    left, seen, read = list(answers), "", 0
    try:
        with subprocess.Popen(
            command,
            cwd=cwd,
            stdin=there,
            stdout=there,
            stderr=there,
            env=environ,
            start_new_session=True,
            preexec_fn=take_the_terminal,  # noqa: PLW1509  # one system call, which takes no lock
        ) as process:
            os.close(there)
            while True:
                if not select.select([here], [], [], _PATIENCE_SECONDS)[0]:
                    process.kill()
                    break
                try:
                    part = os.read(here, 65536)
                except OSError:  # how Linux says that the other side of a terminal is gone
                    break
                if not part:
                    break
                seen += part.decode(errors="replace")
                while left and (found := seen.find(left[0][0], read)) >= 0:
                    read = found + len(left[0][0])
                    os.write(here, left.pop(0)[1].encode())
    finally:
        os.close(here)
    assert not left, f"it never said {left[0][0]!r}, but: {seen}"
    return process.returncode, seen


# --- How a program is made to die in the middle of writing a file


DYING = """
import os, signal, sys
from pathlib import Path

path, number = sys.argv[1], 0

def deadly(function, at):
    def call(*args, **kwargs):
        global number
        number += 1
        if number == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return call

class Dying:
    '''A file whose every write and flush is counted; the n-th is the process's last act.'''
    def __init__(self, file, at):
        self.file = file
        self.write = deadly(file.write, at)
        self.flush = deadly(file.flush, at)
    def __getattr__(self, name):
        return getattr(self.file, name)
    def __enter__(self):
        return self
    def __exit__(self, *args):
        self.file.close()

def spoil(at):
    open_, replace = Path.open, Path.replace
    Path.open = lambda *a, **k: Dying(open_(*a, buffering=0, **k), at)
    Path.replace = deadly(replace, at)
    os.fsync = deadly(os.fsync, at)
"""
"""The n-th write, flush, fsync or rename after ``spoil(n)`` is the process's last act. ``path`` is its argument."""

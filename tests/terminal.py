"""A program whose stderr is a terminal, or all three are."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import subprocess
import termios
from collections.abc import Sequence
from pathlib import Path

__all__ = ["at_a_terminal", "converse"]

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

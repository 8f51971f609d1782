"""A program whose stderr is a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
from collections.abc import Sequence
from pathlib import Path

__all__ = ["at_a_terminal"]

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

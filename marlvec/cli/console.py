"""Shared by commands: consoles, display of errors, and the import path."""

from __future__ import annotations

import difflib
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

__all__ = [
    "check_writable",
    "complain",
    "did_you_mean",
    "naming",
    "plain_errors",
    "print_json",
    "settle_in",
    "stdout",
    "torch_within_cores",
]

_WIDTH_IN_A_PIPE = 140
_THREADS = "OMP_NUM_THREADS"


def settle_in() -> None:
    """Make policies and envs importable from the working folder, as `python -m` does; hide pygame's greeting."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")


def stdout() -> Console:
    """Return the console for results: as wide as the terminal, and wide enough in a pipe or file."""
    console = Console(emoji=False)
    return console if console.is_terminal else Console(emoji=False, width=_WIDTH_IN_A_PIPE)


def print_json(data: Any) -> None:
    """Print JSON to stdout; NaN and infinity become null."""
    typer.echo(json.dumps(_plain(data), indent=2, allow_nan=False))


def _plain(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {str(key): _plain(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_plain(value) for value in data]
    value = data.item() if hasattr(data, "item") else data  # numpy scalars
    return None if isinstance(value, float) and not math.isfinite(value) else value


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean …?)`` for an unknown name; empty if no known name is close."""
    by_lower = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.6)
    return f" (did you mean {' or '.join(by_lower[one] for one in near)}?)" if near else ""


@contextmanager
def plain_errors(traceback: bool) -> Iterator[None]:
    """Print marlvec's errors in one line: exit code 2 if the command line is wrong, else 1."""
    try:
        yield
    except Exception as error:
        # Imported here: they import Gymnasium, which `--help` does not need.
        from marlvec.errors import (
            ArgumentError,
            CheckpointError,
            EnvArgumentError,
            MarlvecError,
            MissingExtraError,
            RegistryError,
        )

        if traceback or not isinstance(error, MarlvecError):
            raise
        # Errors that another command line avoids; all others are faults of the running code.
        usage = (ArgumentError, CheckpointError, RegistryError, MissingExtraError, EnvArgumentError)
        lines = str(error).splitlines() or [type(error).__name__]
        hint = ["--traceback shows where"] if len(lines) > 1 else []
        complain("; ".join([lines[0], *getattr(error, "__notes__", []), *hint]))
        raise typer.Exit(2 if isinstance(error, usage) else 1) from None


@contextmanager
def naming(option: str) -> Iterator[None]:
    """Raise an `OSError` of the block, about a path, as an `ArgumentError` that begins with ``option``."""
    try:
        yield
    except OSError as error:
        from marlvec.errors import ArgumentError, MarlvecError

        if isinstance(error, MarlvecError):
            raise
        at = "" if error.filename is None else f": {error.filename}"
        raise ArgumentError(f"{option}: cannot be used ({error.strerror or error}{at}); name another path") from error


def check_writable(path: Path, option: str) -> None:
    """Raise `ArgumentError`, before a long run, if no file can be written to this path."""
    from marlvec.errors import ArgumentError

    with naming(f"{option} {path}"):
        if path.is_dir():
            raise ArgumentError(f"{option} {path}: expected a file, got a folder")
        if not path.parent.is_dir():
            raise ArgumentError(f"{option} {path}: folder {path.parent} does not exist")
        try:  # permissions alone do not show it: /proc, a full disk
            tempfile.TemporaryFile(dir=path.parent).close()
        except OSError as error:
            where = f"folder {path.parent} cannot be written to ({error.strerror or error})"
            raise ArgumentError(f"{option} {path}: {where}") from error


@contextmanager
def torch_within_cores() -> Iterator[None]:
    """Limit torch, also if imported later, to the usable cores: more threads slow small policies down.

    torch counts all cores of the machine, also those beyond a container's quota.
    """
    from marlvec.vector.shards.partition import usable_cores

    cores, torch, given = usable_cores(), sys.modules.get("torch"), os.environ.get(_THREADS)
    if given is None:
        os.environ[_THREADS] = str(cores)  # torch reads it when it is imported
    threads = 0 if torch is None else int(torch.get_num_threads())
    if torch is not None:
        torch.set_num_threads(min(threads, cores))
    try:
        yield
    finally:
        if given is None:
            os.environ.pop(_THREADS, None)
        if torch is not None:
            torch.set_num_threads(threads)


def complain(text: str) -> None:
    """Print an error in one line of any length: a terminal wraps it, a log file keeps it in one line."""
    Console(stderr=True, emoji=False).print(
        f"[bold red]error:[/] [red]{escape(text)}[/]", highlight=False, soft_wrap=True
    )

"""Shared by commands: consoles, the import path, and errors, also typer's usage errors, in one line."""

from __future__ import annotations

import difflib
import inspect
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

_WIDTH_IN_A_PIPE = 140
_THREADS = "OMP_NUM_THREADS"

Side = StrEnum("Side", "AGENT ACTION LEARNER")


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
    from marlvec.vector.cores import usable_cores

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


# typer may use its own copy of click; its public names lead to the right classes.
_UsageError: Any = typer.BadParameter.__mro__[1]


class CommandGroup(TyperGroup):
    """The commands; usage errors are printed in one line that begins with ``error:``, with exit code 2."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; paragraphs of its help become single lines, which the terminal wraps."""
        command = super().get_command(ctx, cmd_name)
        if command is not None and command.help:
            command.help = _unwrapped(command.help)
            _hide_types_of_flags(command.get_params(ctx))
        return command

    def get_params(self, ctx: Any) -> list[Any]:
        options = super().get_params(ctx)
        _hide_types_of_flags(options)
        return options

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run as typer does, but without its frame around errors."""
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except _UsageError as error:
            if not standalone_mode:
                raise
            if type(error).__name__ == "NoArgsIsHelpError":
                typer.echo(error.ctx.get_help())
                sys.exit(0)
            complain(_in_a_line(error, prog_name or "marlvec"))
            sys.exit(2)
        if not standalone_mode:
            return code
        sys.exit(code if isinstance(code, int) else 0)


def _hide_types_of_flags(options: Sequence[Any]) -> None:
    """Hide ``<bool>`` in the help of flags, which take no value."""
    for option in options:
        if getattr(option, "is_flag", False):
            option.metavar = ""


def _unwrapped(text: str) -> str:
    """Remove a docstring's line breaks inside paragraphs; indented lines are examples, and stay."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(part if part.startswith(" ") else " ".join(part.split()) for part in paragraphs)


def _in_a_line(error: Any, program: str) -> str:
    """Return a usage error in one line, with the command that shows the usage."""
    text = " ".join(error.format_message().split()).removesuffix(".").replace("Value error, ", "")
    if found := re.fullmatch(r"No such command '(.*)'", text):  # older typers have no suggestions
        text += did_you_mean(found[1], error.ctx.command.list_commands(error.ctx))
    command = program if error.ctx is None else error.ctx.command_path
    parameter = getattr(error, "param", None)
    if type(error).__name__ == "MissingParameter" and getattr(parameter, "metavar", None) == "ENV":
        text += f", e.g. `{command} simple_spread`; `{program} envs` lists them"
    end = "" if text.endswith("?") else ";"
    return f"{text[:1].lower()}{text[1:]}{end} `{command} -h` shows what it takes"

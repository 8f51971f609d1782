"""Where commands run: what they print to, how errors look, and where they find policies."""

from __future__ import annotations

import difflib
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

__all__ = ["complain", "did_you_mean", "plain_errors", "print_json", "settle_in", "stdout", "torch_within_cores"]

_WIDTH_IN_A_PIPE = 140
_THREADS = "OMP_NUM_THREADS"


def settle_in() -> None:
    """Let policies and envs be found from here, as they are by `python -m`, and pygame keep its greeting to itself."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")


def stdout() -> Console:
    """For results: as wide as the terminal, and wide enough in a pipe or file."""
    console = Console(emoji=False)
    return console if console.is_terminal else Console(emoji=False, width=_WIDTH_IN_A_PIPE)


def print_json(data: Any) -> None:
    """Print JSON to stdout; numbers that are none (NaN, infinity) are null there."""
    typer.echo(json.dumps(_plain(data), indent=2, allow_nan=False))


def _plain(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {str(key): _plain(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_plain(value) for value in data]
    value = data.item() if hasattr(data, "item") else data  # numpy's numbers
    return None if isinstance(value, float) and not math.isfinite(value) else value


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` (did you mean …?)`` to go behind a name that is not known; nothing where nothing comes near."""
    by_lower = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.6)
    return f" (did you mean {' or '.join(by_lower[one] for one in near)}?)" if near else ""


@contextmanager
def plain_errors(traceback: bool) -> Iterator[None]:
    """Say what marlvec raises in one line: exit code 2 if the command line is wrong, else 1."""
    try:
        yield
    except Exception as error:
        # Not above: Gymnasium comes with them, and a `--help` is answered without it.
        from marlvec.errors import ArgumentError, EnvArgumentError, MarlvecError, MissingExtraError, RegistryError

        if traceback or not isinstance(error, MarlvecError):
            raise
        # What a different command line would mend; everything else is a fault of what ran.
        usage = (ArgumentError, RegistryError, MissingExtraError, EnvArgumentError)
        lines = str(error).splitlines() or [type(error).__name__]
        hint = ["--traceback shows where"] if len(lines) > 1 else []
        complain("; ".join([lines[0], *getattr(error, "__notes__", []), *hint]))
        raise typer.Exit(2 if isinstance(error, usage) else 1) from None


@contextmanager
def torch_within_cores() -> Iterator[None]:
    """Have torch, whenever it comes, use no more threads than there are cores: small policies wait for one another.

    It counts the machine's cores, also those beyond a container's quota.
    """
    from marlvec.vector.shards.partition import usable_cores

    cores, torch, given = usable_cores(), sys.modules.get("torch"), os.environ.get(_THREADS)
    if given is None:
        os.environ[_THREADS] = str(cores)  # which torch reads when it is imported
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
    """Say what went wrong, in one line, whatever its length: a terminal wraps it, a log file keeps it whole."""
    Console(stderr=True, emoji=False).print(
        f"[bold red]error:[/] [red]{escape(text)}[/]", highlight=False, soft_wrap=True
    )

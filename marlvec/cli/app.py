"""The commands, their options, and how errors look to somebody who typed one.

What a command needs is imported when it runs, so that ``marlvec --help`` answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from marlvec.errors import ArgumentError, EnvArgumentError, MarlvecError, MissingExtraError, RegistryError

__all__ = ["app", "main"]

app = typer.Typer(
    help="Many multi-agent envs at once: arrays with an agent axis, and per-policy batches.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

# What a different command line would mend; everything else is a fault of what ran.
_USAGE = (ArgumentError, RegistryError, MissingExtraError, EnvArgumentError)
_WIDTH_IN_A_PIPE = 140


class Backend(StrEnum):
    """Where envs run."""

    ASYNC = "async"
    SYNC = "sync"


class AutoresetMode(StrEnum):
    """What happens when an env's episode ends."""

    SAME_STEP = "same_step"
    NEXT_STEP = "next_step"
    DISABLED = "disabled"


class BatchMode(StrEnum):
    """Where batches are cut."""

    TRUNCATE = "truncate"
    COMPLETE = "complete"


def main() -> None:
    """Entry point of the ``marlvec`` command."""
    app(prog_name="marlvec")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"marlvec {sys.modules['marlvec'].__version__}")
        raise typer.Exit


@app.callback()
def _marlvec(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def rollout(
    env: Annotated[
        str,
        typer.Argument(
            metavar="ENV", help="An id such as simple_spread ([b]marlvec envs[/] lists them), or MODULE:ATTR."
        ),
    ],
    num_envs: Annotated[int, typer.Option(min=1, metavar="N", help="How many copies of it.")] = 16,
    env_steps: Annotated[
        int, typer.Option(min=1, metavar="N", help="How many steps, over all envs together.")
    ] = 20_000,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[ID=]WHAT",
            help="Who acts; may be given several times. WHAT is [b]random[/], MODULE:ATTR or FILE.py:ATTR: a marlvec "
            "Policy (class or instance), or a function from rows to actions. ID is its name in the table, by default "
            "ATTR. Without this option all agents act at random.",
        ),
    ] = None,
    mapping: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PREFIX=ID",
            help="Agents whose names begin with PREFIX are played by policy ID; the longest PREFIX decides. All others "
            "are played by the first --policy.",
        ),
    ] = None,
    connectors: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[ID=]CHAIN",
            help="What stands between the envs and policy ID, or every policy: agent connectors of marlvec.connectors, "
            'e.g. "NormalizeObs(clip=5), FrameStack(4)".',
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="An argument for the env, e.g. max_cycles=50; may be given several times.",
        ),
    ] = None,
    backend: Annotated[Backend, typer.Option(help="Worker processes, or this one.")] = Backend.ASYNC,
    num_workers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Worker processes.", show_default="one per usable core")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Makes the run repeatable: envs and policies.", show_default="none"),
    ] = None,
    autoreset_mode: Annotated[
        AutoresetMode, typer.Option(help="How the next episode begins; the batches do not depend on it.")
    ] = AutoresetMode.SAME_STEP,
    batch_mode: Annotated[
        BatchMode, typer.Option(help="Exactly --env-steps, or whole episodes until they sum to it.")
    ] = BatchMode.TRUNCATE,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw returns and lengths into this file (.png, .svg, .pdf, …). Needs marlvec\\[plot]."
        ),
    ] = None,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show errors with their traceback.")] = False,
) -> None:
    """Step envs with policies; show returns, shapes and speed.

    The progress bar goes to stderr, the table to stdout. Ctrl-C ends the run early, with the table of what there is.

    Two policies, each with connectors of its own:

      marlvec rollout simple_spread --policy main=random --policy examples/policies.py:seek
      --mapping agent_2=seek --connectors "main=NormalizeObs, FrameStack(4)" --plot returns.png
    """
    from marlvec.cli import arguments, tables
    from marlvec.cli.rollout import roll_out
    from marlvec.collect import Collector
    from marlvec.registry import make

    # So that policies and envs are found from here, as they are by `python -m`.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")  # its greeting would stand above the table
    with _plain_errors(traceback):
        if plot is not None:
            from marlvec.cli.figure import check_file, returns_figure

            check_file(plot)
        named = arguments.policies(policy or [])
        chains = arguments.connectors(connectors or [], tuple(named))
        kwargs = arguments.env_kwargs(settings or [])
        with make(
            env,
            num_envs,
            backend=backend.value,
            num_workers=num_workers,
            autoreset_mode=autoreset_mode.value,
            copy=False,  # the collector keeps copies of what it needs
            env_kwargs=kwargs,
        ) as envs:
            named, played_by = arguments.cast(named, mapping or [], envs.agents, envs.groups)
            collector = Collector(
                envs,
                named,
                played_by,
                agent_connectors=chains if chains else None,
                batch_mode=batch_mode.value,
                seed=seed,
                window=env_steps + num_envs,  # every episode of this run: each takes a step at least
            )
            result = roll_out(collector, played_by, env_steps, Console(stderr=True, emoji=False))
        console = _stdout()
        tables.print_rollout(console, result)
        if plot is not None:
            returns_figure(result).savefig(plot)
            console.print(f"Plot: {plot}", markup=False, highlight=False, soft_wrap=True)
    if result.interrupted:
        raise typer.Exit(130)


@app.command()
def envs(
    filter: Annotated[
        str | None,
        typer.Argument(
            metavar="FILTER",
            help="Show ids that contain this; Gymnasium's own are listed too then.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """List the envs that make() knows, and what to install where something is missing."""
    from marlvec.cli import tables
    from marlvec.registry import listing

    wanted = (filter or "").lower()
    rows = [row for row in listing(with_gymnasium=bool(wanted)) if wanted in row.id.lower()]
    if not rows:
        _complain(f"no env id contains {filter!r}; `marlvec envs` lists all")
        raise typer.Exit(1)
    tables.print_envs(_stdout(), rows, with_gymnasium=bool(wanted))


def _stdout() -> Console:
    """For results: as wide as the terminal, and wide enough in a pipe or file."""
    console = Console(emoji=False)
    return console if console.is_terminal else Console(emoji=False, width=_WIDTH_IN_A_PIPE)


@contextmanager
def _plain_errors(traceback: bool) -> Iterator[None]:
    """Say what marlvec raises in one line: exit code 2 if the command line is wrong, else 1."""
    try:
        yield
    except MarlvecError as error:
        if traceback:
            raise
        lines = str(error).splitlines() or [type(error).__name__]
        hint = ["--traceback shows where"] if len(lines) > 1 else []
        _complain("; ".join([lines[0], *getattr(error, "__notes__", []), *hint]))
        raise typer.Exit(2 if isinstance(error, _USAGE) else 1) from None


def _complain(text: str) -> None:
    # One line, whatever its length: a terminal wraps it, a log file keeps it whole.
    Console(stderr=True, emoji=False).print(
        f"[bold red]error:[/] [red]{escape(text)}[/]", highlight=False, soft_wrap=True
    )

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

from marlvec.cli.options import Backend, Connectors, Env, Mapping, NumWorkers, Policies, Seed, Settings, Side, Traceback
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
    env: Env,
    num_envs: Annotated[int, typer.Option(min=1, metavar="N", help="How many copies of it.")] = 16,
    env_steps: Annotated[
        int, typer.Option(min=1, metavar="N", help="How many steps, over all envs together.")
    ] = 20_000,
    policy: Policies = None,
    mapping: Mapping = None,
    connectors: Connectors = None,
    settings: Settings = None,
    backend: Annotated[
        Backend, typer.Option(help="Worker processes, threads, neither, compiled worlds, or a pool.")
    ] = Backend.ASYNC,
    num_workers: NumWorkers = None,
    seed: Seed = None,
    autoreset_mode: Annotated[
        AutoresetMode, typer.Option(help="How the next episode begins; the batches do not depend on it.")
    ] = AutoresetMode.SAME_STEP,
    batch_mode: Annotated[
        BatchMode, typer.Option(help="Exactly --env-steps, or whole episodes until they sum to it.")
    ] = BatchMode.TRUNCATE,
    live: Annotated[
        bool,
        typer.Option(
            "--live",
            help="Show returns, speed and times while it runs, in place of the bar; lines now and then if stderr is "
            "no terminal.",
        ),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw returns and lengths into this file (.png, .svg, .pdf, …). Needs marlvec\\[plot]."
        ),
    ] = None,
    traceback: Traceback = False,
) -> None:
    """Step envs with policies; show returns, shapes and speed.

    The progress bar, or with --live a table that keeps up, goes to stderr; the table at the end to stdout. Ctrl-C ends
    the run early, with the table of what there is.

    Two policies, each with connectors of its own:

      marlvec rollout simple_spread --policy main=random --policy examples/policies.py:seek
      --mapping agent_2=seek --connectors "main=NormalizeObs, FrameStack(4)" --plot returns.png
    """
    from marlvec.cli import arguments, tables
    from marlvec.cli.rollout import roll_out
    from marlvec.collect import Collector
    from marlvec.collect.callbacks import LiveTable
    from marlvec.registry import make

    _settle_in()
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
            stderr = Console(stderr=True, emoji=False)
            table = LiveTable(env_steps, title=envs.spec.name, console=stderr) if live else None
            collector = Collector(
                envs,
                named,
                played_by,
                callbacks=() if table is None else (table,),
                agent_connectors=chains if chains else None,
                batch_mode=batch_mode.value,
                seed=seed,
                window=env_steps + num_envs,  # every episode of this run: each takes a step at least
            )
            result = roll_out(collector, played_by, env_steps, stderr, table)
        console = _stdout()
        tables.print_rollout(console, result)
        if plot is not None:
            returns_figure(result).savefig(plot)
            console.print(f"Plot: {plot}", markup=False, highlight=False, soft_wrap=True)
    if result.interrupted:
        raise typer.Exit(130)


@app.command()
def record(
    env: Env,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="The video: a name that ends in .mp4 or .gif. Needs marlvec\\[video].",
        ),
    ],
    episodes: Annotated[int, typer.Option(min=1, metavar="N", help="How many episodes of each env.")] = 1,
    num_envs: Annotated[
        int, typer.Option(min=1, metavar="N", help="How many copies of it, side by side in one picture.")
    ] = 1,
    policy: Policies = None,
    mapping: Mapping = None,
    connectors: Connectors = None,
    settings: Settings = None,
    max_episode_steps: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Truncate episodes after so many steps.", show_default="the env's own"),
    ] = None,
    fps: Annotated[
        float | None, typer.Option(metavar="N", help="Frames a second.", show_default="what the env says, or 30")
    ] = None,
    backend: Annotated[Backend, typer.Option(help="Worker processes, threads, or neither.")] = Backend.SYNC,
    seed: Seed = None,
    traceback: Traceback = False,
) -> None:
    """Play episodes and write a video of them, from the first frames to the last.

    With several envs the picture is a grid; one that has played its episodes keeps its last frame. Ctrl-C ends the
    video early, with the frames that there are.

      marlvec record simple_spread -o spread.gif --episodes 3 --num-envs 4 --policy examples/policies.py:seek
    """
    from marlvec.cli import arguments
    from marlvec.cli.record import check_output, print_recording, roll_camera
    from marlvec.registry import make

    _settle_in()
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pictures are drawn in memory: pygame needs no screen for them
    with _plain_errors(traceback):
        check_output(output, fps)
        named = arguments.policies(policy or [])
        chains = arguments.connectors(connectors or [], tuple(named))
        with make(
            env,
            num_envs,
            backend=backend.value,
            autoreset_mode="disabled",
            render_mode="rgb_array",
            max_episode_steps=max_episode_steps,
            env_kwargs=arguments.env_kwargs(settings or []),
        ) as envs:
            named, played_by = arguments.cast(named, mapping or [], envs.agents, envs.groups)
            result = roll_camera(
                envs,
                named,
                played_by,
                chains,
                output=output,
                episodes=episodes,
                fps=fps,
                seed=seed,
                console=Console(stderr=True, emoji=False),
            )
        print_recording(_stdout(), result)
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


@app.command()
def connectors(
    filter: Annotated[
        str | None,
        typer.Argument(metavar="FILTER", help="Show those whose names contain this.", show_default=False),
    ] = None,
    side: Annotated[
        Side | None, typer.Option(help="Show those of this side of a policy.", show_default="all of them")
    ] = None,
) -> None:
    """List the connectors that come with marlvec, and what each does."""
    from marlvec.cli.connectors import print_connectors
    from marlvec.connectors.catalogue import catalogue

    rows = catalogue(filter or "", None if side is None else side.value)
    if not rows:
        of_side = "" if side is None else f" of the {side.value} side"
        _complain(f"no connector{of_side} has {filter!r} in its name; `marlvec connectors` lists all")
        raise typer.Exit(1)
    print_connectors(_stdout(), rows)


def _settle_in() -> None:
    """Let policies and envs be found from here, as they are by `python -m`, and pygame keep its greeting to itself."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")


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

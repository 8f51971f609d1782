"""The commands, their options, and the display of errors.

Modules of a command are imported when it runs, so that ``marlvec --help`` is fast.
"""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from marlvec.cli.commands import (
    DEFAULT_BACKEND,
    AsJson,
    Backend,
    Connectors,
    Env,
    MaxEpisodeSteps,
    NumWorkers,
    Policies,
    PolicyMapping,
    Seed,
    Settings,
    Traceback,
    TrainedPolicies,
    arena,
    data,
    play,
    record_data,
)
from marlvec.cli.console import (
    CommandGroup,
    Side,
    complain,
    did_you_mean,
    naming,
    plain_errors,
    print_json,
    settle_in,
    stdout,
)

app = typer.Typer(
    cls=CommandGroup,
    help="Many multi-agent envs at once: arrays with an agent axis, and per-policy batches.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


AutoresetMode = StrEnum("AutoresetMode", "SAME_STEP NEXT_STEP DISABLED")  # values are the names in lower case


class BatchMode(StrEnum):
    """Modes of `Collector(batch_mode=)`."""

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
    mapping: PolicyMapping = None,
    connectors: Connectors = None,
    settings: Settings = None,
    backend: Annotated[
        Backend,
        typer.Option(
            metavar="NAME",
            help="Where envs run: async (worker processes), thread, sync (in this process), native (compiled envs), "
            "pool, or auto.",
        ),
    ] = DEFAULT_BACKEND,
    num_workers: NumWorkers = None,
    seed: Seed = None,
    autoreset_mode: Annotated[
        AutoresetMode,
        typer.Option(
            metavar="MODE",
            help="How the next episode begins: same_step, next_step or disabled; the batches do not depend on it.",
        ),
    ] = AutoresetMode.SAME_STEP,
    batch_mode: Annotated[
        BatchMode,
        typer.Option(
            metavar="MODE", help="truncate: exactly --env-steps; complete: whole episodes until they sum to it."
        ),
    ] = BatchMode.TRUNCATE,
    live: Annotated[
        bool,
        typer.Option(
            "--live",
            help="Show returns, speed and times while it runs, instead of the bar; occasional lines if stderr is no "
            "terminal.",
        ),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw returns and lengths into this file (.png, .svg, .pdf, …). Needs marlvec\\[plot]."
        ),
    ] = None,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    r"""Step envs with policies; show returns, shapes and speed.

    The progress bar, or the live table of --live, is printed to stderr; the table at the end to stdout. Ctrl-C ends the
    run early, with the table so far.

    Two policies, each with its own connectors:

      marlvec rollout simple_spread --mapping agent_2=seek \
        --policy main=random --policy examples/policies.py:seek \
        --connectors "main=NormalizeObs, FrameStack(4)" --plot returns.png
    """
    from marlvec.cli import arguments
    from marlvec.cli import display as rollout_table
    from marlvec.cli.arguments import build_envs
    from marlvec.cli.running import roll_out
    from marlvec.collect import Collector
    from marlvec.collect.loggers import LiveTable

    settle_in()
    with plain_errors(traceback):
        if plot is not None:
            from marlvec.cli.display import check_file, returns_figure

            check_file(plot)
        named = arguments.policies(policy or [])
        chains = arguments.connectors(connectors or [], tuple(named))
        kwargs = arguments.env_kwargs(settings or [])
        with build_envs(
            env,
            num_envs,
            backend=backend.value,
            num_workers=num_workers,
            autoreset_mode=autoreset_mode.value,
            copy=False,  # the collector copies what it keeps
            env_kwargs=kwargs,
        ) as envs:
            named, played_by = arguments.assign_policies(named, mapping or [], envs.agents, envs.groups)
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
                window=env_steps + num_envs,  # all episodes of this run: each takes at least one step
            )
            result = roll_out(collector, played_by, env_steps, stderr, table)
        console = stdout()
        if as_json:
            print_json(rollout_table.rollout_json(result))
        else:
            rollout_table.print_rollout(console, result)
        if plot is not None:
            with naming(f"--plot {plot}"):
                returns_figure(result).savefig(plot)
            (Console(stderr=True) if as_json else console).print(
                f"Plot: {plot}", markup=False, highlight=False, soft_wrap=True
            )
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
    policy: TrainedPolicies = None,
    mapping: PolicyMapping = None,
    connectors: Connectors = None,
    settings: Settings = None,
    max_episode_steps: MaxEpisodeSteps = None,
    fps: Annotated[
        float | None, typer.Option(metavar="N", help="Frames a second.", show_default="the env's own, or 30")
    ] = None,
    begin: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="Begin with a saved step of an episode: a file of marlvec.save_state(); with several envs, each "
            "continues from it.",
        ),
    ] = None,
    env_id: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Which env of --from.", show_default="the only one in it")
    ] = None,
    backend: Annotated[
        Backend,
        typer.Option(
            metavar="NAME",
            help="Where envs run: sync (in this process), async (worker processes), thread, native (compiled envs), "
            "pool, or auto.",
        ),
    ] = Backend.SYNC,
    seed: Seed = None,
    traceback: Traceback = False,
) -> None:
    r"""Play episodes and write a video of them, from the first frames to the last.

    With several envs the picture is a grid; an env that has played its episodes keeps its last frame. Ctrl-C ends the
    video early, with the frames so far. With --from the first episode of each env continues from a saved state: the
    same situation can be replayed any number of times, and with other policies.

      marlvec record simple_spread -o spread.gif --episodes 3 --num-envs 4 \
        --policy examples/policies.py:seek
    """
    from functools import partial

    from marlvec.cli import arguments
    from marlvec.cli.arguments import build_envs
    from marlvec.cli.running import collector_of
    from marlvec.cli.video import check_output, print_recording, read_moment, record_episodes

    settle_in()
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame draws in memory, without a screen
    with plain_errors(traceback):
        check_output(output, fps)
        moment = read_moment(begin, env_id)
        with build_envs(
            env,
            num_envs,
            backend=(moment and moment.backend) or backend.value,
            autoreset_mode="disabled",
            render_mode="rgb_array",
            max_episode_steps=max_episode_steps,
            env_kwargs=arguments.env_kwargs(settings or []),
            env_state=None if moment is None else "deepcopy",
        ) as envs:
            result = record_episodes(
                envs,
                partial(
                    collector_of,
                    texts=policy or [],
                    mapping=mapping or [],
                    connectors=connectors or [],
                    explore=True,
                    seed=seed,
                ),
                output=output,
                episodes=episodes,
                fps=fps,
                console=Console(stderr=True, emoji=False),
                begin=moment,
            )
        print_recording(stdout(), result)
    if result.interrupted:
        raise typer.Exit(130)


app.command()(play)
app.command()(arena)
app.command("record-data")(record_data)
app.command()(data)


@app.command()
def serve(
    env: Env,
    policy: TrainedPolicies = None,
    mapping: PolicyMapping = None,
    connectors: Connectors = None,
    settings: Settings = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="0 for a free one.")] = 8765,
    num_envs: Annotated[int, typer.Option(min=1, metavar="N", help="How many episodes can run at a time.")] = 64,
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Accept other machines; they need the token, or --no-token.")
    ] = False,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File with the token (mode 600); default: the variable MARLVEC_TOKEN, if set."
        ),
    ] = None,
    no_token: Annotated[
        bool, typer.Option("--no-token", help="Require no token of any client, also of other machines.")
    ] = False,
    origin: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="Another site whose pages may use it; may be repeated.")
    ] = None,
    name: Annotated[
        list[str] | None, typer.Option(metavar="HOST", help="Another name of the server; may be repeated.")
    ] = None,
    explore: Annotated[
        bool, typer.Option("--explore", help="Let policies explore, instead of acting as well as they can.")
    ] = False,
    seed: Seed = None,
    traceback: Traceback = False,
) -> None:
    """Serve policies over a socket to simulators and web pages, until Ctrl-C. Needs the extra "external".

    Three agents of simple_spread, all played by one function:

      marlvec serve simple_spread --policy examples/policies.py:seek
    """
    from marlvec import external
    from marlvec.cli import arguments
    from marlvec.cli import running as serve_command

    settle_in()
    with plain_errors(traceback), external.make(env, num_envs, **arguments.env_kwargs(settings or [])) as envs:
        token = serve_command.token_of(token_file, no_token=no_token)
        collector = serve_command.collector_of(
            envs, policy or [], mapping or [], connectors or [], explore=explore, seed=seed
        )
        with external.Server(
            envs,
            host,
            port,
            token=token,
            allow_remote=allow_remote,
            allow_no_token=no_token,
            hosts=name or (),
            origins=origin or (),
            logs=serve_command.takes_logs(collector),
        ) as server:
            console = Console(stderr=True, emoji=False)
            console.print(
                f"{envs.spec.name}: {', '.join(collector.policies)} at {server.url}; Ctrl-C ends it", highlight=False
            )
            if token is None:
                console.print(serve_command.who_may_come(server.host), highlight=False, soft_wrap=True)
            serve_command.answer(collector)


@app.command()
def bench(
    env: Env,
    num_envs: Annotated[int, typer.Option(min=1, metavar="N", help="How many copies of it.")] = 16,
    seconds: Annotated[float, typer.Option(min=0.01, metavar="S", help="Seconds of stepping for each backend.")] = 3.0,
    num_workers: NumWorkers = None,
    settings: Settings = None,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """Step an env on every backend that supports it, and recommend one.

    Random actions, backends in turns; only the wall-clock time of `step()` counts, so nothing else should be running.
    All compilation happens before.
    """
    from marlvec.cli import arguments
    from marlvec.cli import running as benchmark

    settle_in()
    with plain_errors(traceback):
        kwargs = arguments.env_kwargs(settings or [])
        figures, refused = benchmark.bench(
            env, num_envs, num_workers, kwargs, seconds, Console(stderr=True, emoji=False)
        )
        benchmark.print_bench(stdout(), env, num_envs, figures, refused, as_json=as_json)


@app.command()
def check(
    env: Env,
    episodes: Annotated[
        int, typer.Option(min=1, metavar="N", help="How many episodes; each is played four or five times.")
    ] = 3,
    max_steps: Annotated[
        int, typer.Option(min=1, metavar="N", help="Limit within which every episode must end.")
    ] = 10_000,
    skip: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A check to leave out; may be given several times.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of the env and of the actions.")] = 0,
    settings: Settings = None,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """Play your own env, and report its faults and what to change. Exit code 1 if it has faults.

    Whole episodes are played, in one instance, and in two in turns; serious findings come first.

      marlvec check my_package.envs:MyEnv --set size=5 --skip infos
    """
    from marlvec.cli import arguments
    from marlvec.cli import running as checking

    settle_in()
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # some envs open a window when they are built
    with plain_errors(traceback):
        kwargs = arguments.env_kwargs(settings or [])
        findings = checking.check(
            env,
            kwargs,
            skip=skip or (),
            progress=sys.stderr.isatty(),
            episodes=episodes,
            seed=seed,
            max_steps=max_steps,
        )
        checking.print_findings(stdout(), env, findings, as_json=as_json)
    if findings:
        raise typer.Exit(1)


@app.command()
def envs(
    filter: Annotated[
        str | None,
        typer.Argument(
            metavar="FILTER", help="Show ids that contain this, including Gymnasium's own.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the envs that make() knows, and what to install if something is missing."""
    from marlvec.cli import running as lists
    from marlvec.registry import listing

    wanted = (filter or "").lower()
    known = listing(with_gymnasium=bool(wanted))
    rows = [row for row in known if wanted in row.id.lower()]
    if not rows:
        near = did_you_mean(wanted, (row.id.rpartition("/")[2] for row in known))
        complain(f"no env id contains {filter!r}{near}; `marlvec envs` lists all")
        raise typer.Exit(2)
    if as_json:
        return print_json(lists.envs_json(rows))
    lists.print_envs(stdout(), rows, with_gymnasium=bool(wanted))


@app.command()
def connectors(
    filter: Annotated[
        str | None,
        typer.Argument(metavar="FILTER", help="Show connectors whose names contain this.", show_default=False),
    ] = None,
    side: Annotated[
        Side | None, typer.Option(help="Show connectors of this side of a policy.", show_default="all of them")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the connectors that come with marlvec, and what each does."""
    from marlvec.cli.running import connectors_json, print_connectors
    from marlvec.connectors.registry import catalogue

    rows = catalogue(filter or "", None if side is None else side.value)
    if not rows:
        of_side = "" if side is None else f" of the {side.value} side"
        near = did_you_mean(filter or "", (row.name for row in catalogue("", None)))
        complain(f"no connector{of_side} has {filter!r} in its name{near}; `marlvec connectors` lists all")
        raise typer.Exit(2)
    if as_json:
        return print_json(connectors_json(rows))
    print_connectors(stdout(), rows)


@app.command()
def examples(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Print the source of this example.", show_default=False)
    ] = None,
    copy: Annotated[bool, typer.Option("--copy", help="Copy NAME, or all examples, instead of printing.")] = False,
    to: Annotated[Path, typer.Option(metavar="FOLDER", help="Where copies go.")] = Path("examples"),
) -> None:
    """List the example scripts that come with marlvec, print one, or copy them.

    Copy one, and play with its policy:

      marlvec examples policies --copy

      marlvec rollout simple_spread --policy examples/policies.py:seek
    """
    from marlvec.cli.running import copy_examples, example_files, print_examples

    with plain_errors(traceback=False):
        files = example_files(name)
        if copy:
            for file in copy_examples(files, to):
                typer.echo(file)
        elif name is None:
            print_examples(stdout(), files)
        else:
            typer.echo(files[0].read_text(encoding="utf-8"), nl=False)

"""``marlvec record-data``: a dataset of what policies do in an env."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from marlvec.cli.console import plain_errors, settle_in
from marlvec.cli.options import AsJson, Backend, Connectors, Env, Mapping, NumWorkers, Seed, Settings, Traceback

if TYPE_CHECKING:
    from marlvec.collect import Collector

__all__ = ["record_data"]

_AT_A_TIME = 4096  # env steps of a batch at most
_BATCHES = 50  # at least, for the bar


class Format(StrEnum):
    PARQUET = "parquet"
    ARROW = "arrow"


def record_data(
    env: Env,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="FOLDER", help="The recording: a new folder. Needs marlvec\\[parquet]."),
    ],
    env_steps: Annotated[
        int, typer.Option(min=1, metavar="N", help="How many steps, over all envs together.")
    ] = 100_000,
    num_envs: Annotated[int, typer.Option(min=1, metavar="N", help="How many copies of it.")] = 64,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[ID=]WHAT[@PATH]",
            help="Who acts, as in [b]marlvec rollout[/]; PATH is what it has learned: a pool of opponents (its "
            "newest), POOL/ID, or a file of save_policy().",
        ),
    ] = None,
    mapping: Mapping = None,
    connectors: Connectors = None,
    settings: Settings = None,
    best: Annotated[
        bool, typer.Option("--best", help="Have policies take the best they know, and not draw their actions.")
    ] = False,
    format: Annotated[
        Format, typer.Option(metavar="NAME", help="parquet: small files; arrow: faster to write, twice the size.")
    ] = Format.PARQUET,
    append: Annotated[bool, typer.Option("--append", help="Go on with a recording of the same env.")] = False,
    backend: Annotated[
        Backend,
        typer.Option(
            metavar="NAME",
            help="Where envs run: auto, async (worker processes), thread, sync (in this process), native or pool.",
        ),
    ] = Backend.AUTO,
    num_workers: NumWorkers = None,
    seed: Seed = None,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    r"""Play an env, and record all policies' rows for marlvec.load_dataset().

    Ctrl-C ends the recording early, with the batches that were collected until then. [b]marlvec data[/] shows what it
    holds.

      marlvec record-data simple_spread --out runs/seek --env-steps 50000 \
        --policy examples/policies.py:seek
    """
    from marlvec.cli import arguments
    from marlvec.cli.building import build_envs
    from marlvec.cli.commands.serve import collector_of
    from marlvec.cli.recording.data import show
    from marlvec.recording.recorder import Recorder

    settle_in()
    with plain_errors(traceback):
        kwargs = arguments.env_kwargs(settings or [])
        notes = {"env": env, "env_kwargs": kwargs, "seed": seed, "policies": policy or ["random"]}
        with (
            build_envs(
                env, num_envs, backend=backend.value, num_workers=num_workers, copy=False, env_kwargs=kwargs
            ) as envs,
            Recorder(out, format.value, append=append, notes=notes) as recorder,
        ):
            collector = collector_of(
                envs,
                policy or [],
                mapping or [],
                connectors or [],
                explore=not best,
                seed=seed,
                callbacks=[recorder],
            )
            interrupted = _collect(collector, env_steps)
        show(out, as_json=as_json)
    if interrupted:
        raise typer.Exit(130)


def _collect(collector: Collector, env_steps: int) -> bool:
    """Collect so many env steps under a progress bar; return whether Ctrl-C has ended it."""
    from marlvec.collect.progress_bar import ProgressBar

    collector.eval()
    at_a_time = max(1, min(_AT_A_TIME, env_steps // _BATCHES))
    console = Console(stderr=True, emoji=False)
    done = 0
    with ProgressBar(collector.envs.spec.name, "env steps", env_steps, console=console) as bar:
        try:
            while done < env_steps:
                done += collector.collect(env_steps=min(at_a_time, env_steps - done)).env_steps
                bar.show(done)
        except KeyboardInterrupt:
            return True
    return False

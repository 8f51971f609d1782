"""``marlvec record-data`` and ``marlvec data``: a dataset of what policies do in an env, and what is in it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from marlvec.cli.console import naming, plain_errors, print_json, settle_in, stdout
from marlvec.cli.options import (
    AsJson,
    Backend,
    Connectors,
    Env,
    NumWorkers,
    PolicyMapping,
    Seed,
    Settings,
    Traceback,
    TrainedPolicies,
)

if TYPE_CHECKING:
    from marlvec.collect import Collector
    from marlvec.recording import RecordedDataset, RecordedRows
    from marlvec.recording.recorder import Recorder

__all__ = ["record_data", "data", "show"]

_AT_A_TIME = 4096  # env steps of a batch at most
_BATCHES = 50  # at least, for the bar


class Format(StrEnum):
    """File formats of `marlvec record-data`."""

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
    policy: TrainedPolicies = None,
    mapping: PolicyMapping = None,
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

    settle_in()
    with plain_errors(traceback):
        kwargs = arguments.env_kwargs(settings or [])
        notes = {"env": env, "env_kwargs": kwargs, "seed": seed, "policies": policy or ["random"]}
        with (
            build_envs(
                env, num_envs, backend=backend.value, num_workers=num_workers, copy=False, env_kwargs=kwargs
            ) as envs,
            _recorder(out, format.value, append=append, notes=notes) as recorder,
        ):
            collector = collector_of(
                envs, policy or [], mapping or [], connectors or [], explore=not best, seed=seed, callbacks=[recorder]
            )
            interrupted = _collect(collector, env_steps)
        show(out, as_json=as_json)
    if interrupted:
        raise typer.Exit(130)


def _recorder(out: Path, *arguments: Any, **options: Any) -> Recorder:
    from marlvec.recording.recorder import Recorder

    with naming(f"--out {out}"):
        return Recorder(out, *arguments, **options)


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


def data(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A recording, of marlvec record-data or Recorder.")],
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """Show what is in a recording: rows, episodes, returns, columns, size.

    The files are checked against the manifest as far as they are read: ids and rewards of all rows.
    """
    with plain_errors(traceback):
        show(folder, as_json=as_json)


def show(folder: Path, *, as_json: bool) -> None:
    """Print a recording's content."""
    from marlvec.recording.dataset import load_dataset

    with load_dataset(folder) as dataset:
        content = _content(dataset)
    if as_json:
        print_json(content)
    else:
        _print(stdout(), content)


def _content(dataset: RecordedDataset) -> dict[str, Any]:
    policies = [
        {"policy": name, "rows": len(rows), "files": len(rows.files), "bytes": rows.size_bytes, "columns": _forms(rows)}
        for name, rows in dataset.items()
    ]
    return {
        "folder": str(dataset.folder),
        "env": dataset.env_name,
        "agents": dataset.agents,
        "env_steps": dataset.env_steps,
        "sessions": [{"closed": session.closed, **session.about} for session in dataset.sessions],
        "closed": dataset.is_closed,
        "bytes": dataset.size_bytes,
        "episodes": _episodes(dataset),
        "policies": policies,
        "notes": dataset.notes,
    }


def _episodes(dataset: RecordedDataset) -> dict[str, Any] | None:
    """Return statistics of whole episodes; None where rows are no episodes."""
    from marlvec.errors import ArgumentError

    try:
        table = dataset.episode_table()
    except ArgumentError:
        return None
    returns, lengths = table.returns[table.whole], table.length[table.whole]
    found: dict[str, Any] = {"whole": len(returns), "parts": len(table.whole) - len(returns)}
    if len(returns):
        found |= {
            "return_mean": returns.mean(),
            "return_std": returns.std(),
            "return_min": returns.min(),
            "return_max": returns.max(),
            "length_mean": lengths.mean(),
        }
    return found


def _forms(rows: RecordedRows) -> dict[str, Any]:
    """Return each column's dtype and shape of a row, or those of a tree's leaves."""
    from marlvec.trees import tree_leaves

    found = {}
    names = rows.keys()
    for name in names:
        leaves = {path: f"{leaf.dtype} {leaf.shape[1:]}" for path, leaf in tree_leaves(rows.column(name))}
        found[name] = leaves.get("", leaves)
    return found


def _print(console: Console, content: dict[str, Any]) -> None:
    from rich.text import Text

    from marlvec.cli.display.table import NOTHING, print_table
    from marlvec.selfplay.results.whole_table import Column

    env = f" of {content['env']}" if content["env"] else ""
    state = "" if content["closed"] else "; not closed: its recorder was killed, or still records"
    title = f"{content['folder']}{env}: {content['env_steps']:,} env steps, {_readable(content['bytes'])}{state}"
    columns: list[Column] = [("policy", "left"), ("rows", "right"), ("files", "right"), ("size", "right")]
    columns.append(("columns", "left"))
    cells: list[list[str | Text]] = [
        [
            Text(one["policy"]),
            f"{one['rows']:,}",
            f"{one['files']:,}",
            _readable(one["bytes"]),
            Text(", ".join(one["columns"])),
        ]
        for one in content["policies"]
    ]
    print_table(console, Text(title), columns, cells or [[Text(NOTHING), "0", "0", "0 B", Text(NOTHING)]])
    if (episodes := content["episodes"]) is not None:
        line = f"{episodes['whole']:,} whole episodes, parts of {episodes['parts']:,}"
        if "return_mean" in episodes:
            line += (
                f"; return {episodes['return_mean']:.4g} ± {episodes['return_std']:.3g} "
                f"({episodes['return_min']:.4g} to {episodes['return_max']:.4g}), "
                f"length {episodes['length_mean']:.4g}"
            )
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _readable(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"

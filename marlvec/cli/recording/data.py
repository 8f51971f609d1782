"""``marlvec data``: what is in a recording, as a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from marlvec.cli.console import plain_errors, print_json, stdout
from marlvec.cli.options import AsJson, Traceback

if TYPE_CHECKING:
    from rich.console import Console

    from marlvec.recording import RecordedDataset, RecordedRows

__all__ = ["data", "show"]


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
        {
            "policy": name,
            "rows": len(rows),
            "files": len(rows.files),
            "bytes": rows.size_bytes,
            "columns": _forms(rows),
        }
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

    from marlvec.cli.display.table import NOTHING, Column, print_table

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

"""``marlvec envs``, ``connectors`` and ``examples``: lists as tables; examples are printed and copied, too."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from marlvec.cli.console import did_you_mean, naming
from marlvec.cli.display.table import NOTHING, fits, print_table
from marlvec.cli.options import Side
from marlvec.connectors.catalogue import CatalogueRow
from marlvec.errors import ArgumentError
from marlvec.registry import EnvRow
from marlvec.selfplay.results.whole_table import Column

__all__ = [
    "connectors_json",
    "envs_json",
    "print_connectors",
    "print_envs",
    "copy_examples",
    "example_files",
    "print_examples",
]

_WHERE = {
    Side.AGENT: "Agent side: between the envs and a policy",
    Side.ACTION: "Action side: between a policy and the envs",
    Side.LEARNER: "Learner side: on a finished batch",
}


def print_connectors(console: Console, rows: Sequence[CatalogueRow]) -> None:
    """Print the connectors of each side, and what each does."""
    width = max(len(row.name) for row in rows)
    for side, where in _WHERE.items():
        if mine := [row for row in rows if row.side == side]:
            table = Table(title=where, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
            table.add_column("connector", min_width=width, no_wrap=True)
            table.add_column("what it does")
            for row in mine:
                table.add_row(Text(row.name), Text(row.line.replace("``", "`")))
            console.print(table)
    count = f"{len(rows)} connectors, all" if len(rows) > 1 else "1 connector,"
    console.print(
        f"{count} in marlvec.connectors; `help(marlvec.connectors.{rows[0].name})` says more.",
        style="dim",
        markup=False,
        highlight=False,
    )


def connectors_json(rows: Sequence[CatalogueRow]) -> list[dict[str, str]]:
    """Return the connectors as JSON."""
    return [{"name": row.name, "side": str(row.side), "line": row.line} for row in rows]


def _in_order(rows: Sequence[EnvRow]) -> list[EnvRow]:
    return sorted(rows, key=lambda row: (not row.installed, row.family, row.id))


def _state(row: EnvRow) -> Text:
    if row.installed:
        return Text("yes", "green")
    return Text("no" if row.extra else "no: its package", "yellow")


def envs_json(rows: Sequence[EnvRow]) -> list[dict[str, Any]]:
    """Return the ids as JSON."""
    return [
        {"id": row.id, "family": row.family, "extra": row.extra or None, "installed": row.installed}
        for row in _in_order(rows)
    ]


def print_envs(console: Console, rows: Sequence[EnvRow], *, with_gymnasium: bool) -> None:
    """Print ids by family, their extras, and what to install for ids that lack something."""
    columns: list[Column] = [(name, "left") for name in ("env", "family", "extra", "installed")]
    cells: list[list[str | Text]] = [
        [Text(row.id), Text(row.family), Text(row.extra or NOTHING), _state(row)] for row in _in_order(rows)
    ]
    if not fits(console, columns, cells):  # drop the family, which most ids begin with
        columns, cells = [columns[0], *columns[2:]], [[row[0], *row[2:]] for row in cells]
    print_table(console, Text(), columns, cells)
    there = sum(row.installed for row in rows)
    console.print(f"{len(rows)} envs, {there} of them ready to use.", highlight=False)
    if missing := sorted({row.extra for row in rows if row.extra and not row.installed}):
        console.print(f'For the others: pip install "marlvec[{",".join(missing)}]"', style="yellow", markup=False)
    if not with_gymnasium:
        console.print(
            "Prefix and version of an id are optional: simple_spread is mpe/simple_spread_v3.\n"
            "Gymnasium's ids work too, e.g. CartPole-v1; `marlvec envs gymnasium` lists them.",
            style="dim",
            highlight=False,
        )


_PACKAGE = Path(__file__).resolve().parents[2]


def example_files(name: str | None = None) -> list[Path]:
    """Return the example scripts, or the one with this name, with or without ``.py``."""
    # They are inside the package in a wheel, beside it in a checkout.
    folder = next(folder for folder in (_PACKAGE / "examples", _PACKAGE.parent / "examples") if folder.is_dir())
    found = sorted(folder.glob("*.py"))
    if name is None:
        return found
    wanted = Path(name).name.removesuffix(".py")
    chosen = [file for file in found if file.stem == wanted]
    if not chosen:
        near = did_you_mean(wanted, (file.stem for file in found))
        raise ArgumentError(f"no example {name!r}{near}; `marlvec examples` lists all")
    return chosen


def print_examples(console: Console, files: Sequence[Path]) -> None:
    """Print the names of examples, and their subjects."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("example", no_wrap=True)
    table.add_column("what it shows")
    for file in files:
        about = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        table.add_row(Text(file.stem), Text(" ".join(about.partition("\n\n")[0].split())))
    console.print(table)
    console.print(
        "`marlvec examples NAME` prints an example; --copy copies it, or all, into the folder examples.",
        style="dim",
        markup=False,
        highlight=False,
    )


def copy_examples(files: Iterable[Path], folder: Path) -> list[Path]:
    """Copy example scripts into a folder, created if missing; if one exists there, nothing is copied."""
    copies = {file: folder / file.name for file in files}
    with naming(f"--to {folder}"):
        for copy in copies.values():
            if copy.exists():
                raise ArgumentError(
                    f"--copy: {copy} exists already; move it, or copy to another folder with --to FOLDER"
                )
        folder.mkdir(parents=True, exist_ok=True)
        for file, copy in copies.items():
            copy.write_bytes(file.read_bytes())
    return list(copies.values())

"""``marlvec examples``: print and copy the example scripts that come with marlvec."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from marlvec.cli.console import did_you_mean
from marlvec.errors import ArgumentError

__all__ = ["copy_examples", "example_files", "print_examples"]

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
    for copy in copies.values():
        if copy.exists():
            raise ArgumentError(f"--copy: {copy} exists already; move it, or copy to another folder with --to FOLDER")
    folder.mkdir(parents=True, exist_ok=True)
    for file, copy in copies.items():
        copy.write_bytes(file.read_bytes())
    return list(copies.values())

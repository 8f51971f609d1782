"""Tables that are never truncated: a table too wide for the terminal is printed as one block of lines per row."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from marlvec.selfplay.results.whole_table import Column, WholeTable

__all__ = ["NOTHING", "Column", "fits", "print_table"]

NOTHING = "–"


def print_table(console: Console, title: Text, columns: Sequence[Column], rows: Sequence[Sequence[str | Text]]) -> None:
    """Print a table; if the terminal is too narrow, one block of lines per row, which its first cell names."""
    if title.plain:
        console.print(title)
    console.print(WholeTable(columns, rows))


def fits(console: Console, columns: Sequence[Column], rows: Sequence[Sequence[str | Text]]) -> bool:
    """Return whether a table fits without truncating a cell."""
    return WholeTable(columns, rows).fits(console)

"""Tables that are never cut: what does not fit the terminal is printed as a block of lines a row."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from marlvec.selfplay.results.whole_table import Column, WholeTable

__all__ = ["NOTHING", "Column", "fits", "print_table"]

NOTHING = "–"


def print_table(console: Console, title: Text, columns: Sequence[Column], rows: Sequence[Sequence[str | Text]]) -> None:
    """Print a table; where the terminal is too narrow for its numbers and ids, a block a row.

    Args:
        console: Where to.
        title: Above it.
        columns: Headings, and on which side their cells stand.
        rows: Cells; the first of a row is what the row is about.
    """
    if title.plain:
        console.print(title)
    console.print(WholeTable(columns, rows))


def fits(console: Console, columns: Sequence[Column], rows: Sequence[Sequence[str | Text]]) -> bool:
    """Whether a table of these has room with every cell as wide as it is."""
    return WholeTable(columns, rows).fits(console)

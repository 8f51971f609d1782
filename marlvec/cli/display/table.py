"""Tables that are never cut: what does not fit the terminal is printed as a block of lines a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

__all__ = ["NOTHING", "Column", "fits", "print_table"]

NOTHING = "–"

Column = tuple[str, Literal["left", "right"]]
_NO_LIMIT = 10_000  # columns of a terminal


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
    if fits(console, columns, rows):
        console.print(_table(columns, rows))
        return
    for first, *cells in rows:
        console.print()
        console.print(first)
        lines = Table.grid(padding=(0, 2, 0, 0))
        lines.add_column(style="dim", no_wrap=True)
        lines.add_column(overflow="fold")
        for (name, _), cell in zip(columns[1:], cells, strict=True):
            if str(cell).strip():
                lines.add_row(name, cell)
        console.print(Padding(lines, (0, 0, 0, 2)))
    console.print()


def fits(console: Console, columns: Sequence[Column], rows: Sequence[Sequence[str | Text]]) -> bool:
    """Whether a table of these has room with every cell as wide as it is."""
    options = console.options.update(width=_NO_LIMIT)
    return Measurement.get(console, options, _table(columns, rows)).maximum <= console.width


def _table(columns: Sequence[Column], rows: Sequence[Sequence[str | Text]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name, justify in columns:
        table.add_column(Text(name), justify=justify, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table

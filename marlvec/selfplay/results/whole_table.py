"""`WholeTable`: a table for the terminal that truncates no cell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table
    from rich.text import Text

__all__ = ["Column", "WholeTable"]

Column = tuple[str, Literal["left", "right"]]
"""Heading and alignment of a column."""
_NO_LIMIT = 10_000  # width in characters


class WholeTable:
    """A table if the terminal is wide enough for all numbers and ids; otherwise one block of lines per row.

    The first cell of a row names it.
    """

    def __init__(self, columns: Sequence[Column], rows: Sequence[Sequence[str | Text]]) -> None:
        self._columns, self._rows = columns, rows

    def fits(self, console: Console, width: int | None = None) -> bool:
        """Return whether the table fits into this many characters, by default the console's width."""
        from rich.measure import Measurement

        options = console.options.update(width=_NO_LIMIT)
        room = console.width if width is None else width
        return Measurement.get(console, options, self._table()).maximum <= room

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text

        if self.fits(console, options.max_width):
            yield self._table()
            return
        for first, *cells in self._rows:
            yield Text()
            yield Text(first) if isinstance(first, str) else first
            lines = Table.grid(padding=(0, 2, 0, 0))
            lines.add_column(style="dim", no_wrap=True)
            lines.add_column(overflow="fold")
            for (name, _), cell in zip(self._columns[1:], cells, strict=True):
                if str(cell).strip():
                    lines.add_row(Text(name), cell)
            yield Padding(lines, (0, 0, 0, 2))
        yield Text()

    def _table(self) -> Table:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name, justify in self._columns:
            table.add_column(Text(name), justify=justify, no_wrap=True)
        for row in self._rows:
            table.add_row(*row)
        return table

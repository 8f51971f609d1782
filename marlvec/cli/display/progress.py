"""The progress bar of commands: how far, how fast, how long yet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

__all__ = ["progress_bar"]

_WIDEST, _NARROWEST = 40, 4  # of the bar itself


class _WholeColumns(Progress):
    """Cuts no number: the bar takes what room there is, and where that is too little, columns are left out whole.

    Its columns are what runs, how far, how fast, a note, and how long yet.
    """

    def make_tasks_table(self, tasks: Iterable[Task]) -> Table:
        """As many columns as have room, the least needed left out first."""
        shown = [task for task in tasks if task.visible]
        if not shown:  # as while it is built
            return super().make_tasks_table(shown)
        name, far, fast, note, long = (one for one in self.columns if isinstance(one, ProgressColumn))
        for columns in ((name, far, fast, note, long), (name, far, fast, long), (far, fast, long)):
            room = self.console.width - self._width(columns, shown) - 1
            if room >= _NARROWEST and columns[0] is name:
                bar = BarColumn(bar_width=min(_WIDEST, room))
                return self._table((name, bar, *columns[1:]), shown)
            if room >= -1:
                break
        return self._table(columns, shown)

    def _width(self, columns: Sequence[ProgressColumn], tasks: Sequence[Task]) -> int:
        endless = self.console.options.update(width=10_000)  # nothing measures wider than its console
        return self.console.measure(self._table(columns, tasks), options=endless).maximum

    def _table(self, columns: Sequence[ProgressColumn], tasks: Sequence[Task]) -> Table:
        table = Table.grid(*(one.get_table_column().copy() for one in columns), padding=(0, 1), expand=self.expand)
        for task in tasks:
            table.add_row(*(one(task) for one in columns))
        return table


def progress_bar(console: Console, unit: str, *, speed: str = "", disable: bool = False) -> Progress:
    """A bar whose tasks have the fields ``speed``, a number per second, and ``note``.

    Args:
        console: Where it is drawn; nothing is shown if it is no terminal.
        unit: What is counted.
        speed: What ``speed`` counts, if not the same.
        disable: Whether to show nothing at all.
    """
    rate = f" {speed}" if speed else ""

    def whole() -> Column:
        return Column(no_wrap=True)

    return _WholeColumns(
        TextColumn("[bold]{task.description}", table_column=whole()),
        MofNCompleteColumn(table_column=whole()),
        TextColumn(f"{unit}  [cyan]{{task.fields[speed]:,.0f}}{rate}/s[/]", table_column=whole()),
        TextColumn(" {task.fields[note]}", table_column=whole()),
        TimeRemainingColumn(compact=True, table_column=whole()),
        console=console,
        disable=disable or not console.is_terminal,
    )

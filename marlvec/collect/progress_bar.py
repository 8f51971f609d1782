"""`ProgressBar`: on a terminal, how far long work has come, how fast it goes, and how long it takes yet."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from marlvec.collect.background import Unit
from marlvec.collect.metrics import Metrics

_WIDEST, _NARROWEST = 40, 4  # of the bar itself


class ProgressBar:
    """A bar, from where a ``with`` block is entered to where it is left.

    ``unit`` is what is counted, up to ``total`` (None: no end); ``speed_unit`` what the speed counts, if something
    else. It is drawn on the console if that is a terminal; by default on stderr, of which a file gets the end alone.
    """

    def __init__(
        self,
        name: str,
        unit: str,
        total: int | None,
        *,
        speed_unit: str = "",
        console: Console | None = None,
        disable: bool = False,
    ) -> None:
        rate = f" {speed_unit}" if speed_unit else ""

        def whole() -> Column:
            return Column(no_wrap=True)

        self._progress = _WholeColumns(
            TextColumn("[bold]{task.description}", table_column=whole()),
            MofNCompleteColumn(table_column=whole()),
            TextColumn(f"{unit}  [cyan]{{task.fields[speed]:,.0f}}{rate}/s[/]", table_column=whole()),
            TextColumn(" {task.fields[note]}", table_column=whole()),
            TimeRemainingColumn(compact=True, table_column=whole()),
            console=console or Console(stderr=True, emoji=False),
            disable=disable or not (console is None or console.is_terminal),
        )
        self._task = self._progress.add_task(name, total=total, speed=0.0, note="")

    def show(self, done: int, *, speed: float | None = None, note: str = "") -> None:
        """Redraw the bar; ``speed`` is per second, by default the recent growth of ``done``."""
        if speed is None:
            speed = self._progress.tasks[0].speed or 0.0
        self._progress.update(self._task, completed=done, speed=speed, note=note)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._progress.stop()


@contextmanager
def collecting(unit: Unit, total: int | None, metrics: Metrics) -> Iterator[Callable[[int], None]]:
    """Draw a bar; yields what shows how much is collected, and the mean return."""
    with ProgressBar("collect", unit.replace("_", " "), total) as bar:

        def show(done: int) -> None:
            mean = metrics.returns.mean
            bar.show(done, note="" if math.isnan(mean) else f"mean return {mean:.4g}")

        yield show


class _WholeColumns(Progress):
    """Columns that are shown completely or not at all: the bar takes the remaining room.

    The columns: task, progress, speed, a note, remaining time.
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

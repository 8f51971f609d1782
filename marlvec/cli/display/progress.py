"""The progress bar of commands: how far, how fast, how long yet."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

__all__ = ["progress_bar"]


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
        return Column(no_wrap=True)  # numbers keep their width; the bar makes room

    return Progress(
        TextColumn("[bold]{task.description}", table_column=whole()),
        BarColumn(),
        MofNCompleteColumn(table_column=whole()),
        TextColumn(
            f"{unit}  [cyan]{{task.fields[speed]:,.0f}}{rate}/s[/]  {{task.fields[note]}}", table_column=whole()
        ),
        TimeRemainingColumn(compact=True, table_column=whole()),
        console=console,
        disable=disable or not console.is_terminal,
    )

"""The progress bar of long collecting."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

from marlvec.collect.metrics.metrics import Metrics
from marlvec.collect.sample_target import BatchSchedule, Unit

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["ProgressBar"]


class ProgressBar:
    """A bar, with the speed, the time that is left, and the mean return.

    Where there is no total it only counts. Where there is no terminal nothing is drawn but its end.

    Args:
        unit: What is counted.
        course: How far it has come.
        metrics: The collector's.
        console: A rich console to draw on; None for one on stderr.
    """

    def __init__(self, unit: Unit, course: BatchSchedule, metrics: Metrics, console: Console | None = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column

        self._metrics = metrics
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),  # makes room where numbers would be cut
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[speed]}/s, mean return {task.fields[mean]:.4g}"),
            TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
            console=console or Console(stderr=True),
        )
        self._task = self._progress.add_task(unit.replace("_", " "), total=course.total, speed="–", mean=float("nan"))

    def show(self, done: int) -> None:
        """Draw how it stands: so much is done."""
        task = self._progress.tasks[0]
        speed = "–" if task.speed is None else f"{task.speed:,.0f}"
        self._progress.update(self._task, completed=done, speed=speed, mean=self._metrics.returns.mean)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._progress.stop()

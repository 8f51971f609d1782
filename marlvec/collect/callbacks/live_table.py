"""`LiveTable`: returns, speed and times on the terminal while collecting."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Collection, Mapping
from datetime import timedelta
from time import perf_counter
from typing import TYPE_CHECKING

from marlvec.collect.batch import MultiAgentBatch
from marlvec.collect.callbacks.callback import ClosingCallback
from marlvec.collect.callbacks.episode_step import EpisodeStep
from marlvec.collect.metrics.metrics import CollectorStats, Metrics, Stats, stats_of_episodes, stats_of_policy
from marlvec.errors import ArgumentError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

__all__ = ["LiveTable"]

_PACE_SECONDS = 5.0
"""Seconds that the speed is averaged over."""

_NOTHING = "–"
_COLLECTORS = 32
"""Of how many collectors there is a line."""


class LiveTable(ClosingCallback):
    """A live table: env steps a second, returns and lengths, custom numbers, seconds per part of the loop.

    The team's return is the sum over all agents; further rows show the returns of each policy's agents. Means and
    ranges are over the last episodes; `Metrics.add_value` shows its last value. Each of many collectors
    (`marlvec.distributed.Collectors`, the first 32) has a row: restarts, versions that its rows were behind, share of
    time spent waiting for requests, and env steps.

    On a terminal the table is redrawn in place. Elsewhere, as in a log file, a plain line is printed now and then.
    Close it, or use it in a ``with`` block; the last drawing remains.

    Args:
        total_env_steps: Planned env steps, for a progress bar and the remaining time; None: no bar.
        title: Title of the table.
        console: A rich console to draw on; None for one on stdout.
        policies: Policy ids whose returns to show; None: all (a long table with a pool of opponents).
        window: Number of last episodes for returns and lengths; at most the metrics' window.
        refresh_seconds: Least seconds between two drawings.
        plain_seconds: Least seconds between two plain lines.

    Raises:
        ArgumentError: A number is not positive.
    """

    def __init__(
        self,
        total_env_steps: int | None = None,
        *,
        title: str = "",
        console: Console | None = None,
        policies: Collection[str] | None = None,
        window: int = 100,
        refresh_seconds: float = 0.25,
        plain_seconds: float = 10.0,
    ) -> None:
        from rich.console import Console

        for name, value in (("window", window), ("refresh_seconds", refresh_seconds), ("plain_seconds", plain_seconds)):
            if not value > 0:
                raise ArgumentError(f"LiveTable({name}={value!r}): expected a number above 0")
        self._total, self._title, self._window = total_env_steps, title, window
        self._policies = None if policies is None else tuple(policies)
        self._console = console or Console()
        self._draws = (self._console.is_terminal and not self._console.is_dumb_terminal) or self._console.is_jupyter
        self._pause = refresh_seconds if self._draws else plain_seconds
        self._due = 0.0  # time of the next drawing
        self._live: Live | None = None
        self._metrics: Metrics | None = None
        self._past: deque[tuple[float, int]] = deque()
        self._is_stale = False
        self._closed = False

    def on_episode_step(self, step: EpisodeStep) -> None:
        self._show(step.metrics)

    def on_sample_end(self, batch: MultiAgentBatch, metrics: Metrics) -> None:
        self._show(metrics)

    def close(self) -> None:
        """Draw the table a last time. May be called twice."""
        if not self._closed and self._metrics is not None and self._is_stale:
            self._draw(self._metrics)
        self._closed = True
        if self._live is not None:
            self._live.stop()

    def _show(self, metrics: Metrics) -> None:
        now = perf_counter()
        if self._closed:
            return
        if metrics is not self._metrics:  # the first, or another collector's
            self._metrics = metrics
            self._past.clear()
            self._past.append((now, metrics.env_steps))
            self._due = max(self._due, now + (0.0 if self._draws else self._pause))
        self._is_stale = True
        if now >= self._due:
            self._draw(metrics)
            self._due = perf_counter() + self._pause

    def _draw(self, metrics: Metrics) -> None:
        self._is_stale = False
        speed = self._speed(metrics)
        if not self._draws:
            self._console.print(self._line(metrics, speed), markup=False, highlight=False, soft_wrap=True)
            return
        if self._live is None:
            from rich.live import Live

            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
            weakref.finalize(self, self._live.stop)  # restores the terminal's cursor if close() is not called
        self._live.update(self._table(metrics, speed), refresh=True)

    def _speed(self, metrics: Metrics) -> float:
        """Return recent env steps a second."""
        now = perf_counter()
        self._past.append((now, metrics.env_steps))
        while len(self._past) > 2 and self._past[1][0] <= now - _PACE_SECONDS:
            self._past.popleft()
        began, steps = self._past[0]
        return (metrics.env_steps - steps) / max(now - began, 1e-9)

    def _head(self, metrics: Metrics, speed: float) -> str:
        total = f" of {self._total:,}" if self._total else ""
        lost = metrics.episodes_faulty + metrics.episodes_restarted
        return (
            f"{metrics.env_steps:,}{total} env steps · {speed:,.0f}/s · {metrics.episodes_total:,} episodes"
            f"{f', {lost:,} lost' if lost else ''}"
        )

    def _shown(self, metrics: Metrics) -> tuple[str, ...]:
        """Return the policies that get a row."""
        return metrics.policies if self._policies is None else self._policies

    def _line(self, metrics: Metrics, speed: float) -> str:
        records = metrics.latest(self._window)
        parts = [f"{self._title}: " * bool(self._title) + self._head(metrics, speed)]
        for name in self._shown(metrics):
            stats = stats_of_policy(records, name)["return"]
            if stats.count:
                parts.append(f"{name}: return per agent {stats.mean:.4g} ({_range(stats)})")
        parts += [f"{name} (mean): {stats.mean:.4g}" for name, stats in metrics.episode_values.items() if stats.count]
        parts += [f"{name}: {value:.4g}" for name, value in metrics.last_values.items()]
        for own in metrics.collectors[:_COLLECTORS]:
            restarts, lag, waiting, _ = _of_collector(own)
            parts.append(f"collector {own.index}: {restarts} restarts, lag {lag}, waiting {waiting}")
        return " · ".join(parts)

    def _table(self, metrics: Metrics, speed: float) -> RenderableType:
        from rich import box
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        records = metrics.latest(self._window)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("", overflow="fold")  # ids are never cut, nor are numbers
        for name in ("mean", "min … max", "length", "min … max"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_row("team return (sum over agents)", *_cells(stats_of_episodes(records)), end_section=True)
        table.add_row(Text("return per agent", "dim"))
        for name in self._shown(metrics):
            table.add_row(Text(name, "bold cyan"), *_cells(stats_of_policy(records, name)))
        if own := metrics.episode_values:
            table.add_section()
            table.add_row(Text("per episode", "dim"))
        for name, stats in own.items():
            table.add_row(Text(name), _mean(stats), _range(stats))
        if given := metrics.last_values:
            table.add_section()
            table.add_row("", Text("last", "bold"))
        for name, value in given.items():
            table.add_row(Text(name), f"{value:.4g}")
        if metrics.collectors:
            table.add_section()
            table.add_row("", *(Text(name, "bold") for name in ("restarts", "lag", "waiting", "env steps")))
        for one in metrics.collectors[:_COLLECTORS]:
            table.add_row(f"collector {one.index}", *_of_collector(one))
        if more := len(metrics.collectors[_COLLECTORS:]):
            table.add_row(Text(f"and {more} more", "dim"))
        parts: list[RenderableType] = [Text(self._title, "bold")] if self._title else []
        parts.append(Text(self._head(metrics, speed)))
        if self._total:
            parts.append(_bar(metrics.env_steps, self._total, speed))
        return Group(*parts, table, Text(_times(metrics), "dim"))


def _bar(done: int, total: int, speed: float) -> RenderableType:
    """Return a progress bar with the remaining time."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    left = timedelta(seconds=round(max(total - done, 0) / speed)) if speed > 0 else _NOTHING
    row = Table.grid(padding=(0, 1))
    row.add_row(ProgressBar(total, min(done, total), width=40), f"{min(done / total, 1):.0%}, {left} left")
    return row


def _cells(found: Mapping[str, Stats]) -> list[str]:
    return [cell for key in ("return", "length") for cell in (_mean(found[key]), _range(found[key]))]


def _of_collector(stats: CollectorStats) -> tuple[str, str, str, str]:
    """Return a collector's cells: restarts, lag, share of waiting, env steps."""
    return f"{stats.restarts}", f"{stats.lag}", f"{stats.waiting:.0%}", f"{stats.env_steps:,}"


def _mean(stats: Stats) -> str:
    return f"{stats.mean:.4g}" if stats.count else _NOTHING


def _range(stats: Stats) -> str:
    return f"{stats.min:.4g} … {stats.max:.4g}" if stats.count else _NOTHING


def _times(metrics: Metrics) -> str:
    seconds = {name: timer.seconds for name, timer in metrics.timers.items()}
    total = sum(seconds.values())
    shares = [f"{name.replace('_', ' ')} {part / total:.0%}" for name, part in seconds.items() if part > 0.005 * total]
    return f"time: {', '.join(shares)}" if shares else ""

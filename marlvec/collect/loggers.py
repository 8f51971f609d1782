"""Callbacks that show and log: `LiveTable`, `TensorBoardLogger`, `JSONLinesLogger`; and the progress bar.

`AppendFile` appends whole records to a file, each exactly once, even after failed writes.
"""

from __future__ import annotations

import io
import json
import os
import socket
import time
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from datetime import timedelta
from itertools import count
from os import PathLike
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from marlvec.collect.append_file import AppendFile, digest_before
from marlvec.collect.batch import MultiAgentBatch
from marlvec.collect.callbacks import ClosingCallback, EpisodeStep, RunningEpisode
from marlvec.collect.metrics import CollectorStats, EpisodeRecord, Metrics, Stats, stats_of_episodes, stats_of_policy
from marlvec.errors import ArgumentError, MissingExtraError
from marlvec.serialization.records import Count, read_fields
from marlvec.serialization.saved import ProcessBound

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live


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


_numbers = count()  # numbers of this process' files


class TensorBoardLogger(ProcessBound, ClosingCallback):
    """Writes metrics for TensorBoard after each batch; the x axis is the collector's env steps.

    Scalars, if they have a value:

    - ``episodes/return_mean``, ``_min``, ``_max``, over the metrics' window: team returns, sums over all agents;
      also ``length`` (env steps) and ``duration``;
    - ``policies/ID/…`` and ``agents/NAME/…``, the same curves per policy and per agent;
    - ``custom/NAME``, the last value given to `Metrics.add_value`;
    - ``custom/NAME_mean``, over the window's episodes, of the numbers in ``episode.custom``;
    - ``totals/…``: agent steps, episodes, and lost ones;
    - ``collectors/restarts``, ``lag_max`` and ``waiting_mean``, of many collectors (`marlvec.distributed.Collectors`);
    - ``speed/env_steps_per_second`` and ``seconds/TIMER`` of each part of the loop, both since the previous batch.

    All data is on disk when the hook returns. Close it, or use it in a ``with`` block. Needs ``marlvec[tensorboard]``,
    which does not install torch.

    If training resumes from a checkpoint, curves continue at its step, and TensorBoard drops points that were written
    after the checkpoint.

    Args:
        folder: The folder; each logger writes its own file there.
        agents: Whether to also write a curve for each agent.
        policies: Policy ids whose curves to write; None: all (many with a pool of opponents).
        first_step: Env steps made earlier, if the collector counts from 0 again.

    Raises:
        MissingExtraError: TensorBoard is not installed.
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        *,
        agents: bool = True,
        policies: Collection[str] | None = None,
        first_step: int = 0,
    ) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise MissingExtraError(
                f"TensorBoardLogger needs tensorboard, which cannot be imported ({error}); install it with: "
                f'pip install "marlvec[tensorboard]"'
            ) from error
        self._event, self._summary, self._session, self._records = Event, Summary, SessionLog, RecordWriter
        Path(folder).mkdir(parents=True, exist_ok=True)
        # Named like the files of TensorBoard's writer, since files are read in order of their names. (That writer has
        # a thread, which ends when the disk is full.)
        name = f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        self._file = AppendFile(Path(folder) / name)
        try:
            self._write(file_version="brain.Event:2")
        except BaseException:
            self._file.forget()
            self._file.close()
            raise
        self._agents, self._first_step = agents, first_step
        self._policies = None if policies is None else frozenset(policies)
        self._began = time.perf_counter()
        self._env_steps = 0
        self._seconds: dict[str, float] = {}

    def on_sample_end(self, batch: MultiAgentBatch, metrics: Metrics) -> None:
        policies = [name for name in metrics.policies if self._policies is None or name in self._policies]
        values = {
            **_statistics(metrics, policies, agents=self._agents),
            **_of_collectors(metrics),
            **self._pace(metrics),
        }
        summary = self._summary(value=[self._summary.Value(tag=k, simple_value=v) for k, v in values.items()])
        self._file.forget()  # records left by a failed call belong to the same batch
        self._write(step=self._first_step + metrics.env_steps, summary=summary)
        self._began, self._env_steps = time.perf_counter(), metrics.env_steps
        self._seconds = {name: timer.seconds for name, timer in metrics.timers.items()}

    def _write(self, **fields: Any) -> None:
        """Write an event with the current time."""
        self._check_process("writing")
        record = io.BytesIO()
        self._records(record).write(self._event(wall_time=time.time(), **fields).SerializeToString())
        self._file.add(record.getvalue())
        self._file.flush()

    def _pace(self, metrics: Metrics) -> dict[str, float]:
        now = time.perf_counter()
        values = {"speed/env_steps_per_second": (metrics.env_steps - self._env_steps) / max(now - self._began, 1e-9)}
        for name, timer in metrics.timers.items():
            values[f"seconds/{name}"] = timer.seconds - self._seconds.get(name, 0.0)
        return values

    def state_dict(self) -> dict[str, Any]:
        """Return the env steps and the seconds spent on each part so far, as plain data."""
        return {"first_step": self._first_step, "env_steps": self._env_steps, "seconds": dict(self._seconds)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state's env step; TensorBoard hides later points of that run.

        Raises:
            ArgumentError: Not such a state.
        """
        kinds = {"first_step": int, "env_steps": int, "seconds": dict[str, float]}
        found = read_fields(state, "the state of a TensorBoardLogger", **kinds)
        self._first_step, self._env_steps, self._seconds = found.values()
        self._began = time.perf_counter()
        start = self._session(status=self._session.START)
        self._write(step=self._first_step + self._env_steps + 1, session_log=start)

    def close(self) -> None:
        """Close the file. May be called twice."""
        self._file.close()


def _statistics(metrics: Metrics, policies: Iterable[str], *, agents: bool) -> dict[str, float]:
    groups = {"episodes": {"return": metrics.returns, "length": metrics.lengths, "duration": metrics.durations}}
    groups |= {f"policies/{name}": metrics.policy(name) for name in policies}
    if agents:
        groups |= {f"agents/{name}": metrics.agent(name) for name in metrics.agents}
    values = {
        f"{group}/{name}_{kind}": value
        for group, found in groups.items()
        for name, stats in found.items()
        for kind, value in _extremes(stats).items()
    }
    values |= {f"custom/{name}": value for name, value in metrics.last_values.items()}
    values |= {f"custom/{name}_mean": stats.mean for name, stats in metrics.episode_values.items() if stats.count}
    totals = ("agent_steps", "episodes_total", "episodes_faulty", "episodes_restarted", "env_steps_lost", "noop_steps")
    return values | {f"totals/{name.removesuffix('_total')}": float(getattr(metrics, name)) for name in totals}


def _of_collectors(metrics: Metrics) -> dict[str, float]:
    if not (found := metrics.collectors):
        return {}
    return {
        "collectors/restarts": float(sum(stats.restarts for stats in found)),
        "collectors/lag_max": float(max(stats.lag for stats in found)),
        "collectors/waiting_mean": sum(stats.waiting for stats in found) / len(found),
    }


def _extremes(stats: Stats) -> dict[str, float]:
    return {"mean": stats.mean, "min": stats.min, "max": stats.max} if stats.count else {}


class JSONLinesLogger(ProcessBound, ClosingCallback):
    """Writes a line of JSON for each finished episode; read them with ``pandas.read_json(path, lines=True)``.

    A line is an object with ``eps_id``, ``env_id``, ``number``, ``length``, ``return`` (the team's, the sum over all
    agents), ``duration``, the lists ``returns``, ``decisions``, ``present`` and ``policies`` in agent order, and
    ``custom``: numbers of callbacks that precede the logger. NaN and infinities are null. Values given to
    `Metrics.add_value` belong to no episode and are not written. Lines are on disk at the end of each batch; after a
    full disk or Ctrl-C, at the end of the next one. Close it, or use it in a ``with`` block.

    If training resumes from a checkpoint, lines that were written after the checkpoint are cut off: their episodes are
    collected again.

    Args:
        path: The file; lines are appended to its content.

    Raises:
        OSError: The file is not writable.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = Path(path)
        self._file = AppendFile(self._path)

    def on_episode_end(self, episode: RunningEpisode, record: EpisodeRecord) -> None:
        self._check_process("on_episode_end()")
        line = {
            "eps_id": record.eps_id,
            "env_id": record.env_id,
            "number": record.number,
            "length": record.length,
            "return": record.episode_return,
            "duration": record.duration,
            "returns": record.returns_A.tolist(),
            "decisions": record.lengths_A.tolist(),
            "present": record.present_A.tolist(),
            "policies": record.policies,
            "custom": {name: float(value) for name, value in record.custom.items()},
        }
        self._file.add(json.dumps(_plain(line), allow_nan=False).encode() + b"\n")

    def on_sample_end(self, *_: object) -> None:
        self._check_process("on_sample_end()")
        self._file.flush()

    def state_dict(self) -> dict[str, Any]:
        """Return the file's size and a digest of its end, as plain data."""
        size = self._size()
        return {"bytes": size, "end": digest_before(self._path, size)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Cut off lines that were written after `state_dict` was called. A different file stays unchanged.

        Raises:
            ArgumentError: Not such a state.
        """
        size, end = read_fields(state, "the state of a JSONLinesLogger", bytes=Count, end=str).values()
        if self._size() > size and digest_before(self._path, size) == end:
            self._file.truncate(size)

    def _size(self) -> int:
        """Return the file's size in bytes, after writing all lines; 0 for a pipe."""
        self._check_process("state_dict()")
        self._file.flush()
        return self._file.size or 0

    def close(self) -> None:
        """Close the file. May be called twice."""
        self._file.close()


def _plain(value: object) -> object:
    """Replace NaN and infinities, which JSON lacks."""
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value

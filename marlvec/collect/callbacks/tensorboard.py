"""`TensorBoardLogger`: writes metrics to TensorBoard event files."""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Collection, Iterable, Mapping
from itertools import count
from os import PathLike
from pathlib import Path
from typing import Any

from marlvec.collect.batch import MultiAgentBatch
from marlvec.collect.callbacks.append_file import AppendFile
from marlvec.collect.callbacks.callback import ClosingCallback
from marlvec.collect.metrics.metrics import Metrics, Stats
from marlvec.errors import ArgumentError, MissingExtraError
from marlvec.serialization.saved import ProcessBound

__all__ = ["TensorBoardLogger"]

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
        if state.keys() != {"first_step", "env_steps", "seconds"}:
            raise ArgumentError(f"expected the state of a TensorBoardLogger, got {list(state)}")
        self._first_step, self._env_steps = int(state["first_step"]), int(state["env_steps"])
        self._seconds = {str(name): float(seconds) for name, seconds in state["seconds"].items()}
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

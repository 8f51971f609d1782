"""`BatchSource`: what gives batches, one or many: a `Collector`, or the `Collectors` of many processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from marlvec.arguments import count_from
from marlvec.collect.batch import MultiAgentBatch
from marlvec.collect.batch.sample_target import BatchSchedule, SampleTarget, Unit, sample_target
from marlvec.collect.metrics.metrics import Metrics

__all__ = ["BatchSource"]


class BatchSource(ABC):
    """Calls that collect batches."""

    metrics: Metrics
    _count_by: Unit

    @abstractmethod
    def _fill(self, schedule: BatchSchedule, *, show: Callable[[int], object] | None = None) -> MultiAgentBatch:
        """Collect the next batch of a schedule; ``show`` is called with how much of that is done."""

    @abstractmethod
    def _check_ready_for(self, call: str) -> None:
        """Raise where a batch cannot be collected now."""

    def _goal(
        self, call: str, steps: int | None, env_steps: int | None, agent_steps: int | None, episodes: int | None
    ) -> SampleTarget:
        amounts: dict[Unit, int | None] = {"env_steps": env_steps, "agent_steps": agent_steps, "episodes": episodes}
        return sample_target(amounts, steps, self._count_by, call)

    def batches(
        self,
        steps: int | None = None,
        *,
        env_steps: int | None = None,
        agent_steps: int | None = None,
        episodes: int | None = None,
        total: int | None = None,
        progress: bool = False,
    ) -> Iterator[MultiAgentBatch]:
        """Collect one batch after the other, each when it is asked for.

        What one raises comes out of ``next()`` and ends the iteration; nothing is lost, as with `collect`: begin
        another one.

        Args:
            steps: How much a batch is, as `collect` takes it.
            env_steps: How many env steps a batch is.
            agent_steps: How many decisions with a known outcome a batch is.
            episodes: How many episodes a batch is.
            total: How much all of them are, in the same unit: the last one holds what is left. In complete mode, where
                a batch may hold more, they end once there is that much. None: they never end.
            progress: Whether to draw a progress bar on stderr.

        Raises:
            ArgumentError: Not exactly one positive amount, or a total that is not positive.
        """
        goal = self._goal("batches", steps, env_steps, agent_steps, episodes)
        schedule = BatchSchedule(goal, None if total is None else count_from(total, f"batches(total={total!r})"))
        bar: AbstractContextManager[Any] = nullcontext()
        if progress:
            from marlvec.collect.progress_bar import collecting  # here, since rich takes its time

            bar = collecting(goal.unit, schedule.total, self.metrics)
        return self._run(schedule, bar)

    def _run(self, schedule: BatchSchedule, bar: AbstractContextManager[Any]) -> Iterator[MultiAgentBatch]:
        with bar as show:
            while schedule.next_goal is not None:
                self._check_ready_for("batches")
                yield self._fill(schedule, show=show)

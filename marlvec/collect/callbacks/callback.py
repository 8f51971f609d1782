"""`Callback`: base class of objects that a collector calls while collecting."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal, Self

from marlvec.collect.batch import MultiAgentBatch
from marlvec.collect.callbacks.episode_step import EpisodeStep, RunningEpisode
from marlvec.collect.metrics.episode_table import EpisodeRecord
from marlvec.collect.metrics.metrics import Metrics

__all__ = ["HOOKS", "Callback", "ClosingCallback", "LossReason"]

LossReason = Literal["fault", "restart", "reset", "interrupt"]
"""Why an episode was lost."""

HOOKS = (
    "on_episode_created",
    "on_episode_start",
    "on_episode_step",
    "on_episode_end",
    "on_episode_lost",
    "on_sample_end",
    "on_collector_created",
    "on_collector_start",
    "on_collector_lost",
)
"""Names of the methods of `Callback`."""


class Callback:
    """Hooks that a collector calls while collecting. Override the hooks you need; the others cost nothing.

    For each episode: created, started, its steps, then its end or its loss; and once per batch `on_sample_end`. The
    order is the same in every autoreset mode. Within one step of the envs: steps, losses, ends, new episodes; each in
    env order.

    If a callback raises, `Collector.collect` (or ``reset``) raises the error, with a note that names the callback, once
    the step is finished and all other callbacks were called for it. No data is lost: the next call continues. If
    `on_sample_end` raises, the batch is not returned, and the next batch has its rows: callbacks may see them twice.

    Several collectors may share a callback. During a hook, its collector can neither collect nor reset.
    """

    def on_episode_created(self, episode: RunningEpisode) -> None:
        """Called when an episode has a policy for each agent, before connectors get its first rows."""

    def on_episode_start(self, episode: RunningEpisode) -> None:
        """Called once per episode, when its first observations have passed the agent connectors."""

    def on_episode_step(self, step: EpisodeStep) -> None:
        """Called once for each step of some envs, with all of these envs. A reset is not a step."""

    def on_episode_end(self, episode: RunningEpisode, record: EpisodeRecord) -> None:
        """Called when an episode has ended and its last rows have passed the agent connectors.

        Numbers put into ``episode.custom`` here still count. `Metrics` gets the record after this hook.
        """

    def on_episode_lost(self, episode: RunningEpisode, why: LossReason) -> None:
        """Called when a running episode is lost: it has no record, and `on_episode_end` is not called for it.

        Args:
            episode: The episode.
            why: ``"fault"``: its env failed, or another env in the same worker. ``"restart"``: its env raised
                `RestartQuietly`. ``"reset"``: `Collector.reset` was called. ``"interrupt"``: Ctrl-C, or an error of an
                env or a connector, in the middle of a tick; the hook is called in the next `collect`.
        """

    def on_sample_end(self, batch: MultiAgentBatch, metrics: Metrics) -> None:
        """Called before a batch is returned, with the collector's metrics."""

    def on_collector_created(self, collector: Any) -> None:
        """Called at the end of the constructor of `Collector`, which passes on errors raised here.

        Args:
            collector: The `Collector`.
        """

    def on_collector_start(self, place: Any) -> None:
        """Called by `marlvec.distributed.Collectors` only, when one of its collectors was built.

        Args:
            place: Its `marlvec.distributed.Place`.
        """

    def on_collector_lost(self, place: Any, why: str, requests: int) -> None:
        """Called by `marlvec.distributed.Collectors` only, when one of its collectors was lost.

        Args:
            place: Its `marlvec.distributed.Place`.
            why: As in `marlvec.distributed.Accounting`.
            requests: Number of requests lost with it.
        """


class ClosingCallback(Callback, ABC):
    """A callback that is closed, by `close` or at the end of a ``with`` block."""

    @abstractmethod
    def close(self) -> None:
        """Close it. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

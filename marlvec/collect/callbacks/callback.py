"""`Callback`: the base class of what is called while collecting."""

from __future__ import annotations

from typing import Any, Literal

from marlvec.collect.batch import MultiAgentBatch
from marlvec.collect.callbacks.episode_step import EpisodeStep, RunningEpisode
from marlvec.collect.metrics.episode_table import EpisodeRecord
from marlvec.collect.metrics.metrics import Metrics

__all__ = ["HOOKS", "Callback", "LossReason"]

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
    """Is called while a collector collects. Override what you need; the rest costs nothing.

    Of each episode: created, started, its steps, and at last either its end or its loss; then that of the batch. All
    of this is the same in every autoreset mode. Where several things happen in one step of the envs, steps come first,
    then losses, ends, and the episodes that begin, each in the order of the envs.

    What a callback raises, with a note that names it, comes out of `Collector.collect` (or ``reset``) once the step of
    the envs is finished and all other callbacks were called for it. Nothing is lost then: the next call goes on. Where
    `on_sample_end` fails the batch is not returned, and its rows come in the next one: callbacks may see them twice.

    A callback may be given to several collectors. While it is called for a step, its collector can neither collect nor
    reset.
    """

    def on_episode_created(self, episode: RunningEpisode) -> None:
        """An episode is there, with a policy for each agent; its first rows have not met a connector yet."""

    def on_episode_start(self, episode: RunningEpisode) -> None:
        """The first observations of an episode have passed the agent connectors. Comes once."""

    def on_episode_step(self, step: EpisodeStep) -> None:
        """Some envs have made a step: all of them in one call. The beginning of an episode is no step."""

    def on_episode_end(self, episode: RunningEpisode, record: EpisodeRecord) -> None:
        """An episode is over, and its last rows have passed the agent connectors.

        Numbers put into ``episode.custom`` here still count. `Metrics` has the record when this is through.
        """

    def on_episode_lost(self, episode: RunningEpisode, why: LossReason) -> None:
        """An episode was lost, there is no record of it, and it will have no end.

        Args:
            episode: Which.
            why: ``"fault"``: of its env, or of one beside it in the same worker. ``"restart"``: its env raised
                `RestartQuietly`. ``"reset"``: `Collector.reset` was called while it ran. ``"interrupt"``:
                Ctrl-C, or an error of an env or a connector, came in the middle of a tick; called in the next
                `collect`.
        """

    def on_sample_end(self, batch: MultiAgentBatch, metrics: Metrics) -> None:
        """A batch is about to be returned; metrics are the collector's."""

    def on_collector_created(self, collector: Any) -> None:
        """A collector was built with this callback; nothing was collected yet. What it raises, the constructor raises.

        Args:
            collector: The `Collector`.
        """

    def on_collector_start(self, place: Any) -> None:
        """Called when one of many collectors was built, by `marlvec.distributed.Collectors` alone.

        Args:
            place: Its `marlvec.distributed.Place`.
        """

    def on_collector_lost(self, place: Any, why: str, requests: int) -> None:
        """Called when one of many collectors is gone, by `marlvec.distributed.Collectors` alone.

        Args:
            place: Its `marlvec.distributed.Place`.
            why: As in `marlvec.distributed.Accounting`.
            requests: How many requests were lost with it.
        """

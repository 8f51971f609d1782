"""`HeadCallbacks`: callbacks on the head: for returned batches, and for collectors that start or are lost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from marlvec.collect import EpisodeRecord, Metrics, MultiAgentBatch
from marlvec.collect.callbacks import RunningEpisode
from marlvec.collect.callbacks.callback_list import CallbackLike, listeners_by_hook
from marlvec.distributed.collector_group import LostCollector
from marlvec.distributed.place import Place
from marlvec.errors import ArgumentError

__all__ = ["HeadCallbacks"]

_HERE = ("on_sample_end", "on_episode_end", "on_collector_start", "on_collector_lost")


class HeadCallbacks:
    """The callbacks of `Collectors`, in calling order; callbacks that have only hooks of collectors are refused."""

    def __init__(self, callbacks: Iterable[CallbackLike]) -> None:
        found = list(callbacks) if not isinstance(callbacks, dict) else callbacks
        self._listeners = listeners_by_hook(found)
        self.callbacks = tuple(found)
        for callback in found:
            own = [hook for hook, listeners in listeners_by_hook([callback]).items() if listeners]
            if own and not set(own) & set(_HERE):
                raise ArgumentError(
                    f"{callback!r} has the hooks {own}, which are called beside the envs: give it to the Collector "
                    f"in build; on the head there are {list(_HERE)}"
                )

    def sample_end(self, records: Iterable[EpisodeRecord], batch: MultiAgentBatch, metrics: Metrics) -> None:
        """Call callbacks for a finished batch and the episodes that end in it; a note names one that raises."""
        if self._listeners["on_episode_end"]:
            for record in records:
                episode = RunningEpisode(record.eps_id, record.env_id, record.number, 0, record.policies)
                episode.custom = dict(record.custom)
                episode.stage = "over"
                self._call("on_episode_end", episode, record)
        self._call("on_sample_end", batch, metrics)

    def collector_start(self, place: Place) -> None:
        """Call callbacks for a built collector."""
        self._call("on_collector_start", place)

    def collector_lost(self, loss: LostCollector) -> None:
        """Call callbacks for a lost collector."""
        self._call("on_collector_lost", loss.place, loss.why, loss.requests)

    def _call(self, hook: str, *what: Any) -> None:
        for name, listener in self._listeners[hook]:
            try:
                listener(*what)
            except BaseException as error:
                error.add_note(f"in {hook} of {name}")
                raise

"""`LocalEpisodes`: running episodes of a driver in a thread of this process, and their answers."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

from marlvec.errors import AnswerTimeout, BusyError, ClosedError, EpisodeOver, EpisodesFull, StateError
from marlvec.external.exchange.external_episode import ExternalEpisode, Flags
from marlvec.external.exchange.gateway import EpisodeGateway
from marlvec.vector.settings import LONGEST_WAIT

__all__ = ["LocalEpisodes"]

_numbers = count()


class _Run:
    """An episode, its answers (`box`), and whether a request's answer was not fetched yet (`asked`)."""

    __slots__ = ("asked", "box", "episode")

    def __init__(self, episode: ExternalEpisode, box: queue.SimpleQueue[Any]) -> None:
        self.episode, self.box, self.asked = episode, box, False

    def check_idle(self, call: str) -> None:
        """Raise if the next answer would belong to an earlier request."""
        if self.asked:
            raise BusyError(f"{call}(): the earlier request's actions are still to be taken; wait_for_action() first")


class LocalEpisodes:
    """Running episodes of one driver; see `RunningEpisodes`. Any thread may use it, an episode one thread at a time."""

    def __init__(self, gateway: EpisodeGateway, max_episodes: int | None) -> None:
        self._gateway, self._max_episodes = gateway, max_episodes
        self._runs: dict[Hashable, _Run] = {}
        self._changed = threading.Condition()
        self.stopped = False

    def __len__(self) -> int:
        return len(self._runs)

    def stop(self) -> None:
        """Make waiting calls raise `ClosedError`, and lose running episodes."""
        with self._changed:
            self.stopped = True
            runs = self._take_all()
        for run in runs:
            run.box.put(ClosedError("stop() was called"))
            run.episode.abandon(ClosedError("stop() was called"))

    def abandon(self, error: BaseException) -> None:
        """Lose running episodes."""
        for run in self._take_all():
            run.episode.abandon(error)

    def _take_all(self) -> list[_Run]:
        with self._changed:
            runs = list(self._runs.values())
            self._runs.clear()
            self._changed.notify_all()
        return runs

    # --- calls of the driver

    def begin(
        self, key: Hashable | None, *, training_enabled: bool, env_id: int | None, timeout: float | None
    ) -> Hashable:
        key = f"episode-{next(_numbers)}" if key is None else key
        box: queue.SimpleQueue[Any] = queue.SimpleQueue()
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                if self.stopped:
                    raise ClosedError("start_episode(): stop() was called")
                if key in self._runs:
                    raise StateError(f"start_episode({key!r}): an episode with this id runs; end_episode() it first")
                if self._max_episodes is not None and len(self._runs) >= self._max_episodes:
                    raise EpisodesFull(
                        f"start_episode(): {len(self._runs)} episodes run, as many as max_episodes allows"
                    )
                try:
                    episode = self._gateway.begin(
                        training_enabled=training_enabled, env_id=env_id, on_lost=box.put, on_free=self._wake
                    )
                except EpisodesFull:
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        raise
                    self._changed.wait(LONGEST_WAIT if left is None else min(left, LONGEST_WAIT))
                    continue
                self._runs[key] = _Run(episode, box)
                return key

    def ask(self, key: Hashable, obs: Any, masks: Any, timeout: float | None) -> Mapping[str, Any]:
        run = self._running(key)
        run.check_idle("get_action")
        with self._forgetting(key):
            run.episode.ask(obs, masks=masks, answer=run.box.put)
        run.asked = True
        return self.wait(key, timeout)

    def wait(self, key: Hashable, timeout: float | None) -> Mapping[str, Any]:
        run = self._running(key)
        if not run.asked:
            raise StateError(f"wait_for_action({key!r}): nothing was asked for; call get_action() first")
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while True:
            left = max(0.0, deadline - time.monotonic())
            with suppress(queue.Empty):
                answer: Mapping[str, Any] | Exception = run.box.get(timeout=min(left, LONGEST_WAIT))
                break
            if left <= LONGEST_WAIT:
                raise AnswerTimeout(
                    f"episode {key!r}: no action within {timeout} s; is a collector collecting? The request stays "
                    f"pending: call wait_for_action() again, or end_episode()"
                )
        run.asked = False
        if isinstance(answer, Exception):
            self._forget(key)
            raise answer
        return answer

    def log(
        self, key: Hashable, obs: Any, actions: Any, masks: Any, timeout: float | None, *, as_policy: bool = False
    ) -> None:
        run = self._running(key)
        run.check_idle("log_action")
        with self._forgetting(key):
            run.episode.wait_for_room(timeout)
            run.episode.log_action(obs, actions, masks=masks, as_policy=as_policy)

    def log_returns(self, key: Hashable, rewards: Any, infos: Any) -> None:
        self._running(key).episode.log_returns(rewards, infos)

    def leave(
        self, key: Hashable, final_obs: Any, terminated: Flags | None, truncated: Flags, timeout: float | None
    ) -> None:
        """End some agents, without waiting; see `EpisodeDriver.end_agents`."""
        self._running(key).episode.end_agents(final_obs, terminated=terminated, truncated=truncated)

    def end(
        self, key: Hashable, final_obs: Any, terminated: Flags | None, truncated: Flags, timeout: float | None
    ) -> None:
        """End an episode, without waiting; see `EpisodeDriver.end_episode`."""
        self._running(key).episode.end(final_obs, terminated=terminated, truncated=truncated)
        self._forget(key)

    # --- inside

    def _running(self, key: Hashable) -> _Run:
        with self._changed:
            run = self._runs.get(key)
            if run is None and self.stopped:
                raise ClosedError(f"episode {key!r}: stop() was called")
        if run is None:
            raise EpisodeOver(f"no episode {key!r} runs: it has ended, was lost, or never began")
        if run.episode.over is not None:  # lost by the collector's side
            self._forget(key)
            raise type(run.episode.over)(str(run.episode.over))
        return run

    def _forget(self, key: Hashable) -> None:
        with self._changed:
            self._runs.pop(key, None)
            self._changed.notify_all()

    @contextmanager
    def _forgetting(self, key: Hashable) -> Iterator[None]:
        """Forget the episode if the call finds it over."""
        try:
            yield
        except EpisodeOver:
            self._forget(key)
            raise

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

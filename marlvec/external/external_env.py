"""`ExternalEnv`: a simulator in a thread of this process that runs at its own pace and requests actions."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, Self

from marlvec.errors import ArgumentError, DriverGone, EpisodeCut, StateError
from marlvec.external.driver import DEFAULT, EpisodeDriver
from marlvec.external.exchange.local_episodes import LocalEpisodes

if TYPE_CHECKING:
    from marlvec.external.vector_env import ExternalVectorEnv

__all__ = ["ExternalEnv"]


class ExternalEnv(EpisodeDriver):
    """Drives episodes from outside the collector, in its own thread or in yours.

        class Game(ExternalEnv):
            def run(self):
                while not self.stopping:
                    episode = self.start_episode()
                    obs = simulator.begin()
                    while not simulator.over:
                        actions = self.get_action(episode, obs)
                        obs, rewards = simulator.go(actions)
                        self.log_returns(episode, rewards)
                    self.end_episode(episode, obs)

        with Game(envs):                      # starts the thread, and stops it
            batch = collector.collect(4096)

    Without a `run`, create one and call it from your own threads. Different episodes may be driven from different
    threads, each episode by one thread at a time.

    If the vectorizer has one agent, observations, actions, rewards and infos are that agent's values; otherwise they
    are dicts by agent name.

    If `run` raises, the collector's call raises `DriverGone` at once, and the driver's running episodes are lost;
    `stop` loses them, too. If `run` raises `EpisodeCut`, it is called again.

    Args:
        envs: The vectorizer that its episodes run in.
        timeout: Seconds that each call waits for the collector at most; None: for ever. The collector answers only
            during `collect`, so the time between two calls of `collect` counts.
        max_episodes: How many of its episodes may run at a time; None: as many as there are slots.
        dicts: Whether values are dicts by agent name even if there is one agent.

    Attributes:
        gateway: The vectorizer's `EpisodeGateway`.
        agents: Agent names, in order.
        timeout: As given; may be changed.
    """

    def __init__(
        self,
        envs: ExternalVectorEnv,
        *,
        timeout: float | None = None,
        max_episodes: int | None = None,
        dicts: bool = False,
    ) -> None:
        if max_episodes is not None and max_episodes < 1:
            raise ArgumentError(f"max_episodes: expected at least 1, or None, got {max_episodes}")
        self.gateway, self._local_episodes = envs.gateway, LocalEpisodes(envs.gateway, max_episodes)
        super().__init__(self._local_episodes, self.gateway.agents, timeout, dicts=dicts)
        self._thread: threading.Thread | None = None

    def run(self) -> None:
        """Drive the simulator; runs in the thread that `start` starts. Return when `stopping` is True.

        If it raises `EpisodeCut`, its other running episodes are lost, and it is called again.
        """
        raise NotImplementedError(f"{type(self).__name__} has no run()")

    # --- the thread

    def start(self) -> Self:
        """Start a thread that calls `run`.

        Returns:
            This object.

        Raises:
            StateError: The thread is already running, or the class does not define `run`.
        """
        if type(self).run is ExternalEnv.run:
            raise StateError(
                f"{type(self).__name__} has no run(): derive from ExternalEnv, or call it from your thread"
            )
        self._check_process("start()")
        if self.is_alive:
            raise StateError(f"{type(self).__name__} start(): its thread runs already; stop() it first")
        self._local_episodes.stopped = False
        self.gateway.arrive()
        self._thread = threading.Thread(target=self._main, name=f"marlvec-{type(self).__name__}", daemon=True)
        self._thread.start()
        return self

    @property
    def is_alive(self) -> bool:
        """Whether its thread is running."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def stopping(self) -> bool:
        """Whether `run` must return: `stop` was called, or the vectorizer was closed."""
        return self._local_episodes.stopped or self.gateway.closed

    def stop(self, timeout: float | None = 10.0) -> None:
        """Stop the thread: waiting calls raise `ClosedError`, and running episodes are lost.

        Safe to call again, and if no thread was started.

        Args:
            timeout: Seconds to wait for `run` to return; None: for ever.

        Raises:
            StateError: `run` did not return in time; the thread still runs.
        """
        self._local_episodes.stop()
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(timeout)
        if thread.is_alive():
            raise StateError(
                f"{type(self).__name__}.run() has not returned {timeout} s after stop(); have its loops test "
                f"self.stopping"
            )

    def __enter__(self) -> Self:
        return self if type(self).run is ExternalEnv.run else self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "its thread runs" if self.is_alive else "no thread"
        return f"<{type(self).__name__}: {len(self._local_episodes)} episodes, {state}>"

    def _main(self) -> None:
        name, error = type(self).__name__, None
        while True:
            try:
                self.run()
            except BaseException as raised:  # sys.exit() too
                if not (self.stopping and isinstance(raised, StateError)):  # stop() and close() end run() by this error
                    error = raised
            self._local_episodes.abandon(error or DriverGone(f"{name}.run() returned while the episode was running"))
            if not isinstance(error, EpisodeCut):
                break
            error = None
        if error is not None:
            gone = DriverGone(f"{name}.run() raised {type(error).__name__}: {error}")
            gone.__cause__ = error
            self.gateway.fail(gone)
        self.gateway.depart()

    # --- episodes

    def log_action(
        self,
        episode_id: Hashable,
        obs: Any,
        actions: Any,
        *,
        masks: Any = None,
        timeout: float | None = DEFAULT,
        as_policy: bool = False,
    ) -> None:
        """Log actions that were taken at observations; no policy is asked for an action.

        Waits only while too many rows wait for the collector.

        Args:
            episode_id: The episode.
            obs: Observations of all agents that act now.
            actions: Their actions.
            masks: As `get_action`.
            timeout: Seconds to wait until a row is accepted; default: the constructor's.
            as_policy: As `ExternalEpisode.log_action`.

        Raises:
            AnswerTimeout: The row was not accepted in time. Nothing was logged.
            MarlvecError: As `get_action`.
        """
        tables = self._table(obs), self._table(actions), None if masks is None else self._table(masks)
        self._local_episodes.log(episode_id, *tables, self._seconds(timeout), as_policy=as_policy)

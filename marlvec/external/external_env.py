"""`ExternalEnv`: a simulator in a thread of this process that runs at its own pace, and asks for actions."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from marlvec.errors import (
    AnswerTimeout,
    ArgumentError,
    BusyError,
    ClosedError,
    DriverGone,
    EpisodeCut,
    EpisodeOver,
    EpisodesFull,
    StateError,
)
from marlvec.external.exchange.external_episode import ExternalEpisode, Flags
from marlvec.vector.settings import LONGEST_WAIT

if TYPE_CHECKING:
    from marlvec.external.vector_env import ExternalVectorEnv

__all__ = ["Running", "ExternalEnv"]


class Running:
    """A running episode and the way back.

    Args:
        episode: The episode.
        box: Where its answers come in, and why it was lost.

    Attributes:
        asked: Whether an answer is due that was not taken out of the box.
    """

    __slots__ = ("asked", "box", "episode")

    def __init__(self, episode: ExternalEpisode, box: queue.SimpleQueue[Any]) -> None:
        self.episode, self.box, self.asked = episode, box, False

    def check_idle(self, call: str) -> None:
        """Raise if the next answer in the box would be one to an earlier question."""
        if self.asked:
            raise BusyError(f"{call}(): what was asked before is still to be taken; wait_for_action() first")


_DEFAULT = -1.0  # of timeouts: as the constructor says
_numbers = count()


class ExternalEnv:
    """Drives the loop from outside, in a thread of its own or of yours.

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

    Or derive nothing and start nothing: hold one, and call it from your own threads. Different episodes may be served
    from different threads, each by one at a time.

    Where the vectorizer has one agent, observations, actions, rewards and infos are that agent's own; else they are
    dicts of agent name to one.

    If `run` raises, the collector's call raises at once (`DriverGone`), and the episodes that it was running are lost.
    So they are by `stop`. An `EpisodeCut` that it lets out is no reason to end: it is called again.

    Args:
        envs: Where its episodes run.
        timeout: Seconds that each call waits for the collector at most; None: for ever. The collector answers while
            `collect` runs, so the pause between two calls of `collect` counts.
        max_episodes: How many of its episodes may run at a time; None: as many as there are slots.
        dicts: Whether everything goes by agent name also where there is one agent.

    Attributes:
        gateway: Where its episodes come in.
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
            raise ArgumentError(f"max_episodes must be at least 1, got {max_episodes}")
        self.gateway, self.timeout = envs.gateway, timeout
        self._max_episodes = max_episodes
        self._alone = self.gateway.agents[0] if len(self.gateway.agents) == 1 and not dicts else None
        self._runs: dict[Hashable, Running] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False

    def run(self) -> None:
        """Drive the simulator; called in the thread that `start` starts. Return when `stopping`.

        Called again where it lets out an `EpisodeCut`: its other episodes are lost then, if it has any.
        """
        raise NotImplementedError(f"{type(self).__name__} has no run()")

    # --- the thread

    def start(self) -> Self:
        """Start a thread that calls `run`.

        Returns:
            This object.

        Raises:
            StateError: It runs already, or there is no `run` of its own.
        """
        if type(self).run is ExternalEnv.run:
            raise StateError(
                f"{type(self).__name__} has no run(): derive from ExternalEnv, or call it from your thread"
            )
        if self.is_alive:
            raise StateError(f"{type(self).__name__} runs already; stop() it first")
        self._stopping = False
        self.gateway.arrive()
        self._thread = threading.Thread(target=self._main, name=f"marlvec-{type(self).__name__}", daemon=True)
        self._thread.start()
        return self

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def stopping(self) -> bool:
        """Whether `run` is to return: `stop` was called, or the vectorizer was closed."""
        return self._stopping or self.gateway.closed

    def stop(self, timeout: float | None = 10.0) -> None:
        """Stop: every call that waits raises `ClosedError`, running episodes are lost, and the thread has ended.

        May be called again, and where no thread was started.

        Args:
            timeout: Seconds to wait for `run` to return; None: for ever.

        Raises:
            StateError: It did not return in time, and is still at work.
        """
        with self._changed:
            self._stopping = True
            runs = list(self._runs.values())
            self._runs.clear()
            self._changed.notify_all()
        for run in runs:
            run.box.put(ClosedError("stop() was called"))
            run.episode.abandon(ClosedError("stop() was called"))
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(timeout)
        if thread.is_alive():
            raise StateError(
                f"{type(self).__name__}.run() has not returned {timeout} s after stop(); have its loops look at "
                f"self.stopping"
            )

    def __enter__(self) -> Self:
        return self if type(self).run is ExternalEnv.run else self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "its thread runs" if self.is_alive else "no thread"
        return f"<{type(self).__name__}: {len(self._runs)} episodes, {state}>"

    def _main(self) -> None:
        name, error = type(self).__name__, None
        while True:
            try:
                self.run()
            except BaseException as raised:  # sys.exit() too
                if not (self.stopping and isinstance(raised, StateError)):  # else it is how stop() and close() end it
                    error = raised
            with self._changed:
                runs = list(self._runs.values())
                self._runs.clear()
            for run in runs:
                run.episode.abandon(error or DriverGone(f"{name}.run() returned before it had ended"))
            if not isinstance(error, EpisodeCut):
                break
            error = None
        if error is not None:
            gone = DriverGone(f"{name}.run() raised {type(error).__name__}: {error}")
            gone.__cause__ = error
            self.gateway.fail(gone)
        self.gateway.depart()

    # --- episodes

    def start_episode(
        self,
        episode_id: Hashable | None = None,
        *,
        training_enabled: bool = True,
        env_id: int | None = None,
        timeout: float | None = _DEFAULT,
    ) -> Hashable:
        """Begin an episode; wait for a free slot.

        Args:
            episode_id: How to call it; None: a number that no other one has.
            training_enabled: False: its rows are in no batch.
            env_id: The slot it gets; None: any.
            timeout: Seconds to wait; default: as the constructor says.

        Returns:
            Its id. It is forgotten when the episode is over.

        Raises:
            EpisodesFull: No slot was free in time, or ``max_episodes`` run.
            StateError: An episode of this id runs.
            ClosedError: `stop` was called, or the vectorizer was closed.
        """
        key = f"episode-{next(_numbers)}" if episode_id is None else episode_id
        box: queue.SimpleQueue[Any] = queue.SimpleQueue()
        seconds = self._seconds(timeout)
        deadline = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            while True:
                if self._stopping:
                    raise ClosedError("start_episode(): stop() was called")
                if key in self._runs:
                    raise StateError(f"start_episode({key!r}): an episode of this id runs; end_episode() it first")
                if self._max_episodes is not None and len(self._runs) >= self._max_episodes:
                    raise EpisodesFull(
                        f"start_episode(): {len(self._runs)} episodes run, as many as max_episodes allows"
                    )
                try:
                    episode = self.gateway.begin(
                        training_enabled=training_enabled, env_id=env_id, on_lost=box.put, on_free=self._wake
                    )
                except EpisodesFull:
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        raise
                    self._changed.wait(LONGEST_WAIT if left is None else min(left, LONGEST_WAIT))
                    continue
                self._runs[key] = Running(episode, box)
                return key

    def get_action(self, episode_id: Hashable, obs: Any, *, masks: Any = None, timeout: float | None = _DEFAULT) -> Any:
        """Ask for actions, and wait for them.

        Args:
            episode_id: The episode.
            obs: Observations of all who act now.
            masks: Action masks, where they are not in the observations.
            timeout: Seconds to wait; default: as the constructor says.

        Returns:
            Actions for the env.

        Raises:
            AnswerTimeout: None came in time. They may still come: `wait_for_action`, or end the episode.
            EpisodeOver: There is no such episode, or no more: `EpisodeCut` if time was up, and this was its end.
            ClosedError: `stop` was called, or the vectorizer was closed.
            MarlvecError: As `ExternalEpisode.ask`; nothing was asked then.
        """
        run = self._running(episode_id)
        run.check_idle("get_action")
        with self._forgetting(episode_id):
            run.episode.ask(self._table(obs), masks=None if masks is None else self._table(masks), answer=run.box.put)
        run.asked = True
        return self.wait_for_action(episode_id, timeout)

    def wait_for_action(self, episode_id: Hashable, timeout: float | None = _DEFAULT) -> Any:
        """Wait for what a `get_action` that ran out of time has asked for.

        Returns:
            As `get_action`.

        Raises:
            StateError: Nothing was asked.
            MarlvecError: As `get_action`.
        """
        run, seconds = self._running(episode_id), self._seconds(timeout)
        if not run.asked:
            raise StateError(f"wait_for_action({episode_id!r}): nothing was asked; get_action() first")
        deadline = float("inf") if seconds is None else time.monotonic() + seconds
        while True:
            left = max(0.0, deadline - time.monotonic())
            with suppress(queue.Empty):
                answer = run.box.get(timeout=min(left, LONGEST_WAIT))
                break
            if left <= LONGEST_WAIT:
                raise AnswerTimeout(
                    f"episode {episode_id!r}: no action within {seconds} s; is a collector collecting? It stays asked "
                    f"for: wait_for_action(), or end_episode()"
                )
        run.asked = False
        if isinstance(answer, Exception):
            self._forget(episode_id)
            raise answer
        return answer if self._alone is None else answer[self._alone]

    def log_action(
        self,
        episode_id: Hashable,
        obs: Any,
        actions: Any,
        *,
        masks: Any = None,
        as_policy: bool = False,
        timeout: float | None = _DEFAULT,
    ) -> None:
        """Say what was done at what observation; no policy is asked for an action.

        Waits only where too many rows wait already.

        Args:
            episode_id: The episode.
            obs: Observations of all who act now.
            actions: Their actions.
            masks: As `get_action`.
            as_policy: As `ExternalEpisode.log_action`.
            timeout: As `get_action`.

        Raises:
            AnswerTimeout: There was no room in time. Nothing was logged.
            MarlvecError: As `get_action`.
        """
        run = self._running(episode_id)
        run.check_idle("log_action")
        with self._forgetting(episode_id):
            run.episode.wait_for_room(self._seconds(timeout))
            allowed = None if masks is None else self._table(masks)
            run.episode.log_action(self._table(obs), self._table(actions), masks=allowed, as_policy=as_policy)

    def log_returns(self, episode_id: Hashable, rewards: Any, infos: Any = None) -> None:
        """Note the rewards for the last actions; see `ExternalEpisode.log_returns`."""
        self._running(episode_id).episode.log_returns(
            self._table(rewards), None if infos is None else self._table(infos)
        )

    def end_agents(
        self, episode_id: Hashable, final_obs: Any, *, terminated: Flags | None = None, truncated: Flags = False
    ) -> None:
        """Some agents end, and the episode goes on; see `ExternalEpisode.end_agents`."""
        self._running(episode_id).episode.end_agents(self._table(final_obs), terminated=terminated, truncated=truncated)

    def end_episode(
        self,
        episode_id: Hashable,
        final_obs: Any = None,
        *,
        terminated: Flags | None = None,
        truncated: Flags = False,
    ) -> None:
        """The episode is over; see `ExternalEpisode.end`. Its id is forgotten."""
        run = self._running(episode_id)
        run.episode.end(
            None if final_obs is None else self._table(final_obs), terminated=terminated, truncated=truncated
        )
        self._forget(episode_id)

    # --- inside

    def _running(self, episode_id: Hashable) -> Running:
        with self._changed:
            run = self._runs.get(episode_id)
            if run is None and self._stopping:
                raise ClosedError(f"episode {episode_id!r}: stop() was called")
        if run is None:
            raise EpisodeOver(f"no episode {episode_id!r} runs: it has ended, was lost, or never began")
        if run.episode.over is not None:  # this side has lost it
            self._forget(episode_id)
            raise type(run.episode.over)(str(run.episode.over))
        return run

    def _forget(self, episode_id: Hashable) -> None:
        with self._changed:
            self._runs.pop(episode_id, None)
            self._changed.notify_all()

    @contextmanager
    def _forgetting(self, episode_id: Hashable) -> Iterator[None]:
        """Forget an episode that turns out to be over."""
        try:
            yield
        except EpisodeOver:
            self._forget(episode_id)
            raise

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _table(self, value: Any) -> Mapping[str, Any]:
        return value if self._alone is None else {self._alone: value}  # checked there

    def _seconds(self, timeout: float | None) -> float | None:
        return self.timeout if timeout == _DEFAULT else timeout

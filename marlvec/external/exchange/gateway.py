"""`EpisodeGateway`: begins external episodes, and gives each a slot."""

from __future__ import annotations

import time
from collections.abc import Callable

from marlvec.errors import ArgumentError, ClosedError, EpisodesFull
from marlvec.external.exchange.external_episode import ExternalEpisode, OnLost
from marlvec.external.exchange.row import Account
from marlvec.external.exchange.row_exchange import RowExchange
from marlvec.external.exchange.value_checker import ValueChecker

__all__ = ["EpisodeGateway"]


class EpisodeGateway:
    """Begins external episodes in the slots of an `ExternalVectorEnv`. May be used from any thread.

    Args:
        exchange: The queue of rows.
        checker: Checks all values.
        max_episode_steps: Episode length after which it is cut; None: no limit.

    Attributes:
        agents: Agent names, in order of the agent axis.
        num_envs: N, how many episodes can run at a time.
    """

    def __init__(self, exchange: RowExchange, checker: ValueChecker, max_episode_steps: int | None = None) -> None:
        self._exchange, self._checker, self._max_steps = exchange, checker, max_episode_steps
        self.agents = checker.agents
        self.num_envs = len(exchange.places)

    def __repr__(self) -> str:
        return f"<EpisodeGateway: {len(self.episodes)} of {self.num_envs} episodes run>"

    @property
    def episodes(self) -> tuple[ExternalEpisode, ...]:
        """The running episodes, by slot."""
        with self._exchange.lock:
            return tuple(place.episode for place in self._exchange.places if isinstance(place.episode, ExternalEpisode))

    @property
    def closed(self) -> bool:
        """Whether the vectorizer was closed."""
        return self._exchange.closed

    def begin(
        self,
        *,
        training_enabled: bool = True,
        env_id: int | None = None,
        timeout: float | None = 0.0,
        on_lost: OnLost | None = None,
        on_free: Callable[[], None] | None = None,
        account: Account | None = None,
    ) -> ExternalEpisode:
        """Begin an episode.

        Args:
            training_enabled: False: its rows are in no batch; metrics and amounts to collect include them.
            env_id: The slot it gets; None: the free slot with the fewest waiting rows.
            timeout: Seconds to wait for a free slot; 0: not at all; None: for ever.
            on_lost: Called once, with the reason, if the collector begins new episodes or the vectorizer is closed.
                Runs in any thread, and must be quick.
            on_free: If `EpisodesFull` is raised, called once when a slot is free or the vectorizer is closed. Runs in
                any thread, and must be quick.
            account: Counts and limits the episode's bytes; None: no limit.

        Returns:
            The episode, in its slot.

        Raises:
            EpisodesFull: All slots are taken, or the slot ``env_id`` is.
            ClosedError: The vectorizer was closed.
            ArgumentError: No slot ``env_id`` exists.
        """
        exchange = self._exchange
        if env_id is not None and not 0 <= env_id < self.num_envs:
            raise ArgumentError(f"begin(env_id={env_id!r}): no such slot; slots are 0 to {self.num_envs - 1}")
        deadline = None if timeout is None else time.monotonic() + timeout
        with exchange.changing():
            while True:
                if exchange.closed:
                    raise ClosedError("begin(): the vectorizer was closed")
                exchange.look_for_idle(time.monotonic())
                free = exchange.free()
                if env_id is not None:
                    free = [env_id] if env_id in free else []
                if free:
                    break
                if not exchange.wait(deadline):
                    if on_free is not None:
                        exchange.when_free(on_free)
                    what = (
                        f"{self.num_envs} episodes run, as many as can" if env_id is None else f"slot {env_id} is taken"
                    )
                    raise EpisodesFull(
                        f"begin(): {what}; end() one first, wait with timeout=…, or make() more num_envs"
                    )
            episode = ExternalEpisode(
                exchange,
                self._checker,
                free[0],
                training_enabled=training_enabled,
                on_lost=on_lost,
                max_steps=self._max_steps,
                account=account,
            )
            exchange.place(free[0], episode)
        return episode

    def free_slots(self, on_free: Callable[[], None]) -> list[int]:
        """Return the free slots, those with the fewest waiting rows first.

        ``on_free`` is called once when one more slot is free or the vectorizer is closed, as in `begin`.

        Returns:
            Env ids.
        """
        exchange = self._exchange
        with exchange.changing():
            exchange.look_for_idle(time.monotonic())
            exchange.when_free(on_free)
            return exchange.free()

    def drop(self, account: Account, reason: BaseException) -> None:
        """Abandon, for this reason, all episodes with rows that wait on an account, also ended ones."""
        exchange = self._exchange
        with exchange.changing():
            for place in exchange.places:
                for episode in {row.episode for row in place.rows if row.episode.account is account}:
                    exchange.lose(episode, reason)

    def fail(self, error: Exception) -> None:
        """Make the collector's call raise an error as soon as possible. No episode is lost by it."""
        with self._exchange.changing():
            self._exchange.fail(error)

    def arrive(self) -> None:
        """Count a driver in: the collector waits for its rows until `depart`."""
        with self._exchange.lock:
            self._exchange.drivers = (self._exchange.drivers or 0) + 1

    def depart(self) -> None:
        """Count a driver out. If none is left, a call that waits for rows raises."""
        with self._exchange.changing():
            assert self._exchange.drivers
            self._exchange.drivers -= 1
            self._exchange.wake_collector()

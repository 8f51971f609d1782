"""`EpisodeGateway`: begins external episodes, and gives each a slot."""

from __future__ import annotations

import time
from collections.abc import Callable

from marlvec.errors import ArgumentError, ClosedError, EpisodesFull
from marlvec.external.account import Account
from marlvec.external.exchange.external_episode import ExternalEpisode, OnLost
from marlvec.external.exchange.row_exchange import RowExchange
from marlvec.external.exchange.value_checker import ValueChecker

__all__ = ["EpisodeGateway"]


class EpisodeGateway:
    """Begins episodes; what simulators outside see of an `ExternalVectorEnv`. May be used from any thread.

    Args:
        exchange: Where rows go.
        checker: What checks them.
        max_episode_steps: After how many steps an episode is cut; None: never.

    Attributes:
        agents: Agent names, in order of the agent axis.
        num_envs: N: as many episodes can run at a time.
    """

    def __init__(self, exchange: RowExchange, checker: ValueChecker, max_episode_steps: int | None = None) -> None:
        self._exchange, self._checker, self._max_steps = exchange, checker, max_episode_steps
        self.agents = checker.agents
        self.num_envs = len(exchange.places)

    def __repr__(self) -> str:
        return f"<EpisodeGateway: {len(self.episodes)} of {self.num_envs} episodes run>"

    @property
    def episodes(self) -> tuple[ExternalEpisode, ...]:
        """Those that run, by slot. One that has ended is not remembered here."""
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
            training_enabled: False: its rows are in no batch; metrics and the amounts that are collected count it.
            env_id: The slot it gets; None: a free one, that first which has the least to do.
            timeout: Seconds to wait for a free slot; 0: not at all; None: for ever.
            on_lost: Called once, with the reason, where this side loses the episode: the collector begins new ones,
                or the vectorizer is closed. From any thread, and must be quick.
            on_free: Where it is full, called once, when a slot is free or the vectorizer is closed: begin again then.
                Likewise.
            account: Where its bytes are counted, and said to be too many; None: nowhere.

        Returns:
            The episode, in a slot of its own.

        Raises:
            EpisodesFull: All slots are taken, or the one that was asked for is.
            ClosedError: The vectorizer was closed.
            ArgumentError: There is no such slot.
        """
        exchange = self._exchange
        if env_id is not None and not 0 <= env_id < self.num_envs:
            raise ArgumentError(f"begin(env_id={env_id!r}): slots are 0 to {self.num_envs - 1}")
        deadline = None if timeout is None else time.monotonic() + timeout
        with exchange.lock:
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
        exchange.notify()
        return episode

    def free_slots(self, on_free: Callable[[], None]) -> list[int]:
        """Slots that are free, those first which have the least to do.

        Args:
            on_free: Called once, when one more is free or the vectorizer is closed; as that of `begin`.

        Returns:
            Env ids.
        """
        exchange = self._exchange
        with exchange.lock:
            exchange.look_for_idle(time.monotonic())
            exchange.when_free(on_free)
            free = exchange.free()
        exchange.notify()
        return free

    def drop(self, account: Account, reason: BaseException) -> None:
        """Drop all that waits on an account, also of episodes that have ended: they are lost.

        Args:
            account: As given to `begin`.
            reason: Why, as with `ExternalEpisode.abandon`.
        """
        exchange = self._exchange
        with exchange.lock:
            for place in exchange.places:
                for episode in {row.episode for row in place.rows if row.episode.account is account}:
                    exchange.lose(episode, reason)
        exchange.notify()

    def fail(self, error: Exception) -> None:
        """Have the collector's call raise an error, as soon as can be. No episode is lost by it.

        Args:
            error: The error.
        """
        with self._exchange.lock:
            self._exchange.fail(error)
        self._exchange.notify()

    def arrive(self) -> None:
        """One more driver is there from now on: the collector relies on it, until `depart`."""
        with self._exchange.lock:
            self._exchange.drivers = (self._exchange.drivers or 0) + 1

    def depart(self) -> None:
        """A driver that has arrived is gone. A call that waits for rows raises if no driver is left."""
        with self._exchange.lock:
            assert self._exchange.drivers
            self._exchange.drivers -= 1
            self._exchange.look_around()
        self._exchange.notify()

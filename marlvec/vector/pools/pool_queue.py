"""`PoolQueue`: keeps a pool's requests in order, and its batches full."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress

import numpy as np

from marlvec.errors import BusyError, ContractError
from marlvec.vector.pools.pool import Pool, PoolReply

__all__ = ["PoolQueue"]


class PoolQueue:
    """Keeps a pool's requests in order, and its batches full.

    A pool that answers `Pool.batch_size` rows at a time would never answer when fewer are asked for. Its spare envs
    make up the difference; callers do not see them.

    Args:
        pool: The pool.

    Attributes:
        in_flight: How many envs the pool was asked for and has not answered, spares among them.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._idle_spares = list(range(pool.num_envs, pool.num_envs + pool.num_spares))
        self._receiver: ThreadPoolExecutor | None = None
        self._receiving: Future[PoolReply] | None = None
        self.in_flight = 0

    @property
    def batch_size(self) -> int:
        """How many envs must be in flight for an answer."""
        return 1 if self._pool.synchronous else self._pool.batch_size

    @property
    def empty(self) -> bool:
        """Whether there is nothing to wait for."""
        return not self.in_flight and not self._waiting

    def ask(self, count: int, request: Callable[[], None]) -> None:
        """Ask the pool now, or as soon as it can be asked.

        Args:
            count: Of how many envs.
            request: A call of `Pool.reset` or `Pool.send`.
        """
        self._waiting.append((count, request))
        self._ask_pool()

    def receive(self, timeout: float | None) -> PoolReply | None:
        """Wait for the next answer, without the rows of spares.

        Args:
            timeout: Seconds; None for ever.

        Returns:
            The rows; None if time ran out.

        Raises:
            BusyError: The pool would never answer: too few envs are in flight.
        """
        if self._receiving is None:
            self._ask_pool()
            self._add_spares()
            if timeout is None:
                return self._without_spares(self._pool.recv())
            if self._receiver is None:  # pools cannot wait for a limited time, threads can
                self._receiver = ThreadPoolExecutor(1, "marlvec-pool")
            self._receiving = self._receiver.submit(self._pool.recv)
        with suppress(FutureTimeout):
            reply = self._receiving.result(timeout)
            self._receiving = None
            return self._without_spares(reply)
        return None

    def missing_for(self, count: int) -> int:
        """How many envs would be missing in the last batch, if the pool was asked for ``count`` and nothing else."""
        missing = -count % self.batch_size
        return max(0, missing - self._pool.num_spares)

    def reset(self) -> None:
        """The pool has lost what it was asked for."""
        pool = self._pool
        self._waiting.clear()
        self._idle_spares = list(range(pool.num_envs, pool.num_envs + pool.num_spares))
        self.in_flight = 0

    def forget(self) -> bool:
        """Let go of all that the pool was asked. Returns whether it can go on, with a reset."""
        if self._receiving is not None:  # it must not be taken away from the thread that waits for it
            with suppress(Exception):
                self._receiving.result()
            self._receiving = None
        self.reset()
        return self._pool.forget()

    def close(self, timeout: float) -> None:
        """Let go of the thread that waits, if there is one: the pool must not be closed under it."""
        if self._receiving is not None:
            with suppress(Exception):
                self._receiving.result(timeout)
        if self._receiver is not None:
            self._receiver.shutdown(wait=self._receiving is None or self._receiving.done(), cancel_futures=True)

    def _ask_pool(self) -> None:
        while self._waiting and not (self._pool.synchronous and self.in_flight):
            count, request = self._waiting.popleft()
            request()
            self.in_flight += count

    def _add_spares(self) -> None:
        missing = self.batch_size - self.in_flight
        if missing <= 0:
            return
        if missing > len(self._idle_spares):
            raise BusyError(
                f"recv(): {self.in_flight} envs are in flight, and this pool hands out {self._pool.batch_size} rows at "
                f"a time: it would wait for ever. send() to more envs first; nothing is lost"
            )
        spares, self._idle_spares = self._idle_spares[:missing], self._idle_spares[missing:]
        nothing: Sequence[None] = [None] * missing
        self._pool.reset(np.array(spares, np.int64), nothing, nothing)
        self.in_flight += missing

    def _without_spares(self, reply: PoolReply) -> PoolReply:
        pool, ids = self._pool, reply.env_ids
        self.in_flight -= len(ids)
        if self.in_flight < 0:
            raise ContractError(
                f"{pool.spec.name}: the pool answered for {-self.in_flight} envs more than it was asked"
            )
        if pool.num_spares:
            mine = ids < pool.num_envs
            if not mine.all():
                self._idle_spares += ids[~mine].tolist()
                return reply.select(mine)
        return reply

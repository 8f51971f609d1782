"""`PoolQueue`: sends a pool's requests in order, with full batches."""

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
    """Sends a pool's requests in order, with full batches.

    A pool that returns `Pool.batch_size` rows at a time never replies to a smaller request. Its hidden spare envs make
    up the difference; ``in_flight`` counts them, too.
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
        """Number of envs that must be in flight for a reply."""
        return 1 if self._pool.synchronous else self._pool.batch_size

    @property
    def empty(self) -> bool:
        return not self.in_flight and not self._waiting

    def ask(self, count: int, request: Callable[[], None]) -> None:
        """Send a request of ``count`` envs (`Pool.reset` or `Pool.send`), now or as soon as the pool accepts it."""
        self._waiting.append((count, request))
        self._ask_pool()

    def receive(self, timeout: float | None) -> PoolReply | None:
        """Wait for the next reply, at most ``timeout`` seconds; return it without spares' rows, or None."""
        # BusyError: the pool would never reply, since too few envs are in flight.
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
        """Return the number of envs missing in the last batch of a request for ``count`` envs alone."""
        missing = -count % self.batch_size
        return max(0, missing - self._pool.num_spares)

    def reset(self) -> None:
        """Forget all requests: the pool has lost them."""
        pool = self._pool
        self._waiting.clear()
        self._idle_spares = list(range(pool.num_envs, pool.num_envs + pool.num_spares))
        self.in_flight = 0

    def forget(self) -> bool:
        """Discard all requests; return whether the pool can continue, with a reset."""
        if self._receiving is not None:  # the waiting thread still uses the pool
            with suppress(Exception):
                self._receiving.result()
            self._receiving = None
        self.reset()
        return self._pool.forget()

    def close(self, timeout: float) -> None:
        """Release the waiting thread, if any: the pool must not be closed while it waits."""
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

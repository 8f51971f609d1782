"""`PoolShard`: the counterpart of `Shard` for the envs of a pool.

The rows it leaves behind are those that `Shard` leaves behind for the same envs, bit for bit. One thing differs: of
a turn-based game a pool may show all players every move, where PettingZoo's AEC shows it to the one who acts next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.env_ids import rows_of
from marlvec.envs.autoreset import AutoresetMode, AutoresetRules
from marlvec.errors import ArgumentError, BusyError, ContractError
from marlvec.vector.data.buffers import Selection
from marlvec.vector.data.infos import InfoColumns
from marlvec.vector.data.report import Report
from marlvec.vector.pools.pool import Pool, PoolReply
from marlvec.vector.shards.batched_shard import BatchedEvent, BatchedPhase, BatchedShard

__all__ = ["PoolShard", "PoolQueue"]

Ids = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


class PoolShard(BatchedShard):
    """All envs of a pool.

    Args:
        pool: The pool.
        autoreset_mode: ``"same_step"``, ``"next_step"`` or ``"disabled"``.

    Attributes:
        spec: What one env looks like.
        queue: What keeps the requests to the pool.

    Raises:
        ArgumentError: The pool cannot do that.
    """

    def __init__(self, pool: Pool, autoreset_mode: str) -> None:
        super().__init__(pool.spec, pool.num_envs, autoreset_mode)
        self.queue = PoolQueue(pool)
        self._pool = pool
        self._check_batches(self._autoreset)
        self._next_episode = self._autoreset.next_episode_request(AutoresetMode(pool.autoreset))
        n = pool.num_envs
        self._everyone = np.arange(n)
        self._had_rows = np.zeros((n, len(pool.spec.agents)), np.bool_)
        self._columns, self._final_columns = InfoColumns(n), InfoColumns(n)
        (group,) = pool.spec.groups
        self._harmless = [_harmless(leaf.space) for leaf in group.action_tree.leaves]
        self._declares_mask = group.mask_size is not None
        self._masked = self._declares_mask  # a mask has been written

    def _check_batches(self, autoreset: AutoresetRules) -> None:
        """Refuse a mode that the pool does not serve, and batches that would never be full."""
        pool = self._pool
        autoreset.check_pool(pool.spec.name, AutoresetMode(pool.autoreset), steps_all=pool.steps_all)
        if 0 < pool.num_spares < pool.batch_size - 1 and not pool.synchronous:
            raise ArgumentError(
                f"{pool.spec.name} hands out {pool.batch_size} rows at a time: expected no spare envs or at least "
                f"{pool.batch_size - 1}, got {pool.num_spares}"
            )
        if missing := self.queue.missing_for(1 if autoreset.begins_at_once else pool.num_envs):
            raise ArgumentError(
                f"autoreset_mode={autoreset.mode.value!r}: {pool.spec.name} hands out {pool.batch_size} rows at a "
                f"time, and {missing} more envs are needed as spares to fill up batches. PoolVectorEnv(pool, "
                f"num_envs=…) leaves envs over, and marlvec.make() provides them; or take 'next_step' and a "
                f"batch_size that divides num_envs={pool.num_envs}"
            )

    # --- asking ---

    def ask_reset(
        self, ids: Ids, seeds: Sequence[int | None], options: Sequence[dict[str, Any] | None], *, alone: bool
    ) -> None:
        """Ask for new episodes. Cancels any autoreset that was due.

        Args:
            ids: Which envs.
            seeds: One per env, or None.
            options: Likewise.
            alone: Whether nothing else is under way, nor arrived and not handed out.
        """
        if alone:  # what others have said before was handed out already
            self._columns.forget(slice(None))
            self._final_columns.forget(slice(None))
        if self.queue.empty and any(seed is not None for seed in seeds):
            self.queue.reset()
        self.queue.ask(len(ids), partial(self._pool.reset, ids, seeds, options))
        self._phases.on(ids, BatchedEvent.ASK_RESET)
        self._buffers.events[ids] = False
        self._final_columns.forget(ids)

    def ask_step(self, ids: Ids) -> None:
        """Ask for a step with the actions in the rows. What they say of the step before is gone then."""
        ids = self._in_order(ids)
        rows = self._rows(ids)
        begun = began = None
        if not self._phases.are_all(rows, BatchedPhase.RUNNING):
            if self._any_finals_kept:
                begun = ids[self._phases.where(rows, BatchedPhase.BEGUN)]
            over = self._phases.where(rows, BatchedPhase.OVER)
            began = over if np.count_nonzero(over) else None
        going = ids
        if began is not None and self._next_episode == "reset":
            self._begin(ids[began])
            going = ids[~began]
        if len(going):
            self._send(going)
        self._phases.on(rows, BatchedEvent.ASK_STEP)
        self._clear(rows, begun, began)  # while the pool is at work

    def _begin(self, ids: Ids) -> None:
        """Ask for these envs' next episodes."""
        nothing: list[None] = [None] * len(ids)
        self.queue.ask(len(ids), partial(self._pool.reset, ids, nothing, nothing))

    def _clear(self, rows: Selection, begun: Ids | None, began: BoolArray | None) -> None:
        """Make room for a step of these envs: the first of ``begun``, the next episode where ``began``."""
        buffers = self._buffers
        if begun is not None and len(begun):  # they go with the first step of the next episode
            self._clear_finals(begun)
        buffers.events[rows] = False
        if self._final_columns:
            self._final_columns.forget(rows)
        if began is not None:
            buffers.reset_mask[rows] = began

    def _send(self, ids: Ids) -> None:
        rows, buffers = self._rows(ids), self._buffers
        acting = buffers.acting[rows]
        actions: list[NDArray[Any]] = [leaf[rows] for leaf in buffers.actions[0]]
        if np.count_nonzero(acting) < acting.size:  # what the others are made to say may be anything
            for k, (action, harmless) in enumerate(zip(actions, self._harmless, strict=True)):
                lead = acting.reshape(acting.shape + (1,) * (action.ndim - 2))
                actions[k] = np.where(lead, action, harmless)
        self.queue.ask(len(ids), partial(self._pool.send, ids, actions, acting))

    # --- taking in answers ---

    def read(self, reply: PoolReply) -> tuple[Ids, Report]:
        """Write the rows of an answer.

        Returns:
            The envs that are ready now, and what they report.

        Raises:
            ContractError: The pool says something that cannot be.
        """
        ids = self._in_order(reply.env_ids)
        if ids is not reply.env_ids and np.count_nonzero(ids != reply.env_ids):
            reply = reply.select(np.argsort(reply.env_ids))
        report, rows = Report(infos=reply.infos), self._rows(ids)
        ended = reply.terminated | reply.truncated
        began = self._note_beginnings(reply, ids, rows, ended)
        present = self._note_rows(reply, rows, began)
        if present is not None:
            ended &= present
        any_ended = np.count_nonzero(ended) > 0
        done = self._note_ends(reply, rows, ended, present) if any_ended else None
        if not any_ended and not (present is None and began is None and reply.acting is None and reply.mask is None):
            self._write_turns(reply, rows, np.ones(ended.shape, np.bool_) if present is None else present)
        self._write_obs(reply, rows, present)
        if reply.columns or self._columns:
            self._columns.write(rows, reply.columns)
            if reply.has_columns is not None:
                self._columns.forget(ids[~reply.has_columns])
        ready = ids
        if done is not None:
            self._snapshot(reply, ended)
            if np.count_nonzero(done):
                ready = self._finish(reply, done, report)
        if self._columns or self._final_columns:
            report.columns, report.final_columns = self._columns, self._final_columns
        return ready, report

    def _note_beginnings(self, reply: PoolReply, ids: Ids, rows: Selection, ended: BoolArray) -> BoolArray | None:
        """Write the rewards, unless an autoreset in the same step goes on with what the step has said.

        Returns:
            Whose episodes begin with this row, (n,) bool; None where none does.
        """
        began: BoolArray | None = None
        again = 0
        if not self._phases.are_all(rows, BatchedPhase.STEPPING):
            began = ~self._phases.where(rows, BatchedPhase.STEPPING)
            if self._autoreset.begins_at_once:
                replaced = self._phases.where(rows, BatchedPhase.REPLACING)
                again = int(np.count_nonzero(replaced))
        try:
            self._phases.on(rows, BatchedEvent.REPLY)
        except KeyError as error:
            raise self._broken(f"it answers for envs {ids.tolist()}, not all of which were asked: {error}") from None
        self._check_beginnings(reply, ended, began)
        if again:
            self._buffers.reward[ids[~replaced]] = reply.reward[~replaced]
        else:
            self._buffers.reward[rows] = reply.reward
        return began

    def _check_beginnings(self, reply: PoolReply, ended: BoolArray, began: BoolArray | None) -> None:
        """What a pool says of beginnings must be what it was asked for.

        Raises:
            ContractError: It is not.
        """
        ids = reply.env_ids
        if reply.elapsed is not None and reply.finals is None:
            at_start = reply.elapsed == 0
            wrong = at_start if began is None else at_start != began
            if np.count_nonzero(wrong):
                i = int(wrong.argmax())
                what = "stepped" if at_start[i] else "reset"
                raise self._broken(
                    f"env {ids[i]} was {what}, and says that {reply.elapsed[i]} steps have passed since its reset"
                )
        if began is None:
            return
        first = began.nonzero()[0]
        if np.count_nonzero(over := ended[first]):
            raise self._broken(
                f"in envs {ids[first][over.any(axis=1)].tolist()} the episode is over right after its reset"
            )
        if np.count_nonzero(rewards := reply.reward[first]):
            raise self._broken(f"envs {ids[first][rewards.any(axis=1)].tolist()} give a reward for a reset")
        if reply.present is not None and not reply.present[began].any(axis=1).all():
            empty = ids[began & ~reply.present.any(axis=1)].tolist()
            raise self._broken(f"in envs {empty} no agent is there after a reset")

    def _note_rows(self, reply: PoolReply, rows: Selection, began: BoolArray | None) -> BoolArray | None:
        """Who is in the episode, or ends in this step, (n, A) bool; None for all.

        One that has a row, was not alive and had none before joins. One that had one is padding, to keep rows in their
        places.
        """
        if reply.present is None and len(self.spec.agents) == 1:
            return None  # who has ended is asked for nothing but a new episode
        before = self._buffers.alive[rows]
        if began is not None:
            before = np.where(began[:, None], True if reply.present is None else reply.present, before)
        if reply.present is None and np.count_nonzero(before) == before.size:
            if began is not None:
                self._had_rows[rows] = True
            return None
        given = np.ones(before.shape, np.bool_) if reply.present is None else reply.present
        if np.count_nonzero(lost := before & ~given):
            i, a = np.argwhere(lost)[0].tolist()
            who = f"agent {self.spec.agents[a]!r} of env {reply.env_ids[i]}"
            raise self._broken(f"{who} is gone, and was neither terminated nor truncated")
        present = given & (before | ~self._had_rows[rows])
        self._had_rows[rows] = given
        return present

    def _note_ends(self, reply: PoolReply, rows: Selection, ended: BoolArray, present: BoolArray | None) -> BoolArray:
        """Write who ended, who is alive and who acts; returns in which envs the episode is over, (n,) bool."""
        buffers = self._buffers
        terminated, truncated, alive = reply.terminated, reply.truncated, ~ended
        if present is not None:
            terminated, truncated, alive = terminated & ended, truncated & ended, alive & present
        buffers.terminated[rows] |= terminated
        buffers.truncated[rows] |= truncated
        done = ended[:, 0] if ended.shape[1] == 1 else ended.any(axis=1) & ~alive.any(axis=1)
        buffers.done[rows] |= done
        if reply.finals is not None:
            alive = alive | reply.finals.ended[:, None]
        self._write_turns(reply, rows, alive)
        return np.asarray(done)

    def _finish(self, reply: PoolReply, done: BoolArray, report: Report) -> Ids:
        """Episodes are over; begin the next ones if the mode says so. Returns who is ready."""
        over = reply.env_ids[done]
        if not self._autoreset.begins_at_once:
            self._phases.on(over, BatchedEvent.END)
            return reply.env_ids
        if reply.finals is not None:
            report.final_infos.update(reply.finals.infos)
            self._phases.on(over, BatchedEvent.FOLLOW)
            return reply.env_ids
        if reply.columns:
            self._final_columns.write(over, {path: column[done] for path, column in reply.columns.items()})
        report.final_infos.update({i: report.infos.pop(i) for i in over.tolist() if i in report.infos})
        self._phases.on(over, BatchedEvent.REPLACE)
        if self._next_episode == "step":
            self._send(over)
        else:
            self._begin(over)
        return reply.env_ids[~done]

    # --- rows ---

    def _in_order(self, ids: Ids) -> Ids:
        """These envs, ascending; the same array every time where they are all."""
        if len(ids) == len(self._everyone):
            return self._everyone
        return np.sort(ids) if (ids[1:] < ids[:-1]).any() else ids

    def _rows(self, ids: Ids) -> Selection:
        """The rows of envs that are in order: a slice, so that nothing is copied, where they follow on one another."""
        return slice(None) if ids is self._everyone else rows_of(ids)

    def _write_obs(self, reply: PoolReply, rows: Selection, present: BoolArray | None) -> None:
        for target, leaf in zip(self._buffers.obs[0], reply.obs, strict=True):
            if present is not None:
                leaf = np.where(present.reshape(present.shape + (1,) * (leaf.ndim - 2)), leaf, 0)
            target[rows] = leaf

    def _write_turns(self, reply: PoolReply, rows: Selection, alive: BoolArray) -> None:
        """Write who is there, who acts, and what may be done."""
        buffers = self._buffers
        acting = alive if reply.acting is None else reply.acting & alive
        buffers.alive[rows] = alive
        buffers.acting[rows] = acting
        mask = buffers.action_masks[0]
        if reply.mask is not None and mask is not None:
            if not self._declares_mask:
                buffers.gave_mask[rows] = True
            mask[rows] = reply.mask | ~acting[:, :, None]
            self._masked = True
        elif self._masked:
            buffers.clear_masks(rows)

    def _snapshot(self, reply: PoolReply, ended: BoolArray) -> None:
        """Keep the observations of agents that ended, before the next episode writes over them."""
        buffers, finals = self._buffers, reply.finals
        where, who = (ended[:, 0].nonzero()[0], 0) if ended.shape[1] == 1 else np.nonzero(ended)
        envs = reply.env_ids[where]
        for k, target in enumerate(buffers.final_obs[0]):
            target[envs, who] = reply.obs[k][where, who] if finals is None else finals.obs[k][where, who]
        self._note_finals(envs)

    def _broken(self, problem: str) -> ContractError:
        return ContractError(f"{self.spec.name}: {problem}")


def _harmless(space: Any) -> NDArray[Any]:
    """An action that lies in the space, for those who need not act."""
    low, high = getattr(space, "low", None), getattr(space, "high", None)
    if low is not None and high is not None:
        return np.clip(np.zeros(space.shape, space.dtype), low, high)
    return np.asarray(np.zeros(space.shape, space.dtype) + getattr(space, "start", 0), space.dtype)


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

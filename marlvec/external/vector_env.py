"""A vectorizer whose slots are filled from outside."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.env_ids import EnvIds, Options
from marlvec.envs.spec import EnvSpec
from marlvec.envs.wrappers.time_limit import check_limit
from marlvec.errors import ArgumentError, BrokenError, ClosedError, EpisodeCut, Failure
from marlvec.external.exchange.gateway import EpisodeGateway
from marlvec.external.exchange.row import ExternalRow
from marlvec.external.exchange.row_exchange import RowExchange
from marlvec.external.exchange.slot_env import SlotEnv
from marlvec.external.exchange.value_checker import ValueChecker
from marlvec.vector.backends.in_process import InProcessVectorEnv
from marlvec.vector.call_state import CallEvent, exclusive
from marlvec.vector.data.buffers import Buffers
from marlvec.vector.data.report import Report
from marlvec.vector.settings import Settings
from marlvec.vector.shards.shard import Shard
from marlvec.vector.vector_step import VectorStep

__all__ = ["ExternalVectorEnv"]


class ExternalVectorEnv(InProcessVectorEnv):
    """N slots for episodes that simulators outside run: they drive, and this answers. Made by `marlvec.external.make`.

    A slot is an env whose steps other code makes. A reset asks for an episode, and comes back when one has begun
    outside; a send hands out actions, and comes back with what followed from them. The row that ends an episode holds
    its end alone (``autoreset_mode="disabled"``). What an episode says is checked where it is said: what is wrong
    raises there, and never here. An episode that was abandoned is a fault (``infos["fault"]``, `faults`).

    It has no thread of its own: rows are taken up in `recv`, and answers are given in `send`.

    Unless ``lockstep``, a `Collector` waits for no slot in particular: it answers those that ask, several in one call,
    and takes in what comes. Batches have exactly the size that was asked for, and their episodes are in order of
    arrival. With ``lockstep`` it goes in rounds, as with every other vectorizer: batches are those that the same envs
    give inside of it, bit for bit, and all slots have to be in use.

    Args:
        spec: What one env outside looks like.
        num_envs: N, how many episodes can run at a time.
        batch_size: How many rows are taken up at a time at most, and so answered in one call of a policy; None: N.
        batch_wait: Seconds to wait for more rows, once there is one, as long as other simulators are at work.
        max_backlog: How many rows one slot may have waiting that ask for no answer.
        lockstep: Whether it goes in rounds.
        max_episode_steps: After so many steps an episode is cut where it stands: all who are in it are truncated, and
            its next `ask` is its end. None: never.
        idle_timeout: Seconds after which an episode of which nothing is heard, though it is its turn, is lost. Looked
            at while `collect` runs, or a driver wants a slot. None: never.
        copy: As in `marlvec.make`.
        grouped: Likewise.
        validate: Likewise, for actions. Values that come from outside are always held against their spaces, but for
            ``"off"``; shapes and dtypes always are.

    Raises:
        ArgumentError: An argument is wrong.

    Attributes:
        gateway: Where episodes come in.
    """

    backend = "external"

    def __init__(
        self,
        spec: EnvSpec,
        num_envs: int = 1,
        *,
        batch_size: int | None = None,
        batch_wait: float = 0.002,
        max_backlog: int = 64,
        lockstep: bool = False,
        max_episode_steps: int | None = None,
        idle_timeout: float | None = None,
        copy: bool = True,
        grouped: bool = False,
        validate: str = "sample",
    ) -> None:
        chosen = Settings(autoreset_mode="disabled", copy=copy, grouped=grouped, validate=validate)
        super().__init__(num_envs, chosen)
        if batch_size is not None and batch_size < 1:
            raise ArgumentError(f"batch_size must be at least 1, got {batch_size}")
        if not 0 <= batch_wait < float("inf"):
            raise ArgumentError(f"batch_wait must be seconds from 0, got {batch_wait}")
        if max_backlog < 1:
            raise ArgumentError(f"max_backlog must be at least 1, got {max_backlog}")
        if max_episode_steps is not None:
            check_limit(max_episode_steps)
        if idle_timeout is not None and not 0 < idle_timeout < float("inf"):
            raise ArgumentError(f"idle_timeout must be seconds above 0, or None, got {idle_timeout}")
        self.lockstep = bool(lockstep)
        self._most, self._batch_wait = batch_size or num_envs, batch_wait
        self._slot_envs = [SlotEnv(spec) for _ in range(num_envs)]
        self._shard = Shard([partial(_itself, slot_env) for slot_env in self._slot_envs], 0, **chosen.of_shard())
        buffers = Buffers(self._shard.spec, num_envs)
        self._shard.attach(buffers)
        self._slots = [buffers.slot(i) for i in range(num_envs)]  # to read actions from
        self._exchange = RowExchange(num_envs, max_backlog, idle_timeout)
        self._bind(self._shard.spec, buffers)
        checker = ValueChecker(self.spec, values=chosen.validate != "off")
        self.gateway = EpisodeGateway(self._exchange, checker, max_episode_steps)

    def _find_obstacles(self) -> dict[int, str]:
        why = "its episodes run in a simulator outside, which alone knows their state"
        return dict.fromkeys(range(self.num_envs), why)

    @exclusive()
    def drain(self, timeout: float | None = None) -> VectorStep:
        """Receive all that is there, and wait for nothing more: episodes that others are at work on are lost.

        Args:
            timeout: Not needed here.

        Returns:
            As `VectorEnv.drain`. Slots in which no episode had begun come with a row in which no agent is alive.
        """
        self._call_state.check_open()
        self._exchange.recall()
        return super().drain(timeout)

    def _request_reset(self, call: str, seed: Any, options: Options, env_ids: EnvIds | None) -> None:
        if options is not None:
            raise ArgumentError(f"{call}(options={options!r}): episodes begin outside, where these do not reach")
        super()._request_reset(call, seed, options, env_ids)

    def _send_request(self, operation: str, env_ids: NDArray[np.int64], arguments: tuple[Sequence[Any], ...]) -> None:
        if operation not in ("reset", "step", "send"):
            super()._send_request(operation, env_ids, arguments)
            return
        self._is_sending = True
        due = self._exchange.want(env_ids.tolist(), "reset" if operation == "reset" else "step")
        for row in due:
            self._answer(row)

    def _answer(self, row: ExternalRow) -> None:
        actions = self._slots[row.episode.env_id].read_actions()
        try:
            assert row.answer is not None
            row.answer({self.agents[a]: actions[a] for a in row.obs})
        except Exception as error:  # it is the simulator's own affair
            row.episode.abandon(error)

    def _receive(self, timeout: float | None, everyone: bool) -> bool:
        if self._requests:
            return super()._receive(timeout, everyone)
        most, wait_for_more = (self.num_envs, 0.0) if everyone else (self._most, self._batch_wait)
        taken = self._exchange.take(timeout, most, wait_for_more)
        try:
            if taken:
                self._replies.append((np.array([i for i, _ in taken], np.int64), self._write(taken)))
        except BaseException:  # Ctrl-C in the middle: what was taken is in pieces
            self._call_state.on(CallEvent.BREAK, BrokenError("recv() was interrupted while it took rows up"))
            raise
        return bool(taken)

    def _run(self, operation: str, env_ids: NDArray[np.int64], arguments: tuple[Sequence[Any], ...]) -> Report | None:
        return self._shard.do(operation, env_ids.tolist(), arguments)

    def _forget_requests(self) -> bool:
        return False  # others go on with what they were asked

    def _write(self, taken: Sequence[tuple[int, ExternalRow | None]]) -> Report:
        report = Report()
        first: list[int] = []
        steps: list[int] = []
        for i, row in taken:
            if row is None or row.lost is not None:
                self._write_lost(i, None if row is None else row.lost, report)
                continue
            self._slot_envs[i].row = row
            (first if row.first else steps).append(i)
        if first:
            nothing = [None] * len(first)
            report.update(self._shard.reset(first, nothing, nothing))
        if steps:
            report.update(self._shard.step(steps))
        return report

    def _write_lost(self, i: int, reason: BaseException | None, report: Report) -> None:
        """A row that says that an episode was lost, or, without a reason, that there is none."""
        buffers = self._buffers
        alive = buffers.alive[i].copy()
        buffers.reward[i] = 0
        buffers.events[i] = False
        buffers.done[i] = True
        buffers.alive[i] = buffers.acting[i] = False
        for clear in (buffers.clear_obs, buffers.clear_final_obs, buffers.clear_masks):
            clear(i)
        if reason is not None:
            buffers.truncated[i] = alive
            summary = f"{type(reason).__name__}: {reason}"
            report.faults[i] = Failure(i, "episode", summary, "", reason)
            if not isinstance(reason, (ClosedError, EpisodeCut)):  # these were dropped on purpose
                self._fault_log.note([i], [i], "episode", summary, "lose", quiet=False)

    def _shut_down(self, timeout: float) -> None:
        self._exchange.close()
        self._shard.close()


def _itself(slot_env: SlotEnv) -> SlotEnv:
    return slot_env

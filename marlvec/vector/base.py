"""`VectorEnvBase`: sends requests and receives replies, whatever the backend."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from marlvec.env_ids import EnvIds, check_env_ids
from marlvec.envs.adapters.base import warn_of_contract
from marlvec.envs.spec import AutoresetRules, EnvSpec
from marlvec.errors import ArgumentError, BrokenError, EnvFault, Failure, FetchTimeout
from marlvec.serialization.saved import ProcessBound
from marlvec.vector.buffers import BufferReuse, Buffers, EnvSelection
from marlvec.vector.calls import (
    CONTROL_CALLS,
    PUBLIC_CALLS,
    CallEvent,
    CallKind,
    CallPhase,
    CallState,
    Command,
    is_interrupt,
)
from marlvec.vector.checks import ActionWriter, ObservationValidator
from marlvec.vector.failures import WorkerLost, out_of_space, raise_failures
from marlvec.vector.infos import ShardReport
from marlvec.vector.recovery import FaultLog, Recovery
from marlvec.vector.settings import LONGEST_WAIT, RestartBudget, Settings
from marlvec.vector.vector_step import VectorStep

ALL_ROWS = slice(None)


class VectorEnvBase(ProcessBound, ABC):
    """Sends requests to shards and hands out their replies; every reply belongs to one numbered request."""

    backend: str = "?"
    backend_reason: str = ""
    shared_generators: frozenset[str] = frozenset()
    lockstep: bool = True
    spec: EnvSpec
    grouped: bool
    _instead = "call make() in each process, and send get_state() where envs must continue"
    _works_in_forks = False  # whether a forked process has all that the envs need
    _place_name: str = "?"  # where envs run, for error messages
    _always_checks_actions = False  # with a wrong action, compiled code could read or write outside its arrays

    def __init__(self, num_envs: int, settings: Settings) -> None:
        if num_envs < 1:
            raise ArgumentError(f"num_envs must be at least 1, got {num_envs}")
        self.num_envs = num_envs
        self.autoreset = AutoresetRules.of(settings.autoreset_mode)
        self.autoreset_mode: str = self.autoreset.mode.value
        self.done_on = settings.done_on
        self.copy = bool(settings.copy)
        self.on_fault = settings.on_fault
        self.brings_state = bool(settings.state)
        self._settings = settings
        self._copier = BufferReuse()  # copies arrays of all envs' rows
        self._call_state = CallState(num_envs)
        self._everyone = np.arange(num_envs)
        self._everyone.flags.writeable = False
        self._budget = RestartBudget(settings.limit)
        self._fault_log = FaultLog()
        self._report: ShardReport | None = None  # of replies that have arrived but were not returned yet
        self._replies: list[tuple[NDArray[np.int64], ShardReport | None]] = []  # replies that have just been received
        self._warned: set[str] = set()  # warnings of workers' envs that were given already
        self.drive_count = 0
        self._is_sending = False  # a request is being sent: an interrupt would leave it incomplete
        self._is_reading = False  # a reply is being read: an interrupt would lose it

    def _bind(self, spec: EnvSpec, buffers: Buffers) -> None:
        """Set up everything that depends on the spec of the envs."""
        self.spec = spec
        self.grouped = bool(self._settings.grouped) or len(spec.groups) > 1
        self._buffers = buffers
        self._copy_all_rows: Callable[[NDArray[Any]], NDArray[Any]] = self._copier.copier_of(buffers.arrays())
        self._action_writer = ActionWriter(
            spec, grouped=self.grouped, validate=self._settings.validate, always=self._always_checks_actions
        )
        self._validator = ObservationValidator(spec, self._settings.validate)
        self._recovery = Recovery(
            self.num_envs,
            len(spec.agents),
            mode=self._settings.on_fault,
            autoreset=self.autoreset,
            budget=self._budget,
            log=self._fault_log,
        )

    # --- what a backend provides ---

    @abstractmethod
    def _send_request(self, operation: str, env_ids: NDArray[np.int64], arguments: tuple[Sequence[Any], ...]) -> None:
        """Send a request to these idle envs, without waiting. Sets ``_is_sending`` once the request cannot be undone.

        `operation` is a key of the shards' operations; ``"send"`` is a step whose rows are received as they become
        ready. `arguments` have one entry per env: seeds and options of a reset, commands, or arguments of
        `Shard.restart`. Raises `WorkerLost` if a worker died and its envs must not be restarted.
        """

    @abstractmethod
    def _receive(self, timeout: float | None, everyone: bool) -> bool:
        """Put replies into ``_replies``, the ids of ready envs and their report; False if time ran out.

        `timeout` None: the backend decides, at most 0.1 s per wait. `everyone`: the caller needs all envs in flight, so
        that the order of arrival does not matter. Raises `WorkerLost`.
        """

    def _restart_worker(self, w: int) -> None:
        """Start worker ``w`` again after it died, without waiting. Requests to it may have been made before."""
        raise NotImplementedError  # only where workers are processes

    def _forget_requests(self) -> bool:
        """Wait until no request is in flight, and drop the replies. False if the backend cannot do that."""
        return False

    @abstractmethod
    def _shut_down(self, timeout: float) -> None:
        """Release all resources in bounded time, in any state."""

    # --- requests ---

    def _request(self, call: str, ids: NDArray[np.int64], arguments: tuple[Sequence[Any], ...] = ()) -> None:
        """Send the requests of a public call. If sending fails, the call is undone here, and only here."""
        public = PUBLIC_CALLS[call]
        if not len(ids) and public.kind is CallKind.STREAM:
            return  # no env to wait for
        calls, recovery, operation = self._call_state, self._recovery, public.operation
        before, driven = calls.outstanding, self.drive_count
        self._is_sending = False
        try:
            if public.kind is not CallKind.CONTROL:
                self.drive_count = driven + 1
            calls.begin(call, ids)
            self._last_operation = "reset" if operation == "reset" else "step"  # for messages
            if not len(ids):
                return
            if operation == "reset":
                calls.lose_episodes(ids)  # until the new ones have begun
                arguments = recovery.record_reset(ids, *arguments)
            if recovery.has_exceptions:
                requests, ready = recovery.divert((operation, ids, arguments), self._buffers)
                for request in requests:
                    self._send_request(*request)
                self._take_in(ready, None)
            else:
                self._send_request(operation, ids, arguments)
            self._is_sending = False
        except WorkerLost as loss:
            self._break(loss)
        except BaseException:  # something cannot be pickled, or Ctrl-C
            if self._is_sending:
                self._tear(f"{call}() was interrupted while it was being sent")
            else:
                calls.undo_begin(ids, before)
                self.drive_count = driven
            raise

    # --- control calls: requests that cost no episode ---

    def _chosen_ids(self, call: str, indices: EnvIds | None) -> NDArray[np.int64]:
        self._call_state.check_idle(call)
        return self._everyone if indices is None else check_env_ids(indices, self.num_envs)

    def _control(self, command: Command, indices: EnvIds | None) -> None:
        ids = self._chosen_ids(command.call, indices)
        self._ask(command.call, ids, [command] * len(ids))

    def _answers_to(self, command: Command, indices: EnvIds | None) -> tuple[Any, ...]:
        self._control(command, indices)
        return self._fetch_answers(command.call)

    def _ask(self, call: str, ids: NDArray[np.int64], *arguments: Sequence[Any]) -> None:
        self._asked = ids
        self._request(call, ids, arguments)

    def _fetch_report(self, call: str, timeout: float | None = None) -> ShardReport:
        self._call_state.check_pending(call)
        self._wait(self._call_state.outstanding, timeout, f"{call}_fetch")
        return self._take_results()[1]

    def _fetch_answers(self, call: str, timeout: float | None = None) -> tuple[Any, ...]:
        report = self._fetch_report(call, timeout)
        raise_failures(report.failures, self._place_name, report.answers)
        masked = self._recovery.masked
        return tuple(None if masked[i] else report.answers[i] for i in self._asked.tolist())

    # --- replies ---

    def _fetch(self, call: str, timeout: float | None = None) -> VectorStep:
        """Return the rows of the envs that the pending ``call`` requested; all rows after a partial reset."""
        self._wait(self._call_state.outstanding, timeout, f"{call}_fetch")
        return self._deliver(everything=True)

    def _wait(self, wanted: int, timeout: float | None, call: str) -> None:
        """Process replies until ``wanted`` envs are ready."""
        calls, recovery = self._call_state, self._recovery
        deadline = None if timeout is None else time.monotonic() + timeout
        while calls.arrived < wanted:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            pause = recovery.due_in() if recovery.due_heap else None
            longest = left if pause is None else pause if left is None else min(left, pause)
            if longest is not None and longest > LONGEST_WAIT:
                longest = LONGEST_WAIT  # another thread may close this vectorizer meanwhile
            try:
                if pause == 0.0:
                    self._is_reading = True  # due restarts are removed from the heap before they are requested
                    self._restart_due()
                    self._is_reading = False
                    continue
                try:
                    in_time = bool(self._replies) or self._receive(longest, wanted == calls.outstanding)
                    self._is_reading = True
                    for ids, report in self._replies:
                        self._take_in(ids, report)
                    self._replies.clear()
                except WorkerLost as loss:
                    self._handle_lost_worker(loss)
                    in_time = True  # envs that became ready are counted next
                self._is_reading = False
            except BaseException as error:
                if self._is_reading and is_interrupt(error):
                    self._tear(f"{call}() was interrupted in the middle of a reply")
                raise
            if calls.closed:
                break
            if in_time or longest != left or left is None:
                continue
            raise FetchTimeout(
                f"{call}(): envs {calls.in_flight.tolist()} did not reply within {timeout} s; "
                f"their requests stay pending, fetch again"
            )
        if calls.closed:
            calls.check_open()

    def _take_in(self, ids: NDArray[np.int64], report: ShardReport | None) -> None:
        recovery = self._recovery
        if (report is not None or recovery.is_active) and self._call_state.pending not in CONTROL_CALLS:
            if report is not None and report.failures:
                ids = recovery.handle_failures(ids, report, self._buffers)
            if recovery.is_active:
                report = recovery.complete_rows(ids, report, self._buffers)
        self._call_state.arrive(ids)
        if self._report is None:
            self._report = report
        elif report is not None:
            self._report.update(report)

    def _take_results(self) -> tuple[NDArray[np.int64], ShardReport]:
        """Return all envs that have arrived, and their report."""
        try:
            report, self._report = self._report, None
            return self._call_state.hand_out(), ShardReport() if report is None else report
        except BaseException:
            self._tear(f"{self._call_state.pending}() was interrupted while its results were handed out")
            raise

    def _deliver(self, *, everything: bool = False) -> VectorStep:
        """Return rows of envs that were reset or stepped, or raise their failures."""
        self.drive_count += 1
        arrived, report = self._take_results()
        calls, buffers = self._call_state, self._buffers
        if not calls.all_run:
            calls.have_episodes(arrived)
        if self.autoreset.caller_begins and np.count_nonzero(buffers.done):
            calls.lose_episodes(arrived[buffers.done[arrived] & ~self._recovery.masked[arrived]])
        self._record_delivered(arrived)
        if report.warnings:
            self._warn(report.warnings)
        everyone = everything or len(arrived) == self.num_envs
        result = self._make_step(self._everyone if everyone else arrived, report)
        schedule = self._validator.schedule
        schedule.countdown -= 1
        if not schedule.countdown:
            schedule.restart()
            if wrong := self._validator.check(result, arrived):
                report.failures += [out_of_space(env_id, self._last_operation, text) for env_id, text in wrong]
                result = self._make_step(result.env_ids, report)
        if report.failures:
            none_left = bool(self._recovery.masked.all())
            try:
                raise_failures(report.failures, self._place_name, result, can_go_on=not none_left)
            except EnvFault as error:
                if none_left:
                    calls.on(CallEvent.BREAK, error)
                raise
        return result

    def _warn(self, texts: Iterable[str]) -> None:
        new = [text for text in dict.fromkeys(texts) if text not in self._warned]
        self._warned.update(new)
        for text in new:
            warn_of_contract(text)

    def _record_delivered(self, ids: NDArray[np.int64]) -> None:
        """Record that the caller has received these envs' rows."""
        recovery, buffers = self._recovery, self._buffers
        if len(ids) == self.num_envs:
            recovery.known_flags[...] = buffers.flags
        else:
            recovery.known_flags[ids] = buffers.flags[ids]
        if recovery.resets:
            recovery.forget_resets(ids)

    def _make_step(self, ids: NDArray[np.int64], report: ShardReport) -> VectorStep:
        """Return rows of those ``ids`` that did not fail; mark failed envs as having no episode."""
        if failed := [failure.env_id for failure in report.failures]:
            ids = ids[~np.isin(ids, failed)]
            self._call_state.lose_episodes(failed)
        return VectorStep(
            self._buffers,
            ids,
            ALL_ROWS if ids is self._everyone else self._selection(ids),
            report,
            grouped=self.grouped,
            copy=self.copy,
            state=self._settings.state,
            copier=self._copy_all_rows,
        )

    def _selection(self, ids: NDArray[np.int64]) -> EnvSelection:
        """Return a slice, which copies nothing, if ``ids`` are all envs in order; else the ids."""
        if ids is self._everyone or (len(ids) == self.num_envs and np.array_equal(ids, self._everyone)):
            return ALL_ROWS
        return ids

    # --- failures ---

    def _restart_due(self) -> None:
        for kind, index in self._recovery.due():
            try:
                if kind == "env":
                    self._send_request(*self._recovery.rebuild(index))
                else:
                    self._restart_worker(index)
            except WorkerLost as loss:
                self._handle_lost_worker(loss)

    def _handle_lost_worker(self, loss: WorkerLost) -> None:
        calls = self._call_state
        control = calls.pending in CONTROL_CALLS
        # worker_lost returns None instead of raising: a traceback through it would keep the buffers alive.
        done = self._recovery.worker_lost(loss, calls.pending, self._buffers, control=control)
        if done is None:
            self._break(loss)
        requests, ready = done
        for request in requests:
            self._send_request(*request)
        report: ShardReport | None = None
        if control and len(ready):
            failures = [Failure(i, calls.pending or "", str(loss.error), "", loss.error) for i in ready.tolist()]
            report = ShardReport(failures=failures)
        self._take_in(ready, report)

    def _break(self, loss: WorkerLost) -> NoReturn:
        """Mark this vectorizer as broken and raise; the error carries the rows that have arrived."""
        calls = self._call_state
        calls.on(CallEvent.BREAK, loss.error)
        if calls.pending not in CONTROL_CALLS:
            loss.error.result = self._make_step(*self._take_results())
        raise loss.error from None

    def _tear(self, how: str) -> None:
        """Note that Ctrl-C left it unknown which requests were sent or answered."""
        self.drive_count += 1
        self._call_state.on(CallEvent.TEAR, how)

    def _drop_interrupted(self) -> None:
        """After an interrupted call: wait for its replies and drop them."""
        calls = self._call_state
        if calls.phase is CallPhase.TORN:
            if not self._forget_requests():
                calls.on(CallEvent.BREAK, BrokenError(str(calls.reason)))
                calls.check_open()
            self._is_sending = self._is_reading = False
            self._replies.clear()
            self._report = None
            self._recovery.forget()
            calls.forget()
            return
        is_control = calls.pending in CONTROL_CALLS
        self._wait(calls.outstanding, None, calls.pending or "?")
        if not is_control:
            calls.lose_episodes(calls.asked)  # before the list of requested envs is cleared: Ctrl-C may come here, too
        arrived, _ = self._take_results()
        if not is_control:
            self._record_delivered(arrived)

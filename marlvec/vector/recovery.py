"""`Recovery`: restarts or masks envs that raised, hung or died, according to ``on_fault``.

Random generators that are class attributes of an env are kept per env: all envs of one process draw from them.
"""

from __future__ import annotations

import dis
import heapq
import logging
import random
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from types import FunctionType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.envs.adapters.base import warn_of_contract
from marlvec.envs.spec import AutoresetRules, Info
from marlvec.errors import ArgumentError, Failure, RestartQuietly
from marlvec.vector.buffers import Buffers, split_flags
from marlvec.vector.failures import WorkerExit, WorkerLost
from marlvec.vector.infos import ShardReport
from marlvec.vector.settings import NOT_RESTARTABLE, RestartBudget, restart_seed

_LOG = logging.getLogger("marlvec")
_KEPT = 1000  # faults that are remembered
_IN_WORDS = {"restart": "built anew after a fault", "mask": "masked after a fault", "lose": "without its episode"}


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that was handled by a restart or a mask.

    Attributes:
        env_ids: The envs that caused it; all envs of a worker if the cause is unknown.
        lost_env_ids: The envs that lost their episode.
        operation: The operation that failed, e.g. ``"step"``.
        summary: The fault in one line.
        action: ``"restart"`` or ``"mask"``; ``"lose"`` if only the episode was lost and no env is restarted.
        quiet: Whether the env raised `RestartQuietly`.
        time: When it was found, by `time.monotonic`.
    """

    env_ids: tuple[int, ...]
    lost_env_ids: tuple[int, ...]
    operation: str
    summary: str
    action: str
    quiet: bool
    time: float


class FaultLog:
    """The last faults of one vectorizer, oldest first; each is also logged, once, as a warning of ``marlvec``."""

    def __init__(self) -> None:
        self.faults: deque[Fault] = deque(maxlen=_KEPT)

    def add(
        self, culprits: Sequence[int], lost: Sequence[int], operation: str, summary: str, action: str, *, quiet: bool
    ) -> None:
        """Add a fault; the arguments are those of `Fault`. Quiet faults are not logged."""
        self.faults.append(Fault(tuple(culprits), tuple(lost), operation, summary, action, quiet, time.monotonic()))
        if not quiet:
            who = f"env {lost[0]} is" if len(lost) == 1 else f"envs {list(lost)} are"
            _LOG.warning("%s %s: %s", who, _IN_WORDS[action], summary)


_ROW_OPERATIONS = ("reset", "step", "send")  # operations that return rows


class RowKind(Enum):
    """Meaning of the next row of an env that is restarted or masked."""

    FAULT = "its episode was lost"
    AUTORESET = "the next episode, which was due in next-step mode: no episode was lost"
    RESET = "the episode that a reset requested: no episode was lost"
    END = "the complete end of an episode; the next one could not begin"
    MASKED = "the env has no agents any more"


IntArray = NDArray[np.int64]
Request = tuple[str, IntArray, tuple[Sequence[Any], ...]]


class Recovery:
    """Fault state of each env: alive, lost, masked, restarts left.

    A failed env is rebuilt in its worker; if the worker died, a new worker is started with all its envs. Either way the
    env is *revived*: it stays in flight until the new incarnation has replied, and only then does the caller see it. An
    env that was idle when its worker died is revived by the next request for it.

    Attributes:
        incarnations: (N,) int64, number of restarts of each env.
        known_flags: (N, 5A + 3) bool, flags of the last returned rows, in the layout of `Buffers.flags`.
        known_alive: (N, A) bool, view of it: agents that are alive in the rows that the caller has seen.
        known_over: (N,) bool, view of it: envs whose episode is over in those rows.
        resets: Options of the resets in flight, by env.
        has_exceptions: Whether some envs are lost or masked, so that requests need `divert`.
        is_active: Whether replies need `complete_rows`.
    """

    def __init__(
        self,
        num_envs: int,
        agent_num: int,
        *,
        mode: str,
        autoreset: AutoresetRules,
        budget: RestartBudget,
        log: FaultLog,
    ) -> None:
        self.mode = mode
        self.incarnations = np.zeros(num_envs, np.int64)
        self.masked = np.zeros(num_envs, np.bool_)
        self.known_flags = np.zeros((num_envs, 5 * agent_num + 3), np.bool_)
        _, _, _, self.known_over, _, self.known_alive, _, _ = split_flags(self.known_flags, agent_num)
        self.resets: dict[int, dict[str, Any] | None] = {}
        self.due_heap: list[tuple[float, int, str, int]] = []
        self.has_exceptions = False
        self.is_active = False
        self._log = log
        self._budget = budget
        self._autoreset = autoreset
        self._seeds: list[int | None] = [None] * num_envs
        self._since = [0] * num_envs  # incarnations since that seed was given
        self._not_begun: set[int] = set()  # new incarnations that have not begun an episode
        self._lost_idle: set[int] = set()  # idle envs that lost their episode, which the caller has not seen yet
        self._unbuilt: set[int] = set()  # envs in _lost_idle that must also be rebuilt
        self._masked_unsaid: set[int] = set()  # masked envs whose row still has the end of their episode
        self._revived: dict[int, RowKind] = {}  # envs in flight → meaning of their next rows
        self._causes: dict[int, Failure] = {}  # faults that the caller will see
        self._quietly: dict[int, int] = {}  # quiet restarts since an env's last complete step
        self._held_final_infos: dict[int, Info] = {}  # final infos of envs that are being revived
        self._order = 0

    # --- requests

    def record_reset(
        self, ids: IntArray, seeds: Sequence[int | None], options: Sequence[dict[str, Any] | None]
    ) -> tuple[Sequence[int | None], Sequence[dict[str, Any] | None]]:
        """Record an explicit reset. The first one of a new incarnation gets a seed derived from the env's last one."""
        used = list(seeds)
        for k, i in enumerate(ids.tolist()):
            if used[k] is not None:
                self._seeds[i], self._since[i] = used[k], 0
            elif i in self._not_begun:
                used[k] = self._seed(i)
            self.resets[i] = options[k]
            if not self.masked[i] and i not in self._unbuilt:
                self._causes.pop(i, None)
                self._lost_idle.discard(i)
        if self._not_begun:
            self._not_begun.difference_update(ids.tolist())
        self._update_flags()
        return used, options

    def divert(self, request: Request, buffers: Buffers) -> tuple[list[Request], IntArray]:
        """Return the requests to send instead if some envs are lost or masked, and envs whose rows are ready."""
        operation, ids, arguments = request
        self.is_active = True  # first, so that replies are completed even if this is interrupted
        out = self.masked[ids]
        ready = ids[out]
        gone = np.zeros(len(ids), np.bool_)
        if operation in _ROW_OPERATIONS:
            gone = np.array([i in self._lost_idle for i in ids.tolist()], np.bool_) & ~out
            for i in self._masked_unsaid.intersection(ready.tolist()):
                buffers.events[i] = False
                buffers.reward[i] = 0
                self._masked_unsaid.discard(i)
            for i in self._lost_idle.intersection(ready.tolist()):
                self._lost_idle.discard(i)
                self._write_masked(i, buffers)
        requests: list[Request] = []
        plain = ~(out | gone)
        if plain.any():
            positions = np.flatnonzero(plain).tolist()
            chosen = tuple([argument[k] for k in positions] for argument in arguments)
            requests.append((operation, ids[plain], chosen))
        if gone.any():
            for i in ids[gone].tolist():
                self._lost_idle.discard(i)
                self._revived[i] = self._kind(i)
            requests.append(self._revival(ids[gone], build=False))
        self._update_flags()
        return requests, ready

    def due_in(self) -> float | None:
        """Return the seconds until the next restart is due; None if none is scheduled."""
        return max(0.0, self.due_heap[0][0] - time.monotonic()) if self.due_heap else None

    def due(self) -> list[tuple[str, int]]:
        """Return what is due now: ``("worker", w)``: start the worker; ``("env", i)``: send `rebuild`'s request."""
        found = []
        now = time.monotonic()
        while self.due_heap and self.due_heap[0][0] <= now:
            _, _, kind, index = heapq.heappop(self.due_heap)
            found.append((kind, index))
        return found

    def rebuild(self, i: int) -> Request:
        """Return the request that rebuilds an env in its worker."""
        return self._revival(np.array([i]), build=True)

    def _revival(self, ids: IntArray, *, build: bool) -> Request:
        seeds: list[int | None] = []
        begin: list[bool] = []
        keep: list[bool] = []
        options: list[dict[str, Any] | None] = []
        for i in ids.tolist():
            seeds.append(self._seed(i))
            begin.append(self._autoreset.begins_at_once or self._revived[i] is not RowKind.FAULT)
            options.append(self.resets.get(i))
            keep.append(self._revived[i] is RowKind.END)
            if begin[-1] or self._autoreset.begins_on_next_step:
                self._not_begun.discard(i)
        anew = [build or i in self._unbuilt for i in ids.tolist()]
        self._unbuilt.difference_update(ids.tolist())
        return "restart", ids, (seeds, options, anew, begin, keep)

    def _kind(self, i: int) -> RowKind:
        """Return the meaning of the next row of a revived env."""
        if i in self.resets:
            return RowKind.RESET
        was_due = self._autoreset.begins_on_next_step and self.known_over[i]
        return RowKind.AUTORESET if was_due else RowKind.FAULT

    def _seed(self, i: int) -> int | None:
        seed = self._seeds[i]
        return restart_seed(seed, self._since[i]) if seed is not None and self._since[i] else seed

    # --- replies

    def handle_failures(self, ids: IntArray, report: ShardReport, buffers: Buffers) -> IntArray:
        """Restart or mask failed envs, and drop their failures from the report; return the ids that are ready."""
        self.is_active = True  # first, so that replies are completed even if this is interrupted
        kept: list[Failure] = []
        waiting: list[int] = []
        for failure in report.failures:
            i = failure.env_id
            # Its last episode had ended in the same step, and the caller has not seen the end yet.
            is_whole = (
                self._autoreset.begins_at_once
                and failure.operation == "reset"
                and self._kind(i) is RowKind.FAULT
                and buffers.done[i]
            )
            outcome, quiet = self._outcome(failure)
            if outcome == "restart":
                kind = self._revived.get(i, RowKind.END if is_whole else self._kind(i))
                kept_failure = self._restart(failure, kind, quiet=quiet)
                if kept_failure is None:
                    waiting.append(i)
                    report.infos.pop(i, None)
                    if i in report.final_infos:
                        self._held_final_infos[i] = report.final_infos.pop(i)
                else:
                    kept.append(kept_failure)
            elif outcome == "mask":
                self._mask([i], [i], failure, failure.operation, failure.summary)
                self._write_masked(i, buffers, is_whole=bool(is_whole))
                kept += [_with_history(failure, "No env is left.")] if self.masked.all() else []
            else:
                kept.append(failure)
        report.failures = kept
        self._update_flags()
        return ids[~np.isin(ids, waiting)] if waiting else ids

    def _outcome(self, failure: Failure) -> tuple[str, bool]:
        """Return how to handle a failed env, and whether it is a quiet restart within the limit."""
        if isinstance(failure.exception, NOT_RESTARTABLE):
            return "raise", False
        if not isinstance(failure.exception, RestartQuietly):
            return self.mode, False
        i = failure.env_id
        self._quietly[i] = self._quietly.get(i, 0) + 1
        if self._quietly[i] <= self._budget.limit.count:
            return "restart", True
        del self._quietly[i]
        return self.mode, False

    def _restart(self, failure: Failure, kind: RowKind, *, quiet: bool) -> Failure | None:
        """Schedule the restart of an env. Returns the failure to raise if the limit is reached, else None."""
        i = failure.env_id
        pause = 0.0 if quiet else self._budget.try_restart(("env", i), failure.summary)
        if pause is None:
            for table in (self._quietly, self._revived, self._causes):
                table.pop(i, None)
            self._not_begun.add(i)
            return _with_history(failure, self._budget.history(("env", i)))
        self._log.add([i], [i], failure.operation, failure.summary, "restart", quiet=quiet)
        self._count_restarts([i])
        self._revived[i] = kind
        self._causes.setdefault(i, failure)
        self._schedule(pause, "env", i)
        return None

    def worker_lost(
        self, loss: WorkerLost, call: str | None, buffers: Buffers, *, control: bool
    ) -> tuple[list[Request], IntArray] | None:
        """Restart or mask the envs of a dead worker; None if the loss must be raised (``"raise"``, too many restarts).

        Else requests for the new worker, and the envs that are ready at once. `control`: the pending call is a control
        call, whose answers cannot be recovered.
        """
        if self.mode == "raise":
            return None
        self.is_active = True  # first, so that replies are completed even if this is interrupted
        lost = loss.env_ids[~self.masked[loss.env_ids]].tolist()  # masked envs have no episode to lose
        culprits = list(loss.culprits) or loss.env_ids.tolist()
        summary = str(loss.error).partition("\n")[0]
        operation = call or "between calls"
        cause = Failure(culprits[0], operation, summary, "", loss.error)
        asked = loss.in_flight[:0] if control else loss.in_flight
        unaware = sorted(set(lost) - set(asked.tolist()))  # the next request for them returns the loss
        if self.mode == "mask":
            self._mask(culprits, lost, cause, operation, summary)
            for i in asked.tolist():
                self._write_masked(i, buffers)
            self._lost_idle.update(unaware)
            self._update_flags()
            return None if self.masked.all() else ([], loss.in_flight)
        pause = self._budget.try_restart(("worker", loss.worker), loss.reason)
        if pause is None:
            loss.error.args = (f"{loss.error} {self._budget.history(('worker', loss.worker))}",)
            return None
        self._log.add(culprits, lost, operation, summary, "restart", quiet=False)
        self._count_restarts(lost)
        self._lost_idle.update(unaware)
        for i in asked.tolist():
            kind = self._revived.get(i, self._kind(i))
            self._revived[i] = RowKind.FAULT if kind is RowKind.END else kind  # its row may be half written
        for i in lost:
            self._causes.setdefault(i, cause)
            self._held_final_infos.pop(i, None)
        self.due_heap = [entry for entry in self.due_heap if entry[2] == "worker" or entry[3] not in lost]
        heapq.heapify(self.due_heap)
        self._schedule(pause, "worker", loss.worker)
        self._update_flags()
        if control:
            return [], loss.in_flight
        return [self._revival(asked, build=False)] if len(asked) else [], asked[:0]

    def complete_rows(self, ids: IntArray, report: ShardReport | None, buffers: Buffers) -> ShardReport | None:
        """Complete the rows of envs that were revived or masked, and add their faults to the report."""
        report = report or ShardReport()
        failed = {failure.env_id for failure in report.failures}
        for i in ids.tolist():
            kind = self._revived.pop(i, RowKind.MASKED if self.masked[i] else None)
            if kind is None:
                if i not in self.resets and not buffers.reset_mask[i]:  # it has completed a step
                    self._quietly.pop(i, None)
                continue
            cause = self._causes.pop(i, None)
            if i in self._held_final_infos:
                report.final_infos[i] = self._held_final_infos.pop(i)
            if i in failed:
                continue
            if kind is RowKind.AUTORESET:
                buffers.reset_mask[i] = True
            elif kind is RowKind.FAULT:
                self._write_fault(i, buffers)
            if cause is not None and kind in (RowKind.FAULT, RowKind.MASKED):
                report.faults[i] = cause
        self._update_flags()
        return report

    def forget_resets(self, ids: IntArray) -> None:
        """Note that the rows of these envs were returned, so their resets are no longer in flight."""
        for i in ids.tolist():
            self.resets.pop(i, None)

    def forget(self) -> None:
        """Drop all requests and episodes; envs that had to be rebuilt still are."""
        self._unbuilt.update(self._revived)
        self._lost_idle.update(self._revived)
        for table in (self._revived, self.resets, self._causes, self._held_final_infos):
            table.clear()
        self.due_heap.clear()
        self._update_flags()

    def record_survived(self, survived: Iterable[Failure | WorkerExit]) -> None:
        """Log envs that were built at a second or later attempt, with what ended the first."""
        for end in survived:
            env_ids, summary = ((end.env_id,), end.summary) if isinstance(end, Failure) else (end.env_ids, str(end))
            self._log.add(env_ids, env_ids, "__init__", summary, "restart", quiet=False)
            self.incarnations[list(env_ids)] += 1

    # --- saved states

    def unseen_faults(self, ids: IntArray) -> list[int]:
        """Return those of these envs that lost their episode to a fault that the caller has not seen yet."""
        lost = self._lost_idle | self._unbuilt
        return [i for i in ids.tolist() if i in lost] if lost else []

    def get_state(self, ids: IntArray) -> dict[str, Any]:
        """Return the state of these envs between two calls, name → (n, …): seeds, masks, flags as last returned."""
        each = ids.tolist()
        seeds = [self._seeds[i] for i in each]
        return {
            "seeds": [None if seed is None else int(seed) for seed in seeds],
            "since": np.array(self._since, np.int64)[ids],
            "not_begun": np.isin(ids, list(self._not_begun)),
            "quietly": np.array([self._quietly.get(i, 0) for i in each] if self._quietly else [0] * len(ids), np.int64),
            "masked": self.masked[ids],
            "masked_unsaid": np.isin(ids, list(self._masked_unsaid)),
            "known_alive": self.known_alive[ids],
            "known_over": self.known_over[ids],
        }

    def check_masks(self, ids: IntArray, masked: NDArray[np.bool_]) -> None:
        """Raise `ArgumentError` unless these envs can take the masks of a state."""
        if len(wrong := ids[self.masked[ids] & ~masked]):
            raise ArgumentError(f"set_state(): envs {wrong.tolist()} are masked for good; leave them out of env_ids")
        new = ids[masked & ~self.masked[ids]]
        if len(new) and (self.mode != "mask" or len(new) + np.count_nonzero(self.masked) == len(self.masked)):
            raise ArgumentError(
                f"set_state(): in this state envs {new.tolist()} are masked: that requires on_fault='mask', and at "
                f"least one env that is not masked"
            )

    def set_state(self, ids: IntArray, state: Mapping[str, Any]) -> None:
        """Restore these envs from a state from `get_state`; the log and the budget do not change."""
        each = ids.tolist()
        for i, seed, since in zip(each, state["seeds"], state["since"].tolist(), strict=True):
            self._seeds[i], self._since[i] = seed, since
        for table, name in ((self._not_begun, "not_begun"), (self._masked_unsaid, "masked_unsaid")):
            table.difference_update(each)
            table.update(ids[state[name]].tolist())
        for i in self._quietly.keys() & set(each):
            del self._quietly[i]
        for k in np.flatnonzero(state["quietly"]).tolist():
            self._quietly[each[k]] = int(state["quietly"][k])
        self.masked[ids] = state["masked"]
        self.known_alive[ids] = state["known_alive"]
        self.known_over[ids] = state["known_over"]
        self._update_flags()

    # --- bookkeeping

    def _count_restarts(self, ids: Iterable[int]) -> None:
        for i in ids:
            self.incarnations[i] += 1
            self._since[i] += 1
            self._not_begun.add(i)

    def _mask(self, culprits: list[int], lost: list[int], cause: Failure, operation: str, summary: str) -> None:
        self._log.add(culprits, lost, operation, summary, "mask", quiet=False)
        self.masked[lost] = True
        for i in lost:
            self._causes.setdefault(i, cause)  # the first fault is the one that cost the episode
            self._revived.pop(i, None)
        self._update_flags()

    def _write_fault(self, i: int, buffers: Buffers) -> None:
        """Write into a row that its episode was lost; its observation already belongs to the next episode."""
        buffers.reward[i] = 0
        buffers.events[i] = False
        buffers.truncated[i] = self.known_alive[i]
        buffers.done[i] = True

    def _write_masked(self, i: int, buffers: Buffers, *, is_whole: bool = False) -> None:
        """Clear a row for good, and write once that the episode was lost or, if ``is_whole``, has ended."""
        buffers.clear_obs(i)
        buffers.clear_masks(i)
        buffers.alive[i] = False
        buffers.acting[i] = False
        if buffers.state is not None:
            buffers.state[i] = 0
        self._masked_unsaid.add(i)
        if is_whole:
            self._causes.pop(i, None)
            return
        buffers.clear_final_obs(i)
        self._write_fault(i, buffers)
        if i in self.resets or (self.known_over[i] and not self._autoreset.begins_at_once):  # no episode was lost
            self.resets.pop(i, None)
            buffers.events[i] = False
            self._causes.pop(i, None)

    def _schedule(self, pause: float, kind: str, index: int) -> None:
        self._order += 1
        heapq.heappush(self.due_heap, (time.monotonic() + pause, self._order, kind, index))

    def _update_flags(self) -> None:
        any_masked = bool(self.masked.any())
        self.has_exceptions = bool(self._lost_idle or any_masked)
        self.is_active = bool(self._revived or self._quietly or any_masked)


def _with_history(failure: Failure, history: str) -> Failure:
    return replace(failure, summary=f"{failure.summary.rstrip('.')}. {history}")


GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)


def warn_of_shared(names: Collection[str], num_envs: int) -> None:
    """Warn, once, that envs share random generators."""
    if not names:
        return
    first = min(names)
    others = f" (and {', '.join(sorted(names)[1:])})" if len(names) > 1 else ""
    name = first.rpartition(".")[2]
    warn_of_contract(
        f"{first}{others} is a random generator in the class of the envs, expected one for each env: envs of one "
        f"process share it, so that each draw of one env changes the draws of the others, and a seed gives other "
        f"episodes than in a single env. Set self.{name} = np.random.default_rng(seed) in reset(seed=…). Until then, "
        f"if reset(seed=…) seeds it, give each env its own process: make(…, num_envs={num_envs}, "
        f'backend="async", num_workers={num_envs}). marlvec.testing.check_env() lists what else is shared'
    )


def is_drawn_by_all(kind: type, name: str) -> bool:
    """Return whether all instances draw from a class's generator: no method replaces it on self, and it has a state."""
    if isinstance(getattr(kind, name), random.SystemRandom):
        return False
    functions = [value for base in kind.__mro__ for value in vars(base).values() if isinstance(value, FunctionType)]
    return not any(_sets(function, name) for function in functions if name in function.__code__.co_names)


def _sets(function: FunctionType, name: str) -> bool:
    code = function.__code__
    if not code.co_argcount:
        return False
    owner = code.co_varnames[0]
    before: dis.Instruction | None = None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_ATTR" and instruction.argval == name and before is not None:
            # Some Pythons load two names at once; the object that is written to is the last.
            loaded = before.argval if isinstance(before.argval, tuple) else (before.argval,)
            if before.opname.startswith("LOAD_FAST") and loaded[-1] == owner:
                return True
        before = instruction
    return False

"""`AsyncVectorEnv`: envs in worker processes that write into shared memory.

`choose_backend` answers ``make(backend="auto")``: sync or async, by the time that a step takes.
"""

from __future__ import annotations

import math
import pickle
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from marlvec.envs.recipes import EnvRecipe
from marlvec.errors import ArgumentError
from marlvec.vector.calls import CONTROL_CALLS, CallEvent
from marlvec.vector.cores import HAS_WORKER_PROCESSES, Partition, refuse_worker_processes, usable_cores
from marlvec.vector.failures import (
    WorkerLost,
    capture,
    dump_each,
    error_of,
    pickle_or_explain,
    raise_failures,
    summary_of,
)
from marlvec.vector.infos import ShardReport
from marlvec.vector.settings import LONGEST_WAIT, Settings, SettingsArguments
from marlvec.vector.vector_env import VectorEnv
from marlvec.vector.workers import channel as ch
from marlvec.vector.workers.pool import WorkerPool, WorkerState, garbled_reason, start_method
from marlvec.vector.workers.worker import Watchdog, WorkerLink, unpack_report

_NOTHING = pickle.dumps(([], "", [[]]))  # a control call to no envs


class AsyncVectorEnv(VectorEnv):
    """Shards in worker processes, several envs a worker.

    Envs write straight into shared memory; a pipe each way per worker carries 16 bytes per step, and pickles only if
    infos are not empty. No env is built in this process. Workers do not import the caller's main module: no
    ``__main__`` guard is needed, and factories, lambdas and classes defined there are sent by value.

    Args:
        factories: One zero-argument callable per env; pickled with cloudpickle.
        num_workers: Processes; default: one per usable core, at most one per env.
        context: Start method: ``"forkserver"`` (default), ``"spawn"``, ``"fork"``, or a multiprocessing context.
        shared_memory: False puts rows into a temporary file that all processes map, instead; ``"require"`` refuses
            spaces with a leaf that cannot be in shared memory.
        daemon: Time for workers to close their envs when the vectorizer is garbage collected, or the interpreter exits,
            without `close`: True: one second; False: as long as they need.
        step_timeout: Seconds that one env may take for a step or a reset; None: no limit. A worker whose env takes
            longer is killed; this is checked while a call waits.
        worker: A loop for workers to run instead of `marlvec.vector.workers.worker.serve`; see `WorkerLink`.
        settings: ``autoreset_mode``, ``done_on``, ``copy``, ``grouped``, ``validate``, ``state``, ``spaces``,
            ``env_state``, ``on_fault`` and ``max_restarts``, as in `marlvec.make`.

    Raises:
        ArgumentError: This system has no worker processes, or an argument is wrong.
        SerialisationError: A factory cannot be pickled; no process was started.
        EnvRaised: A factory raised; names the env, with its traceback. All processes were ended.
        WorkerDied: A worker died while it built its envs.
        ResourceError: The machine lacks memory, processes or file descriptors; all processes were ended.
        ContractError: A factory returned something that is not an env, or the envs' spaces differ.
        UnsupportedSpaceError: A leaf cannot be in shared memory, and ``"require"`` was given.

    Attributes:
        num_workers: Number of worker processes.
        context: Their start method.
        worker_pids: Their process ids.
        step_timeout: As given.
    """

    backend = "async"
    _place_name = "worker process"

    def __init__(
        self,
        factories: Sequence[Callable[[], Any]],
        *,
        num_workers: int | None = None,
        context: Any = None,
        shared_memory: bool | str = True,
        daemon: bool = True,
        step_timeout: float | None = None,
        worker: Callable[[WorkerLink], None] | None = None,
        **settings: Unpack[SettingsArguments],
    ) -> None:
        if not HAS_WORKER_PROCESSES:
            refuse_worker_processes(f"backend={self.backend!r}")
        chosen = Settings(**settings)
        super().__init__(len(factories), chosen)
        if shared_memory not in (True, False, "require"):
            raise ArgumentError(f"shared_memory must be True, False or 'require', got {shared_memory!r}")
        self.step_timeout = _seconds(step_timeout)
        cores = usable_cores()
        self._partition = Partition(self.num_envs, min(self.num_envs, cores) if num_workers is None else num_workers)
        if -(-self.num_envs // self._partition.num_workers) > ch.MAX_COUNT:
            raise ArgumentError(f"num_workers={num_workers}: a worker can have at most {ch.MAX_COUNT} envs; use more")
        self.num_workers = self._partition.num_workers
        self.context = start_method(context)
        self._worker_pool = WorkerPool(
            self._partition,
            self.context,
            cores,
            factories,
            settings=chosen,
            in_file=not shared_memory,
            loop=None if worker is None else pickle_or_explain(worker, "the worker loop"),
        )
        # Also runs when the vectorizer is garbage collected, and when the interpreter exits.
        self._finalizer = weakref.finalize(self, WorkerPool.shut_down, self._worker_pool, 1.0 if daemon else None)
        try:
            spec, buffers = self._worker_pool.start_all(
                self._budget if chosen.on_fault == "restart" else None,
                require=shared_memory == "require",
                place=self._place_name,
            )
        except BaseException:
            self._call_state.on(CallEvent.CLOSE)
            self._finalizer()
            raise
        if chosen.on_fault != "restart":
            self._worker_pool.forget_plans()
        self._bind(spec, buffers)
        self.shared_generators = self._worker_pool.shared_generators
        self._recovery.record_survived(self._worker_pool.take_survived())
        self._request_number = 1  # number of the last request; 0 is CLOSE's
        self._sends_rows = buffers.has_objects
        self._watchdog = None if self.step_timeout is None else Watchdog(self.step_timeout)
        self._raises_on_fault = chosen.on_fault == "raise"
        self._dead: list[tuple[int, str | None]] = []  # dead workers that were not handled yet, and why they died

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the workers, in order of their envs."""
        return tuple(worker.pid for worker in self._worker_pool.workers)

    # --- requests

    def _send_request(self, operation: str, env_ids: NDArray[np.int64], arguments: tuple[Sequence[Any], ...]) -> None:
        code, partition = ch.OPERATIONS[operation], self._partition
        number = self._request_number = self._request_number % 0xFFFFFFFF + 1
        if not self._sends_rows and (code == ch.STEP or code == ch.SEND):
            parts = partition.full_parts if env_ids is self._everyone else partition.parts_of(env_ids)
        else:
            parts = []
            for w, positions in partition.split(env_ids):
                ids = env_ids[positions]
                parts.append((w, ids, self._payload(code, w, ids, positions, arguments)))
        self._is_sending = True
        for w, ids, payload in parts:
            try:
                self._worker_pool.request(w, code, number, ids, payload)
            except ch.ChannelClosed as error:
                if self._raises_on_fault:
                    raise self._lost(w, garbled_reason(error)) from None

    def _payload(
        self,
        code: int,
        w: int,
        ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        arguments: tuple[Sequence[Any], ...],
    ) -> bytes:
        """Pickle a request's payload; ``positions`` are the indices of these envs in ``arguments``."""
        local = ids - self._partition.starts[w]
        if code in (ch.STEP, ch.SEND):
            objects = _by_value([self._buffers.pack_object_actions(ids)], "the actions")
            return pickle.dumps((local.tolist(), "step", objects), protocol=5)
        own = [[argument[k] for k in positions.tolist()] for argument in arguments]
        call = "reset" if code in (ch.RESET, ch.RESTART) else self._call_state.pending or ""
        if code == ch.CONTROL or (call == "reset" and any(option is not None for option in own[1])):
            # Pickled apart: if the worker cannot unpickle the caller's objects, it can still read the env ids.
            each = list(zip(*own, strict=True))
            what = "options" if call == "reset" else f"the arguments of {call}()"
            return pickle.dumps((local.tolist(), call, _by_value(each, what)))
        return pickle.dumps((local.tolist(), call, own))

    # --- replies

    def _receive(self, timeout: float | None, everyone: bool) -> bool:
        pool = self._worker_pool
        if self._dead:
            raise self._lost(*self._dead.pop(0))
        deadline = None if timeout is None else time.monotonic() + timeout
        ready = pool.unread()
        if everyone and not ready and min(pool.states) >= WorkerState.READY:
            return self._receive_from_each(deadline)
        while not self._replies:
            ready = ready or self._listen(deadline)
            if not ready:
                return bool(self._replies)
            self._read_replies(ready)
            if self._dead:
                self._raise_if_lost()
            ready = pool.unread()
        return True

    def _receive_from_each(self, deadline: float | None) -> bool:
        """Wait for one worker after the other, which wakes this process less often than waiting for all.

        Start with the last worker: if every core has a worker, this process gets its core back when that one finishes.
        """
        pool = self._worker_pool
        for w in reversed(range(self.num_workers)):
            while pool.outstanding[w]:
                # A closed pipe is reported once only, so such workers are found by unread().
                ready = pool.unread() if pool.ended else []
                if not ready and deadline is None and self._watchdog is None:
                    ready = pool.wait(None, w)
                elif not ready:
                    ready = self._listen(deadline, w)
                if ready:
                    self._read_replies(ready)
                elif not self._dead:  # read replies that are in time, so that the timeout does not name their envs
                    self._read_replies(pool.unread() or pool.wait(0.0))
                if self._dead:
                    self._raise_if_lost()
                    return True
                if ready:
                    continue
                return bool(self._replies)
        return True

    def _listen(self, deadline: float | None, waiting_for: int | None = None) -> list[int]:
        """Wait for messages from workers; kill workers that hang."""
        watchdog, pool = self._watchdog, self._worker_pool
        if watchdog is None:
            return pool.wait(None if deadline is None else max(0.0, deadline - time.monotonic()), waiting_for)
        ends = time.monotonic() + LONGEST_WAIT if deadline is None else deadline
        while True:
            left = ends - time.monotonic()
            ready = pool.wait(max(0.0, min(left, watchdog.pause)), waiting_for)
            if watchdog.is_due() and self._call_state.pending not in CONTROL_CALLS:  # control calls have no time limit
                self._kill_hung(w for w in watchdog.look(pool.busy()) if not pool.has_unread(w))
                if self._dead:
                    return []  # messages can be read later, and dead workers are in `pool.ended`
            if ready or left <= 0:
                return ready  # do not wait again: a closed pipe is reported once only

    def _kill_hung(self, hung: Iterable[int]) -> None:
        """Kill workers that hang. Their later messages are not read: dumping the stack may wake an env."""
        for w in hung:
            self._worker_pool.kill_hung(w, self.step_timeout or 0.0)
            self._dead.append((w, None))
        self._raise_if_lost()

    def _read_replies(self, ready: Iterable[int]) -> None:
        """Read one message from each of these workers; add dead ones to ``_dead``."""
        pool = self._worker_pool
        self._is_reading = True
        for w in ready:
            how: str | None = None
            try:
                state = pool.states[w]
                if state is WorkerState.READY:
                    how = self._read_reply(w) if pool.outstanding[w] else None
                elif state < WorkerState.READY:
                    how = pool.advance(w)
                    self._recovery.record_survived(pool.take_survived())
                if how is None:
                    continue
            except ch.ChannelClosed as error:
                how = garbled_reason(error)
            self._dead.append((w, how))
        self._is_reading = False

    def _raise_if_lost(self) -> None:
        """Raise for a dead worker, unless other workers have replies, which are returned first."""
        if not self._dead or self._replies:
            return
        readable = {*self._worker_pool.unread(), *self._worker_pool.wait(0.0)}
        self._read_replies(sorted(readable - {w for w, _ in self._dead}))
        if not self._replies:
            raise self._lost(*self._dead.pop(0))

    def _read_reply(self, w: int) -> str | None:
        """Read one reply, if it is complete; return the error in an invalid one, or None."""
        pool, queue = self._worker_pool, self._worker_pool.outstanding[w]
        expected, ids = queue[0]
        message = pool.workers[w].channel.take(expected)
        if message is None:
            if w in pool.ended:  # the pipe is closed, and all its messages were read
                raise ch.ChannelClosed("it does not read")
            return None
        code, count, number, payload = message
        if code != ch.OK or number != expected or count > len(ids):
            return f"answered request {number} for {count} envs, expected {expected} for {len(ids)}"
        replied, report = ids[:count], None
        if payload:
            try:
                report = self._unpack_reply(w, replied, payload)
            except (KeyboardInterrupt, MemoryError):
                raise
            except BaseException as error:
                return garbled_reason(ch.Garbled(f"{len(payload):,} bytes that are no report: {summary_of(error)}"))
            if report is not None and report.failures:
                pid = pool.workers[w].pid
                report.failures = [replace(failure, pid=pid, request=number) for failure in report.failures]
        if count < len(ids):
            queue[0] = expected, ids[count:]
        else:
            queue.popleft()
        self._replies.append((replied, report))
        return None

    def _unpack_reply(self, w: int, ids: NDArray[np.int64], payload: bytes) -> ShardReport | None:
        """Unpack a reply's payload: write objects into their rows, return the report."""
        first = self._partition.starts[w]
        if not self._sends_rows:
            return unpack_report(payload, first)
        objects, payload = pickle.loads(payload)
        bad = {} if objects is None else self._buffers.unpack_objects(ids, objects)
        report = unpack_report(payload, first) if payload else ShardReport()
        failed = {failure.env_id for failure in report.failures}
        report.failures += [capture(i, self._last_operation, error) for i, error in bad.items() if i not in failed]
        return report or None

    def _forget_requests(self) -> bool:
        """Send each worker an empty request, and drop all messages before its answer."""
        pool, asked = self._worker_pool, []
        number = self._request_number = self._request_number % 0xFFFFFFFF + 1
        for w, state in enumerate(pool.states):
            if state is WorkerState.READY:
                asked.append(w)
            elif not self._recovery.masked[self._partition.slices[w]].all() and not self._replace_at_once(w):
                return False
        # Each of a worker's envs may have a step in flight.
        timeout = math.inf if self.step_timeout is None else self.step_timeout * (self._partition.starts[1] + 1)
        for w in list(asked):
            try:
                if pool.workers[w].channel.is_half_sent:
                    raise ch.ChannelClosed("a request was sent incompletely")
                pool.workers[w].channel.send(ch.CONTROL, number, _NOTHING)
            except ch.ChannelClosed:
                asked.remove(w)
                if not self._replace_at_once(w):
                    return False
        for w in asked:
            try:
                pool.workers[w].channel.skip_to(number, timeout)
                pool.outstanding[w].clear()
            except ch.ChannelClosed:
                if not self._replace_at_once(w):
                    return False
        self._dead.clear()
        return True

    def _replace_at_once(self, w: int) -> bool:
        """Replace a worker whose state is unknown; return whether that succeeded."""
        pool = self._worker_pool
        if self.on_fault != "restart":
            return False
        if pool.states[w] not in (WorkerState.PLANNED, WorkerState.REAPED):
            pool.reap(w, None, None)
        pool.outstanding[w].clear()
        if pool.states[w] is WorkerState.REAPED:
            pool.plan(w)
        return pool.start(w) is None

    # --- dead workers

    def _lost(self, w: int, how: str | None = None) -> WorkerLost:
        """Kill a worker and all processes it started; return the error that describes the loss."""
        self._is_reading = True  # until the loss is handled: it is not reported again
        pool = self._worker_pool
        worker_exit = pool.reap(w, how, self._call_state.pending)
        if self._raises_on_fault:
            error = error_of(pool.reap_others(worker_exit, self._call_state.pending), only_close_is_left=True)
        else:
            error = worker_exit.error(only_close_is_left=False)
        everyone = self._partition.slices[w]
        in_flight = [ids for _, ids in pool.outstanding[w]]
        asked = np.concatenate(in_flight) if in_flight else everyone[:0]
        pool.outstanding[w].clear()
        if self.on_fault == "restart":
            pool.plan(w)
        return WorkerLost(w, error, asked, np.setdiff1d(everyone, asked), worker_exit)

    def _restart_worker(self, w: int) -> None:
        if (problem := self._worker_pool.start(w)) is not None:
            raise self._lost(w, problem)

    def _shut_down(self, timeout: float) -> None:
        self._finalizer.detach()
        failures = self._worker_pool.shut_down(timeout)
        raise_failures(failures, self._place_name)


def _by_value(values: Sequence[Any], what: str) -> bytes:
    """Pickle values for a worker, or raise `SerialisationError` with the value and the reason."""
    try:
        return dump_each(values, by_value=True)
    except Exception:
        pickle_or_explain(values, what)  # raises with the reason
        raise


def _seconds(step_timeout: float | None) -> float | None:
    number = isinstance(step_timeout, (int, float, np.number)) and not isinstance(step_timeout, bool)
    if step_timeout is None or (number and 0 < step_timeout < math.inf):
        return None if step_timeout is None else float(step_timeout)
    raise ArgumentError(f"step_timeout must be seconds greater than 0, or None, got {step_timeout!r}")


_OVERHEAD = 100e-6  # seconds that two worker processes add to a step, compared to this process; docs/benchmarks.md
_STEPS = 64  # with one env, and with two
_MAX_SECONDS = 2.0  # slow envs need fewer steps for a good estimate
_WAITS = 3.0  # an env whose wall time exceeds this many times its processor time waits for something


def choose_backend(recipes: Sequence[EnvRecipe], settings: SettingsArguments) -> tuple[str, str]:
    """Time steps of two of the envs in a temporary worker process; return ``"sync"`` or ``"async"``, and the reason.

    In this process a step over N envs costs N times one env's step; over W workers ceil(N / W) times, and the messages.
    An env's cost is its processor time, so that load on the machine does not matter; for an env that mostly waits (for
    a simulator, a socket) it is its wall clock time.
    """
    num_envs = len(recipes)
    workers = min(num_envs, usable_cores())
    share = -(-num_envs // workers)
    if workers == 1:
        return ("sync", "one core, or one env: no envs could run in parallel")
    seconds = _seconds_of_a_step(recipes[:2], settings)
    saved = (num_envs - share) * seconds
    which = (
        f"a step of one env takes {_readable(seconds)}; {workers} worker processes would save {_readable(saved)} a step"
    )
    if saved < _OVERHEAD:
        return ("sync", f"{which}, and cost about {_readable(_OVERHEAD)}")
    return ("async", which)


def _seconds_of_a_step(recipes: Sequence[EnvRecipe], settings: SettingsArguments) -> float:
    """Return the seconds that a second env adds to a step; the messages' cost cancels out."""
    plain: SettingsArguments = {**settings, "copy": False, "on_fault": "raise", "autoreset_mode": "same_step"}
    with AsyncVectorEnv(recipes, num_workers=1, worker=_serve_timed, **plain) as envs:
        envs.reset()
        began = time.perf_counter()
        for _ in range(_STEPS):
            for ids in ([0], [0, 1]):
                envs.send(envs.random_action(env_ids=ids), ids)
                envs.recv(min_envs=len(ids))
            if time.perf_counter() - began > _MAX_SECONDS:
                break
        times: list[tuple[int, float, float]] = envs.exec_func(_timed, [0])[0]
    cpu, wall = (
        median(times[i][column] for i in range(1, len(times), 2))
        - median(times[i][column] for i in range(0, len(times), 2))
        for column in (1, 2)
    )
    return max(wall if wall > _WAITS * cpu else cpu, 0.0)


_TIMES: list[tuple[int, float, float]] = []  # in the worker process: number of envs, processor time, wall clock time


def _serve_timed(link: WorkerLink) -> None:
    for request in link.requests():
        cpu, wall = time.thread_time(), time.perf_counter()
        link.answer(request)
        if request.operation == "send":
            _TIMES.append((len(request.ids), time.thread_time() - cpu, time.perf_counter() - wall))


def _timed(_env: Any) -> list[tuple[int, float, float]]:
    return _TIMES


def _readable(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} µs"

"""The worker processes of one vectorizer: starting them, listening to them, replacing them, and letting go of them."""

from __future__ import annotations

import os
import pickle
import select
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.envs.spec import EnvSpec, object_leaves
from marlvec.errors import Failure, MarlvecError, SerialisationError, UnsupportedSpaceError
from marlvec.vector.data.buffers import Buffers
from marlvec.vector.data.pickling import load_each
from marlvec.vector.faults.failures import PackedFailure, WorkerExit, pickle_or_explain, raise_failures, unpack_failure
from marlvec.vector.faults.recovery import Survived, survived_failures
from marlvec.vector.faults.restarts import RestartBudget
from marlvec.vector.processes import channel as ch
from marlvec.vector.processes import limits, shared_memory
from marlvec.vector.processes.channel import AdaptivePoller, ChannelClosed, Garbled, closer
from marlvec.vector.processes.watchdog import PROGRESS_BYTES, progress_of
from marlvec.vector.processes.worker import WorkerPlan
from marlvec.vector.processes.worker_process import WorkerProcess
from marlvec.vector.settings import LONGEST_WAIT
from marlvec.vector.shards.partition import Partition, agree_on_spec

__all__ = ["WORKER_TRANSITIONS", "WorkerEvent", "WorkerPool", "WorkerState", "garbled_reason"]

_MOMENT = 0.01  # seconds in which workers that are killed together are gone
_LOOK = 400e-6  # seconds to look for an answer before sleeping
_LONG = 2e6  # seconds, as many as poll() can count in milliseconds
_SETUP_NUMBER = 1  # number of requests here; 0 is CLOSE's: its answer must not be taken for that to another


class WorkerState(IntEnum):
    """What a worker is at; those up to `ATTACHING` are not at work yet, and what they are asked waits for them."""

    PLANNED = 0
    """It is to be started."""
    BUILDING = 1
    """It was sent its plan, and builds its envs."""
    ATTACHING = 2
    """It was sent where its rows are."""
    IDLE = 3
    """It has answered everything."""
    BUSY = 4
    """It has requests to answer."""
    KILLED = 5
    """It hung, and was killed."""
    REAPED = 6
    """It is gone, and nothing is left of it."""
    CLOSED = 7
    """It was asked to close, and is gone."""


class WorkerEvent(IntEnum):
    """What happens to a worker."""

    START = 0
    """Its process was started, and sent its plan."""
    BUILT = 1
    """It has built its envs, and was sent where its rows are."""
    ATTACHED = 2
    """It has its rows."""
    REQUEST = 3
    """It is asked for something."""
    ANSWERED = 4
    """It has answered all that it was asked."""
    HANG = 5
    """One of its envs takes too long."""
    REAP = 6
    """It has ended, or must: its end was closed, it said what cannot be, or it could not be started."""
    PLAN = 7
    """Another one is to take its place."""
    CLOSE = 8
    """The vectorizer is closed."""


_PLANNED, _BUILDING, _ATTACHING, _IDLE, _BUSY, _KILLED, _REAPED, _CLOSED = WorkerState
_WAITS = {state: state for state in (_PLANNED, _BUILDING, _ATTACHING)}

WORKER_TRANSITIONS: Mapping[WorkerEvent, Mapping[WorkerState, WorkerState]] = {
    WorkerEvent.START: {_PLANNED: _BUILDING},
    WorkerEvent.BUILT: {_BUILDING: _ATTACHING},
    WorkerEvent.ATTACHED: {_ATTACHING: _IDLE},
    WorkerEvent.REQUEST: {_IDLE: _BUSY, _BUSY: _BUSY, _KILLED: _KILLED, **_WAITS},
    WorkerEvent.ANSWERED: {_BUSY: _IDLE},
    WorkerEvent.HANG: {_BUSY: _KILLED},
    WorkerEvent.REAP: {_IDLE: _REAPED, _BUSY: _REAPED, _KILLED: _REAPED, **dict.fromkeys(_WAITS, _REAPED)},
    WorkerEvent.PLAN: {_REAPED: _PLANNED},
    WorkerEvent.CLOSE: dict.fromkeys(WorkerState, _CLOSED),
}
"""Event, state before → state after. What is not here cannot happen: it raises KeyError.

That a worker's end was closed is no state: what it said before is still to be read, in whatever state it is.
"""

_SPEAKS = frozenset({_BUILDING, _ATTACHING, _BUSY})  # something is to come from these
_REQUEST = WORKER_TRANSITIONS[WorkerEvent.REQUEST]


def garbled_reason(error: ChannelClosed) -> str | None:
    """What a worker must go for, if its channel shows more than its end."""
    if not isinstance(error, Garbled):
        return None
    return f"was killed for what came out of its reply pipe, which an env may have written into ({error}),"


class WorkerPool:
    """The workers of one vectorizer; apart from it, so that they can be let go of without it.

    A new worker is sent its plan and builds its envs, which may take long; it answers with their spec, is given its
    rows, and says that it has them. Replacing one never waits: `start` and `advance` take one step each.

    Args:
        partition: Who has which envs.
        context: The workers' start method.
        num_cores: How many cores this process may use.
        factories: One per env.
        settings: Arguments of their `Shard`.
        in_file: Whether the memory that all share is a temporary file.
        loop: The loop they run, pickled; None for their own.

    Raises:
        SerialisationError: A factory cannot be pickled.

    Attributes:
        owner: The process that started them.
        partition: As given.
        workers: In order of their envs.
        states: What each is at; changed by `WORKER_TRANSITIONS` alone.
        outstanding: Per worker, the requests that it has not answered: number, and the envs yet to be answered for.
        ended: Those whose end was closed; what they said before can still be read.
        shared_generators: Random generators that several envs of a worker draw from.
        progress: (W,) int64, the env that each one is at work on, counted from 1 in its share; 0 for none.
    """

    def __init__(
        self,
        partition: Partition,
        context: str,
        num_cores: int,
        factories: Sequence[Callable[[], Any]],
        *,
        settings: dict[str, Any],
        in_file: bool,
        loop: bytes | None,
    ) -> None:
        self.owner = os.getpid()
        self.partition = partition
        self.workers: list[WorkerProcess] = []
        self.states = [_PLANNED] * partition.num_workers
        self.outstanding: list[deque[tuple[int, NDArray[np.int64]]]] = [deque() for _ in self.states]
        self.ended: set[int] = set()
        self.progress: NDArray[np.int64] = np.zeros(partition.num_workers, np.int64)
        self._queued: list[list[tuple[int, int, bytes]]] = [[] for _ in self.states]  # for who is not at work yet
        self._hung: dict[int, tuple[float, int, str]] = {}  # killed: seconds it was given, at work on, its stacks
        self._by_fd: dict[int, int] = {}
        self._poller = AdaptivePoller(0.0)
        self._poll_any = select.poll()
        self._poll_one: list[select.poll] = []
        self._context, self._num_cores, self._in_file = context, num_cores, in_file
        self._spaces_mode = settings["spaces"]
        self._plans = [
            pickle.dumps(
                WorkerPlan(
                    worker=w,
                    first_env_id=lo,
                    factories=pickle_or_explain(list(factories[lo:hi]), f"the factory of envs {lo} to {hi - 1}"),
                    loop=loop,
                    settings=settings,
                )
            )
            for w, (lo, hi) in enumerate(pairwise(partition.starts))
        ]
        self._memory_fd = -1  # the memory that all share, while it is open here
        self._close_fd = closer()
        self._attach = b""  # what ATTACH says
        self._survived_lately: list[Survived] = []
        self.shared_generators: frozenset[str] = frozenset()

    def note(self, w: int, event: WorkerEvent) -> None:
        """Note what happens to a worker."""
        self.states[w] = WORKER_TRANSITIONS[event][self.states[w]]

    # --- starting all

    def start_all(
        self, budget: RestartBudget | None, *, require: bool, place: str
    ) -> tuple[EnvSpec, Buffers, list[Survived]]:
        """Start all, and wait until they are at work.

        Args:
            budget: How often one that dies while it builds its envs is replaced; None: never.
            require: Whether every leaf must be in shared memory.
            place: How to name where envs run, for messages.

        Returns:
            What one env looks like, the rows of all, and what went wrong in building envs before it went well.
        """
        num_envs = len(self.partition.owner)
        limits.check_descriptors(len(self._plans))
        self._memory_fd = shared_memory.create(in_file=self._in_file)
        self._close_fd = closer(self._memory_fd)
        for w in range(len(self._plans)):
            self.workers.append(WorkerProcess(self._context, self._memory_fd))
            self.note(w, WorkerEvent.START)
        # Where each core has a worker, one that looks takes the core from it.
        self._poller = AdaptivePoller(_LOOK if len(self.workers) < self._num_cores else 0.0)
        self._poll_one = [select.poll() for _ in self.workers]
        for w, worker in enumerate(self.workers):
            self._listen_to(w)
            with suppress(ChannelClosed):  # why, it may have said
                worker.channel.send(ch.INIT, _SETUP_NUMBER, self._plans[w])
        specs, survived = self._read_specs(budget, place)
        self._spec = spec = agree_on_spec(specs, self.partition.starts, self._spaces_mode)
        if require and (leaves := object_leaves(spec)):
            raise UnsupportedSpaceError(
                f"shared_memory='require', but {', '.join(leaves)} cannot be there: not of fixed size. "
                f"shared_memory=True sends such leaves, and only those, through a pipe"
            )
        head = PROGRESS_BYTES * len(self._plans)
        size = head + Buffers.nbytes(spec, num_envs)
        shared_memory.grow(self._memory_fd, size, in_file=self._in_file)
        mapped = shared_memory.map_memory(self._memory_fd, size)
        self.progress = progress_of(mapped, len(self._plans))
        buffers = Buffers(spec, num_envs, memoryview(mapped)[head:])
        buffers.clear_masks()
        # The common spec, not the worker's own: where spaces are compatible only, theirs may differ.
        self._attach = pickle_or_explain((num_envs, len(self._plans), size, spec), "the envs' spaces")
        for w in range(len(self._plans)):
            self._send_attach(w)
        for w in range(len(self._plans)):
            self._read_attached(w)
        return spec, buffers, survived

    def forget_plans(self) -> None:
        """No worker will be replaced: let go of what that would take."""
        self._plans.clear()
        self._close_memory()

    def _read_specs(self, budget: RestartBudget | None, place: str) -> tuple[list[EnvSpec], list[Survived]]:
        """What each worker's envs look like; raises what went wrong in building them."""
        specs: dict[int, EnvSpec] = {}
        failures: list[Failure] = []
        survived: list[Survived] = []
        waiting = set(range(len(self._plans)))
        while waiting:
            for w in self.wait(None):
                if w not in waiting:  # it has said why its envs could not be built, and is gone now
                    continue
                try:
                    reply = self.workers[w].channel.take(_SETUP_NUMBER)
                except ChannelClosed as error:
                    survived.append(self._retry_start(w, error, budget))
                    continue
                if reply is None:
                    continue
                waiting.discard(w)
                if reply.code == ch.OK:
                    specs[w], packed, generators = self._open_spec(w, reply.payload)
                    self.shared_generators |= generators
                    survived += survived_failures(map(unpack_failure, packed))
                else:
                    failures.extend(map(unpack_failure, pickle.loads(reply.payload)))
        raise_failures(failures, place, starts=self.partition.starts[:-1])
        return [specs[w] for w in range(len(self._plans))], survived

    def _retry_start(self, w: int, gone: ChannelClosed, budget: RestartBudget | None) -> Survived:
        """Replace a worker that died while it built its envs for the first time."""
        worker_exit = self._exit_while_building(w, gone)
        error = worker_exit.error(only_close_is_left=False)
        pause = None if budget is None else budget.try_restart(("worker", w), worker_exit.reason)
        if budget is None or pause is None:
            if budget is not None:
                error.args = (f"{error} {budget.history(('worker', w))}",)
            raise error
        time.sleep(pause)
        self.note(w, WorkerEvent.PLAN)
        if self.start(w) is not None:
            raise error from None
        return worker_exit.env_ids, str(worker_exit)

    def _exit_while_building(self, w: int, gone: ChannelClosed) -> WorkerExit:
        """See a worker off that ended, or must, before it was at work for the first time."""
        return self.reap(w, garbled_reason(gone), None)

    def _open_spec(self, w: int, payload: bytes) -> tuple[EnvSpec, list[PackedFailure], frozenset[str]]:
        """What a new worker says of its envs; their spaces may be of any class.

        Raises:
            SerialisationError: It cannot be rebuilt in this process.
        """
        ids = self.partition.slices[w]
        spec: EnvSpec
        failures: list[PackedFailure]
        generators: frozenset[str]
        ((spec, failures, generators),) = load_each(payload, [f"the spaces of envs {ids[0]} to {ids[-1]}"])
        return spec, failures, generators

    def _send_attach(self, w: int) -> None:
        try:
            self.workers[w].channel.send(ch.ATTACH, _SETUP_NUMBER, self._attach)
        except ChannelClosed as error:
            raise self._exit_while_building(w, error).error(only_close_is_left=False) from None
        self.note(w, WorkerEvent.BUILT)

    def _read_attached(self, w: int) -> None:
        try:
            self.workers[w].channel.recv()
        except ChannelClosed as error:
            raise self._exit_while_building(w, error).error(only_close_is_left=False) from None
        self.note(w, WorkerEvent.ATTACHED)

    # --- replacing one

    def plan(self, w: int) -> None:
        """Another worker will take the place of one that is gone: what that is asked from now on waits for it."""
        self.note(w, WorkerEvent.PLAN)

    def start(self, w: int) -> str | None:
        """Start a worker that is planned. Says what went wrong, if it did."""
        try:
            worker = WorkerProcess(self._context, self._memory_fd)
        except (OSError, MarlvecError) as error:
            return f"could not be replaced: {error}"
        self.workers[w] = worker
        self.ended.discard(w)
        self._hung.pop(w, None)
        self.progress[w] = 0
        self.note(w, WorkerEvent.START)
        self._listen_to(w)
        try:
            worker.channel.send(ch.INIT, _SETUP_NUMBER, self._plans[w])
        except ChannelClosed:
            self.ended.add(w)  # why, it may have said
        return None

    def advance(self, w: int) -> str | None:
        """Hear what a new worker has to say, and take the next step. Says what went wrong, if it did.

        Raises:
            ChannelClosed: It is gone.
        """
        channel = self.workers[w].channel
        reply = channel.take(_SETUP_NUMBER)
        if reply is None:
            if w in self.ended:  # it hears nothing any more, and has nothing left to say
                raise ChannelClosed("it does not read")
            return None
        if reply.code == ch.FAILED:
            failure = unpack_failure(pickle.loads(reply.payload)[0])
            return f"could not build its envs again: env {failure.env_id}: {failure.summary}; it ended"
        if self.states[w] is _BUILDING:
            try:
                spec, packed, _ = self._open_spec(w, reply.payload)
            except SerialisationError as error:
                return f"built envs again, but {error}; it ended"
            self._survived_lately += survived_failures(map(unpack_failure, packed))
            if differs := self._spec.difference(spec, self._spaces_mode):
                return f"built envs with other spaces than before: {differs}; it ended"
            self.note(w, WorkerEvent.BUILT)
            channel.send(ch.ATTACH, _SETUP_NUMBER, self._attach)
            return None
        self.note(w, WorkerEvent.ATTACHED)
        if self.outstanding[w]:
            self.note(w, WorkerEvent.REQUEST)
        queued, self._queued[w] = self._queued[w], []
        for code, number, payload in queued:
            channel.send(code, number, payload)
        return None

    def survived_lately(self) -> list[Survived]:
        """What went wrong, and then right, in building envs anew; each is given once."""
        lately, self._survived_lately = self._survived_lately, []
        return lately

    # --- requests and replies

    def request(self, w: int, code: int, number: int, env_ids: NDArray[np.int64], payload: bytes) -> None:
        """Ask a worker for something; one that is not at work yet gets it then.

        Raises:
            ChannelClosed: It is gone. What it said before can still be read.
        """
        self.outstanding[w].append((number, env_ids))
        self.states[w] = state = _REQUEST[self.states[w]]
        if state < _IDLE:
            self._queued[w].append((code, number, payload))
            return
        try:
            self.workers[w].channel.send(code, number, payload)
        except ChannelClosed:
            self.ended.add(w)
            raise

    def forget_requests(self, w: int) -> None:
        """A worker at work has answered everything: whatever it was asked, it has done and said."""
        self.outstanding[w].clear()
        if self.states[w] is _BUSY:
            self.note(w, WorkerEvent.ANSWERED)

    def unread(self) -> list[int]:
        """Workers of which something is there already: what came in while we were sending, or before their end."""
        if not self.ended and not any(worker.channel.inbox for worker in self.workers):
            return []
        return [
            w
            for w, worker in enumerate(self.workers)
            if self.states[w] in _SPEAKS and (w in self.ended or worker.channel.inbox)
        ]

    def has_unread(self, w: int) -> bool:
        """Whether something of this worker is there to read."""
        channel = self.workers[w].channel
        return bool(channel.inbox) or bool(select.select([channel.read_fd], [], [], 0)[0])

    def busy(self) -> Iterator[tuple[int, int, int]]:
        """Workers that have a request to answer, which one, and how far they are."""
        for w, state in enumerate(self.states):
            if state is _BUSY:
                yield w, self.outstanding[w][0][0], int(self.progress[w])

    def wait(self, timeout: float | None, waiting_for: int | None = None) -> list[int]:
        """Wait until a worker has said something, or died.

        Args:
            timeout: Seconds; None for `LONGEST_WAIT`.
            waiting_for: Wait for this worker to speak, or for any to die. Where all must answer anyway, being woken
                by each of them costs more than it brings.

        Returns:
            Workers to hear; empty if time ran out.
        """
        poll = self._poll_any if waiting_for is None else self._poll_one[waiting_for]
        seconds = LONGEST_WAIT if timeout is None else timeout
        events = self._poller.wait(poll, max(0, int(seconds * 1000 + 0.999)))
        ready = [self._by_fd[fd] for fd, _ in events]
        for fd, event in events:
            if event & ~select.POLLIN:
                self._note_end(fd)
        return ready

    def _note_end(self, fd: int) -> None:
        """Stop listening to an end that was closed: it would be reported for ever."""
        self.ended.add(self._by_fd[fd])
        self._stop_listening(fd)

    def _stop_listening(self, fd: int) -> None:
        if fd in self._by_fd:
            for poll in (self._poll_any, *self._poll_one):
                with suppress(KeyError):  # Ctrl-C has come here before
                    poll.unregister(fd)
            del self._by_fd[fd]

    def _listen_to(self, w: int) -> None:
        fd = self.workers[w].channel.read_fd
        self._by_fd[fd] = w
        self._poll_any.register(fd, select.POLLIN)
        for v, poll in enumerate(self._poll_one):
            poll.register(fd, select.POLLIN if v == w else 0)  # with 0, a closed end is still reported

    # --- ends

    def kill_hung(self, w: int, timeout: float) -> None:
        """Kill a worker that hangs, having asked it where. Its closed end shows that."""
        worker = self.workers[w]
        env = int(self.progress[w])  # being asked may wake it
        report = worker.stacks()
        if torn := worker.channel.torn:
            report = f"it had sent {torn}\n{report}"
        self._hung[w] = (timeout, env, report)
        self.note(w, WorkerEvent.HANG)
        worker.kill()

    def reap(self, w: int, how: str | None, call: str | None) -> WorkerExit:
        """See a worker off that is gone, or must go: kill what is left of it, and say what is known."""
        worker = self.workers[w]
        if how is None:
            worker.wait(0.2)
        worker.kill()
        timeout, env, report = self._hung.get(w, (None, int(self.progress[w]), ""))
        queue = self.outstanding[w]
        ids = self.partition.slices[w]
        building = self.states[w] < _IDLE
        worker_exit = WorkerExit(
            worker=w,
            pid=worker.pid,
            exitcode=worker.exitcode,
            first=int(ids[0]),
            last=int(ids[-1]),
            # Garbled bytes are read when what wrote them may be done.
            at_work_on=int(ids[env - 1]) if 0 < env <= len(ids) and not building and how is None else None,
            call=call,
            request=queue[0][0] if queue else None,
            how=how,
            timeout=timeout,
            report=report or worker.crash_report(),
            building=building,
        )
        self._stop_listening(worker.channel.read_fd)
        worker.close()
        self.ended.discard(w)
        self._queued[w].clear()
        self.note(w, WorkerEvent.REAP)
        self._hung.pop(w, None)  # the next one has not hung, should it end before it was started
        return worker_exit

    def reap_others(self, first: WorkerExit, call: str | None) -> list[WorkerExit]:
        """See off those who went with another one, and a moment later."""
        time.sleep(_MOMENT)
        gone = [w for w, worker in enumerate(self.workers) if self.states[w] is not _REAPED and worker.poll()]
        return sorted([first, *(self.reap(w, None, call) for w in gone)], key=lambda worker_exit: worker_exit.worker)

    def _close_memory(self) -> None:
        """Let go of the memory's descriptor; it stays mapped where it is."""
        self._memory_fd = -1
        self._close_fd()

    def shut_down(self, timeout: float | None) -> list[Failure]:
        """Ask the workers to close, wait, kill what is left.

        Args:
            timeout: Seconds; None to wait as long as it takes.

        Returns:
            What went wrong in the envs' own ``close()``.
        """
        if self.owner != os.getpid():  # a forked child got a copy of us; the workers are not its own
            return []
        failures: list[Failure] = []
        deadline = time.monotonic() + (_LONG if timeout is None else timeout)
        asked = []
        for w, worker in enumerate(self.workers):
            is_gone = self.states[w] in (_PLANNED, _REAPED)
            self.note(w, WorkerEvent.CLOSE)
            if is_gone:
                continue
            try:
                worker.channel.send(ch.CLOSE, 0, timeout=max(0.0, deadline - time.monotonic()))
                asked.append(worker)
            except ChannelClosed:
                continue
        for worker in asked:
            failures.extend(self._read_close_reply(worker, deadline))
        for worker in self.workers:
            if not worker.wait(max(0.0, deadline - time.monotonic())):
                worker.kill()
            worker.close()
        self.workers = []
        self.progress = np.zeros(0, np.int64)  # lets go of the memory
        self._close_memory()
        return failures

    def _read_close_reply(self, worker: WorkerProcess, deadline: float) -> list[Failure]:
        """Wait for a worker's answer to CLOSE, past any that are still under way."""
        channel = worker.channel
        try:
            while True:
                reply = channel.recv(deadline - time.monotonic())
                if reply.number == 0 and reply.code == ch.OK:
                    return [unpack_failure(packed) for packed in pickle.loads(reply.payload)] if reply.payload else []
        except Garbled:  # an env wrote into the pipe, or an interrupt has lost half a message
            channel.skip(deadline - time.monotonic())
        except Exception:  # it is gone, time is up, or what it says cannot be
            return []
        return []

"""The worker processes of one vectorizer: starting, messages, replacement and shutdown."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from enum import IntEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.envs.spec import EnvSpec, object_leaves
from marlvec.errors import (
    ArgumentError,
    Failure,
    MarlvecError,
    ResourceError,
    SerialisationError,
    UnsupportedSpaceError,
)
from marlvec.vector import cores as limits
from marlvec.vector.buffers import Buffers
from marlvec.vector.cores import Partition, agree_on_spec
from marlvec.vector.failures import WorkerExit, load_each, pickle_or_explain, raise_failures, unpack_failures
from marlvec.vector.settings import LONGEST_WAIT, RestartBudget, Settings
from marlvec.vector.workers import channel as ch
from marlvec.vector.workers import channel as shared_memory
from marlvec.vector.workers.channel import ASK, AdaptivePoller, ChannelClosed, Garbled, StackDump, closer, pair
from marlvec.vector.workers.fork_server import ensure_server, isolate, no_fork, worker_environ
from marlvec.vector.workers.reaper import new_mark
from marlvec.vector.workers.worker import PROGRESS_BYTES, WorkerPlan, progress_of

_MOMENT = 0.01  # seconds within which workers that are killed together have ended
_LOOK = 400e-6  # seconds to poll for a reply before sleeping
_LONG = 2e6  # seconds, the longest wait that poll() can count in milliseconds
_SETUP_NUMBER = 1  # request number of INIT and ATTACH; different from CLOSE's, which is 0, so that replies differ


class WorkerState(IntEnum):
    """State of a worker. Before `READY`, requests for it are queued."""

    # A closed pipe is not a state: in any state, the worker's earlier messages must still be read.

    PLANNED = 0
    """It will be started."""
    BUILDING = 1
    """It has received its plan, and builds its envs."""
    ATTACHING = 2
    """It was sent the location of its rows."""
    READY = 3
    """It answers requests."""
    KILLED = 4
    """It hung, and was killed."""
    REAPED = 5
    """It has ended, and its processes and files are cleaned up."""
    CLOSED = 6
    """It was sent a close request, and has ended."""


_PLANNED, _BUILDING, _ATTACHING, _READY, _KILLED, _REAPED, _CLOSED = WorkerState


def garbled_reason(error: ChannelClosed) -> str | None:
    """Return why a worker must be killed if its channel was garbled; None if it was only closed."""
    if not isinstance(error, Garbled):
        return None
    return f"was killed for invalid data in its reply pipe, which an env may have written ({error}),"


class WorkerPool:
    """The workers of one vectorizer; a separate object, so that they can be ended without the vectorizer.

    A new worker receives its plan, builds its envs, which may take long, and answers with their spec; then it receives
    the location of its rows, and confirms. Replacing a worker never waits: `start` and `advance` take one step each.

    Attributes:
        outstanding: Per worker, its unanswered requests: number, and the envs without a reply.
        ended: Workers whose pipe was closed; their earlier messages can still be read.
        progress: (W,) int64, the env that each worker runs, counted from 1 in its share; 0 for none.
    """

    def __init__(
        self,
        partition: Partition,
        context: str,
        num_cores: int,
        factories: Sequence[Callable[[], Any]],
        *,
        settings: Settings,
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
        self._queued: list[list[tuple[int, int, bytes]]] = [[] for _ in self.states]  # for workers not ready yet
        self._hung: dict[int, tuple[float, int, str]] = {}  # killed workers: time limit, env it ran, its stacks
        self._by_fd: dict[int, int] = {}
        self._poller = AdaptivePoller(0.0)
        self._poll_any = select.poll()
        self._poll_one: list[select.poll] = []
        self._context, self._num_cores, self._in_file = context, num_cores, in_file
        self._spaces_mode = settings.spaces
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
        self._memory_fd = -1  # the shared memory, while it is open here
        self._close_fd = closer()
        self._attach = b""  # payload of ATTACH
        self._survived: list[Failure | WorkerExit] = []
        self.shared_generators: frozenset[str] = frozenset()

    # --- starting all

    def start_all(self, budget: RestartBudget | None, *, require: bool, place: str) -> tuple[EnvSpec, Buffers]:
        """Start all workers, wait until they are ready, and return the spec of one env and the rows of all.

        `budget`: how often a worker that dies while it builds its envs is replaced; None: never. `require`: every leaf
        must be in shared memory.
        """
        num_envs = len(self.partition.owner)
        limits.check_descriptors(len(self._plans))
        self._memory_fd = shared_memory.create(in_file=self._in_file)
        self._close_fd = closer(self._memory_fd)
        for w in range(len(self._plans)):
            self.workers.append(WorkerProcess(self._context, self._memory_fd))
            self.states[w] = _BUILDING
        # If each core has a worker, polling would take a core from one of them.
        self._poller = AdaptivePoller(_LOOK if len(self.workers) < self._num_cores else 0.0)
        self._poll_one = [select.poll() for _ in self.workers]
        for w, worker in enumerate(self.workers):
            self._listen_to(w)
            with suppress(ChannelClosed):  # its reply may have the reason
                worker.channel.send(ch.INIT, _SETUP_NUMBER, self._plans[w])
        specs = self._read_specs(budget, place)
        self._spec = spec = agree_on_spec(specs, self.partition.starts, self._spaces_mode)
        if require and (leaves := object_leaves(spec)):
            raise UnsupportedSpaceError(
                f"shared_memory='require': expected leaves of fixed size, got {', '.join(leaves)}; "
                f"shared_memory=True sends such leaves, and only those, through a pipe"
            )
        head = PROGRESS_BYTES * len(self._plans)
        size = head + Buffers.nbytes(spec, num_envs)
        shared_memory.grow(self._memory_fd, size, in_file=self._in_file)
        mapped = shared_memory.map_memory(self._memory_fd, size)
        self.progress = progress_of(mapped, len(self._plans))
        buffers = Buffers(spec, num_envs, memoryview(mapped)[head:])
        buffers.clear_masks()
        # The common spec, not the worker's own: with spaces="compatible" they may differ.
        self._attach = pickle_or_explain((num_envs, len(self._plans), size, spec), "the envs' spaces")
        for w in range(len(self._plans)):
            self._send_attach(w)
        for w in range(len(self._plans)):
            self._read_attached(w)
        return spec, buffers

    def forget_plans(self) -> None:
        """Free the resources for replacing workers: none will be replaced."""
        self._plans.clear()
        self._close_memory()

    def _read_specs(self, budget: RestartBudget | None, place: str) -> list[EnvSpec]:
        """Return the spec of each worker's envs; raise failures of their factories."""
        specs: dict[int, EnvSpec] = {}
        failures: list[Failure] = []
        waiting = set(range(len(self._plans)))
        while waiting:
            for w in self.wait(None):
                if w not in waiting:  # it has reported why its envs could not be built, and has ended
                    continue
                try:
                    reply = self.workers[w].channel.take(_SETUP_NUMBER)
                except ChannelClosed as error:
                    self._retry_start(w, error, budget)
                    continue
                if reply is None:
                    continue
                waiting.discard(w)
                if reply.code == ch.OK:
                    specs[w], found, generators = self._open_spec(w, reply.payload)
                    self.shared_generators |= generators
                    self._survived += found
                else:
                    failures += unpack_failures(reply.payload)
        raise_failures(failures, place, starts=self.partition.starts[:-1])
        return [specs[w] for w in range(len(self._plans))]

    def _retry_start(self, w: int, gone: ChannelClosed, budget: RestartBudget | None) -> None:
        """Replace a worker that died while it built its envs for the first time."""
        worker_exit = self.reap(w, garbled_reason(gone), None)
        error = worker_exit.error(only_close_is_left=False)
        pause = None if budget is None else budget.try_restart(("worker", w), worker_exit.reason)
        if budget is None or pause is None:
            if budget is not None:
                error.args = (f"{error} {budget.history(('worker', w))}",)
            raise error
        time.sleep(pause)
        self.states[w] = _PLANNED
        if self.start(w) is not None:
            raise error from None
        self._survived.append(worker_exit)

    def _open_spec(self, w: int, payload: bytes) -> tuple[EnvSpec, list[Failure], frozenset[str]]:
        """Unpickle a new worker's spec; raise `SerialisationError` if its spaces cannot be rebuilt in this process."""
        ids = self.partition.slices[w]
        ((spec, survived, generators),) = load_each(payload, [f"the spaces of envs {ids[0]} to {ids[-1]}"])
        return spec, unpack_failures(survived), generators

    def _send_attach(self, w: int) -> None:
        try:
            self.workers[w].channel.send(ch.ATTACH, _SETUP_NUMBER, self._attach)
        except ChannelClosed as error:
            raise self.reap(w, garbled_reason(error), None).error(only_close_is_left=False) from None
        self.states[w] = _ATTACHING

    def _read_attached(self, w: int) -> None:
        try:
            self.workers[w].channel.recv()
        except ChannelClosed as error:
            raise self.reap(w, garbled_reason(error), None).error(only_close_is_left=False) from None
        self.states[w] = _READY

    # --- replacing one

    def plan(self, w: int) -> None:
        """Plan the replacement of a dead worker: requests for it are queued from now on."""
        self.states[w] = _PLANNED

    def start(self, w: int) -> str | None:
        """Start a planned worker. Return the error as text, or None."""
        assert self.states[w] is _PLANNED, f"worker {w} is not planned"
        try:
            worker = WorkerProcess(self._context, self._memory_fd)
        except (OSError, MarlvecError) as error:
            return f"could not be replaced: {error}"
        self.workers[w] = worker
        self.ended.discard(w)
        self._hung.pop(w, None)
        self.progress[w] = 0
        self.states[w] = _BUILDING
        self._listen_to(w)
        try:
            worker.channel.send(ch.INIT, _SETUP_NUMBER, self._plans[w])
        except ChannelClosed:
            self.ended.add(w)  # its reply may have the reason
        return None

    def advance(self, w: int) -> str | None:
        """Read a new worker's message, and take the next step. Return the error as text, or None."""
        channel = self.workers[w].channel
        reply = channel.take(_SETUP_NUMBER)
        if reply is None:
            if w in self.ended:  # the pipe is closed, and all its messages were read
                raise ChannelClosed("it does not read")
            return None
        if reply.code == ch.FAILED:
            failure = unpack_failures(reply.payload)[0]
            return f"could not build its envs again: env {failure.env_id}: {failure.summary}; it ended"
        if self.states[w] is _BUILDING:
            try:
                spec, survived, _ = self._open_spec(w, reply.payload)
            except SerialisationError as error:
                return f"built envs again, but {error}; it ended"
            self._survived += survived
            if differs := self._spec.difference(spec, self._spaces_mode):
                return f"built envs with other spaces than before: {differs}; it ended"
            self.states[w] = _ATTACHING
            channel.send(ch.ATTACH, _SETUP_NUMBER, self._attach)
            return None
        self.states[w] = _READY
        queued, self._queued[w] = self._queued[w], []
        for code, number, payload in queued:
            channel.send(code, number, payload)
        return None

    def take_survived(self) -> list[Failure | WorkerExit]:
        """Return what ended attempts to build envs since the last call of this method, and was followed by another."""
        survived, self._survived = self._survived, []
        return survived

    # --- requests and replies

    def request(self, w: int, code: int, number: int, env_ids: NDArray[np.int64], payload: bytes) -> None:
        """Send a request to a worker, or queue it. After `ChannelClosed`, earlier messages can still be read."""
        state = self.states[w]
        assert state < _REAPED, f"worker {w} has ended"
        self.outstanding[w].append((number, env_ids))
        if state < _READY:
            self._queued[w].append((code, number, payload))
            return
        try:
            self.workers[w].channel.send(code, number, payload)
        except ChannelClosed:
            self.ended.add(w)
            raise

    def is_busy(self, w: int) -> bool:
        """Return whether a worker that is ready has requests to answer."""
        return self.states[w] is _READY and bool(self.outstanding[w])

    def unread(self) -> list[int]:
        """Return workers with messages to read: received while sending, or sent before the worker ended."""
        if not self.ended and not any(worker.channel.inbox for worker in self.workers):
            return []
        return [
            w
            for w, worker in enumerate(self.workers)
            if (w in self.ended or worker.channel.inbox)
            and (self.is_busy(w) or self.states[w] in (_BUILDING, _ATTACHING))
        ]

    def has_unread(self, w: int) -> bool:
        """Return whether this worker has messages to read."""
        channel = self.workers[w].channel
        return bool(channel.inbox) or bool(select.select([channel.read_fd], [], [], 0)[0])

    def busy(self) -> Iterator[tuple[int, int, int]]:
        """Yield (worker, number of its next request to answer, its progress) of each busy worker."""
        for w in range(len(self.states)):
            if self.is_busy(w):
                yield w, self.outstanding[w][0][0], int(self.progress[w])

    def wait(self, timeout: float | None, waiting_for: int | None = None) -> list[int]:
        """Wait until a worker has sent a message, or died; return workers to read from, none if time ran out.

        `timeout` in seconds, None for `LONGEST_WAIT`. `waiting_for`: wait for a message from this worker only, or for
        the death of any. If all must reply anyway, waking for each of them only costs time.
        """
        poll = self._poll_any if waiting_for is None else self._poll_one[waiting_for]
        seconds = LONGEST_WAIT if timeout is None else timeout
        events = self._poller.wait(poll, max(0, int(seconds * 1000 + 0.999)))
        ready = [self._by_fd[fd] for fd, _ in events]
        for fd, event in events:
            if event & ~select.POLLIN:
                self._drop_closed_pipe(fd)
        return ready

    def _drop_closed_pipe(self, fd: int) -> None:
        """Stop waiting for a closed pipe: poll would report it for ever."""
        self.ended.add(self._by_fd[fd])
        self._stop_listening(fd)

    def _stop_listening(self, fd: int) -> None:
        if fd in self._by_fd:
            for poll in (self._poll_any, *self._poll_one):
                with suppress(KeyError):  # an earlier call was interrupted here by Ctrl-C
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
        """Kill a hung worker, after a dump of its stacks. Its closed pipe is then reported."""
        worker = self.workers[w]
        env = int(self.progress[w])  # read first: the dump's signal may wake the env
        report = worker.stacks()
        if torn := worker.channel.torn:
            report = f"it had sent {torn}\n{report}"
        self._hung[w] = (timeout, env, report)
        self.states[w] = _KILLED
        worker.kill()

    def reap(self, w: int, how: str | None, call: str | None) -> WorkerExit:
        """Kill a worker and all its processes, and return why and how it ended."""
        worker = self.workers[w]
        if how is None:
            worker.wait(0.2)
        worker.kill()
        timeout, env, report = self._hung.get(w, (None, int(self.progress[w]), ""))
        queue = self.outstanding[w]
        ids = self.partition.slices[w]
        building = self.states[w] < _READY
        worker_exit = WorkerExit(
            worker=w,
            pid=worker.pid,
            exitcode=worker.exitcode,
            first=int(ids[0]),
            last=int(ids[-1]),
            # If the channel was garbled, the env that wrote into it may have ended its step.
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
        assert self.states[w] < _REAPED, f"worker {w} has ended"  # perhaps another thread has closed it
        self.states[w] = _REAPED
        self._hung.pop(w, None)  # the replacement has not hung, even if it ends before it was started
        return worker_exit

    def reap_others(self, first: WorkerExit, call: str | None) -> list[WorkerExit]:
        """Clean up workers that ended at the same time as ``first``; return all exits."""
        time.sleep(_MOMENT)
        gone = [w for w, worker in enumerate(self.workers) if self.states[w] is not _REAPED and worker.poll()]
        return sorted([first, *(self.reap(w, None, call) for w in gone)], key=lambda worker_exit: worker_exit.worker)

    def _close_memory(self) -> None:
        """Close the memory's descriptor; mappings stay valid."""
        self._memory_fd = -1
        self._close_fd()

    def shut_down(self, timeout: float | None) -> list[Failure]:
        """Send close requests, wait ``timeout`` seconds, kill workers that still run; return failures of close()."""
        if self.owner != os.getpid():  # in a forked child: the workers belong to the parent
            return []
        failures: list[Failure] = []
        deadline = time.monotonic() + (_LONG if timeout is None else timeout)
        asked = []
        for w, worker in enumerate(self.workers):
            is_gone = self.states[w] in (_PLANNED, _REAPED)
            self.states[w] = _CLOSED
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
        self.progress = np.zeros(0, np.int64)  # frees the view of the memory
        self._close_memory()
        return failures

    def _read_close_reply(self, worker: WorkerProcess, deadline: float) -> list[Failure]:
        """Wait for a worker's answer to CLOSE; skip earlier replies."""
        channel = worker.channel
        try:
            while True:
                reply = channel.recv(deadline - time.monotonic())
                if reply.number == 0 and reply.code == ch.OK:
                    return unpack_failures(reply.payload) if reply.payload else []
        except Garbled:  # an env wrote into the pipe, or an interrupt has lost half a message
            channel.skip(deadline - time.monotonic())
        except Exception:  # it has ended, time is up, or its reply is invalid
            return []
        return []


START_METHODS = ("forkserver", "spawn", "fork")


def start_method(context: Any) -> str:
    """Return the start method for ``context``: None, a name, or a multiprocessing context."""
    name = context.get_start_method() if hasattr(context, "get_start_method") else context
    if name is None:
        return START_METHODS[0]
    if name not in START_METHODS:
        raise ArgumentError(f"context must be one of {START_METHODS} or a multiprocessing context, got {context!r}")
    return str(name)


_workers: weakref.WeakSet[WorkerProcess] = weakref.WeakSet()
_starting: dict[WorkerProcess, tuple[int, Callable[[], object]]] = {}
"""Workers that are being started: the starting thread, and a function that closes the worker's ends of the channel."""


def _after_fork_in_child() -> None:
    """Close channels in a forked child, unless it is the worker: it must not hold them open."""
    for worker in list(_workers):
        worker.close()
    for worker, (thread, close_theirs) in list(_starting.items()):
        if thread != threading.get_ident():
            worker.close()
            close_theirs()
    _starting.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


class WorkerProcess:
    """One worker process and the channel to it; the worker gets a duplicate of ``memory_fd``.

    `pid` is also its process group's. `exitcode` is valid after `wait` has returned True: minus the signal number if a
    signal killed it; None if unknown. `ResourceError`: too many processes or files, or nested too deep.
    """

    def __init__(self, method: str, memory_fd: int) -> None:
        limits.check_depth()
        limits.check_not_importing()
        self.exitcode: int | None = None
        self._gone = False
        self._method = method
        self._server = ensure_server()
        try:
            with limits.asked_for("a worker process"):
                start = self._fork if method == "fork" else self._request
                self.pid = start(memory_fd)
        except ConnectionError as error:
            raise ResourceError(
                f"{error}: it was killed, or could not start; check the memory and the limit on processes"
            ) from error

    @contextlib.contextmanager
    def _ends(self, memory_fd: int) -> Iterator[tuple[int, ...]]:
        """Make the channel, and yield the worker's descriptors (requests in, replies out, memory, stacks)."""
        # The lock is not held in the block: a thread that forks takes other locks before it, which would be a deadlock.
        with no_fork():
            self._stack_file = StackDump()
            try:
                self.channel, theirs = pair()
            except BaseException:
                self._stack_file.close()
                raise
            close_theirs = closer(*theirs)
            _starting[self] = threading.get_ident(), close_theirs
        try:
            yield (*theirs, memory_fd, self._stack_file.fd)
        except BaseException:
            self.close()
            raise
        finally:
            with no_fork():
                close_theirs()
                _starting.pop(self, None)
                _workers.add(self)

    def _request(self, memory_fd: int) -> int:
        server, mark = self._server, new_mark()
        request = {
            "do": "start",
            "method": self._method,
            "environ": worker_environ(),
            "cwd": _folder(),
            "path": sys.path,
            "mark": mark,
        }
        with server.lock:
            with self._ends(memory_fd) as fds, contextlib.ExitStack() as stack:
                server.send(request, (*fds, *(_open_stream(fd, stack) for fd in (1, 2))))
            try:
                return int(server.answer())
            except BaseException:
                self.close()
                raise

    def _fork(self, memory_fd: int) -> int:
        environ, mark, here = worker_environ(), new_mark(), os.getpid()
        with self._ends(memory_fd) as fds:
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {ASK})
            try:
                pid = os.fork()
            finally:
                if os.getpid() == here:
                    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            if pid == 0:
                try:
                    self.channel.close()
                    # No kernel signal at the parent's death: it would come when the starting thread ends. The closed
                    # channel and the fork server end this worker instead.
                    isolate(None, mark)
                    os.environ.clear()
                    os.environ.update(environ)
                    from marlvec.vector.workers.worker import run_worker

                    run_worker(*fds)
                finally:
                    os._exit(1)
        try:
            self._server.ask({"do": "watch", "pid": pid, "mark": mark})
        except BaseException:
            self.close()
            os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):  # other code has waited for it
                os.waitpid(pid, 0)
            raise
        return pid

    def poll(self) -> bool:
        """Return whether the process has ended; store its exit code."""
        if self._gone:
            return True
        if self._method == "fork":
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.exitcode = os.waitstatus_to_exitcode(status)
                    self._gone = True
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(self.pid, signal.SIGKILL)  # processes that its envs started
                    with contextlib.suppress(OSError):
                        self._server.ask({"do": "release", "pid": self.pid})
            except ChildProcessError:  # other code has waited for it
                self._gone = True
        else:
            try:
                self.exitcode = self._server.ask({"do": "status", "pid": self.pid})
                self._gone = self.exitcode is not None
            except OSError:  # the server has ended, and every worker with it
                self._gone = True
        return self._gone

    def wait(self, timeout: float) -> bool:
        """Wait for the process to end; return whether it has."""
        deadline = time.monotonic() + timeout
        pause = 0.0002
        while not self.poll():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, 0.02)
        return True

    def kill(self) -> None:
        """Kill the process and every process it started, and wait until it has ended."""
        with contextlib.suppress(OSError):
            self._server.ask({"do": "kill", "pid": self.pid})
        if self._method == "fork" and not self.poll():  # also if the server has ended
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self.wait(5.0)

    def crash_report(self) -> str:
        """Return all threads' stacks at a crash, without dumps of `stacks`, at most 16 KiB; empty if none."""
        return self._stack_file.crash()

    def stacks(self, timeout: float = 0.3) -> str:
        """Return the current stacks of a living worker's threads, even if one hangs in C code and holds the GIL.

        The signal may interrupt a system call in the worker. And faulthandler reads stacks while they change, so about
        one dump in 100,000 crashes its process (CPython 3.11): call this only for workers that will be killed. At most
        16 KiB; empty if the process is stopped, or does not answer in ``timeout`` seconds.
        """
        if self.poll() or _is_stopped(self.pid):
            return ""
        try:
            return self._stack_file.ask(self._send_ask, timeout)
        except OSError:  # the worker or the server has ended meanwhile
            return ""

    def _send_ask(self) -> None:
        if self._method == "fork":
            os.kill(self.pid, ASK)
        else:
            self._server.ask({"do": "signal", "pid": self.pid, "signal": ASK})

    def close(self) -> None:
        """Close the channel and the file of stack dumps; may be called again."""
        with no_fork():  # a child forked meanwhile would close other files that reuse these descriptor numbers
            self.channel.close()
            self._stack_file.close()

    def __del__(self) -> None:
        """Close the channel, which ends the process, if Ctrl-C came before this object was stored."""
        if hasattr(self, "channel"):
            self.close()


def _folder() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # it was removed
        return "/"


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] in "Tt"
    except OSError:  # no /proc here
        return False


def _open_stream(fd: int, stack: contextlib.ExitStack) -> int:
    """Return ``fd``, or the null device if the parent has closed it."""
    try:
        os.fstat(fd)
        return fd
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        stack.callback(os.close, null)
        return null

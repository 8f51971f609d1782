"""Envs in worker processes that write into shared memory."""

from __future__ import annotations

import os
import pickle
import select
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.envs.spec import EnvSpec
from marlvec.errors import ArgumentError, ContractError, Failure, WorkerDied
from marlvec.vector import channel as ch
from marlvec.vector import memory
from marlvec.vector.buffers import Buffers
from marlvec.vector.channel import ChannelClosed, Patience
from marlvec.vector.faults import describe_exit, picklable, raise_failures, unpack_failure
from marlvec.vector.launch import WorkerProcess, start_method
from marlvec.vector.shard import Report
from marlvec.vector.vector_env import VectorEnv
from marlvec.vector.worker import Plan, unpack_report

__all__ = ["AsyncVectorEnv"]


class AsyncVectorEnv(VectorEnv):
    """Shards in worker processes, several envs a worker.

    Envs write straight into shared memory; a doorbell per worker carries 16 bytes each way per step, and pickles only
    where infos are not empty. No env is ever built in this process. Workers do not import the caller's main module: no
    ``__main__`` guard is needed, and factories, lambdas and classes defined there travel by value.

    Args:
        factories: One zero-argument callable per env; pickled with cloudpickle.
        num_workers: Processes; default: one per usable core, at most one per env.
        autoreset_mode: ``"same_step"``, ``"next_step"`` or ``"disabled"``.
        done_on: ``"all"``: an episode is over when its last agent has ended; ``"any"``: when the first has.
        copy: Return copies; False for read-only views, valid until the next call that steps.
        grouped: Dicts of groups also where there is one group.
        validate: How often action values are checked: ``"strict"``, ``"sample"`` or ``"off"``.
        context: Start method: ``"forkserver"`` (default), ``"spawn"``, ``"fork"``, or a multiprocessing context.
        shared_memory: False sends rows through the pipes instead.

    Raises:
        SerialisationError: A factory cannot be pickled; nothing was started.
        EnvRaised: A factory raised; names the env, with its traceback. Nothing is left running.
        WorkerDied: A worker died while it built its envs.
        ContractError: Something is no env, or the envs' spaces differ.

    Attributes:
        num_workers: How many worker processes there are.
        context: Their start method.
        worker_pids: Their process ids.
    """

    backend = "async"
    _place = "worker process"

    def __init__(
        self,
        factories: Sequence[Callable[[], Any]],
        *,
        num_workers: int | None = None,
        autoreset_mode: str = "same_step",
        done_on: str = "all",
        copy: bool = True,
        grouped: bool = False,
        validate: str = "sample",
        context: Any = None,
        shared_memory: bool = True,
    ) -> None:
        n = len(factories)
        super().__init__(n, autoreset_mode=autoreset_mode, done_on=done_on, copy=copy, validate=validate)
        if num_workers is not None and not 1 <= num_workers <= n:
            raise ArgumentError(f"num_workers must be from 1 to num_envs={n}, got {num_workers}")
        self.num_workers = num_workers or min(n, _usable_cores())
        self.context = start_method(context)
        self._shared = bool(shared_memory)
        # Contiguous slices, as even as can be: 16 envs on 5 workers are 4 + 3 + 3 + 3 + 3.
        share, rest = divmod(n, self.num_workers)
        self._starts = [w * share + min(w, rest) for w in range(self.num_workers + 1)]
        plans: list[Plan] = [
            {
                "factories": picklable(list(factories[lo:hi]), f"the factory of envs {lo} to {hi - 1}"),
                "first": lo,
                "autoreset_mode": autoreset_mode,
                "done_on": done_on,
                "shared": self._shared,
            }
            for lo, hi in pairwise(self._starts)
        ]
        self._crew = _Crew()
        # Also runs when the vectorizer is garbage collected, and when the interpreter exits.
        self._finalizer = weakref.finalize(self, _Crew.shut_down, self._crew, 1.0)
        self._number = 1  # 0 is CLOSE's: its answer must not be taken for that to a request under way
        self._outstanding: list[deque[tuple[int, NDArray[np.int64]]]] = [deque() for _ in plans]
        self._slices = [self._everyone[lo:hi] for lo, hi in pairwise(self._starts)]
        self._owner = np.repeat(np.arange(self.num_workers), np.diff(self._starts))  # (N,) whose worker
        try:
            self._start(plans, grouped)
        except BaseException:
            self._calls.closed = True
            self._finalizer()
            raise

    def _start(self, plans: Sequence[Plan], grouped: bool) -> None:
        memory_fd = memory.create()
        try:
            for _ in plans:
                self._crew.workers.append(WorkerProcess(self.context, memory_fd))
            self._crew.watch()
            for w, plan in enumerate(plans):
                self._send(w, ch.INIT, pickle.dumps(plan))
            specs = self._hear_specs()
            size = Buffers.nbytes(specs[0], self.num_envs)
            if self._shared:
                memory.grow(memory_fd, size)
                buffers = Buffers(specs[0], self.num_envs, memory.map_memory(memory_fd, size))
                buffers.clear_masks()
            else:
                buffers = Buffers(specs[0], self.num_envs)
            for w in range(self.num_workers):
                self._send(w, ch.ATTACH, pickle.dumps((self.num_envs, size)))
            for w in range(self.num_workers):
                self._receive(w)
        finally:
            os.close(memory_fd)
        self._bind(specs[0], buffers, grouped=grouped)

    def _hear_specs(self) -> list[EnvSpec]:
        """What each worker's envs look like; raises what went wrong in building them."""
        specs: dict[int, EnvSpec] = {}
        failures: list[Failure] = []
        waiting = set(range(self.num_workers))
        while waiting:
            for w in self._crew.ready(None):
                if w not in waiting:  # it has told why its envs could not be built, and is gone now
                    continue
                code, _, payload = self._receive(w)
                waiting.discard(w)
                if code == ch.OK:
                    specs[w] = pickle.loads(payload)
                else:
                    failures.extend(unpack_failure(packed) for packed in pickle.loads(payload))
        raise_failures(failures, self._place)
        for w in range(1, self.num_workers):
            if differs := specs[0].difference(specs[w]):
                raise ContractError(f"env {self._starts[w]}: its spaces differ from those of env 0: {differs}")
        return [specs[w] for w in range(self.num_workers)]

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the workers, in order of their envs."""
        return tuple(worker.pid for worker in self._crew.workers)

    def _dispatch(self, operation: str, env_ids: NDArray[np.int64], arguments: Any) -> None:
        code = ch.OPERATIONS[operation]
        self._number = self._number % 0xFFFFFFFF + 1
        if env_ids is self._everyone:
            for w, ids in enumerate(self._slices):
                plain = code == ch.STEP and self._shared  # no more to say than that
                where = slice(self._starts[w], self._starts[w + 1])
                self._request(w, code, ids, b"" if plain else self._payload(code, w, ids, where, arguments))
            return
        owners = self._owner[env_ids]
        for w in np.unique(owners).tolist():
            positions = np.flatnonzero(owners == w)
            ids = env_ids[positions]
            self._request(w, code, ids, self._payload(code, w, ids, positions, arguments))

    def _request(self, w: int, code: int, ids: NDArray[np.int64], payload: bytes) -> None:
        self._outstanding[w].append((self._number, ids))
        self._send(w, code, payload)

    def _payload(self, code: int, w: int, ids: NDArray[np.int64], where: Any, arguments: Any) -> bytes:
        """What a request says beyond its code; ``where`` are these envs' positions in ``arguments``."""
        local = ids - self._starts[w]
        if code == ch.RESET:
            seeds, options = (np.array(argument, object)[where].tolist() for argument in arguments)
            if any(option is not None for option in options):
                return picklable((local.tolist(), seeds, options), "options")
            return pickle.dumps((local.tolist(), seeds, options))
        if code == ch.STATE:
            return pickle.dumps(local.tolist())
        if self._shared:
            return local.astype(np.int32).tobytes()
        return pickle.dumps((local.tolist(), self._buffers.pack_actions(ids)), protocol=5)

    def _gather(
        self, timeout: float | None, everyone: bool
    ) -> Sequence[tuple[NDArray[np.int64], Report | None]] | None:
        news: list[tuple[NDArray[np.int64], Report | None]] = []
        ready = [w for w in self._crew.closed if self._outstanding[w]]  # what they said before, or their end
        if everyone and not ready:
            # Waiting for one after the other wakes this process less often than listening to all.
            deadline = None if timeout is None else time.monotonic() + timeout
            for w, queue in enumerate(self._outstanding):
                while queue:
                    left = None if deadline is None else max(0.0, deadline - time.monotonic())
                    heard = self._crew.ready(left, w)
                    news.extend(self._take(v) for v in heard if self._outstanding[v])
                    if not heard:
                        return news or None
            return news
        while not news:
            ready = ready or self._crew.ready(timeout)
            if not ready:
                return None
            news.extend(self._take(w) for w in ready if self._outstanding[w])
            ready = []
        return news

    def _take(self, w: int) -> tuple[NDArray[np.int64], Report | None]:
        """Take in one reply that is there."""
        _, number, payload = self._receive(w)
        expected, ids = self._outstanding[w].popleft()
        if number != expected:
            raise self._died(w, f"answered request {number}, expected {expected}")
        if payload and not self._shared:
            rows, payload = pickle.loads(payload)
            self._buffers.unpack_results(ids, rows)
        return ids, unpack_report(payload, self._starts[w]) if payload else None

    def _send(self, w: int, code: int, payload: bytes) -> None:
        try:
            self._crew.workers[w].channel.send(code, self._number, payload)
        except ChannelClosed:
            raise self._died(w) from None

    def _receive(self, w: int) -> tuple[int, int, bytes]:
        try:
            return self._crew.workers[w].channel.recv()
        except ChannelClosed:
            raise self._died(w) from None

    def _died(self, w: int, how: str | None = None) -> WorkerDied:
        """The error that tells of a worker's death; also kills what it started."""
        worker = self._crew.workers[w]
        worker.wait(0.2)
        worker.kill()
        lo, hi = self._starts[w], self._starts[w + 1]
        envs = f"env {lo}" if hi == lo + 1 else f"envs {lo} to {hi - 1}"
        doing = f"during {self._calls.pending}()" if self._calls.pending else "while it built its envs"
        return WorkerDied(
            f"worker {w} (pid {worker.pid}, {envs}) {how or describe_exit(worker.exitcode)} {doing}. "
            f"Their episodes are lost; only close() is left.",
            pid=worker.pid,
            exitcode=worker.exitcode,
            lost_env_ids=tuple(range(lo, hi)),
        )

    def _shut_down(self, timeout: float) -> None:
        self._finalizer.detach()
        failures = self._crew.shut_down(timeout)
        raise_failures(failures, self._place)


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Crew:
    """The workers of one vectorizer; apart from it, so that they can be let go of without it."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.workers: list[WorkerProcess] = []
        self.closed: set[int] = set()  # workers whose end was closed; what they said before can still be read
        self._by_fd: dict[int, int] = {}
        self._patience = Patience()
        self._any = select.poll()
        self._one: list[select.poll] = []

    def watch(self) -> None:
        """Listen to all workers from now on."""
        fds = [worker.channel.read_fd for worker in self.workers]
        self._by_fd = {fd: w for w, fd in enumerate(fds)}
        for fd in fds:
            self._any.register(fd, select.POLLIN)
        for mine in fds:
            poll = select.poll()
            for fd in fds:
                poll.register(fd, select.POLLIN if fd == mine else 0)  # with 0, a closed end is still reported
            self._one.append(poll)

    def ready(self, timeout: float | None, waiting_for: int | None = None) -> list[int]:
        """Wait until a worker has said something, or died.

        Args:
            timeout: Seconds; None for ever.
            waiting_for: Wait for this worker to speak, or for any to die. Where all must answer anyway, being woken
                by each of them costs more than it brings.

        Returns:
            Workers to hear; empty if time ran out.
        """
        poll = self._any if waiting_for is None else self._one[waiting_for]
        events = self._patience.wait(poll, None if timeout is None else max(0, int(timeout * 1000 + 0.999)))
        ready = [self._by_fd[fd] for fd, _ in events]
        for fd, event in events:
            if event & ~select.POLLIN:
                self._gone(fd)
        return ready

    def _gone(self, fd: int) -> None:
        """Stop listening to an end that was closed: it would be reported for ever."""
        self.closed.add(self._by_fd[fd])
        for poll in (self._any, *self._one):
            poll.unregister(fd)

    def shut_down(self, timeout: float) -> list[Failure]:
        """Ask the workers to close, wait, kill what is left. Returns what went wrong in the envs' own close()."""
        if self.owner != os.getpid():  # a forked child got a copy of us; the workers are not its own
            return []
        failures: list[Failure] = []
        deadline = time.monotonic() + timeout
        asked = []
        for worker in self.workers:
            try:
                worker.channel.send(ch.CLOSE, 0)
                asked.append(worker)
            except ChannelClosed:
                continue
        for worker in asked:
            failures.extend(self._hear_close(worker, deadline))
        for worker in self.workers:
            if not worker.wait(max(0.0, deadline - time.monotonic())):
                worker.kill()
            worker.close()
        self.workers = []
        return failures

    def _hear_close(self, worker: WorkerProcess, deadline: float) -> list[Failure]:
        """Wait for a worker's answer to CLOSE, past any that are still under way."""
        poll = select.poll()
        poll.register(worker.channel.read_fd, select.POLLIN)
        try:
            while poll.poll(max(0, int(1000 * (deadline - time.monotonic())))):
                code, number, payload = worker.channel.recv()
                if number == 0 and code == ch.OK:
                    return [unpack_failure(packed) for packed in pickle.loads(payload)] if payload else []
        except (ChannelClosed, EOFError, pickle.UnpicklingError):
            return []
        return []

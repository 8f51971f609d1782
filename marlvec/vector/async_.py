"""Envs in worker processes that write into shared memory."""

from __future__ import annotations

import os
import pickle
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Unpack

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from marlvec.envs.spec import EnvSpec, object_leaves
from marlvec.errors import ArgumentError, Failure, UnsupportedSpaceError, WorkerDied
from marlvec.vector import channel as ch
from marlvec.vector import memory
from marlvec.vector.buffers import Buffers
from marlvec.vector.channel import ChannelClosed, Message
from marlvec.vector.crew import Crew
from marlvec.vector.engine import Settings, SettingsArguments
from marlvec.vector.faults import describe_exit, picklable, raise_failures, unpack_failure
from marlvec.vector.launch import WorkerProcess, start_method
from marlvec.vector.reports import Report, unpack_report
from marlvec.vector.shares import Shares, agree
from marlvec.vector.vector_env import VectorEnv
from marlvec.vector.worker import Plan, WorkerLink

__all__ = ["AsyncVectorEnv"]


class AsyncVectorEnv(VectorEnv):
    """Shards in worker processes, several envs a worker.

    Envs write straight into shared memory; a doorbell per worker carries 16 bytes each way per step, and pickles only
    where infos are not empty. No env is ever built in this process. Workers do not import the caller's main module: no
    ``__main__`` guard is needed, and factories, lambdas and classes defined there travel by value.

    Args:
        factories: One zero-argument callable per env; pickled with cloudpickle.
        num_workers: Processes; default: one per usable core, at most one per env.
        context: Start method: ``"forkserver"`` (default), ``"spawn"``, ``"fork"``, or a multiprocessing context.
        shared_memory: False sends rows through the pipes instead; ``"require"`` refuses spaces of which a leaf cannot
            be in shared memory.
        daemon: What happens to workers that were not closed when the vectorizer is garbage collected or the interpreter
            exits: True: they get a second to close their envs; False: they get the time they need.
        worker: A loop for the workers to run in place of `marlvec.vector.worker.serve`; see `WorkerLink`.
        settings: ``autoreset_mode``, ``done_on``, ``copy``, ``grouped``, ``validate``, ``state`` and ``spaces``, as in
            `marlvec.make`.

    Raises:
        SerialisationError: A factory cannot be pickled; nothing was started.
        EnvRaised: A factory raised; names the env, with its traceback. Nothing is left running.
        WorkerDied: A worker died while it built its envs.
        ContractError: Something is no env, or the envs' spaces differ.
        UnsupportedSpaceError: A leaf cannot be in shared memory, and that was required.

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
        context: Any = None,
        shared_memory: bool | str = True,
        daemon: bool = True,
        worker: Callable[[WorkerLink], None] | None = None,
        **settings: Unpack[SettingsArguments],
    ) -> None:
        chosen = Settings(**settings)
        super().__init__(len(factories), chosen)
        if shared_memory not in (True, False, "require"):
            raise ArgumentError(f"shared_memory must be True, False or 'require', got {shared_memory!r}")
        self._shares = Shares(self.num_envs, num_workers)
        if -(-self.num_envs // self._shares.num_workers) > ch.MAX_COUNT:
            raise ArgumentError(f"a worker can have {ch.MAX_COUNT} envs at most; more than num_workers={num_workers}")
        self.num_workers = self._shares.num_workers
        self.context = start_method(context)
        self._shared = bool(shared_memory)
        loop = None if worker is None else picklable(worker, "the worker loop")
        plans: list[Plan] = [
            {
                "factories": picklable(list(factories[lo:hi]), f"the factory of envs {lo} to {hi - 1}"),
                "worker": loop,
                "first": lo,
                "shared": self._shared,
                "shard": chosen.of_shard(),
            }
            for lo, hi in pairwise(self._shares.starts)
        ]
        self._crew = Crew()
        # Also runs when the vectorizer is garbage collected, and when the interpreter exits.
        self._finalizer = weakref.finalize(self, Crew.shut_down, self._crew, 1.0 if daemon else None)
        self._number = 1  # 0 is CLOSE's: its answer must not be taken for that to a request under way
        self._outstanding: list[deque[tuple[int, NDArray[np.int64]]]] = [deque() for _ in plans]
        try:
            self._start(plans, require=shared_memory == "require")
        except BaseException:
            self._calls.closed = True
            self._finalizer()
            raise

    def _start(self, plans: Sequence[Plan], *, require: bool) -> None:
        memory_fd = memory.create()
        try:
            for _ in plans:
                self._crew.workers.append(WorkerProcess(self.context, memory_fd))
            self._crew.watch()
            for w, plan in enumerate(plans):
                self._send(w, ch.INIT, pickle.dumps(plan))
            spec = agree(self._hear_specs(), self._shares.starts, self._settings.spaces)
            if require and (leaves := object_leaves(spec)):
                raise UnsupportedSpaceError(
                    f"shared_memory='require', but {', '.join(leaves)} cannot be there: not of fixed size. "
                    f"shared_memory=True sends such leaves, and only those, through a pipe"
                )
            size = Buffers.nbytes(spec, self.num_envs)
            if self._shared:
                memory.grow(memory_fd, size)
                buffers = Buffers(spec, self.num_envs, memory.map_memory(memory_fd, size))
                buffers.clear_masks()
            else:
                buffers = Buffers(spec, self.num_envs)
            for w in range(self.num_workers):
                # The common spec, not the worker's own: where spaces are compatible only, theirs may differ.
                self._send(w, ch.ATTACH, cloudpickle.dumps((self.num_envs, size, spec)))
            for w in range(self.num_workers):
                self._receive(w)
        finally:
            os.close(memory_fd)
        self._bind(spec, buffers)
        self._plain_steps = self._shared and not buffers.has_objects

    def _hear_specs(self) -> list[EnvSpec]:
        """What each worker's envs look like; raises what went wrong in building them."""
        specs: dict[int, EnvSpec] = {}
        failures: list[Failure] = []
        waiting = set(range(self.num_workers))
        while waiting:
            for w in self._crew.ready(None):
                if w not in waiting:  # it has told why its envs could not be built, and is gone now
                    continue
                told = self._receive(w)
                waiting.discard(w)
                if told.code == ch.OK:
                    specs[w] = pickle.loads(told.payload)
                else:
                    failures.extend(unpack_failure(packed) for packed in pickle.loads(told.payload))
        raise_failures(failures, self._place)
        return [specs[w] for w in range(self.num_workers)]

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the workers, in order of their envs."""
        return tuple(worker.pid for worker in self._crew.workers)

    def _dispatch(self, operation: str, env_ids: NDArray[np.int64], arguments: tuple[Sequence[Any], ...]) -> None:
        code = ch.OPERATIONS[operation]
        self._number = self._number % 0xFFFFFFFF + 1
        if env_ids is self._everyone and self._plain_steps and code in (ch.STEP, ch.SEND):
            for w, ids in enumerate(self._shares.slices):  # "all of yours" needs no more words
                self._request(w, code, ids, b"")
            return
        for w, positions in self._shares.split(env_ids):
            ids = env_ids[positions]
            self._request(w, code, ids, self._payload(code, w, ids, positions, arguments))

    def _request(self, w: int, code: int, ids: NDArray[np.int64], payload: bytes) -> None:
        self._outstanding[w].append((self._number, ids))
        self._send(w, code, payload)

    def _payload(
        self,
        code: int,
        w: int,
        ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        arguments: tuple[Sequence[Any], ...],
    ) -> bytes:
        """What a request says beyond its code; ``positions`` are these envs' places in ``arguments``."""
        local = ids - self._shares.starts[w]
        if code in (ch.STEP, ch.SEND):
            if self._plain_steps:
                return local.astype(np.int32).tobytes()
            buffers = self._buffers
            packed = None if self._shared else buffers.pack_actions(ids)
            if not buffers.has_objects:
                return pickle.dumps((local.tolist(), packed, None), protocol=5)
            return picklable((local.tolist(), packed, buffers.pack_object_actions(ids)), "the actions")
        own = [[argument[k] for k in positions.tolist()] for argument in arguments]
        if code == ch.CONTROL:
            return picklable((local.tolist(), *own), f"what {self._calls.pending}() takes")
        if code == ch.RESET and any(option is not None for option in own[1]):
            return picklable((local.tolist(), *own), "options")
        return pickle.dumps((local.tolist(), *own))

    def _gather(
        self, timeout: float | None, everyone: bool
    ) -> Sequence[tuple[NDArray[np.int64], Report | None]] | None:
        news: list[tuple[NDArray[np.int64], Report | None]] = []
        ready = self._crew.heard(self._outstanding)
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
        _, count, number, payload = self._receive(w)
        queue = self._outstanding[w]
        expected, ids = queue[0]
        if number != expected or count > len(ids):
            raise self._died(w, f"answered request {number} for {count} envs, expected {expected} for {len(ids)}")
        if count < len(ids):
            queue[0] = (expected, ids[count:])
            ids = ids[:count]
        else:
            queue.popleft()
        if payload and not self._plain_steps:
            packed, objects, payload = pickle.loads(payload)
            if packed is not None:
                self._buffers.unpack_results(ids, packed)
            if objects is not None:
                self._buffers.unpack_objects(ids, objects)
        return ids, unpack_report(payload, self._shares.starts[w]) if payload else None

    def _send(self, w: int, code: int, payload: bytes) -> None:
        try:
            self._crew.workers[w].channel.send(code, self._number, payload)
        except ChannelClosed:
            raise self._died(w) from None

    def _receive(self, w: int) -> Message:
        try:
            return self._crew.workers[w].channel.recv()
        except ChannelClosed:
            raise self._died(w) from None

    def _died(self, w: int, how: str | None = None) -> WorkerDied:
        """The error that tells of a worker's death; also kills what it started."""
        worker = self._crew.workers[w]
        worker.wait(0.2)
        worker.kill()
        lo, hi = self._shares.starts[w], self._shares.starts[w + 1]
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

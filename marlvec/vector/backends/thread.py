"""`ThreadVectorEnv`: envs in threads of this process, for envs that release the interpreter lock."""

from __future__ import annotations

import math
import queue
import threading
import time
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from marlvec.envs.env import MultiAgentEnv
from marlvec.envs.spec import EnvSpec
from marlvec.envs.wrapper_chain import innermost
from marlvec.errors import ArgumentError, Failure
from marlvec.vector.call_state import CallEvent
from marlvec.vector.data.buffers import Buffers
from marlvec.vector.data.report import Report
from marlvec.vector.faults.failures import capture, raise_failures
from marlvec.vector.settings import LONGEST_WAIT, Settings, SettingsArguments
from marlvec.vector.shards.env_builder import drawn_by_several, failures_of
from marlvec.vector.shards.partition import Partition, agree_on_spec
from marlvec.vector.shards.shard import Shard
from marlvec.vector.vector_env import VectorEnv

__all__ = ["ThreadVectorEnv"]


class ThreadVectorEnv(VectorEnv):
    """Shards in threads, several envs a thread.

    Nothing is pickled, and only the arrays are shared. Envs written in Python take turns on the interpreter lock and
    get no faster; envs that wait (for a simulator, a socket) or compute outside of Python do.

    Args:
        factories: One zero-argument callable per env; called in the env's own thread.
        num_workers: Threads; default: one per usable core, at most one per env.
        settings: ``autoreset_mode``, ``done_on``, ``copy``, ``grouped``, ``validate``, ``state``, ``spaces``,
            ``env_state``, ``on_fault`` and ``max_restarts``, as in `marlvec.make`.

    Raises:
        EnvRaised: A factory raised.
        ContractError: A factory returned something that is not an env, or the envs' spaces differ.

    Attributes:
        num_workers: Number of threads.
    """

    backend = "thread"
    _place_name = "worker thread"

    def __init__(
        self,
        factories: Sequence[Callable[[], Any]],
        *,
        num_workers: int | None = None,
        **settings: Unpack[SettingsArguments],
    ) -> None:
        chosen = Settings(**settings)
        super().__init__(len(factories), chosen)
        self._partition = Partition(self.num_envs, num_workers)
        self.num_workers = self._partition.num_workers
        self._worker_pool = WorkerThreads()
        # Also runs when the vectorizer is garbage collected, and when the interpreter exits.
        self._finalizer = weakref.finalize(self, WorkerThreads.shut_down, self._worker_pool, 1.0)
        try:
            spec, survived = self._start(factories, chosen)
            buffers = Buffers(spec, self.num_envs)
            self._worker_pool.attach(buffers, self._partition)
        except BaseException:
            self._call_state.on(CallEvent.CLOSE)
            self._finalizer()
            raise
        self._bind(spec, buffers)
        self._recovery.note_survived(survived)

    def _start(self, factories: Sequence[Callable[[], Any]], settings: Settings) -> tuple[EnvSpec, list[Failure]]:
        """Start the threads, which build their envs; return the spec, and failures of factories that were retried."""
        starts = self._partition.starts
        for w in range(self.num_workers):
            self._worker_pool.start(w, factories[starts[w] : starts[w + 1]], starts[w], settings)
        shards: dict[int, Shard] = {}
        failures: list[Failure] = []
        survived: list[Failure] = []
        for _ in range(self.num_workers):
            self._worker_pool.wait(None)
            w, _, outcome = self._worker_pool.replies.popleft()
            if isinstance(outcome, Shard):
                shards[w] = outcome
                survived += outcome.survived
            else:
                failures += outcome
        raise_failures(failures, self._place_name, starts=starts[:-1])
        ordered = [shards[w] for w in range(self.num_workers)]
        _check_apart([env for shard in ordered for env in shard.envs])
        self.shared_generators = drawn_by_several(sum((shard.generators for shard in ordered), Counter()))
        return agree_on_spec([shard.spec for shard in ordered], starts, settings.spaces), survived

    def _send_request(self, operation: str, env_ids: NDArray[np.int64], arguments: tuple[Sequence[Any], ...]) -> None:
        self._is_sending = True
        for w, positions in self._partition.split(env_ids):
            chosen = tuple([argument[k] for k in positions.tolist()] for argument in arguments)
            self._worker_pool.requests[w].put((operation, env_ids[positions] - self._partition.starts[w], chosen))

    def _receive(self, timeout: float | None, everyone: bool) -> bool:
        worker_pool, starts = self._worker_pool, self._partition.starts
        in_time = worker_pool.wait(LONGEST_WAIT if timeout is None else timeout)
        self._is_reading = True
        while worker_pool.replies:
            w, ids, report = worker_pool.replies.popleft()
            self._replies.append((ids + starts[w], report.shifted(starts[w])))
        self._is_reading = False
        return in_time

    def _forget_requests(self) -> bool:
        self._worker_pool.run_dry()
        return True

    def _shut_down(self, timeout: float) -> None:
        failures, stuck = self._worker_pool.shut_down(timeout)
        self._finalizer.detach()
        if stuck:
            warnings.warn(
                f"close(): {len(stuck)} worker threads are still in an env after {timeout} s; a thread cannot be "
                f"killed, and ends when its env returns: {', '.join(stuck)}",
                ResourceWarning,
                stacklevel=3,
            )
        raise_failures(failures, self._place_name)


_Reply = tuple[int, NDArray[np.int64], Any]
"""A worker's index, the local indices of envs that are ready, and their report."""


@dataclass
class WorkerThreads:
    """The threads of one vectorizer; a separate object, so that they can be ended without the vectorizer.

    Replies are counted before each wait and removed only after it, so that an interrupt in the middle loses none.
    """

    # per thread; None ends it; a `_Marker` is sent back when it is reached
    requests: list[queue.SimpleQueue[Any]] = field(default_factory=list)
    replies: deque[_Reply] = field(default_factory=deque)
    wakeup: queue.SimpleQueue[None] = field(default_factory=queue.SimpleQueue)  # at least one entry per reply
    threads: list[threading.Thread] = field(default_factory=list)

    def start(self, w: int, factories: Sequence[Callable[[], Any]], first: int, settings: Settings) -> None:
        """Start one thread; its first reply is its shard, or a list of failures."""
        self.requests.append(queue.SimpleQueue())
        body = (w, factories, first, settings, self.requests[w], self._reply)
        self.threads.append(
            threading.Thread(target=_run_worker_thread, args=body, name=f"marlvec-worker-{w}", daemon=True)
        )
        self.threads[w].start()

    def _reply(self, w: int, ids: NDArray[np.int64], outcome: Any) -> None:
        self.replies.append((w, ids, outcome))
        self.wakeup.put(None)

    def wait(self, timeout: float | None) -> bool:
        """Wait for a reply; return whether there is one."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not self.replies:
            left = max(0.0, deadline - time.monotonic())
            try:
                self.wakeup.get(timeout=min(left, LONGEST_WAIT))
            except queue.Empty:
                if left <= LONGEST_WAIT:
                    return bool(self.replies)
        return True

    def run_dry(self) -> None:
        """Wait until all threads have served their requests, and drop the replies."""
        marker = _Marker()
        for requests in self.requests:
            requests.put(marker)
        missing = len(self.threads)
        while missing:
            self.wait(None)
            missing -= self.replies.popleft()[2] is marker  # markers of earlier, interrupted calls do not count

    def attach(self, buffers: Buffers, partition: Partition) -> None:
        for w, requests in enumerate(self.requests):
            requests.put(buffers.rows(partition.starts[w], partition.starts[w + 1]))

    def shut_down(self, timeout: float) -> tuple[list[Failure], list[str]]:
        """End the threads. Returns failures of the envs' own close(), and names of threads that still run."""
        deadline = time.monotonic() + timeout
        for requests in self.requests:
            requests.put(None)
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        stuck = [thread.name for thread in self.threads if thread.is_alive()]
        failures: list[Failure] = []
        while True:
            try:
                _, _, outcome = self.replies.popleft()
            except IndexError:
                break
            if isinstance(outcome, list):  # failures of close(); anything else is a reply that was not fetched
                failures += outcome
        self.requests, self.threads = [], []
        return failures, stuck


class _Marker:
    """A request that a thread sends back when it reaches it in its queue."""


def _check_apart(envs: Sequence[MultiAgentEnv]) -> None:
    """Raise if threads share an env; within one thread the shard has checked that."""
    places: dict[int, int] = {}
    for i, env in enumerate(envs):
        j = places.setdefault(id(innermost(env)), i)
        if j != i:
            raise ArgumentError(
                f"env {i}, __init__(): expected a new env from its factory, got the object that is env {j} already; "
                f"create an env in each call"
            )


def _run_worker_thread(
    w: int,
    factories: Sequence[Callable[[], Any]],
    first: int,
    settings: Settings,
    requests: queue.SimpleQueue[Any],
    reply: Callable[[int, NDArray[np.int64], Any], None],
) -> None:
    none = np.zeros(0, np.int64)
    try:
        shard = Shard(factories, first, settings)
    except BaseException as error:
        reply(w, none, failures_of(error, first))
        return
    reply(w, none, shard)
    buffers = requests.get()
    if buffers is not None:  # else another thread's envs could not be built
        shard.attach(buffers)
        while (request := requests.get()) is not None:
            if isinstance(request, _Marker):
                reply(w, none, request)
            else:
                _serve(w, shard, first, request, reply)
    reply(w, none, shard.close())


def _serve(
    w: int, shard: Shard, first: int, request: Any, reply: Callable[[int, NDArray[np.int64], Any], None]
) -> None:
    operation, env_ids, arguments = request
    ids = env_ids.tolist()
    answered = 0
    try:
        for part, report in shard.serve(operation, ids, arguments):
            reply(w, np.asarray(part), report)
            answered += len(part)
    except BaseException as error:  # an env called sys.exit(): without a reply the caller would wait for ever
        left = ids[answered:]
        failures = [capture(first + i, operation, error) for i in left]
        reply(w, np.asarray(left), Report(failures=failures))

"""Backends in the calling process: `SyncVectorEnv`, `ThreadVectorEnv`, and `NativeVectorEnv` of compiled envs."""

from __future__ import annotations

import math
import queue
import threading
import time
import warnings
import weakref
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from marlvec.envs.env import MultiAgentEnv
from marlvec.envs.recipes import EnvRecipe
from marlvec.envs.spec import EnvSpec
from marlvec.envs.user_env import innermost
from marlvec.errors import ArgumentError, BrokenError, ContractError, Failure, MissingExtraError
from marlvec.native.catalog import NativeEntry, native_entry
from marlvec.native.native_env import NativeEnv, PaddedNativeEnv, refuse
from marlvec.vector.buffers import BufferReuse, Buffers
from marlvec.vector.calls import CallEvent, is_interrupt
from marlvec.vector.cores import Partition, agree_on_spec, check_memory, memory_for, usable_cores
from marlvec.vector.env_builder import ShardFailed, drawn_by_several, failures_of
from marlvec.vector.failures import capture, raise_failures
from marlvec.vector.infos import ShardReport
from marlvec.vector.native_shard import NativeShard
from marlvec.vector.settings import LONGEST_WAIT, Settings, SettingsArguments
from marlvec.vector.shard import Shard
from marlvec.vector.vector_env import VectorEnv


class InProcessVectorEnv(VectorEnv):
    """Runs requests in the calling process, one after the other, in the calls that fetch their replies."""

    _place_name = "this process"

    def __init__(self, num_envs: int, settings: Settings) -> None:
        super().__init__(num_envs, settings)
        self._requests: list[tuple[str, NDArray[np.int64], tuple[Sequence[Any], ...]]] = []

    @abstractmethod
    def _run(
        self, operation: str, env_ids: NDArray[np.int64], arguments: tuple[Sequence[Any], ...]
    ) -> ShardReport | None:
        """Run an operation on these envs, and return its report."""

    def _send_request(self, operation: str, env_ids: NDArray[np.int64], arguments: tuple[Sequence[Any], ...]) -> None:
        self._is_sending = True
        self._requests.append((operation, env_ids, arguments))

    def _receive(self, timeout: float | None, everyone: bool) -> bool:
        if not self._requests:
            return self._receive_nothing(timeout)
        try:
            operation, env_ids, arguments = self._requests.pop(0)
            self._replies.append((env_ids, self._run(operation, env_ids, arguments)))
        except BaseException as error:
            if is_interrupt(error):  # in the middle of an env's code: its state is unknown, so it has to be reset
                self._lose_in_flight()
            raise
        return True

    def _receive_nothing(self, timeout: float | None) -> bool:
        """Handle that no request is queued: a restart is not due yet, or an interrupt came before the request."""
        if self._recovery.due_heap:
            time.sleep(timeout or 0.0)
            return False
        self._replies.append((self._call_state.in_flight, None))
        return True

    def _lose_in_flight(self) -> None:
        """Mark envs that have not replied as idle, without an episode; results that have arrived are kept."""
        self.drive_count += 1
        calls = self._call_state
        lost = calls.in_flight
        calls.lose_episodes(lost)
        calls.undo_begin(lost, calls.arrived)
        self._requests.clear()
        self._replies.clear()

    def _forget_requests(self) -> bool:
        self._requests.clear()
        return True


class SyncVectorEnv(InProcessVectorEnv):
    """One shard, run by the caller.

    Args:
        factories: One zero-argument callable per env.
        settings: ``autoreset_mode``, ``done_on``, ``copy``, ``grouped``, ``validate``, ``state``, ``spaces``,
            ``env_state``, ``on_fault`` and ``max_restarts``, as in `marlvec.make`.

    Raises:
        EnvRaised: A factory raised.
        ContractError: A factory returned something that is not an env, or the envs' spaces differ.
    """

    backend = "sync"
    _works_in_forks = True

    def __init__(self, factories: Sequence[Callable[[], Any]], **settings: Unpack[SettingsArguments]) -> None:
        chosen = Settings(**settings)
        super().__init__(len(factories), chosen)
        try:
            self._shard = Shard(factories, 0, chosen)
        except ShardFailed as failed:
            failures = failed.failures
        else:
            failures = []
        if failures:
            raise_failures(failures, self._place_name)
        buffers = Buffers(self._shard.spec, self.num_envs)
        self._shard.attach(buffers)
        self._bind(self._shard.spec, buffers)
        self.shared_generators = drawn_by_several(self._shard.generators)
        self._recovery.record_survived(self._shard.survived)

    @property
    def envs(self) -> tuple[MultiAgentEnv, ...]:
        """The envs as adapters; ``.unwrapped`` of each is the user's env."""
        return tuple(self._shard.envs)

    def _run(
        self, operation: str, env_ids: NDArray[np.int64], arguments: tuple[Sequence[Any], ...]
    ) -> ShardReport | None:
        shard = self._shard
        ids = shard.everyone if env_ids is self._everyone else env_ids.tolist()
        return shard.step(ids) if operation == "step" else shard.do(operation, ids, arguments)

    def _shut_down(self, timeout: float) -> None:
        self._requests.clear()
        failures = self._shard.close()
        for failure in failures:
            if not isinstance(failure.exception, Exception):
                raise failure.exception  # Ctrl-C is the caller's, not the env's
        raise_failures(failures, self._place_name)


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
        self._recovery.record_survived(survived)

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
        reply(w, np.asarray(left), ShardReport(failures=failures))


_WORTH_A_THREAD = 512  # envs per thread; with fewer, waking a thread takes more time than it saves


class NativeVectorEnv(InProcessVectorEnv):
    """All envs of one `NativeEnv`; see `marlvec.native`.

    Actions are checked against their spaces in every call, whatever ``validate`` is: with a wrong action a compiled
    function could write outside its arrays. Kernels run no Python and cannot fail for one env alone, so ``on_fault``
    has no effect.

    Args:
        env: The envs.
        num_workers: Threads; default: one per usable core, at most one per 512 envs. Results do not depend on it.
        max_episode_steps: Truncate agents that are still alive after this many steps; None: never.
        render_modes: ``"rgb_array"`` or None per env.
        settings: ``autoreset_mode``, ``done_on``, ``copy``, ``grouped``, ``validate`` and ``state``, as in
            `marlvec.make`; ``spaces``, ``on_fault`` and ``max_restarts`` are accepted and have no effect.

    Attributes:
        num_workers: Number of threads, including the caller's.
    """

    backend = "native"
    _works_in_forks = True
    _always_checks_actions = True

    def __init__(
        self,
        env: NativeEnv,
        *,
        num_workers: int | None = None,
        max_episode_steps: int | None = None,
        render_modes: Sequence[str | None] | None = None,
        **settings: Unpack[SettingsArguments],
    ) -> None:
        chosen = Settings(**settings)
        n = env.num_envs
        super().__init__(n, chosen)
        if num_workers is None:
            num_workers = max(1, min(usable_cores(), n // _WORTH_A_THREAD))
        self.num_workers = Partition(n, num_workers).num_workers
        self._env = env
        self._batch = self._shard = NativeShard(
            env,
            num_threads=self.num_workers,
            autoreset_mode=chosen.autoreset_mode,
            keep_state=chosen.state,
            max_episode_steps=max_episode_steps,
            render_modes=[None] * n if render_modes is None else render_modes,
        )
        self._copier = BufferReuse(self._shard.copy)
        spec = self._shard.spec
        buffers = Buffers(spec, n)
        self._shard.attach(buffers)
        self._bind(spec, buffers)

    def _request_step(self, call: str, actions: Any, ids: NDArray[np.int64]) -> None:
        self._action_writer.write(self._buffers, actions, ids, self._selection(ids))
        self._env.check_actions(ids)
        self._request(call, ids)

    _state_kind = "native"

    def _find_obstacles(self) -> dict[int, str]:
        problem = self._env.state_obstacle()
        return {} if problem is None else dict.fromkeys(range(self.num_envs), problem)

    def _run(
        self, operation: str, env_ids: NDArray[np.int64], arguments: tuple[Sequence[Any], ...]
    ) -> ShardReport | None:
        try:
            return self._shard.do(operation, env_ids, arguments)
        except ArgumentError:  # the operation was not begun
            self._lose_in_flight()
            raise
        except Exception as error:
            if not is_interrupt(error):
                text = f"the envs are left in the middle of a {operation}: {error}"
                self._call_state.on(CallEvent.BREAK, BrokenError(text))
            raise

    def _shut_down(self, timeout: float) -> None:
        self._requests.clear()
        self._shard.close()


def make_native(
    recipes: Sequence[EnvRecipe], *, num_workers: int | None, **settings: Unpack[SettingsArguments]
) -> NativeVectorEnv:
    """Build native envs and compile all their functions; see `NativeVectorEnv` and `plan_native`."""
    found, n = plan_native(recipes), len(recipes)
    try:
        few = found.build(min(n, 2))
    except TypeError as error:
        raise_failures([capture(0, "__init__", error)], NativeVectorEnv._place_name)
        raise
    what, size = f"the rows of {n:,} envs of {found.entry.id}", Buffers.nbytes(few.spec(), n)
    check_memory(size, what)
    with memory_for(what, size):
        env = found.build()
        # Compile now, not in the first step. With a single env, array layouts and compiled signatures differ.
        _warm_up(few)
        return NativeVectorEnv(
            env,
            num_workers=num_workers,
            max_episode_steps=found.max_episode_steps,
            render_modes=found.render_modes,
            **settings,
        )


def is_exact(recipes: Sequence[EnvRecipe]) -> bool:
    """Return whether native envs exist for these recipes, with exactly equal results; compiles nothing."""
    try:
        found = plan_native(recipes)
        if found.entry.exact:
            found.build(1)
    except (ArgumentError, ContractError, MissingExtraError, TypeError):
        return False  # if the arguments are wrong, the reference env raises
    return found.entry.exact


def _warm_up(env: NativeEnv) -> None:
    """Compile every function of a `NativeEnv`, or load it from the disk cache; ``env`` is used for nothing else."""
    with NativeVectorEnv(env, state=env.state_space is not None) as envs:
        envs.reset(seed=0)
        envs.step(envs.random_action())


@dataclass(frozen=True)
class NativePlan:
    """Everything needed to build the envs: a catalog entry, its constructor's arguments, and a mode or None per env."""

    entry: NativeEntry
    kwargs: dict[str, Any]
    render_modes: tuple[str | None, ...]
    max_episode_steps: int | None
    pad: bool

    def build(self, num_envs: int | None = None) -> NativeEnv:
        """Build ``num_envs`` envs; None: all. `TypeError`: the constructor has no such argument."""
        env = self.entry.load()(num_envs or len(self.render_modes), **self.kwargs)
        known = env.metadata.get("render_modes", ())
        for mode in self.render_modes:
            if mode is not None and mode not in known:
                supported = ", ".join(map(repr, known)) or "none at all"
                raise ArgumentError(f"render_mode={mode!r}: {self.entry.id} supports {supported}")
            if mode == "human":  # the reference draws in every step
                raise refuse(self.entry.id, "render_mode='human'")
        return PaddedNativeEnv(env) if self.pad and len(env.spec().groups) > 1 else env


def plan_native(recipes: Sequence[EnvRecipe]) -> NativePlan:
    """Find the native form of the envs that these recipes describe; `ArgumentError` has the reason if none."""
    first = recipes[0]
    name = first.factory.entry.id
    entry = native_entry(name)
    if entry is None:
        raise ArgumentError(f"env {name!r} has no native form; backend='async' runs every env")
    kwargs = _arguments(first)
    for recipe in recipes:
        if recipe.factory.entry != first.factory.entry:
            raise refuse(name, f"another env beside it ({recipe.factory.entry.id!r})")
        if _arguments(recipe) != kwargs:
            raise refuse(name, f"envs of different arguments (env 0 has {kwargs}, env {recipe.env_index} others)")
    if first.wrappers:
        raise refuse(name, "wrappers")
    if first.agents != "auto":
        raise refuse(name, f"agents={first.agents!r}")
    if first.lenient:
        raise refuse(name, "lenient=True")
    modes = tuple(recipe.render_mode or kwargs.get("render_mode") for recipe in recipes)
    kwargs.pop("render_mode", None)
    return NativePlan(entry, kwargs, modes, first.max_episode_steps, first.pad)


def _arguments(recipe: EnvRecipe) -> dict[str, Any]:
    return {**recipe.factory.entry.kwargs, **recipe.factory.kwargs}

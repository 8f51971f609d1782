"""How asynchronous policies are asked: `Row`, `Request`, and the thread in which ``async def`` answers run.

Imported only where an `AsyncPolicy` is asked.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Literal, Protocol

import numpy as np
from gymnasium.spaces import Space

from marlvec.connectors.rows import RowRandom, Rows
from marlvec.errors import AnswerTimeout, ContractError
from marlvec.spaces import SpaceTree
from marlvec.trees import Tree, map_tree, ragged_array

LOOK_AGAIN = 1.0  # seconds


class Limit(Protocol):
    """`AnswerLimit`, which see."""

    def enter(self, request: Request, wake: Callable[[], object], /) -> bool: ...
    def leave(self, request: Request, own: Callable[[], object] | None = None, /) -> None: ...


class Asked(Protocol):
    """`AsyncPolicy`, as far as it is asked."""

    version: int
    action_space: Space[Any] | None
    answer_timeout: float | None
    answer_seed: int
    on_failure: Literal["raise", "restart", "fallback"]
    fallback: Any
    failures: int
    ragged: Mapping[str, Any]

    @property
    def limit(self) -> Limit: ...
    def ask(self, row: Row, /) -> Future[Any]: ...


class Row:
    """One row to answer: ``row.obs`` and other columns without the first axis, ``row.seed`` and ``row.explore``."""

    __slots__ = ("_columns", "_i", "_seed", "explore")

    def __init__(self, columns: Mapping[str, Tree] | Rows, i: int, seed: int, *, explore: bool) -> None:
        self._columns, self._i, self._seed, self.explore = columns, i, seed, explore

    def __getitem__(self, name: str) -> Any:
        if name not in self._columns:
            raise KeyError(f"no column {name!r}; the columns are {list(self._columns.keys())}")
        return map_tree(lambda leaf: _plain(leaf[self._i]), self._columns[name])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in Row.__slots__:  # a half-built instance has none
            raise AttributeError(name)
        if name not in self._columns:
            raise AttributeError(f"no column {name!r}; the columns are {list(self._columns.keys())}")
        return self[name]

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def keys(self) -> Iterable[str]:
        """Names of the columns."""
        return self._columns.keys()

    @property
    def seed(self) -> int:
        """An int below 2**31 that belongs to this row and policy."""
        one = {name: np.array([self[name]]) for name in ("eps_id", "agent_index", "t")}
        draws = RowRandom(0, "answer")
        draws.follow_run(self._seed)
        return int(draws.uniform(Rows.of_length(one, 1))[0, 0] * 2**31)

    def __repr__(self) -> str:
        return f"Row({', '.join(f'{name}={self[name]!r:.80}' for name in self.keys())})"


def _plain(value: Any) -> Any:
    """A row's own copy of a value; numbers become Python's."""
    if isinstance(value, np.ndarray):
        return value.copy()
    return value.item() if isinstance(value, np.generic) else value


class Finished:
    """Queue of requests that are done, for the one thread that waits for them; None: there may be room for another."""

    __slots__ = ("get", "get_nowait", "put")

    def __init__(self) -> None:
        queue: SimpleQueue[Request | None] = SimpleQueue()
        self.put, self.get, self.get_nowait = queue.put, queue.get, queue.get_nowait

    def wake(self) -> None:
        """Wake that thread up."""
        self.put(None)


class Request:
    """One request: open until its answer has come, has failed, or is no longer wanted."""

    __slots__ = (
        *("deadline", "error", "finished", "future", "is_done", "is_open", "key", "lane", "policy", "row", "runner"),
        *("value", "version"),
    )

    finished: Finished

    def __init__(self, policy: Asked, row: Row, *, key: Any = None, runner: Any = None, lane: int = -1) -> None:
        self.policy, self.row, self.key, self.runner, self.lane = policy, row, key, runner, lane
        self.future: Future[Any] | None = None
        self.deadline: float | None = None
        self.is_open = True  # until it has come back, has failed or was cancelled
        self.is_done = False  # whether it has an answer
        self.value: Any = None
        self.version = 0  # the policy's when it was sent
        self.error: BaseException | None = None

    def send(self, finished: Finished, version: int) -> bool:
        """Send it, if the policy's limit allows one more; once done it is in ``finished``.

        An error of the policy's ``ask`` is the request's.
        """
        policy = self.policy
        if not policy.limit.enter(self, finished.wake):
            return False
        self.version, self.finished = version, finished
        timeout = policy.answer_timeout
        self.deadline = None if timeout is None else monotonic() + timeout
        try:
            self.future = future = policy.ask(self.row)
            if not hasattr(future, "add_done_callback"):
                raise ContractError(f"ask() must return a Future, got {type(future).__name__}")
        except Exception as error:
            self.future = future = Future()
            future.set_exception(error)
        future.add_done_callback(self._done)
        return True

    def _done(self, _: Future[Any]) -> None:
        self.policy.limit.leave(self, self.finished.wake)
        if self.is_open:
            self.finished.put(self)

    def take(self) -> None:
        """Take the answer of a future that is done; sets ``value`` or ``error``."""
        future, self.future = self.future, None  # which has this object among its callbacks
        assert future is not None
        self.is_open = False
        if future.cancelled():
            self.error = ContractError("the request was cancelled by the policy's own code")
            return
        self.error = future.exception()
        if self.error is None:
            self.value, self.is_done = future.result(), True

    def expire(self) -> None:
        """Cancel it, and count its answer as late."""
        self.cancel()
        self.error = AnswerTimeout(f"no answer within answer_timeout={self.policy.answer_timeout:g} seconds")

    def cancel(self) -> None:
        """Cancel it, where that is possible, and make room for another one."""
        self.is_open = False
        future, self.future = self.future, None
        if future is not None:
            future.cancel()
        self.policy.limit.leave(self)


def wait_for(finished: Finished, flying: Iterable[Request]) -> list[Request]:
    """Wait until requests have come back, are late, or there may be room for another one; return the former two."""
    deadlines = [request.deadline for request in flying if request.deadline is not None]
    timeout = LOOK_AGAIN if not deadlines else min(LOOK_AGAIN, max(0.0, min(deadlines) - monotonic()))
    found: list[Request] = []
    try:
        request = finished.get(timeout=timeout)
        while True:
            if request is not None and request.is_open:
                request.take()
                found.append(request)
            request = finished.get_nowait()
    except Empty:
        if not found and _to_start and (loop := _loop) is not None:  # Ctrl-C has come before it was told to look there
            loop.call_soon_threadsafe(_start_all, loop)
    if deadlines:
        now = monotonic()
        late = [one for one in flying if one.deadline is not None and one.deadline <= now and one.is_open]
        for request in late:
            request.expire()
        found += late
    return found


def ask_all(policy: Asked, rows: Rows, places: Iterable[int], *, explore: bool) -> list[Any]:
    """Return the answers to these rows; waits for all.

    A failed answer raises, once all others are cancelled, or is the fallback.
    """
    finished = Finished()
    requests = [Request(policy, Row(rows, i, policy.answer_seed, explore=explore)) for i in places]
    waiting, flying = list(reversed(requests)), dict[Request, None]()
    try:
        while waiting or flying:
            while waiting and waiting[-1].send(finished, int(policy.version)):
                flying[waiting.pop()] = None
            for request in wait_for(finished, tuple(flying)):
                del flying[request]
                if request.error is None:
                    continue
                policy.failures += 1
                if policy.on_failure != "fallback":
                    raise request.error
                request.value = policy.fallback
    finally:
        for request in requests:
            if not request.is_done:
                request.cancel()
    return [request.value for request in requests]


# --- from answers to the output of Policy.act


def gather(policy: Asked, answers: Sequence[Any]) -> Tree | tuple[Tree, Mapping[str, Tree]]:
    """Stack answers, each an action or ``(action, columns)``, as `Policy.act` returns them."""
    split = [_split(answer) for answer in answers]
    actions = _stack_actions(policy, [action for action, _ in split])
    names = split[0][1].keys()
    if any(columns.keys() != names for _, columns in split):
        found = sorted({tuple(columns) for _, columns in split})
        raise ContractError(f"answer() must return the same columns each time, got {found}")
    if not names:
        return actions
    return actions, {name: _column(policy, name, [columns[name] for _, columns in split]) for name in names}


def _split(answer: Any) -> tuple[Any, Mapping[str, Any]]:
    if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], Mapping):
        return answer[0], answer[1]
    return answer, {}


def _stack_actions(policy: Asked, actions: Sequence[Any]) -> Tree:
    if policy.action_space is None:
        return _stack(actions, "actions")
    tree = SpaceTree(policy.action_space)
    leaves = []
    for k, leaf in enumerate(tree.leaves):
        values = [tree.flatten(action)[k] for action in actions]
        if leaf.is_object:
            leaves.append(_objects(values))
            continue
        column = _stack(values, "actions")
        fits = column.dtype != leaf.dtype and np.can_cast(column.dtype, leaf.dtype, "same_kind")
        leaves.append(column.astype(leaf.dtype) if fits else column)
    return tree.unflatten(leaves)


def _stack(values: Sequence[Any], name: str) -> np.ndarray[Any, Any]:
    if any(value is None or isinstance(value, (str, bytes)) for value in values):
        return _objects(values)
    try:
        return np.array(values)
    except ValueError:
        shapes = sorted({np.shape(value) for value in values})
        raise ContractError(
            f"answer() gave {name!r} of different shapes, {shapes}: declare lists by ragged={{{name!r}: dtype}}"
        ) from None


def _column(policy: Asked, name: str, values: Sequence[Any]) -> np.ndarray[Any, Any]:
    return ragged_array(values, policy.ragged[name], name) if name in policy.ragged else _stack(values, name)


def _objects(values: Sequence[Any]) -> np.ndarray[Any, Any]:
    column = np.empty(len(values), object)
    column[:] = values
    return column


# --- the event loop of async answers

Answer = Callable[[Row], Coroutine[Any, Any, Any]]

_lock = threading.RLock()  # garbage may be collected inside, and policies are
_loop: asyncio.AbstractEventLoop | None = None
_users: set[int] = set()  # ids of the objects whose answers run in it; it ends with the last one
_pid = 0  # of the process that it runs in
_tasks: set[asyncio.Task[None]] = set()  # a loop holds its tasks weakly
_to_start: deque[tuple[Answer, Row, Future[Any]]] = deque()
_is_called = False  # whether the loop was told to look there


def run_later(owner: object, answer: Answer, row: Row) -> Future[Any]:
    """Run ``answer(row)`` in the event loop; a cancelled future cancels it.

    The loop runs in a thread of its own, as long as one of the owners exists.
    """
    global _is_called
    loop = _loop
    if loop is None or id(owner) not in _users or _pid != os.getpid():
        loop = _join(owner)
    future: Future[Any] = Future()
    _to_start.append((answer, row, future))
    if not _is_called:  # one wake-up call for all that come until the loop looks: it costs more than an answer
        _is_called = True
        loop.call_soon_threadsafe(_start_all, loop)
    return future


def _join(owner: object) -> asyncio.AbstractEventLoop:
    global _loop, _pid, _is_called
    with _lock:
        if _pid != os.getpid():  # a forked child, without the thread
            _loop = None
            _users.clear()
        if id(owner) not in _users:
            _users.add(id(owner))
            weakref.finalize(owner, _leave, id(owner), os.getpid()).atexit = False
        if _loop is None:
            _tasks.clear()
            _to_start.clear()
            _loop, _pid, _is_called = asyncio.new_event_loop(), os.getpid(), False
            threading.Thread(target=_run, args=(_loop,), name="marlvec-answers", daemon=True).start()
        return _loop


def _leave(key: int, pid: int) -> None:
    global _loop
    with _lock:
        _users.discard(key)
        if not _users and _loop is not None and pid == _pid == os.getpid():
            _loop.call_soon_threadsafe(_loop.stop)
            _loop = None


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def _start_all(loop: asyncio.AbstractEventLoop) -> None:
    global _is_called
    _is_called = False  # first: what comes from now on calls again
    while _to_start:
        _start(loop, *_to_start.popleft())


def _start(loop: asyncio.AbstractEventLoop, answer: Answer, row: Row, future: Future[Any]) -> None:
    if future.cancelled():
        return
    task = loop.create_task(_answer(answer, row, future))
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)

    def stop(ended: Future[Any]) -> None:
        if ended.cancelled():
            loop.call_soon_threadsafe(task.cancel)

    future.add_done_callback(stop)


async def _answer(answer: Answer, row: Row, future: Future[Any]) -> None:
    value, error = None, None
    try:
        value = await answer(row)
    except BaseException as raised:
        error = raised
    if not future.set_running_or_notify_cancel():  # nobody waits for it
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)

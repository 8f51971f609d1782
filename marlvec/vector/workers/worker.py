"""A worker process: one shard behind a channel, its report packed for the pipe.

`Watchdog` finds hung envs by how long each worker has been busy with the same env.
"""

from __future__ import annotations

import gc
import io
import os
import pickle
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple, NoReturn

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from marlvec.envs.spec import COMMON
from marlvec.errors import ContractError, ContractWarning, Failure, SerialisationError
from marlvec.vector.buffers import Buffers
from marlvec.vector.cores import begin_worker, usable_cores
from marlvec.vector.env_builder import drawn_by_several, failures_of
from marlvec.vector.failures import capture, dump_each, load_each, pack_failures, pickle_or_explain, unpack_failures
from marlvec.vector.infos import ShardReport
from marlvec.vector.settings import Settings
from marlvec.vector.shard import Shard
from marlvec.vector.workers import channel as ch
from marlvec.vector.workers.channel import (
    AdaptivePoller,
    Channel,
    ChannelClosed,
    ChannelMessage,
    map_memory,
    write_stacks_to,
)


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """First message to a worker; factories and loop are pickled, and None is the loop `serve`."""

    worker: int
    first_env_id: int
    factories: bytes
    loop: bytes | None
    settings: Settings


_NAMES = {code: name for name, code in ch.OPERATIONS.items()}


class Request:
    """One request of the parent, for envs by their index in the shard; `arguments` are seeds and options, or commands.

    `operation` is a key of `OPERATIONS` in channel.py; the rows of ``"send"``, a step, may be answered in parts.
    """

    __slots__ = ("arguments", "ids", "number", "operation")

    def __init__(self, operation: str, number: int, ids: Sequence[int], arguments: tuple[Any, ...] = ()) -> None:
        self.operation = operation
        self.number = number
        self.ids = ids
        self.arguments = arguments

    def __repr__(self) -> str:
        return f"Request({self.operation!r}, ids={list(self.ids)})"


class WorkerLink:
    """A worker's end of the channel: receives requests, sends rows and reports.

    Pass your own loop as ``make(worker=...)`` to replace `serve`: it must answer each request once, in order, and
    return when there are no more.

        def timed(link):
            for request in link.requests():
                start = time.perf_counter()
                link.answer(request)
                log.write(f"{request.operation} of {len(request.ids)} envs: {time.perf_counter() - start:.6f} s")

    Attributes:
        shard: The envs of this worker.
        first_env_id: Index of its first env among all envs.
    """

    def __init__(self, channel: Channel, shard: Shard, buffers: Buffers, first_env_id: int, *, window: float) -> None:
        self.shard = shard
        self.first_env_id = first_env_id
        self._channel = channel
        self._buffers = buffers
        self._window, self._has_objects = window, buffers.has_objects
        self._warnings = _take_contract_warnings()
        self._closing: int | None = None

    def requests(self) -> Iterator[Request]:
        """Yield one request after the other, until the parent sends a close request."""
        channel, everyone = self._channel, self.shard.everyone
        poll, poller = select.poll(), AdaptivePoller(self._window)
        poll.register(channel.read_fd, select.POLLIN)
        while True:
            message = poller.receive(poll, channel)
            code = message.code
            if code == ch.CLOSE:
                self._closing = message.number
                return
            if not message.payload:
                yield Request(_NAMES[code], message.number, everyone)
            elif (request := self._read(message)) is not None:
                yield request

    def _read(self, message: ChannelMessage) -> Request | None:
        """Unpack a request. If the caller's objects cannot be unpickled, reply with the errors and return None."""
        name, number, payload = _NAMES[message.code], message.number, message.payload
        is_step = message.code in (ch.STEP, ch.SEND)
        if is_step and not self._has_objects:
            return Request(name, number, np.frombuffer(payload, np.int32).tolist())
        ids, what, given = pickle.loads(payload)
        if isinstance(given, bytes):
            call = "step" if is_step else what
            names = ["the actions"] if is_step else [f"the arguments of {call}() for env {self._id(i)}" for i in ids]
            try:
                given = load_each(given, names, where="its worker process")
            except SerialisationError as error:
                failures = [capture(self._id(i), call, error) for i in ids]
                self._reply(Request(name, number, ids), ShardReport(failures=failures), ids)
                return None
            given = given[0] if is_step else zip(*given, strict=True)
        if not is_step:
            return Request(name, number, ids, tuple(given))
        self._buffers.unpack_object_actions(np.array(ids), given)
        return Request(name, number, ids)

    def _id(self, i: int) -> int:
        return self.first_env_id + i

    def answer(self, request: Request) -> None:
        """Run a request in the shard, and reply."""
        for ids, report in self.shard.serve(request.operation, request.ids, request.arguments):
            self._reply(request, report, ids)

    def _reply(self, request: Request, report: ShardReport, ids: Sequence[int]) -> None:
        if self._warnings:
            report.warnings += self._warnings
            self._warnings.clear()
        if not self._has_objects:
            payload = pack_report(report, self.first_env_id) if report else b""
        else:
            control = request.operation in ("control", "get_state")
            objects = None if control else self._buffers.pack_objects(np.array(ids))
            payload = pickle.dumps((objects, pack_report(report, self.first_env_id)), protocol=5)
        self._channel.send(ch.OK, request.number, payload, len(ids))

    def close(self) -> None:
        """Close the envs, and reply if the parent sent a close request."""
        failures = self.shard.close()
        if self._closing is not None:
            self._channel.send(ch.OK, self._closing, pack_failures(failures))


def serve(link: WorkerLink) -> None:
    """Answer every request; a worker's default loop."""
    for request in link.requests():
        link.answer(request)


def run_worker(read_fd: int, write_fd: int, memory_fd: int, stacks_fd: int) -> NoReturn:
    """Serve one shard, then end this process."""
    write_stacks_to(stacks_fd)
    begin_worker()
    # Ctrl-C reaches all processes of the terminal; the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    np.random.seed()  # noqa: NPY002  (envs that draw from the global stream would repeat each other)
    channel = Channel(read_fd, write_fd)
    # A process that an env starts must not inherit the channel: the parent finds this worker's end by its closed pipe.
    for fd in (read_fd, write_fd, memory_fd, stacks_fd):
        os.set_inheritable(fd, False)
    os.register_at_fork(after_in_child=channel.close)
    code = 0
    try:
        _run(channel, memory_fd)
    except ChannelClosed:
        pass
    except SystemExit as ending:  # an env called sys.exit(): this process exits with its code
        code = 0 if ending.code is None else ending.code & 0xFF if isinstance(ending.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # there is no terminal, or no longer
            continue
    os._exit(code)  # a forked process must not run its parent's exit handlers


def _run(channel: Channel, memory_fd: int) -> None:
    hello = channel.recv()
    if hello.code == ch.CLOSE:  # another worker could not even be started
        channel.send(ch.OK, hello.number)
        return
    plan: WorkerPlan = pickle.loads(hello.payload)
    first = plan.first_env_id
    try:
        loop: Callable[[WorkerLink], None] = cloudpickle.loads(plan.loop) if plan.loop else serve
        factories = cloudpickle.loads(plan.factories)
    except BaseException as error:  # the user's classes may raise anything when they are loaded
        channel.send(ch.FAILED, hello.number, pack_failures([capture(first, "__init__", error)]))
        return
    try:
        shard = Shard(factories, first, plan.settings)
    except Exception as error:
        channel.send(ch.FAILED, hello.number, pack_failures(failures_of(error, first)))
        return
    survived, generators = pack_failures(shard.survived), drawn_by_several(shard.generators)
    channel.send(ch.OK, hello.number, cloudpickle.dumps((shard.spec, survived, generators)))
    try:
        _attach_and_serve(channel, memory_fd, shard, plan, loop)
    except BaseException:
        shard.close()
        raise


def _attach_and_serve(
    channel: Channel, memory_fd: int, shard: Shard, plan: WorkerPlan, loop: Callable[[WorkerLink], None]
) -> None:
    n, first = len(shard.envs), plan.first_env_id
    message = channel.recv()  # ATTACH: every worker's spec fits, and the memory has its size
    if message.code == ch.CLOSE:  # another worker's envs could not be built, or differ
        channel.send(ch.OK, message.number, pack_failures(shard.close()))
        return
    num_envs, num_workers, size, spec = pickle.loads(message.payload)
    mapped = map_memory(memory_fd, size, inherit=False)
    place = PROGRESS_BYTES * plan.worker
    # A memoryview, whose items are written in half the time of an array's.
    shard.progress = memoryview(mapped)[place : place + PROGRESS_BYTES].cast("q")
    buffers = Buffers(spec, num_envs, memoryview(mapped)[PROGRESS_BYTES * num_workers :]).rows(first, first + n)
    os.close(memory_fd)
    shard.attach(buffers)
    # Present objects (libraries, envs) live as long as this process: the garbage collector can skip them.
    gc.collect()
    gc.freeze()
    channel.send(ch.OK, message.number)
    window = _window(plan.worker, num_workers, usable_cores())
    link = WorkerLink(channel, shard, buffers, first, window=window)
    loop(link)
    link.close()


def _take_contract_warnings() -> list[str]:
    """Return a list that collects each `ContractWarning` of this process for the parent; others are shown here."""
    texts: list[str] = []
    show = warnings.showwarning

    def take(message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> None:
        if issubclass(category, ContractWarning):
            texts.append(str(message))
        else:
            show(message, category, *args, **kwargs)

    warnings.showwarning = take
    warnings.simplefilter("always", ContractWarning)
    return texts


def _window(place: int, num_workers: int, num_cores: int) -> float:
    """Return the seconds that a worker polls for its next request before it sleeps: about a policy's forward pass."""
    # With as many workers as cores, the last worker shares its core with the caller and polls for a shorter time.
    if num_workers > num_cores:
        return 0.0
    return 1e-3 if place + 1 < num_cores else 0.2e-3


MAX_BYTES = 64 * 2**20
"""Maximum size of one env's pickled infos in one call, in bytes. Checked only for infos sent to the parent."""
_INFO, _ANSWER = "the info", "the answer"
_OPERATIONS = {_INFO: "infos", _ANSWER: "call"}


def pack_report(report: ShardReport, first: int) -> bytes:
    """Pickle a report. Infos and answers that cannot be pickled, or are too large, become failures of their env.

    Plain data is pickled in one piece. Objects whose unpickling runs code other than Python's or numpy's may raise in
    the parent, so they are pickled one by one. ``first`` is the global index of the worker's first env.
    """
    tables = (report.infos, report.final_infos, report.answers)
    failures = report.failures
    file = io.BytesIO()
    try:
        _PlainPickler(file, protocol=5).dump((*tables, pack_failures(failures), report.warnings))
        data = file.getvalue()
    except Exception:  # some data are not plain, or cannot be pickled: find these, keep the rest
        for table, what in zip(tables, (_INFO, _INFO, _ANSWER), strict=True):
            failures = failures + _seal_each(table, what, first)
        data = pickle.dumps((*tables, pack_failures(failures), report.warnings), protocol=5)
    if len(data) > MAX_BYTES and (large := _drop_large(report, first)):
        data = pickle.dumps((*tables, pack_failures(failures + large), report.warnings), protocol=5)
    return data


class _PlainPickler(pickle.Pickler):
    """Pickles data that any process can unpickle, and raises at other objects."""

    def reducer_override(self, obj: Any) -> Any:
        """Refuse objects that are not Python's or numpy's; called for all but builtin numbers, texts, containers."""
        kind = obj if isinstance(obj, (type, FunctionType, BuiltinFunctionType)) else type(obj)
        if str(kind.__module__).partition(".")[0] in ("builtins", "numpy"):
            return NotImplemented
        raise TypeError(f"{kind.__qualname__} is not plain")


def _drop_large(report: ShardReport, first: int) -> list[Failure]:
    """Remove infos of envs that exceed `MAX_BYTES`, and return failures for them. Answers may have any size."""
    failures = []
    tables = (report.infos, report.final_infos)
    for i in sorted(report.infos.keys() | report.final_infos.keys()):
        size = sum(len(pickle.dumps(table[i], protocol=5)) for table in tables if i in table)
        if size > MAX_BYTES:
            for table in tables:
                table.pop(i, None)
            problem = f"its infos take {size:,} bytes, pickled; expected at most {MAX_BYTES:,} in one call"
            failures.append(capture(first + i, "infos", ContractError(problem)))
    return failures


class _Sealed(NamedTuple):
    """The info of an env with the agents of its parts, or an answer (``agents`` is None), pickled by `dump_each`."""

    agents: tuple[Any, ...] | None
    data: bytes


def _seal(value: Any, what: str, env_id: int) -> _Sealed:
    is_info = what == _INFO
    try:
        return _Sealed(tuple(value) if is_info else None, dump_each(list(value.values()) if is_info else [value]))
    except Exception:
        pickle_or_explain(value, f"{what} of env {env_id}", coming_back=True)  # raises with the reason
        raise


def _seal_each(table: dict[int, Any], what: str, first: int) -> list[Failure]:
    failures = []
    for i, value in list(table.items()):
        try:
            table[i] = _seal(value, what, first + i)
        except Exception as error:
            del table[i]
            failures.append(capture(first + i, _OPERATIONS[what], error))
    return failures


def unpack_report(payload: bytes, first: int) -> ShardReport:
    """Rebuild a report in the parent, with global env indices. A part that cannot be unpickled becomes a failure."""
    infos, final_infos, answers, failures, warnings = pickle.loads(payload)
    report = ShardReport(failures=unpack_failures(failures), warnings=warnings)
    failed = {failure.env_id for failure in report.failures}
    parts = ((infos, report.infos, _INFO), (final_infos, report.final_infos, _INFO), (answers, report.answers, _ANSWER))
    for source, target, what in parts:
        for i, value in source.items():
            try:
                target[first + i] = _open(value, what) if isinstance(value, _Sealed) else value
            except SerialisationError as error:
                if first + i not in failed:
                    failed.add(first + i)
                    report.failures.append(capture(first + i, _OPERATIONS[what], error))
    return report


def _open(sealed: _Sealed, what: str) -> Any:
    if sealed.agents is None:
        (answer,) = load_each(sealed.data, [what])
        return answer
    names = [what if agent == COMMON else f"{what} of agent {agent!r}" for agent in sealed.agents]
    return dict(zip(sealed.agents, load_each(sealed.data, names), strict=True))


PROGRESS_BYTES = 64
"""One cache line per worker, at the head of the shared memory."""

_LOOK = 0.2  # maximum seconds between two checks


def progress_of(memory: Any, num_workers: int) -> NDArray[np.int64]:
    """Return a (W,) view of each worker's progress number at the head of the shared memory."""
    head = np.frombuffer(memory, np.int64, num_workers * PROGRESS_BYTES // 8)
    return head.reshape(num_workers, PROGRESS_BYTES // 8)[:, 0]


class Watchdog:
    """Finds workers that make no progress for ``timeout`` seconds; ``pause`` is the time until the next check."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.pause = min(_LOOK, timeout / 4)
        self._next_look = 0.0
        self._seen: dict[int, tuple[int, int]] = {}
        self._since: dict[int, float] = {}

    def is_due(self) -> bool:
        return time.monotonic() >= self._next_look

    def look(self, busy: Iterable[tuple[int, int, int]]) -> list[int]:
        """Return workers without progress for ``timeout`` seconds; they may have replied in the meantime."""
        # `busy`: per busy worker its index, the number of the request that it must answer next, and its progress.
        now = time.monotonic()
        hung = []
        due = now + self.pause
        seen = {}
        for w, number, progress in busy:
            seen[w] = (number, progress)
            if self._seen.get(w) != seen[w]:
                self._since[w] = now
            elif now - self._since[w] >= self.timeout:
                hung.append(w)
            due = min(due, max(now + 0.001, self._since[w] + self.timeout))
        self._seen = seen
        self._next_look = due
        return hung

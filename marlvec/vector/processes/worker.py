"""A worker process: one shard behind a channel. It ends on a close request, or when the channel is closed."""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import cloudpickle
import numpy as np

from marlvec.errors import ContractWarning, SerialisationError
from marlvec.vector.data.buffers import Buffers
from marlvec.vector.data.pickling import load_each
from marlvec.vector.data.report import Report
from marlvec.vector.faults.failures import capture, pack_failures
from marlvec.vector.processes import channel as ch
from marlvec.vector.processes.channel import AdaptivePoller, Channel, ChannelClosed, Message
from marlvec.vector.processes.limits import begin_worker
from marlvec.vector.processes.report_packing import pack_report
from marlvec.vector.processes.shared_memory import map_memory
from marlvec.vector.processes.stack_dump import write_stacks_to
from marlvec.vector.processes.watchdog import PROGRESS_BYTES
from marlvec.vector.settings import Settings
from marlvec.vector.shards.env_builder import drawn_by_several, failures_of
from marlvec.vector.shards.partition import usable_cores
from marlvec.vector.shards.shard import Shard

__all__ = ["Request", "WorkerLink", "WorkerPlan", "run_worker", "serve"]


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

    def _read(self, message: Message) -> Request | None:
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
                self._reply(Request(name, number, ids), Report(failures=failures), ids)
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

    def _reply(self, request: Request, report: Report, ids: Sequence[int]) -> None:
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

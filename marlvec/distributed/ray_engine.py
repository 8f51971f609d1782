"""`RayEngine`: each collector an actor of a Ray cluster. The only module that imports ray."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle

from marlvec.distributed.accounting import in_pieces
from marlvec.distributed.engine import LostError, Message, Reply, UnsentError
from marlvec.distributed.server import CollectorServer, Place, Raised
from marlvec.errors import ArgumentError, StateError
from marlvec.extras import needs_extra

with needs_extra("ray", "Collectors(backend='ray')", "pip install 'marlvec[distributed]'"):
    import ray
    from ray import exceptions


RemoteArgs = Mapping[str, Any] | Callable[[Place], Mapping[str, Any]] | None
_GRACE = 5.0  # seconds for collectors to close their envs
# Ray copies larger buffers into its store with six threads, started for each buffer.
_PIECE = 1_000_000  # bytes
# The store costs 1 to 2 ms of processor time a value, and again for each fetch. Up to 100 kB, Ray sends values with the
# call.
_SMALL = 50_000  # bytes
_OURS = ("max_restarts", "max_task_retries", "max_concurrency")
_LONGEST = 1e9  # seconds, as Ray does not accept infinity


@dataclass
class _Connection:
    """A connection to Ray, made by an engine of this process; the last engine that uses it ends it."""

    session: tuple[str, str]
    is_local: bool  # the engine started the cluster
    engines: int = 0  # that use it


_connections: list[_Connection] = []  # at most one connection


class _Actor:
    """A server in its own process, which answers messages one by one, in order."""

    def __init__(self) -> None:
        self._server = CollectorServer(fetch, reports_pid=True)

    def answer(self, message: Any) -> Any:
        return in_pieces(self._server.answer(message), _PIECE)

    def close(self) -> None:
        self._server.close()


class RayEngine:
    """Runs servers as Ray actors that Ray never restarts, with messages that it never sends twice.

    Each incarnation is an actor, so one handle is one process: Ray's own restarts would put a new process behind the
    same handle, and its retries could run a request twice. `StateError` once the connection to Ray has ended.
    """

    def __init__(self, remote_args: RemoteArgs) -> None:
        if not callable(remote_args):
            _check(remote_args or {})
        if not ray.is_initialized():
            # Without an address Ray would join any running cluster on this machine.
            address = os.environ.get("RAY_ADDRESS") or "local"  # set by `ray job submit`
            ray.init(address=address, include_dashboard=False)
            _connections[:] = [_Connection(_session(), address == "local")]
        self._session = _session()
        self._connection = next((known for known in _connections if known.session == self._session), None)
        if self._connection is not None:
            self._connection.engines += 1
        # A cluster that this engine starts runs nothing else, so its CPUs need not be counted.
        is_ours = self._connection is not None and self._connection.is_local
        self._defaults: Mapping[str, Any] = {"num_cpus": 0 if is_ours else 1}
        self._given = remote_args
        self._class = ray.remote(max_restarts=0, max_task_retries=0)(_Actor)
        self._leaving: list[tuple[Any, Any]] = []

    def start(self, place: Place) -> Any:
        self._check_connected()
        given = self._given(place) if callable(self._given) else self._given
        return self._class.options(**{**self._defaults, **_check(given or {})}).remote()

    def submit(self, handle: Any, message: Message) -> Any:
        self._check_connected()
        return handle.answer.remote(message)

    def ready(self, tickets: Sequence[Any], timeout: float) -> list[Any]:
        self._check_connected()
        timeout = min(timeout, _LONGEST)
        # Not fetched here: the node may die between an answer being ready and its bytes being here.
        found, others = ray.wait(list(tickets), num_returns=1, timeout=timeout, fetch_local=False)
        if found and others:
            found += ray.wait(others, num_returns=len(others), timeout=0, fetch_local=False)[0]
        there = set(found)
        return [ticket for ticket in tickets if ticket in there]

    def take(self, ticket: Any, timeout: float) -> Reply:
        try:
            reply: Reply = ray.get(ticket, timeout=min(timeout, _LONGEST))
        except exceptions.RayTaskError as error:  # the reply cannot be sent; the user's exceptions are replies
            cause = error.cause if isinstance(error.cause, Exception) else error
            raise UnsentError(Raised.of(cause, "while its answer was sent")) from error
        except exceptions.GetTimeoutError as error:
            raise LostError("object_lost", f"its answer did not come within {timeout:g} s") from error
        except exceptions.ActorUnavailableError as error:
            raise LostError("unreachable", _first_line(error)) from error
        except (exceptions.RayActorError, exceptions.OutOfMemoryError) as error:
            raise LostError("died", _first_line(error)) from error
        except (exceptions.ObjectLostError, exceptions.ObjectStoreFullError) as error:
            raise LostError("object_lost", _first_line(error)) from error
        except exceptions.RayError as error:  # e.g. its node is gone: whether the request ran is unknown
            raise LostError("unreachable", _first_line(error)) from error
        return reply

    def put(self, value: Any) -> Any:
        self._check_connected()
        arrays: list[pickle.PickleBuffer] = []  # so that nothing is copied to measure the size
        frame = cloudpickle.dumps(value, protocol=5, buffer_callback=arrays.append)
        if len(frame) + sum(array.raw().nbytes for array in arrays) <= _SMALL:
            return bytes(cloudpickle.dumps(value))
        return [ray.put(value)]  # in a list, or Ray would send the value with every message

    def kill(self, handle: Any) -> None:
        if self._is_connected:
            ray.kill(handle)

    def stop(self, handle: Any) -> None:
        if self._is_connected:
            self._leaving.append((handle, handle.close.remote()))
            handle.__ray_terminate__.remote()  # after close()

    def close(self) -> None:
        leaving, self._leaving = self._leaving, []
        if not self._is_connected:
            return
        if leaving:
            ray.wait([closed for _, closed in leaving], num_returns=len(leaving), timeout=_GRACE, fetch_local=False)
        for handle, _ in leaving:
            ray.kill(handle)
        if self._connection is not None:
            self._connection.engines -= 1
            if not self._connection.engines:
                _connections.clear()
                ray.shutdown()

    @property
    def _is_connected(self) -> bool:
        return bool(ray.is_initialized()) and _session() == self._session

    def _check_connected(self) -> None:
        """Raise if the connection ended: Ray would connect to another cluster by itself, without these handles."""
        if not self._is_connected:
            raise StateError("the connection to Ray that these collectors were made with has ended: make others")


def _session() -> tuple[str, str]:
    context = ray.get_runtime_context()
    return str(context.gcs_address), str(context.get_job_id())


def fetch(stored: Any) -> Any:
    """Return a value from `RayEngine.put`. Small values arrive with the message, others once per node on demand."""
    return pickle.loads(stored) if isinstance(stored, bytes) else ray.get(stored[0])


def _check(remote_args: Mapping[str, Any]) -> Mapping[str, Any]:
    if wrong := [name for name in _OURS if name in remote_args]:
        raise ArgumentError(f"remote_args cannot have {wrong}: an actor is one incarnation, and answers in order")
    return remote_args


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)

"""`RayEngine`: each collector an actor of a Ray cluster. The only module that imports ray."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle

from marlvec.distributed.engines.answer_pieces import in_pieces
from marlvec.distributed.engines.engine import LostError, Message, Reply, UnsentError
from marlvec.distributed.place import Place
from marlvec.distributed.server.collector_server import CollectorServer
from marlvec.distributed.server.messages import Raised
from marlvec.errors import ArgumentError, StateError
from marlvec.extras import needs_extra

with needs_extra("ray", "Collectors(backend='ray')", "pip install 'marlvec[distributed]'"):
    import ray
    from ray import exceptions

__all__ = ["RayEngine", "fetch"]

RemoteArgs = Mapping[str, Any] | Callable[[Place], Mapping[str, Any]] | None
_GRACE = 5.0  # seconds for collectors to close their envs
# Ray copies a larger buffer into its store with six threads that it starts for this one.
_PIECE = 1_000_000  # bytes
# The store takes 1 to 2 ms of processor time a value, and as much for each who fetches it. Up to 100 kB Ray sends along
# with the call.
_SMALL = 50_000  # bytes
_OURS = ("max_restarts", "max_task_retries", "max_concurrency")
_LONGEST = 1e9  # seconds that Ray waits for: it knows no infinity


@dataclass
class _Connection:
    """A connection to Ray that an engine of this process has made, and the last one of those that use it ends.

    Attributes:
        session: Which it is.
        is_local: Whether it is to a cluster of our own.
        engines: How many use it.
    """

    session: tuple[str, str]
    is_local: bool
    engines: int = 0


_connections: list[_Connection] = []  # one at most


class _Actor:
    """A server in a process of its own. Its messages are answered in order, one after the other."""

    def __init__(self) -> None:
        self._server = CollectorServer(fetch, reports_pid=True)

    def answer(self, message: Any) -> Any:
        return in_pieces(self._server.answer(message), _PIECE)

    def close(self) -> None:
        self._server.close()


class RayEngine:
    """Actors that Ray never restarts, and messages that it never sends twice.

    An incarnation is an actor, so one handle is one process: Ray's own restarts would put a fresh process behind the
    same handle, and its retries could run a request twice.

    Args:
        remote_args: For ``Actor.options``, or a function of the place.

    Raises:
        ArgumentError: They have what is decided here.
        StateError: By all methods that need it: the connection to Ray that it was made with has ended.
    """

    def __init__(self, remote_args: RemoteArgs) -> None:
        if not callable(remote_args):
            _check(remote_args or {})
        if not ray.is_initialized():
            # Without an address Ray would join any cluster that runs on this machine.
            address = os.environ.get("RAY_ADDRESS") or "local"  # as `ray job submit` sets it
            ray.init(address=address, include_dashboard=False)
            _connections[:] = [_Connection(_session(), address == "local")]
        self._session = _session()
        self._connection = next((known for known in _connections if known.session == self._session), None)
        if self._connection is not None:
            self._connection.engines += 1
        # A cluster of our own on this machine runs nothing else that needs its CPUs counted.
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
        # Not fetched here: to be ready is one thing, to have its bytes another, and a node may go in between.
        found, others = ray.wait(list(tickets), num_returns=1, timeout=timeout, fetch_local=False)
        if found and others:
            found += ray.wait(others, num_returns=len(others), timeout=0, fetch_local=False)[0]
        there = set(found)
        return [ticket for ticket in tickets if ticket in there]

    def take(self, ticket: Any, timeout: float) -> Reply:
        try:
            reply: Reply = ray.get(ticket, timeout=min(timeout, _LONGEST))
        except exceptions.RayTaskError as error:  # a reply that cannot be sent; what the user's code raises is a reply
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
        except exceptions.RayError as error:  # its node is gone, for example: whether it has run is not known
            raise LostError("unreachable", _first_line(error)) from error
        return reply

    def put(self, value: Any) -> Any:
        self._check_connected()
        arrays: list[pickle.PickleBuffer] = []  # not copied to learn their size
        frame = cloudpickle.dumps(value, protocol=5, buffer_callback=arrays.append)
        if len(frame) + sum(array.raw().nbytes for array in arrays) <= _SMALL:
            return bytes(cloudpickle.dumps(value))
        return [ray.put(value)]  # in a list, or every message would bring the value with it

    def kill(self, handle: Any) -> None:
        if self._is_connected:
            ray.kill(handle)

    def stop(self, handle: Any) -> None:
        if self._is_connected:
            self._leaving.append((handle, handle.close.remote()))
            handle.__ray_terminate__.remote()  # once it is closed

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
        """Ray would connect by itself, to a cluster that knows no handle of this one."""
        if not self._is_connected:
            raise StateError("the connection to Ray that these collectors were made with has ended: make others")


def _session() -> tuple[str, str]:
    """Names the connection that there is now."""
    context = ray.get_runtime_context()
    return str(context.gcs_address), str(context.get_job_id())


def fetch(stored: Any) -> Any:
    """What `RayEngine.put` stored: small values came with the message, others once a node, when they are needed."""
    return pickle.loads(stored) if isinstance(stored, bytes) else ray.get(stored[0])


def _check(remote_args: Mapping[str, Any]) -> Mapping[str, Any]:
    if wrong := [name for name in _OURS if name in remote_args]:
        raise ArgumentError(f"remote_args cannot have {wrong}: an actor is one incarnation, and answers in order")
    return remote_args


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)

"""`SyncEngine`: all collectors in the caller's process, one after the other; for reference and debugging."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Sequence
from typing import Any

import cloudpickle

from marlvec.distributed.engines.engine import LostError, Message, Reply
from marlvec.distributed.place import Place
from marlvec.distributed.server.collector_server import CollectorServer

__all__ = ["SyncEngine"]


class _Ticket:
    def __init__(self, handle: _LocalServer, message: Message, number: int) -> None:
        self.handle, self.message, self.number = handle, message, number
        self.reply: Reply | None = None


class _LocalServer:
    def __init__(self) -> None:
        self.server = CollectorServer(pickle.loads, reports_pid=False)
        self.queue: deque[_Ticket] = deque()
        self.is_gone = False


class SyncEngine:
    """Answers a message when its answer is awaited. Values are pickled, so that collectors share no objects."""

    def __init__(self) -> None:
        self._submitted = 0

    def start(self, place: Place) -> _LocalServer:
        return _LocalServer()

    def submit(self, handle: _LocalServer, message: Message) -> _Ticket:
        self._submitted += 1
        ticket = _Ticket(handle, message, self._submitted)
        handle.queue.append(ticket)
        return ticket

    def ready(self, tickets: Sequence[_Ticket], timeout: float) -> list[_Ticket]:
        if not any(map(self._is_ready, tickets)):
            self._work(min(tickets, key=lambda ticket: ticket.number))  # or one server would do all the work
        return [ticket for ticket in tickets if self._is_ready(ticket)]

    def take(self, ticket: _Ticket, timeout: float) -> Reply:
        if not self._is_ready(ticket):
            self._work(ticket)
        if ticket.reply is None:
            raise LostError("died", "it was ended")
        return ticket.reply

    def put(self, value: Any) -> bytes:
        return bytes(cloudpickle.dumps(value))

    def kill(self, handle: _LocalServer) -> None:
        handle.is_gone = True
        handle.server.close()

    def stop(self, handle: _LocalServer) -> None:
        self.kill(handle)

    def close(self) -> None:
        pass

    def _is_ready(self, ticket: _Ticket) -> bool:
        return ticket.reply is not None or ticket.handle.is_gone

    def _work(self, ticket: _Ticket) -> None:
        """Answer messages up to a ticket; after Ctrl-C the next call continues."""
        queue = ticket.handle.queue
        while ticket.reply is None:
            if queue[0].reply is None:
                queue[0].reply = ticket.handle.server.answer(queue[0].message)
            queue.popleft()

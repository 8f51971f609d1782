"""`Engine`: starts collectors' servers, carries messages, and reports losses; `SyncEngine`: in the caller's process."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import cloudpickle

from marlvec.distributed.accounting import LostReason
from marlvec.distributed.server import (
    Answer,
    CollectorCommand,
    CollectorServer,
    CollectRequest,
    Place,
    Raised,
    Start,
    Started,
)

Message = Start | CollectRequest | CollectorCommand
Reply = Started | Answer | Raised


class LostError(Exception):
    """Raised: an answer will never come, or cannot be fetched. `reason` as in `Accounting.lost_by`."""

    def __init__(self, reason: LostReason, text: str) -> None:
        super().__init__(text)
        self.reason: LostReason = reason


class UnsentError(LostError):
    """Raised: an answer cannot be sent, because of `raised`. Its rows are lost; its server continues."""

    def __init__(self, raised: Raised) -> None:
        super().__init__("object_lost", f"its answer could not be sent: {raised.summary}")
        self.raised = raised


class Engine(Protocol):
    """Runs collector servers. The caller keeps track of requests.

    A handle is one server, from `start` to `stop` or `kill`; it is never restarted. A ticket is the future answer to a
    message. Tickets of one handle become ready in the order of their messages.
    """

    def start(self, place: Place) -> Any:
        """Start a server and return its handle, without waiting."""

    def submit(self, handle: Any, message: Message) -> Any:
        """Send a message and return its ticket, without waiting."""

    def ready(self, tickets: Sequence[Any], timeout: float) -> list[Any]:
        """Wait until a ticket is answered or lost, or the time is over; return all such tickets."""

    def take(self, ticket: Any, timeout: float) -> Reply:
        """Fetch an answer to the head; `UnsentError`: it cannot be sent; `LostError`: it is lost, or came too late."""

    def put(self, value: Any) -> Any:
        """Store a value for all servers to fetch, as long as the returned reference lives."""

    def kill(self, handle: Any) -> None:
        """Kill a server at once."""

    def stop(self, handle: Any) -> None:
        """Let an idle server close its envs, then end it."""

    def close(self) -> None:
        """End what is left."""


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

"""`Engine`: starts collectors' servers, carries messages, and reports losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from marlvec.distributed.accounting import LostReason
from marlvec.distributed.place import Place
from marlvec.distributed.server.messages import Answer, Command, Raised, Request, Start, Started

__all__ = ["Engine", "LostError", "Message", "Reply", "UnsentError"]

Message = Start | Request | Command
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

"""`Engine`: what places collectors, carries messages, and reports losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from marlvec.distributed.accounting.ledger import LostReason
from marlvec.distributed.place import Place
from marlvec.distributed.server.messages import Answer, Command, Raised, Request, Start, Started

__all__ = ["Engine", "LostError", "Message", "Reply", "UnsentError"]

Message = Start | Request | Command
Reply = Started | Answer | Raised


class LostError(Exception):
    """An answer will never come, or cannot be had.

    Attributes:
        reason: As the ledger has it.
    """

    def __init__(self, reason: LostReason, text: str) -> None:
        super().__init__(text)
        self.reason: LostReason = reason


class UnsentError(LostError):
    """An answer was made, and cannot be sent. What it took along, rows too, is gone; its server goes on.

    Attributes:
        raised: Why.
    """

    def __init__(self, raised: Raised) -> None:
        super().__init__("object_lost", f"its answer could not be sent: {raised.summary}")
        self.raised = raised


class Engine(Protocol):
    """Runs collector servers. What was requested is its caller's to know.

    A handle is one process, or what stands for one, from `start` to `stop` or `kill`; it is never brought back. A
    ticket is one message's answer. Tickets of one handle become ready in the order in which they were submitted.
    """

    def start(self, place: Place) -> Any:
        """Start a server, and return its handle; does not wait for it."""

    def submit(self, handle: Any, message: Message) -> Any:
        """Send a message, and give its ticket; does not wait."""

    def ready(self, tickets: Sequence[Any], timeout: float) -> list[Any]:
        """Which of these have an answer, or never will, once one has or the seconds are over."""

    def take(self, ticket: Any, timeout: float) -> Reply:
        """Bring an answer to the head.

        Raises:
            UnsentError: It cannot be sent.
            LostError: There is none, or not within so many seconds.
        """

    def put(self, value: Any) -> Any:
        """Store a value where all servers can fetch it, as long as what this returns is referenced."""

    def kill(self, handle: Any) -> None:
        """End a server at once, whatever it does."""

    def stop(self, handle: Any) -> None:
        """Have an idle server close what it has, and end it."""

    def close(self) -> None:
        """End what is left."""

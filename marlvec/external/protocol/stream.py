"""`MessageStream`: numbered messages after the handshake, each replied to once, also after reconnections.

Both sides number their messages 1, 2, 3, …. Every message carries the number of the last message received from the
other side, which may then discard messages up to that number. After a reconnection each side sends again what the other
has not received: every request is processed once, duplicates are counted and dropped, and a gap is an error.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from enum import Enum
from typing import Any

from marlvec.errors import ProtocolError, RefusedError
from marlvec.external.protocol.messages import FORMS, Message, Type, write_message

__all__ = ["EpisodeState", "MessageStream", "check_order"]


class MessageStream:
    """One side's message numbers in one session, and messages that may have to be sent again. Outlives connections.

    At most `max_kept` bytes of unconfirmed messages are kept, counted with `each` more for each message.
    """

    def __init__(self, max_kept: int, each: int = 0) -> None:
        self._max_kept, self._each = max_kept, each
        self._kept: OrderedDict[int, bytes] = OrderedDict()
        self._kept_bytes = 0
        self._sent = 0
        self.received = 0  # number of the last received message
        self.duplicates = 0  # messages that came again and were dropped

    @property
    def sent(self) -> int:
        """Number of the last message that was made."""
        return self._sent

    @property
    def kept_bytes(self) -> int:
        """Bytes of kept messages, with the addition for each."""
        return self._kept_bytes

    def take(self, message: Message) -> bool:
        """Register a received message; return False for a duplicate, which must be ignored.

        `ProtocolError`: an earlier message is missing, or it confirms messages that were never sent.
        """
        self.acknowledge(message.received)
        if not message.number:
            return True
        if message.number <= self.received:
            self.duplicates += 1
            return False
        if message.number > self.received + 1:
            raise ProtocolError(f"message {message.number} came after {self.received}; some are missing")
        self.received = message.number
        return True

    def acknowledge(self, number: int) -> None:
        """Discard kept messages up to this number: the other side has received them."""
        if number > self._sent:
            raise ProtocolError(f"message {number} cannot have been received: the last one sent was {self._sent}")
        while self._kept and next(iter(self._kept)) <= number:
            _, data = self._kept.popitem(last=False)
            self._kept_bytes -= len(data) + self._each

    def make(self, kind: Type, fields: dict[str, Any], max_bytes: float = math.inf) -> bytes:
        """Make the bytes of the next message, and keep them if it is numbered.

        `ProtocolError`, code ``"limit"``, and no message: larger than `max_bytes`, or too many bytes are unconfirmed.
        """
        if not FORMS[kind].is_numbered:
            return write_message(Message(kind, fields, 0, self.received))
        data = write_message(Message(kind, fields, self._sent + 1, self.received))
        if len(data) > max_bytes:
            raise ProtocolError(f"a message of {len(data)} bytes; the other side takes {max_bytes} at most", "limit")
        if self._kept and self._kept_bytes + len(data) + self._each > self._max_kept:
            raise ProtocolError(
                f"more than {self._max_kept} bytes were sent, and the other side confirms none of them", "limit"
            )
        self._sent += 1
        self._kept[self._sent] = data
        self._kept_bytes += len(data) + self._each
        return data

    def missing(self, received: int) -> list[bytes]:
        """Return the messages to send again, in order, given the last number that the other side has received."""
        self.acknowledge(received)
        return list(self._kept.values())


class EpisodeState(Enum):
    """State of an episode, as seen from the protocol."""

    BEGINNING = "waits for a free slot"
    RUNNING = "runs"
    ASKED = "waits for actions"


_OF_EPISODES = frozenset({Type.STEP, Type.LOG, Type.RETURNS, Type.LEAVE, Type.END, Type.ABANDON})
_ALLOWED = {
    EpisodeState.BEGINNING: frozenset({Type.ABANDON}),
    EpisodeState.RUNNING: _OF_EPISODES,
    EpisodeState.ASKED: frozenset({Type.RETURNS, Type.END, Type.ABANDON}),
}


def check_order(message: Message, state: EpisodeState | None) -> None:
    """Check that a message about an episode may come while the episode is in this state; None: it is not running.

    `RefusedError`: code ``"order"``: not in this state; ``"episode"``: no such episode is running.
    """
    if message.type in _OF_EPISODES:
        episode = message.fields["episode"]
        if state is None:
            raise RefusedError(f"there is no episode {episode}, or it is over", "episode")
        if message.type not in _ALLOWED[state]:
            name = message.type.name.lower()
            raise RefusedError(f"episode {episode} {state.value}: {name!r} cannot come now", "order")

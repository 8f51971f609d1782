"""`MessageStream`: numbered messages after the handshake, each replied to once, also after reconnections.

A client numbers its messages 1, 2, 3, …; so does the server with its replies. Every message has the number of the
last one that came the other way, and messages up to that number need not be kept any longer. After a reconnection each
side says which number it has got, and the other sends again what came after. So every request is looked at once, and
every reply is seen once; what comes twice is counted and dropped, and a gap is an error.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from enum import Enum
from typing import Any

from marlvec.errors import ProtocolError, RefusedError
from marlvec.external.protocol.messages import FORMS, Message, Type, write_message

__all__ = ["EpisodeState", "EpisodeStates", "MessageStream"]


class MessageStream:
    """Numbers of one session on one side, and what may have to be sent again. Outlives connections.

    Args:
        max_kept: Bytes of messages that are kept until the other side has confirmed them.
        each: Bytes that each of them counts beside its own.

    Attributes:
        received: Number of the last message that has come.
        duplicates: How many have come again and were dropped.
    """

    def __init__(self, max_kept: int, each: int = 0) -> None:
        self._max_kept, self._each = max_kept, each
        self._kept: OrderedDict[int, bytes] = OrderedDict()
        self._kept_bytes = 0
        self._sent = 0
        self.received = 0
        self.duplicates = 0

    @property
    def sent(self) -> int:
        """Number of the last message that was made."""
        return self._sent

    @property
    def kept_bytes(self) -> int:
        """Bytes that are kept, as they count."""
        return self._kept_bytes

    def take(self, message: Message) -> bool:
        """Note a message that has come. Returns whether it is to be looked at: it is not, where it has come before.

        Raises:
            ProtocolError: One before it is missing, or it confirms messages that were never sent.
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
        """The other side has got all messages up to this one; they need not be kept.

        Raises:
            ProtocolError: It was never sent.
        """
        if number > self._sent:
            raise ProtocolError(f"message {number} cannot have come: the last one sent was {self._sent}")
        while self._kept and next(iter(self._kept)) <= number:
            _, data = self._kept.popitem(last=False)
            self._kept_bytes -= len(data) + self._each

    def make(self, kind: Type, fields: dict[str, Any], max_bytes: float = math.inf) -> bytes:
        """The bytes of the next message, which are kept where it is numbered.

        Args:
            kind: What.
            fields: What it holds.
            max_bytes: What the other side takes.

        Raises:
            ProtocolError: It is larger than that, or the other side lets too much lie; code ``"limit"``. It was not
                made then.
        """
        if not FORMS[kind].is_numbered:
            return write_message(Message(kind, fields, 0, self.received))
        data = write_message(Message(kind, fields, self._sent + 1, self.received))
        if len(data) > max_bytes:
            raise ProtocolError(f"a message of {len(data)} bytes; the other side takes {max_bytes}", "limit")
        if self._kept and self._kept_bytes + len(data) + self._each > self._max_kept:
            raise ProtocolError(
                f"more than {self._max_kept} bytes were sent, and the other side confirms none", "limit"
            )
        self._sent += 1
        self._kept[self._sent] = data
        self._kept_bytes += len(data) + self._each
        return data

    def missing(self, received: int) -> list[bytes]:
        """What is to be sent again, in order, once the other side has said what it has got.

        Raises:
            ProtocolError: It says that it got what was never sent.
        """
        self.acknowledge(received)
        return list(self._kept.values())


class EpisodeState(Enum):
    """Where an episode stands, seen from the wire."""

    BEGINNING = "waits for a free slot"
    RUNNING = "runs"
    ASKED = "waits for actions"


_OF_EPISODES = frozenset({Type.STEP, Type.LOG, Type.RETURNS, Type.LEAVE, Type.END, Type.ABANDON})
_ALLOWED = {
    EpisodeState.BEGINNING: frozenset({Type.ABANDON}),
    EpisodeState.RUNNING: _OF_EPISODES,
    EpisodeState.ASKED: frozenset({Type.RETURNS, Type.END, Type.ABANDON}),
}


class EpisodeStates:
    """The episodes of one session, and which messages may come to them now.

    Their numbers are the client's choice, each larger than all before, so that none has to be remembered for ever.

    Args:
        most: How many may be there at a time.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._states: dict[int, EpisodeState] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, episode: int) -> bool:
        return episode in self._states

    def state(self, episode: int) -> EpisodeState:
        """Where an episode of these stands."""
        return self._states[episode]

    def check(self, message: Message) -> None:
        """Refuse what may not come now. Nothing has changed then, or now: that is for `begin`, `move` and `end`.

        Raises:
            RefusedError: Code ``"order"``: it may not come now; ``"episode"``: there is no such episode, or no more;
                ``"limit"``: there are too many.
        """
        if message.type is Type.BEGIN:
            episode = message.fields["episode"]
            if episode <= self._last:
                raise RefusedError(
                    f"episode {episode} is not new: numbers must grow, the last was {self._last}", "order"
                )
            if len(self._states) >= self._most:
                raise RefusedError(f"a client may have {self._most} episodes at a time", "limit")
        elif message.type in _OF_EPISODES:
            episode = message.fields["episode"]
            state = self._states.get(episode)
            if state is None:
                raise RefusedError(f"there is no episode {episode}, or it is over", "episode")
            if message.type not in _ALLOWED[state]:
                name = message.type.name.lower()
                raise RefusedError(f"episode {episode} {state.value}: {name!r} cannot come now", "order")

    def begin(self, episode: int) -> None:
        """A new one waits for its slot."""
        self._states[episode] = EpisodeState.BEGINNING
        self._last = episode

    def move(self, episode: int, state: EpisodeState) -> None:
        """It stands elsewhere now."""
        self._states[episode] = state

    def end(self, episode: int) -> None:
        """It is over; may be said again."""
        self._states.pop(episode, None)

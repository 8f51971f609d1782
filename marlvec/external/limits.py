"""`Limits`: how much memory, time and how many connections a server grants its clients."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from marlvec.errors import ArgumentError

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one client may cost, and all of them together. A client that goes beyond is sent the reason, and cut off.

    Attributes:
        clients: How many at a time; the next one is refused, also where it comes back.
        episodes: How many one client may have at a time.
        message_bytes: Of one message; a longer one is refused before it is read.
        window: Requests of one client that are not answered yet.
        held_bytes: Of one client's requests that wait, for the collector or for their turn, and of what it has sent
            that goes with a row which has not come. Once as much waits in rows, those that follow wait for room.
        kept_bytes: Of replies to one client, that it has not confirmed.
        unsent_bytes: Of what one client is too slow to read.
        total_bytes: Of all that, and of rows that wait, for all clients; the one with the most is cut off first. With
            half of it in rows, those that follow wait for room.
        messages_per_second: Of one client; it is read more slowly then.
        handshake_seconds: Until a new client must have said who it is.
        message_seconds: From a message's first byte to its last, whatever its fragments; and until a slow client has
            read something.
        heartbeat_seconds: A silent client is pinged after that, and given up after twice as long.
        idle_seconds: That an episode may go on without a message about it, while it is the client's turn.
        episode_seconds: That an episode may last in all.
        begin_seconds: To wait for a slot for a new episode.
        resume_seconds: That a session waits for its client to come back; 0: its episodes are lost at once.

    Raises:
        ArgumentError: One is not a positive number.
    """

    clients: int = 1024
    episodes: int = 64
    message_bytes: int = 16 * 2**20
    window: int = 256
    held_bytes: int = 32 * 2**20
    kept_bytes: int = 8 * 2**20
    unsent_bytes: int = 8 * 2**20
    total_bytes: int = 2**29
    messages_per_second: float = 20_000
    handshake_seconds: float = 5
    message_seconds: float = 10
    heartbeat_seconds: float = 10
    idle_seconds: float = 300
    episode_seconds: float = math.inf
    begin_seconds: float = 60
    resume_seconds: float = 30

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_whole = field.name in _WHOLE
            if (
                isinstance(value, bool)
                or not isinstance(value, int if is_whole else (int, float))
                or not (value > 0 or (value == 0 and field.name == "resume_seconds"))
            ):
                raise ArgumentError(
                    f"Limits({field.name}={value!r}): expected a positive {'whole ' if is_whole else ''}number"
                )
        if not 4096 <= self.message_bytes <= 2**31:
            raise ArgumentError(f"Limits(message_bytes={self.message_bytes}): expected 4,096 to 2**31")


_WHOLE = {
    "clients",
    "episodes",
    "message_bytes",
    "window",
    "held_bytes",
    "kept_bytes",
    "unsent_bytes",
    "total_bytes",
}

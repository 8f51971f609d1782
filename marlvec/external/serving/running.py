"""One episode of a client, as its session knows it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from marlvec.external.episode import Episode

__all__ = ["Running"]


@dataclass(slots=True)
class Running:
    """One episode, seen from its client.

    Attributes:
        born, heard: When it began, and when something was said about it last.
        training: Whether it goes into batches.
        slot: The slot it asks for, or None.
        re: Number of the request that is not answered: ``begin``, or what asked for actions.
        episode: The episode behind the door, once it has a slot.
        held: Requests that wait for room: their numbers, and as they came. Read, they might be many times as large.
    """

    born: float
    heard: float
    training: bool
    slot: int | None
    re: int
    episode: Episode | None = None
    held: deque[tuple[int, bytes]] = field(default_factory=deque)

"""Counts of what has happened at a server."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Tally"]


@dataclass(slots=True)
class Tally:
    """Counts since the server began.

    Attributes:
        accepted: Connections.
        strangers: Those that were closed before they were let in.
        turned_away: Those that were closed at once, since so many are there.
        refused: Times that somebody was told why, and cut off.
        wrong_tokens: Of those, for a token.
        sessions: Clients that were let in.
        resumed: Times that one came back.
        messages: Sound messages.
        duplicates: Of those, that came twice and were dropped.
    """

    accepted: int = 0
    strangers: int = 0
    turned_away: int = 0
    refused: int = 0
    wrong_tokens: int = 0
    sessions: int = 0
    resumed: int = 0
    messages: int = 0
    duplicates: int = 0

"""`PolicyLog`: the policy changes that all collectors make, in order."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from marlvec.distributed.server.messages import Answer, Change
from marlvec.distributed.server.policy_changes import (
    AddPolicy,
    MapPolicies,
    PolicyChange,
    RemovePolicy,
    TrainPolicies,
)

__all__ = ["PolicyLog"]


@dataclass(slots=True, eq=False)
class _Entry:
    content: PolicyChange
    change: Change  # the message to collectors
    note: Callable[[], None] | None = None  # to call once it is confirmed; None after the call
    is_confirmed: bool = False  # a collector has made it; from then on all must make it
    error: BaseException | None = None  # the first collector's exception


class PolicyLog:
    """Changes that all collectors make before their next request; restarted collectors before their first.

    The first collector to get a change decides. If it raises, the caller gets the exception, and nothing has changed.
    Once it has made the change, all others must make it; if one cannot, it is restarted, as collectors may not differ.
    """

    def __init__(self, put: Callable[[Any], Any]) -> None:
        self._put = put
        self._entries: dict[int, _Entry] = {}
        self._count = 0

    def add(self, content: PolicyChange, note: Callable[[], None]) -> int:
        """Record a change that no collector has made yet; return its number. `note_confirmed` calls `note`."""
        number, self._count = self._count, self._count + 1
        self._entries[number] = _Entry(content, Change(self._put(content)), note)
        return number

    def drop(self, number: int) -> None:
        """Forget a change that no collector has made."""
        if number in self._entries and not self._entries[number].is_confirmed:
            del self._entries[number]

    def __getitem__(self, number: int) -> Change:
        return self._entries[number].change

    def note_confirmed(self) -> None:
        """Call the head's functions for changes that a collector has made."""
        for entry in self._entries.values():
            if entry.is_confirmed and entry.note is not None:
                entry.note()
                entry.note = None

    def is_confirmed(self, number: int) -> bool:
        """Return whether a collector has made a change; raise the first collector's exception."""
        entry = self._entries[number]
        if entry.error is not None:
            raise entry.error
        return entry.is_confirmed

    def unsent(self, sent: Collection[int]) -> list[int]:
        """Return the changes to send to a collector that has these, in order."""
        return [number for number, entry in self._entries.items() if entry.is_confirmed and number not in sent]

    def take(self, number: int, answer: Answer) -> bool:
        """Record that a collector has made a change, or raised; False: it differs from others: restart it."""
        entry = self._entries.get(number)
        if answer.raised is not None:
            if entry is not None and not entry.is_confirmed:
                entry.error = answer.raised.exception()
            return entry is None or not entry.is_confirmed
        if entry is None:  # the change was dropped meanwhile
            return False
        if not entry.is_confirmed and answer.value is not None:
            entry.change = Change(entry.change.content, self._put(answer.value))
        entry.is_confirmed = True
        return True

    def compact(self) -> None:
        """Forget changes that later changes undo, once all collectors have made all of them."""
        numbers = list(self._entries)
        found = {n: getattr(self._entries[n].content, "mapping", None) for n in numbers}
        mappings: dict[int, bytes] = {n: mapping for n, mapping in found.items() if mapping is not None}
        maps = list(mappings)
        trains = [n for n in numbers if isinstance(self._entries[n].content, TrainPolicies)]
        undone = set(trains[:-1]) | {n for n in maps[:-1] if isinstance(self._entries[n].content, MapPolicies)}
        added: dict[str, int] = {}
        for number in numbers:
            content = self._entries[number].content
            if isinstance(content, TrainPolicies):
                added.clear()  # its mapping may name them
            elif isinstance(content, AddPolicy):
                added[content.policy_id] = number
            elif isinstance(content, RemovePolicy) and content.policy_id in added:
                undone |= {number, added.pop(content.policy_id)}
        if maps and maps[-1] in undone:  # keep its mapping
            mapping = MapPolicies(mappings[maps[-1]])
            self._entries[maps[-1]] = _Entry(mapping, Change(self._put(mapping)), is_confirmed=True)
            undone.remove(maps[-1])
        self._entries = {number: entry for number, entry in self._entries.items() if number not in undone}

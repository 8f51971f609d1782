"""`SlotQueue`: which client gets the next free slot; clients take turns."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from itertools import count
from typing import Generic, TypeVar

__all__ = ["SlotQueue"]


Client = TypeVar("Client", bound=Hashable)


class _Turn:
    __slots__ = ("episodes", "order")

    def __init__(self, order: int) -> None:
        self.order = order  # clients with smaller numbers come first
        self.episodes: OrderedDict[int, None] = OrderedDict()  # numbers, the oldest first


class SlotQueue(Generic[Client]):
    """Episodes that wait for a slot. Used by the server's thread alone.

    There is a line for each slot that clients request by number, and one for any slot. In each line clients take turns,
    in order of arrival; after a turn a client goes to the end. A client's own episodes come in order of request. Every
    operation takes constant time, however many episodes wait.
    """

    def __init__(self) -> None:
        self._lines: dict[int | None, OrderedDict[Client, _Turn]] = {}
        self._next_turn = count()

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __len__(self) -> int:
        return sum(len(turn.episodes) for line in self._lines.values() for turn in line.values())

    def add(self, client: Client, number: int, slot: int | None) -> None:
        """Queue a client's episode for a slot; None: any."""
        line = self._lines.setdefault(slot, OrderedDict())
        if client not in line:
            line[client] = _Turn(next(self._next_turn))
        line[client].episodes[number] = None

    def remove(self, client: Client, number: int, slot: int | None, *, served: bool = False) -> None:
        """Remove an episode. `served`: it got a slot, so that the client's turn is over."""
        line = self._lines[slot]
        turn = line[client]
        del turn.episodes[number]
        if served:
            turn.order = next(self._next_turn)
            line.move_to_end(client)
        if not turn.episodes:
            del line[client]
        if not line:
            del self._lines[slot]

    def first(self, free: Iterable[int]) -> tuple[Client, int] | None:
        """Return the next client and episode for one of the free slots; None if no client waits for one."""
        for slot in free:
            heads = [next(iter(self._lines[key].items())) for key in (None, slot) if key in self._lines]
            if heads:
                client, turn = min(heads, key=lambda head: head[1].order)
                return client, next(iter(turn.episodes))
        return None

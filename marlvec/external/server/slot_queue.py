"""`SlotQueue`: which client gets the next free slot: each in turn."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from itertools import count
from typing import Generic, TypeVar

__all__ = ["SlotQueue"]


Client = TypeVar("Client", bound=Hashable)


class _Turn:
    """What one client waits for in one line.

    Attributes:
        order: When it is its turn: before all with a larger one.
        episodes: Numbers of its episodes, the oldest first.
    """

    __slots__ = ("episodes", "order")

    def __init__(self, order: int) -> None:
        self.order = order
        self.episodes: OrderedDict[int, None] = OrderedDict()


class SlotQueue(Generic[Client]):
    """Episodes that wait for a slot. Used by the server's thread alone.

    There is a line for each slot that a client wants in particular, and one for any slot. In each, clients have their
    turn one after the other, in the order in which they came; who was served goes to the end. What one client waits for
    comes in the order in which it asked. All of it takes the same time, however many wait.
    """

    def __init__(self) -> None:
        self._lines: dict[int | None, OrderedDict[Client, _Turn]] = {}
        self._next_turn = count()

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __len__(self) -> int:
        return sum(len(turn.episodes) for line in self._lines.values() for turn in line.values())

    def add(self, client: Client, number: int, slot: int | None) -> None:
        """An episode waits from now on.

        Args:
            client: Whose it is.
            number: Its number there.
            slot: The slot that it wants, or None: any.
        """
        line = self._lines.setdefault(slot, OrderedDict())
        if client not in line:
            line[client] = _Turn(next(self._next_turn))
        line[client].episodes[number] = None

    def remove(self, client: Client, number: int, slot: int | None, *, served: bool = False) -> None:
        """It waits no longer.

        Args:
            client: As `add`.
            number: Likewise.
            slot: Likewise.
            served: Whether it has got a slot, so that others come before this client's next one.
        """
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
        """Whose turn it is, given the slots that are free; None where no client waits for one of these."""
        for slot in free:
            heads = [next(iter(self._lines[key].items())) for key in (None, slot) if key in self._lines]
            if heads:
                client, turn = min(heads, key=lambda head: head[1].order)
                return client, next(iter(turn.episodes))
        return None

"""Rows that wait for their policy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from marlvec.env_ids import Where

__all__ = ["Ready"]

IntArray = NDArray[np.int64]


@dataclass(slots=True)
class Ready:
    """Rows that wait for an action, in lane order.

    Attributes:
        lanes: (n,) whose they are: ``env * A + agent``.
        places: The same as an index.
        slots: (n,) where they are stored.
        where: The same as a slice, where they stand in a row.
    """

    lanes: IntArray
    places: Where
    slots: IntArray
    where: Where

    @classmethod
    def block(cls, lanes: IntArray, places: Where, slots: IntArray) -> Ready:
        """Rows in consecutive slots; at least one."""
        start = int(slots[0])
        return cls(lanes, places, slots, slice(start, start + len(slots)))

    @classmethod
    def none(cls) -> Ready:
        """No rows."""
        nothing = np.zeros(0, np.int64)
        return cls(nothing, nothing, nothing, slice(0, 0))

    def move(self, slots: IntArray) -> None:
        """Note where the rows are now; those in a row have stayed so."""
        self.slots = slots
        in_a_row = isinstance(self.where, slice) and len(slots)
        self.where = slice(int(slots[0]), int(slots[0]) + len(slots)) if in_a_row else slots

    def take(self, mask: NDArray[np.bool_]) -> Ready:
        """Some of them."""
        lanes, slots = self.lanes[mask], self.slots[mask]
        return Ready(lanes, lanes, slots, slots)

    def join(self, other: Ready) -> Ready:
        """These and others."""
        if not len(self.lanes):
            return other
        lanes = np.concatenate([self.lanes, other.lanes])
        slots = np.concatenate([self.slots, other.slots])
        order = np.argsort(lanes, kind="stable")
        lanes, slots = lanes[order], slots[order]
        return Ready(lanes, lanes, slots, slots)

"""`Account`: bytes that a client's episodes hold in the server before the collector takes them."""

from __future__ import annotations

from sys import getsizeof
from typing import Any

__all__ = ["Account", "growth"]

_ENTRY = 128  # bytes of a dict's entry, with the room that a dict keeps for more


class Account:
    """Bytes of what one client's episodes have said. Changed with the exchange locked; may be read at any time.

    Args:
        most: With how many bytes of rows a slot in which some wait has no room for more.
        whole: Of all clients together, or None.

    Attributes:
        said: What waits for the row that it is to go with.
        rows: Rows that wait for the collector.
    """

    __slots__ = ("_most", "_whole", "rows", "said")

    def __init__(self, most: int, whole: Account | None = None) -> None:
        self._most, self._whole = most, whole
        self.said = self.rows = 0

    @property
    def is_full(self) -> bool:
        """Whether rows should be taken before there are more."""
        return self.rows >= self._most or (self._whole is not None and self._whole.is_full)

    def add(self, *, said: int = 0, rows: int = 0) -> None:
        """Count some more, or, below zero, less."""
        self.said += said
        self.rows += rows
        if self._whole is not None:
            self._whole.add(said=said, rows=rows)


def growth(known: dict[str, Any], new_infos: dict[str, Any]) -> int:
    """By how many bytes new infos make infos grow; they replace those under the same keys."""
    return sum(
        getsizeof(value) - getsizeof(known[key]) if key in known else _ENTRY + getsizeof(key) + getsizeof(value)
        for key, value in new_infos.items()
    )

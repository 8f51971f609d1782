"""`Account`: bytes of data that a client's episodes hold in the server until the collector takes them."""

from __future__ import annotations

from sys import getsizeof
from typing import Any

__all__ = ["Account", "growth"]

_ENTRY = 128  # bytes of a dict entry, including the dict's spare capacity


class Account:
    """Bytes that one client's episodes hold. Change it with the exchange locked; read it at any time.

    Above `most` bytes of rows, a slot that already has a waiting row accepts no more rows. `total` counts all clients.
    """

    __slots__ = ("_most", "_total", "pending", "rows")

    def __init__(self, most: int, total: Account | None = None) -> None:
        self._most, self._total = most, total
        self.pending = self.rows = 0

    @property
    def is_full(self) -> bool:
        """Whether the collector should take rows before more are accepted."""
        return self.rows >= self._most or (self._total is not None and self._total.is_full)

    def add(self, *, pending: int = 0, rows: int = 0) -> None:
        """Add bytes; negative numbers subtract."""
        self.pending += pending
        self.rows += rows
        if self._total is not None:
            self._total.add(pending=pending, rows=rows)


def growth(known: dict[str, Any], new_infos: dict[str, Any]) -> int:
    """Return by how many bytes infos grow if updated with new infos; equal keys are replaced."""
    return sum(
        getsizeof(value) - getsizeof(known[key]) if key in known else _ENTRY + getsizeof(key) + getsizeof(value)
        for key, value in new_infos.items()
    )

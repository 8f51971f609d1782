"""`ExternalRow`: one step of an external episode, with the `RowSource` and the `Account` of its bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from sys import getsizeof
from typing import Any, Protocol

from numpy.typing import NDArray

from marlvec.envs.spec import Info

__all__ = ["Account", "growth", "Answer", "Ending", "ExternalRow", "RowSource"]

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


Answer = Callable[[dict[str, Any]], None]
"""Callback for actions: receives agent name → env action."""

Ending = tuple[Any, bool, bool]
"""An agent's final observation (None: it has none), terminated, truncated."""


class RowSource(Protocol):
    """The part of an external episode that rows and their exchange use; see `ExternalEpisode`."""

    id: int
    env_id: int
    account: Account | None
    over: Exception | None

    @property
    def is_waiting(self) -> bool:
        """Whether an answer is due."""

    def abandon(self, error: BaseException) -> None:
        """Give the episode up."""

    def lost(self, reason: Exception) -> None:
        """Note that the collector's side has lost the episode."""

    def forget(self) -> None:
        """Drop rewards, infos and ends that are in no row yet."""


@dataclass(slots=True)
class ExternalRow:
    """One row for the collector. Its values are checked copies, by agent index."""

    episode: RowSource
    first: bool = False  # of the episode's rows
    obs: Mapping[int, Any] = field(default_factory=dict)  # of the agents that act
    masks: Mapping[int, NDArray[Any]] = field(default_factory=dict)  # of some of them
    rewards: Mapping[int, float] = field(default_factory=dict)  # since the previous row
    ended: Mapping[int, Ending] = field(default_factory=dict)  # agents that ended with this row
    infos: Info = field(default_factory=dict)
    done: bool = False  # the episode is over
    answer: Answer | None = None  # None: no actions are requested
    lost: BaseException | None = None  # why the episode is lost; the row's other values do not count then
    cost: int = 0  # bytes on the account of its episode

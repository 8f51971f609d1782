"""`ExternalRow`: one step of an external episode; `RowSource`: the part of an episode that the exchange uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from numpy.typing import NDArray

from marlvec.envs.spec import Info
from marlvec.external.account import Account

__all__ = ["Answer", "Ending", "ExternalRow", "RowSource"]

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

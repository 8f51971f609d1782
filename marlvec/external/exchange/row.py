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
    """The part of an external episode that rows and their exchange use.

    Attributes:
        id: Its number.
        env_id: Its slot.
        account: Counts its bytes, or None.
        over: Why the episode accepts no more calls, or None.
    """

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
    """One row for the collector. Its values are checked copies.

    Attributes:
        episode: The row's episode.
        first: Whether it is the episode's first row.
        obs: Agent index to observation, of the agents that act.
        masks: Agent index to action mask, for some of them.
        rewards: Agent index to reward since the previous row.
        ended: Agent index to its end, for agents that ended with this row.
        infos: Infos by agent.
        done: Whether the episode is over.
        answer: Callback for the actions, or None if none are requested.
        lost: Why the episode is lost; the row's other values do not count then.
        cost: Its bytes on the account of its episode.
    """

    episode: RowSource
    first: bool = False
    obs: Mapping[int, Any] = field(default_factory=dict)
    masks: Mapping[int, NDArray[Any]] = field(default_factory=dict)
    rewards: Mapping[int, float] = field(default_factory=dict)
    ended: Mapping[int, Ending] = field(default_factory=dict)
    infos: Info = field(default_factory=dict)
    done: bool = False
    answer: Answer | None = None
    lost: BaseException | None = None
    cost: int = 0

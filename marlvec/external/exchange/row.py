"""`ExternalRow`: one moment of an external episode; `RowSource`: what an exchange knows of an episode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from numpy.typing import NDArray

from marlvec.envs.spec import Info
from marlvec.external.account import Account

__all__ = ["Answer", "Ending", "ExternalRow", "RowSource"]

Answer = Callable[[dict[str, Any]], None]
"""Is called with the actions: agent name → action for the env."""

Ending = tuple[Any, bool, bool]
"""An agent's final observation, or None where there is none; whether it was terminated, and truncated."""


class RowSource(Protocol):
    """All that rows and their exchange know of an episode outside.

    Attributes:
        id: Its number.
        env_id: Its slot.
        account: What it costs in memory, where that is counted.
        over: Why nothing can be said any more, or None.
    """

    id: int
    env_id: int
    account: Account | None
    over: Exception | None

    @property
    def is_waiting(self) -> bool:
        """Whether an answer is due."""
        ...

    def abandon(self, error: BaseException) -> None:
        """It will not go on."""

    def lost(self, reason: Exception) -> None:
        """The collector's side has lost it."""

    def forget(self) -> None:
        """Drop what was said and is in no row yet."""


@dataclass(slots=True)
class ExternalRow:
    """One row on its way to the collector. Everything in it was checked, and no other code has it.

    Attributes:
        episode: Whose row it is.
        first: Whether the episode begins with it.
        obs: Agent index to its observation: those who act.
        masks: Agent index to its action mask, of some of them.
        rewards: Agent index to its reward since the row before.
        ended: Agent index to how it ended, of those that ended with this row.
        infos: What else was said.
        done: Whether the episode is over.
        answer: What is called with the actions, or None where none are asked for.
        lost: Why the episode is lost, in its last row; nothing else in that row counts.
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

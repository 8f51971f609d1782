"""What has come in and was not handed over yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Counters", "WholeEpisode"]


@dataclass(slots=True)
class Counters:
    """What has come in and was not handed over yet; what is lost goes off again.

    Attributes:
        env_steps: Env steps.
        decisions: Decisions given to envs, outcome known or not.
        agent_steps: Closed transitions.
        episodes: Episodes that ended.
    """

    env_steps: int = 0
    decisions: int = 0
    agent_steps: int = 0
    episodes: int = 0


class WholeEpisode(NamedTuple):
    """An episode that ended and is in no batch yet; these are handed over in their order.

    Attributes:
        round: The round of its last step.
        env_id: Its env.
        eps_id: Its id.
        env_steps: Its env steps.
        agent_steps: Decisions that were made in it.
        episodes: One.
    """

    round: int
    env_id: int
    eps_id: int
    env_steps: int
    agent_steps: int
    episodes: int = 1

"""What has come in and was not handed over yet."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Counters"]


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

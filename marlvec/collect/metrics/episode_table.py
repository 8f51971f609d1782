"""What is on record of one finished episode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["EpisodeRecord"]


@dataclass(frozen=True)
class EpisodeRecord:
    """One finished episode. Rewards are raw: as the env paid them, to acting and idle agents alike.

    Attributes:
        eps_id: Its id, as in batches.
        env_id: Its env.
        number: It was the env's n-th episode, from 0.
        length: Env steps.
        returns_A: (A,) float64, sum of each agent's rewards.
        lengths_A: (A,) int64, decisions each agent made.
        present_A: (A,) bool, whether the agent was in this episode at all.
        truncated_A: (A,) bool, whether its end was a truncation, and no termination.
        policies: Each agent's policy id.
        duration: Seconds from its first observation to its end, by the clock on the wall.
        custom: Numbers that callbacks have put into `RunningEpisode.custom`, by name.
    """

    eps_id: int
    env_id: int
    number: int
    length: int
    returns_A: NDArray[np.float64]
    lengths_A: NDArray[np.int64]
    present_A: NDArray[np.bool_]
    truncated_A: NDArray[np.bool_]
    policies: tuple[str, ...]
    duration: float
    custom: Mapping[str, float] = field(default_factory=dict)

    @property
    def episode_return(self) -> float:
        """Sum of all agents' returns."""
        return float(self.returns_A.sum())

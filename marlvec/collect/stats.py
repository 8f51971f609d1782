"""Least, mean and greatest of what happened in some episodes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from marlvec.collect.episode_record import EpisodeRecord

__all__ = ["Stats", "stats_of_agents", "stats_of_episodes", "stats_of_policy"]


@dataclass(frozen=True, slots=True)
class Stats:
    """Least, mean, greatest and standard deviation (of these alone) of some numbers; NaN where there are none."""

    count: int = 0
    min: float = math.nan
    mean: float = math.nan
    max: float = math.nan
    std: float = field(default=math.nan, compare=False)

    @classmethod
    def of(cls, values: Iterable[float]) -> Stats:
        """Statistics of these numbers."""
        numbers = list(values)
        if not numbers:
            return cls()
        mean = math.fsum(numbers) / len(numbers)
        std = math.sqrt(math.fsum((number - mean) ** 2 for number in numbers) / len(numbers))
        return cls(len(numbers), float(min(numbers)), mean, float(max(numbers)), std)

    def as_dict(self) -> dict[str, float]:
        """The first four by name."""
        return {"count": self.count, "min": self.min, "mean": self.mean, "max": self.max}


def stats_of_episodes(records: Iterable[EpisodeRecord]) -> dict[str, Stats]:
    """``return`` (of all agents together), ``length`` (env steps) and ``duration`` of episodes."""
    records = list(records)
    return {
        "return": Stats.of(e.episode_return for e in records),
        "length": Stats.of(e.length for e in records),
        "duration": Stats.of(e.duration for e in records),
    }


def stats_of_agents(pairs: Sequence[tuple[EpisodeRecord, int]]) -> dict[str, Stats]:
    """``return``, ``length`` (decisions) and ``duration`` of agents, each given as (episode, place on the axis)."""
    return {
        "return": Stats.of(float(e.returns_A[a]) for e, a in pairs),
        "length": Stats.of(int(e.lengths_A[a]) for e, a in pairs),
        "duration": Stats.of(e.duration for e, _ in pairs),
    }


def stats_of_policy(records: Iterable[EpisodeRecord], policy_id: str) -> dict[str, Stats]:
    """The same of all agents that one policy played in these episodes, each on its own."""
    return stats_of_agents(
        [(e, a) for e in records for a, name in enumerate(e.policies) if name == policy_id and e.present_A[a]]
    )

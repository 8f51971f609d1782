"""`MetricsDelta`: what has come to a collector's metrics since it was asked before, to be added to another's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from marlvec.collect.metrics.episode_table import FinishedEpisodes
from marlvec.collect.rollout_state import Counters

__all__ = ["MetricsDelta", "counted", "difference", "renumbered", "standalone"]

_COUNTED = (
    *("env_steps", "agent_steps", "env_steps_lost", "agent_steps_lost", "episodes_total", "episodes_faulty"),
    *("episodes_restarted", "episodes_interrupted", "noop_steps"),
)
"""The sums of `Counters` that metrics show."""


@dataclass(frozen=True, slots=True)
class MetricsDelta:
    """The records, sums and seconds that a `Metrics` gained since the delta before.

    Statistics do not add up: a mean of means is that of other numbers. So all finished episodes are in it, each once.

    Attributes:
        agents, policies: The collector's.
        episodes: The episodes that have finished.
        counters: By how much each sum has grown.
        timers: Seconds and calls by name.
        values: What `Metrics.add_value` was given, in order, NaN left out.
    """

    agents: tuple[str, ...]
    policies: tuple[str, ...]
    episodes: FinishedEpisodes
    counters: Mapping[str, int]
    timers: Mapping[str, tuple[float, int]]
    values: tuple[tuple[str, float], ...]


def difference(now: Counters, before: Counters) -> dict[str, int]:
    """By how much each sum has grown."""
    return {name: getattr(now, name) - getattr(before, name) for name in _COUNTED}


def counted(counters: Counters, more: Mapping[str, int]) -> Counters:
    """The sums with what has come since."""
    new = counters.copy()
    for name in _COUNTED:
        setattr(new, name, getattr(new, name) + more[name])
    return new


def standalone(found: FinishedEpisodes) -> FinishedEpisodes:
    """A copy of rows of a table, without what their records can be made from again."""
    arrays = {name: getattr(found, name).copy() for name in FinishedEpisodes.__slots__ if name != "policy_ids"}
    for i, record in enumerate(found.made.tolist()):
        if record is not None and not record.custom:
            arrays["made"][i] = None
    used = np.unique(found.policy).tolist()
    return FinishedEpisodes(**arrays, policy_ids={number: found.policy_ids[number] for number in used})


def renumbered(found: FinishedEpisodes, numbers: dict[str, int]) -> FinishedEpisodes:
    """Return these episodes with another table's policy numbers.

    Args:
        found: The episodes.
        numbers: Number by policy id there; new ones are added.
    """
    policy = np.empty_like(found.policy)
    for number, name in found.policy_ids.items():
        policy[found.policy == number] = numbers.setdefault(name, len(numbers))
    arrays = {name: getattr(found, name) for name in FinishedEpisodes.__slots__ if name not in ("policy", "policy_ids")}
    return FinishedEpisodes(**arrays, policy=policy, policy_ids={number: name for name, number in numbers.items()})

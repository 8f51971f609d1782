"""`MetricsDelta`: the changes of a collector's metrics since the last delta, to be added to other metrics."""

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
    """The records, counts and seconds that a `Metrics` gained since its last delta.

    Means cannot be added, so it contains every finished episode once.
    """

    agents: tuple[str, ...]
    policies: tuple[str, ...]
    episodes: FinishedEpisodes
    counters: Mapping[str, int]  # increase of each counter
    timers: Mapping[str, tuple[float, int]]  # seconds and calls by name
    values: tuple[tuple[str, float], ...]  # given to `Metrics.add_value`, in order, NaN left out


def difference(now: Counters, before: Counters) -> dict[str, int]:
    """Return the increase of each counter."""
    return {name: getattr(now, name) - getattr(before, name) for name in _COUNTED}


def counted(counters: Counters, more: Mapping[str, int]) -> Counters:
    """Return the counters with these increases added."""
    new = counters.copy()
    for name in _COUNTED:
        setattr(new, name, getattr(new, name) + more[name])
    return new


def standalone(found: FinishedEpisodes) -> FinishedEpisodes:
    """Return a copy of a table's rows, without fields that their records can be rebuilt from."""
    arrays = {name: getattr(found, name).copy() for name in FinishedEpisodes.__slots__ if name != "policy_ids"}
    for i, record in enumerate(found.made.tolist()):
        if record is not None and not record.custom:
            arrays["made"][i] = None
    used = np.unique(found.policy).tolist()
    return FinishedEpisodes(**arrays, policy_ids={number: found.policy_ids[number] for number in used})


def renumbered(found: FinishedEpisodes, numbers: dict[str, int]) -> FinishedEpisodes:
    """Return these episodes with another table's policy numbers, to which new ids are added."""
    policy = np.empty_like(found.policy)
    for number, name in found.policy_ids.items():
        policy[found.policy == number] = numbers.setdefault(name, len(numbers))
    arrays = {name: getattr(found, name) for name in FinishedEpisodes.__slots__ if name not in ("policy", "policy_ids")}
    return FinishedEpisodes(**arrays, policy=policy, policy_ids={number: name for name, number in numbers.items()})

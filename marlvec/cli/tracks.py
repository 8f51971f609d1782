"""What a policy's agents earned, episode by episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.collect import EpisodeRecord

__all__ = ["Track", "tracks"]


@dataclass(frozen=True, slots=True)
class Track:
    """One entry per agent and episode, in order of time.

    Attributes:
        env_steps: (k,) int64, env steps all envs had made together when the episode ended; they step in turn, so it is
            its own env's steps times their number.
        returns: (k,) float64, what the agent was paid in the episode.
        lengths: (k,) int64, decisions it made.
        agents: (k,) int64, agent index.
    """

    env_steps: NDArray[np.int64]
    returns: NDArray[np.float64]
    lengths: NDArray[np.int64]
    agents: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.returns)

    def of_agent(self, index: int) -> Track:
        """One agent's entries."""
        mine = self.agents == index
        return Track(self.env_steps[mine], self.returns[mine], self.lengths[mine], self.agents[mine])

    @property
    def agents_differ(self) -> bool:
        """Whether the mean returns of two agents are further apart than three standard errors."""
        own = [self.returns[self.agents == a] for a in np.unique(self.agents)]
        if len(own) < 2:
            return False
        means = np.array([part.mean() for part in own])
        low, high = own[int(means.argmin())], own[int(means.argmax())]
        error = np.sqrt(low.var() / len(low) + high.var() / len(high))
        return bool(np.ptp(means) > 3 * error)


def tracks(episodes: Sequence[EpisodeRecord], policy_ids: Sequence[str], num_envs: int) -> Mapping[str, Track]:
    """Sort episodes' results by policy; agents that never were in an episode have no entry for it.

    Args:
        episodes: All finished episodes since the envs' first reset, in order.
        policy_ids: All policies.
        num_envs: N.
    """
    made = np.zeros(num_envs, np.int64)
    entries: dict[str, list[tuple[Any, ...]]] = {name: [] for name in policy_ids}
    for episode in episodes:
        made[episode.env_id] += episode.length
        at = int(made[episode.env_id]) * num_envs
        for a in np.flatnonzero(episode.present_A).tolist():
            entries[episode.policies[a]].append((at, episode.returns_A[a], episode.lengths_A[a], a))
    return {name: _track(found) for name, found in entries.items()}


def _track(entries: list[tuple[Any, ...]]) -> Track:
    at, returns, lengths, agents = zip(*entries, strict=True) if entries else ((), (), (), ())
    steps = np.array(at, np.int64)
    order = np.argsort(steps, kind="stable")
    return Track(
        steps[order],
        np.array(returns, np.float64)[order],
        np.array(lengths, np.int64)[order],
        np.array(agents, np.int64)[order],
    )

"""What happened in the episodes: returns, lengths, durations; what was lost; and where the time went."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.errors import ArgumentError

__all__ = ["TIMERS", "EpisodeRecord", "Metrics", "Stats", "Timer"]

TIMERS = ("inference", "action_connectors", "env_wait", "agent_connectors", "ingest", "batch")
"""Where a collector's time goes: policies; both sides' connectors; waiting for envs; book-keeping; batches, with
their connectors."""


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
        policies: Each agent's policy id.
        duration: Seconds from its first observation to its end, by the clock on the wall.
    """

    eps_id: int
    env_id: int
    number: int
    length: int
    returns_A: NDArray[np.float64]
    lengths_A: NDArray[np.int64]
    present_A: NDArray[np.bool_]
    policies: tuple[str, ...]
    duration: float

    @property
    def episode_return(self) -> float:
        """Sum of all agents' returns."""
        return float(self.returns_A.sum())


@dataclass(frozen=True, slots=True)
class Stats:
    """Least, mean and greatest of some numbers; NaN where there are none."""

    count: int = 0
    min: float = math.nan
    mean: float = math.nan
    max: float = math.nan

    @classmethod
    def of(cls, values: Iterable[float]) -> Stats:
        """Statistics of these numbers."""
        numbers = list(values)
        if not numbers:
            return cls()
        return cls(len(numbers), float(min(numbers)), math.fsum(numbers) / len(numbers), float(max(numbers)))

    def as_dict(self) -> dict[str, float]:
        """The four numbers by name."""
        return {"count": self.count, "min": self.min, "mean": self.mean, "max": self.max}


@dataclass(slots=True)
class Timer:
    """Seconds spent in one place, over the life of a collector.

    Attributes:
        seconds: Together.
        calls: Number of times.
    """

    seconds: float = 0.0
    calls: int = 0

    def add(self, seconds: float) -> None:
        """Count one call."""
        self.seconds += seconds
        self.calls += 1

    @property
    def mean(self) -> float:
        """Seconds a call; 0 before the first."""
        return self.seconds / self.calls if self.calls else 0.0


class Metrics:
    """Totals over a collector's life, and statistics over its last episodes.

    Nothing goes astray: at any time ``env_steps`` is the sum of those of all batches, of ``env_steps_lost``, and of
    what waits for a later batch; after a ``collect(env_steps=...)`` that cuts through episodes, nothing waits. So it is
    with ``agent_steps``, where a decision waits until its outcome is known. Lost is what came into no batch and never
    will, because a fault or `RestartQuietly` ended its episode, or because `Collector.reset` did.

    Args:
        agents: Agent names, in order.
        policies: Policy ids.
        window: Number of episodes that statistics are over.

    Attributes:
        env_steps: Env steps that envs answered, lost ones and those that failed included; autoreset steps are none.
        agent_steps: Decisions given to envs, likewise.
        episodes_total: Episodes finished; lost ones are not.
        episodes_faulty: Episodes lost to a fault: of their own env, or of one beside it in the same worker.
        episodes_restarted: Episodes lost because their env raised `RestartQuietly`.
        noop_steps: How often an agent's declared no-op was sent, because a connector had taken its row out.
        env_steps_lost: Those of ``env_steps`` that were lost.
        agent_steps_lost: Those of ``agent_steps`` that were lost.
        timers: Timer by name, see `TIMERS`.
    """

    def __init__(self, agents: tuple[str, ...], policies: tuple[str, ...], *, window: int = 100) -> None:
        if window < 1:
            raise ArgumentError(f"the metrics' window must be at least 1 episode, got {window}")
        self._agents, self._policies = agents, policies
        self._window: deque[EpisodeRecord] = deque(maxlen=window)
        self.env_steps = 0
        self.agent_steps = 0
        self.episodes_total = 0
        self.episodes_faulty = 0
        self.episodes_restarted = 0
        self.noop_steps = 0
        self.env_steps_lost = 0
        self.agent_steps_lost = 0
        self.timers = {name: Timer() for name in TIMERS}

    def add(self, record: EpisodeRecord) -> None:
        """Count a finished episode."""
        self._window.append(record)
        self.episodes_total += 1

    @property
    def episodes(self) -> list[EpisodeRecord]:
        """The last finished episodes, oldest first; at most as many as the window is long."""
        return list(self._window)

    @property
    def returns(self) -> Stats:
        """Of whole episodes: the sum over all agents."""
        return Stats.of(e.episode_return for e in self._window)

    @property
    def lengths(self) -> Stats:
        """Env steps an episode."""
        return Stats.of(e.length for e in self._window)

    @property
    def durations(self) -> Stats:
        """Seconds an episode."""
        return Stats.of(e.duration for e in self._window)

    def env(self, env_id: int) -> dict[str, Stats]:
        """``return``, ``length`` and ``duration`` of one env's episodes."""
        return _of_episodes([e for e in self._window if e.env_id == env_id])

    def agent(self, name: str) -> dict[str, Stats]:
        """``return``, ``length`` (decisions) and ``duration`` of the episodes that one agent was in.

        Raises:
            KeyError: There is no such agent.
        """
        if name not in self._agents:
            raise KeyError(f"no agent {name!r}; there are {list(self._agents)}")
        a = self._agents.index(name)
        return _of_agents([(e, a) for e in self._window if e.present_A[a]])

    def policy(self, policy_id: str) -> dict[str, Stats]:
        """``return``, ``length`` (decisions) and ``duration`` of the agents that one policy played, each on its own.

        Raises:
            KeyError: There is no such policy.
        """
        if policy_id not in self._policies:
            raise KeyError(f"no policy {policy_id!r}; there are {list(self._policies)}")
        pairs = ((e, a) for e in self._window for a in range(len(self._agents)))
        return _of_agents([(e, a) for e, a in pairs if e.policies[a] == policy_id and e.present_A[a]])

    def summary(self) -> dict[str, Any]:
        """Return everything as plain dicts and numbers."""
        return {
            "env_steps": self.env_steps,
            "agent_steps": self.agent_steps,
            "episodes_total": self.episodes_total,
            "episodes_faulty": self.episodes_faulty,
            "episodes_restarted": self.episodes_restarted,
            "noop_steps": self.noop_steps,
            "env_steps_lost": self.env_steps_lost,
            "agent_steps_lost": self.agent_steps_lost,
            **_plain(_of_episodes(self.episodes)),
            "envs": {i: _plain(self.env(i)) for i in sorted({e.env_id for e in self._window})},
            "agents": {name: _plain(self.agent(name)) for name in self._agents},
            "policies": {name: _plain(self.policy(name)) for name in self._policies},
            "timers": {name: {"seconds": t.seconds, "calls": t.calls} for name, t in self.timers.items()},
        }

    def __repr__(self) -> str:
        r = self.returns
        gone = self.episodes_faulty + self.episodes_restarted
        lost = f" and {gone} lost" if gone else ""
        return (
            f"Metrics({self.env_steps} env steps, {self.agent_steps} agent steps, {self.episodes_total} episodes"
            f"{lost}; returns of the last {r.count}: mean {r.mean:.4g}, min {r.min:.4g}, max {r.max:.4g})"
        )


def _of_episodes(episodes: list[EpisodeRecord]) -> dict[str, Stats]:
    return {
        "return": Stats.of(e.episode_return for e in episodes),
        "length": Stats.of(e.length for e in episodes),
        "duration": Stats.of(e.duration for e in episodes),
    }


def _of_agents(pairs: list[tuple[EpisodeRecord, int]]) -> dict[str, Stats]:
    return {
        "return": Stats.of(float(e.returns_A[a]) for e, a in pairs),
        "length": Stats.of(int(e.lengths_A[a]) for e, a in pairs),
        "duration": Stats.of(e.duration for e, _ in pairs),
    }


def _plain(stats: dict[str, Stats]) -> dict[str, dict[str, float]]:
    return {name: s.as_dict() for name, s in stats.items()}

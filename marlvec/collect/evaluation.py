"""`Evaluation`: whole episodes without learning, and statistics over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.metrics.episode_table import EpisodeRecord
from marlvec.collect.metrics.metrics import Stats, stats_of_agents, stats_of_policy
from marlvec.errors import ArgumentError
from marlvec.vector.vector_env import VectorEnv

__all__ = ["EpisodeQuotas", "Evaluation", "check_apart"]


@dataclass(frozen=True, repr=False)
class Evaluation:
    """The result of `Collector.evaluate`.

    Attributes:
        episodes: The episodes' records: every env's first one, by env, then every env's second one, and so on.
        agents: Agent names, in order of the records' arrays.
        versions: Policy id to the version that was evaluated, of those that played.
        lost: Number of episodes that were lost to faults or `RestartQuietly`; others were played for them.
    """

    episodes: Sequence[EpisodeRecord]
    agents: tuple[str, ...]
    versions: Mapping[str, int]
    lost: int = 0

    def __len__(self) -> int:
        return len(self.episodes)

    @property
    def returns(self) -> Stats:
        """Of whole episodes: the sum over all agents."""
        return Stats.of(e.episode_return for e in self.episodes)

    @property
    def lengths(self) -> Stats:
        """Env steps an episode."""
        return Stats.of(e.length for e in self.episodes)

    @property
    def agent_returns(self) -> dict[str, Stats]:
        """Agent name to its returns in the episodes it was in."""
        return {
            name: stats_of_agents([(e, a) for e in self.episodes if e.present_A[a]])["return"]
            for a, name in enumerate(self.agents)
        }

    @property
    def policy_returns(self) -> dict[str, Stats]:
        """Policy id to the returns of the agents it played, each on its own."""
        return {name: stats_of_policy(self.episodes, name)["return"] for name in self.versions}

    def __repr__(self) -> str:
        lost = f", {self.lost} lost" if self.lost else ""
        lines = [f"Evaluation of {len(self)} episodes{lost}:"]
        lines.append(f"  team return (sum over agents): {_line(self.returns)}")
        lines.append(f"  length: {_line(self.lengths)}")
        per_policy = ("return per agent of policy", self.policy_returns)
        for what, found in (("return of agent", self.agent_returns), per_policy):
            lines += [f"  {what} {name!r}: {_line(stats)}" for name, stats in found.items()]
        return "\n".join(lines)


def _line(stats: Stats) -> str:
    return f"{stats.mean:.4g} ± {stats.std:.4g} (min {stats.min:.4g}, max {stats.max:.4g})"


class EpisodeQuotas:
    """The episodes that each env still has to play.

    It is settled before they begin which episodes count: every env's first ones, as many of each. To take the first to
    end would favour short episodes, and to take them from whichever env begins one, envs in which they are short.
    """

    def __init__(self, episodes: int, num_envs: int) -> None:
        self._left_N = np.full(num_envs, episodes // num_envs)
        self._left_N[: episodes % num_envs] += 1
        self._found: list[tuple[int, EpisodeRecord]] = []
        self._count_N = np.zeros(num_envs, np.int64)

    def note(self, record: EpisodeRecord) -> None:
        """An episode has ended."""
        i = record.env_id
        if self._left_N[i] > 0:
            self._found.append((int(self._count_N[i]), record))
            self._left_N[i] -= 1
            self._count_N[i] += 1

    def wanted(self, living: NDArray[np.int64]) -> NDArray[np.bool_]:
        """(N,): of which envs there are too few. What was wanted of one that is out for good is of the others."""
        gone = np.ones(len(self._left_N), np.bool_)
        gone[living] = False
        if len(living):
            for i in np.flatnonzero(gone & (self._left_N > 0)).tolist():
                for _ in range(int(self._left_N[i])):
                    planned = self._left_N[living] + self._count_N[living]
                    self._left_N[living[np.argmin(planned)]] += 1
                self._left_N[i] = 0
        wanted: NDArray[np.bool_] = self._left_N > 0
        return wanted

    @property
    def records(self) -> list[EpisodeRecord]:
        """The finished episodes, by round and env."""
        return [record for _, record in sorted(self._found, key=lambda item: (item[0], item[1].env_id))]


def check_apart(envs: VectorEnv, collected: VectorEnv, who: str) -> None:
    """Refuse the envs that are collected from, also behind a view of them."""
    if envs is collected or getattr(envs, "envs", None) is collected:
        raise ArgumentError(f"{who} cannot play in the envs that are collected from; make() others")

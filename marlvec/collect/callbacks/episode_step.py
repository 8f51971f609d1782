"""`EpisodeStep` and `RunningEpisode`: a step of some envs, and a running episode, as arguments of callbacks."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.episodes import Episode
from marlvec.collect.metrics.metrics import Metrics
from marlvec.collect.scheduling.env_step import EnvStep
from marlvec.envs.spec import Info
from marlvec.vector.data.infos import infos_to_list
from marlvec.vector.vector_env import VectorEnv

__all__ = ["RunningEpisode", "EpisodeStep"]


class RunningEpisode(Episode):
    """One episode, the same object from its creation to its end.

    Attributes:
        policies: Each agent's policy id when the episode was created.
        custom: Numbers by name, for callbacks to fill; copied to `EpisodeRecord.custom` and `Metrics.custom`.
    """

    __slots__ = ("custom", "policies", "stage")

    def __init__(self, eps_id: int, env_id: int, number: int, entropy: int, policies: tuple[str, ...]) -> None:
        super().__init__(eps_id, env_id, number, entropy)
        self.policies = policies
        self.custom: dict[str, float] = {}
        self.stage = "running"  # last stage reported to callbacks: "new", "running", "over"


class EpisodeStep:
    """One step of n envs, in env order, without envs whose episode was lost in it.

    Its arrays are copies: keep or change them freely.

    Attributes:
        env_ids: (n,) int64, ascending.
        rewards: (n, A) float64, raw rewards of the envs.
        terminated, truncated: (n, A) bool, whether the agent ended in this step.
        done: (n,) bool, whether the episode ended in this step.
        metrics: The collector's.
    """

    def __init__(
        self,
        env_step: EnvStep,
        rows: NDArray[np.int64],
        running_N: NDArray[np.object_],
        envs: VectorEnv,
        metrics: Metrics,
    ) -> None:
        self.env_ids = env_step.env_ids[rows]
        self.rewards = env_step.rewards[rows]
        self.terminated, self.truncated = env_step.terminated[rows], env_step.truncated[rows]
        self.done = env_step.done[rows]
        self.metrics = metrics
        self._running_n = running_N[self.env_ids]
        self._results, self._envs = env_step.results, envs

    def __len__(self) -> int:
        return len(self.env_ids)

    def __repr__(self) -> str:
        return f"EpisodeStep(env_ids={self.env_ids.tolist()}, done={self.done.tolist()})"

    @cached_property
    def episodes(self) -> list[RunningEpisode]:
        """Each env's episode in this step."""
        episodes: list[RunningEpisode] = self._running_n.tolist()
        return episodes

    @cached_property
    def infos(self) -> list[Info]:
        """Each env's infos of this step, ``{agent: {key: value}, "__common__": {key: value}}``; built when read."""
        agents, ended = self._envs.agents, set(self.env_ids[self.done].tolist())
        found: dict[int, Info] = {}
        for result in self._results:
            ids, stacked = result.env_ids.tolist(), result.infos
            found |= zip(ids, infos_to_list(stacked, agents, len(ids)), strict=True)
            if self._envs.autoreset.begins_at_once:  # after an episode's end they belong to the next episode
                finals = zip(ids, infos_to_list(stacked.get("final_info", {}), agents, len(ids)), strict=True)
                found |= {i: info for i, info in finals if i in ended}
        return [found[i] for i in self.env_ids.tolist()]

"""A marlvec vectorizer as CleanRL's scripts use it: flat rows, and infos in the form of Gymnasium 0.29."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.interop.gymnasium import GymnasiumVectorEnv
from marlvec.interop.rows import EpisodeSums, InfoEntry, check_view
from marlvec.vector.vector_env import VectorEnv

__all__ = ["CleanRLVectorEnv"]


class CleanRLVectorEnv(GymnasiumVectorEnv):
    """A `GymnasiumVectorEnv` in same-step mode, for CleanRL's scripts and similar ones.

    It differs from that class only in steps in which an agent ends:

    * ``infos["final_observation"]``, (R,) objects: the last observation of each row whose flag is True; else None.
    * ``infos["final_info"]``, (R,) objects: the row's last info as a dict, with ``"episode"``:
      ``{"r": return, "l": number of steps alive, "t": seconds since the view was made}``; else None.
    * ``infos["_final_observation"]`` and ``infos["_final_info"]``, (R,) bool: the rows that have an entry.

    Rows whose episode was lost to a fault have neither entry; they are truncated. No ``RecordEpisodeStatistics`` is
    needed, and lengths do not count padding. With several agents, ``infos["acting"]``, (R,) bool, marks the rows whose
    agent decides at the observation: leave the others out of losses.

    Args:
        envs: The vectorizer.

    Raises:
        ArgumentError: There are several groups, or the autoreset mode differs.
    """

    def __init__(self, envs: VectorEnv) -> None:
        check_view(envs, "CleanRLVectorEnv")
        super().__init__(envs)
        self._alive = np.ones(self.num_envs, np.bool_)
        self._sums = EpisodeSums(self.num_envs)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        chosen = None if options is None else options.get("reset_mask")
        obs, infos = super().reset(seed=seed, options=options)
        self._sums.clear(slice(None) if chosen is None else np.asarray(chosen))
        self._note(infos)
        return obs, infos

    def step(
        self, actions: Any
    ) -> tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        obs, rewards, terminated, truncated, infos = super().step(actions)
        self._sums.add(rewards, self._alive)
        self._note(infos)
        ended = terminated | truncated
        if np.count_nonzero(ended):
            if "final_obs" in infos:  # otherwise all their episodes were lost
                infos["final_observation"] = infos.pop("final_obs")
                infos["_final_observation"] = infos.pop("_final_obs")
            for row in np.flatnonzero(infos.get("_final_info", ())).tolist():
                infos["final_info"][row]["episode"] = self._sums.at(row)
            self._sums.clear(ended)
        return obs, rewards, terminated, truncated, infos

    def _note(self, infos: dict[str, Any]) -> None:
        if "alive" in infos:  # otherwise there is one agent, always alive
            self._alive = infos["alive"].copy()

    def _final_info(self, entries: list[InfoEntry], rows: NDArray[np.int64]) -> Any:
        infos = np.full(self.num_envs, None, object)
        for row in rows.tolist():
            infos[row] = {entry.key: entry.at(row) for entry in entries if entry.present[row]}
        return infos

"""A marlvec vectorizer as CleanRL's scripts use it: flat rows, and infos in the form of Gymnasium 0.29.

Axis letters: N envs, A agents, R = N * A rows; the agents of env i are rows i * A to i * A + A - 1.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.envs.autoreset import AutoresetMode
from marlvec.interop.gymnasium import GymnasiumVectorEnv
from marlvec.interop.rows.infos import InfoEntry
from marlvec.interop.rows.view_checks import NEXT_BEGINS_AT_ONCE, check_view
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
        check_view(envs, "CleanRLVectorEnv", NEXT_BEGINS_AT_ONCE, modes=[AutoresetMode.SAME_STEP])
        super().__init__(envs)
        self._alive = np.ones(self.num_envs, np.bool_)
        self._returns = np.zeros(self.num_envs)
        self._lengths = np.zeros(self.num_envs, np.int64)
        self._began = time.monotonic()

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        chosen = None if options is None else options.get("reset_mask")
        obs, infos = super().reset(seed=seed, options=options)
        begun = slice(None) if chosen is None else np.asarray(chosen)
        self._returns[begun], self._lengths[begun] = 0, 0
        self._note(infos)
        return obs, infos

    def step(
        self, actions: Any
    ) -> tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        obs, rewards, terminated, truncated, infos = super().step(actions)
        self._returns += rewards
        self._lengths += self._alive
        self._note(infos)
        ended = terminated | truncated
        if np.count_nonzero(ended):
            seconds = round(time.monotonic() - self._began, 6)
            if "final_obs" in infos:  # otherwise all their episodes were lost
                infos["final_observation"], infos["_final_observation"] = (
                    infos.pop("final_obs"),
                    infos.pop("_final_obs"),
                )
            for row in np.flatnonzero(infos.get("_final_info", ())).tolist():
                infos["final_info"][row]["episode"] = {
                    "r": float(self._returns[row]),
                    "l": int(self._lengths[row]),
                    "t": seconds,
                }
            self._returns[ended], self._lengths[ended] = 0, 0
        return obs, rewards, terminated, truncated, infos

    def _note(self, infos: dict[str, Any]) -> None:
        if "alive" in infos:  # otherwise there is one agent, always alive
            self._alive = infos["alive"].copy()

    def _final_info(self, entries: list[InfoEntry], rows: NDArray[np.int64]) -> Any:
        infos = np.full(self.num_envs, None, object)
        for row in rows.tolist():
            infos[row] = {entry.key: entry.at(row) for entry in entries if entry.present[row]}
        return infos

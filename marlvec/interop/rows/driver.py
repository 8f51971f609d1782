"""`RowDriver`: steps a vectorizer for single-agent libraries: flat rows, one info dict per row.

Axis letters: N envs, A agents, R = N * A rows; the agents of env i are rows i * A to i * A + A - 1.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.envs.spec import COMMON, Info
from marlvec.errors import ArgumentError
from marlvec.interop.rows.agent_rows import AgentRows, cleared
from marlvec.interop.rows.infos import merged, split_infos
from marlvec.interop.rows.view_checks import check_view, value_at
from marlvec.vector.vector_env import VectorEnv
from marlvec.vector.vector_step import VectorStep

__all__ = ["EpisodeSums", "RowDriver", "RowStep"]


@dataclass(frozen=True, slots=True)
class RowStep:
    """One step of all rows; arrays and dicts belong to the caller."""

    # (R, …), or a tree of such arrays. If an env's episode ended, the first observation of the next one; zeros in rows
    # without an agent.
    obs: Any
    rewards: NDArray[np.float64]  # (R,), as are the flags
    terminated: NDArray[np.bool_]  # the agent ended in this step
    truncated: NDArray[np.bool_]
    infos: list[dict[str, Any]]  # of each row, see `RowDriver`
    first_infos: list[dict[str, Any]]  # of the reset after the step; empty without a reset


class EpisodeSums:
    """Return and length of each row's running episode; lengths count steps alive."""

    def __init__(self, row_num: int) -> None:
        self._returns, self._lengths = np.zeros(row_num), np.zeros(row_num, np.int64)
        self._began = time.monotonic()

    def add(self, rewards: NDArray[np.float64], was_alive: NDArray[np.bool_]) -> None:
        self._returns += rewards
        self._lengths += was_alive

    def clear(self, rows: Any = slice(None)) -> None:
        """Begin new episodes in these rows: a mask, or a slice."""
        self._returns[rows], self._lengths[rows] = 0, 0

    def at(self, row: int) -> dict[str, Any]:
        """Return a row's sums, as ``RecordEpisodeStatistics`` does; ``"t"``: seconds since this object was made."""
        seconds = round(time.monotonic() - self._began, 6)
        return {"r": float(self._returns[row]), "l": int(self._lengths[row]), "t": seconds}


class RowDriver:
    """Resets and steps a `VectorEnv` in same-step mode, and reports on each row.

    An agent's flag is True once, when it ends. If its env continues, the row is padding from the next observation on,
    as for an agent that has not joined: zeros, reward 0, no flags, any action ignored, until the env's next episode.
    Envs begin a new episode, all rows together, in the step in which their last agent ends.

    Each row's info has its agent's info, the info of the env as a whole, and

    * ``"alive"``, ``"acting"``: for the returned observation: whether there is an agent, and whether it must act now;
    * ``"action_mask"``: (k,) bool, for that observation, if there are masks;
    * ``"TimeLimit.truncated"``: the agent was truncated, and not terminated;
    * in the step in which the agent ended, ``"terminal_observation"``, its last observation, and ``"episode"``:
      ``{"r": return, "l": number of steps alive, "t": seconds since the driver began}``;
    * ``"fault"``: True if its episode was lost. The row is truncated, and its last observation is the one before the
      lost step.
    """

    def __init__(self, envs: VectorEnv, view: str) -> None:
        self.rows = AgentRows(envs, view)
        check_view(envs, view)
        self.envs = envs
        # (R,): for the latest observations; the row's action counted in the latest step; that step lost its episode.
        self.alive, self.acting, self.acted, self.lost = np.zeros((4, self.rows.row_num), np.bool_)
        self._sums = EpisodeSums(self.rows.row_num)
        self._leaves: list[NDArray[Any]] = []
        self._mask: NDArray[np.bool_] | None = None

    @property
    def has_masks(self) -> bool:
        """Whether actions can be masked: they are discrete choices."""
        return self.rows.group.choices is not None

    @property
    def action_masks(self) -> NDArray[np.bool_]:
        """(R, k), for the latest observations; all True if the envs have no masks, and in rows that do not act."""
        choices = self.rows.group.choices
        if choices is None:
            raise ArgumentError(f"action_masks: expected discrete choices, got {self.rows.group.action_space}")
        return np.ones((self.rows.row_num, choices), np.bool_) if self._mask is None else self._mask.copy()

    def reset(
        self, seed: int | Sequence[int | None] | None = None, options: Any = None
    ) -> tuple[Any, list[dict[str, Any]]]:
        """Begin new episodes in all envs; return obs (R, …), and one info per row."""
        self.envs.reset_send(seed=seed, options=options)
        result = self.envs.recv()
        self._note(result)
        self.acted, self.lost = np.zeros((2, self.rows.row_num), np.bool_)
        self._sums.clear()
        now, _ = split_infos(result, self.envs.agents)
        self._leaves = self._copy_rows(result.obs_leaves[0])
        return self._tree(), self._merge_infos(now, self._driver_infos())

    def send(self, actions: Any) -> None:
        """Send actions (R, …), or a tree of such arrays; rows that do not act may have any action."""
        self.envs.step_send(self.rows.split(actions))

    def recv(self) -> RowStep:
        """Wait for the step started by `send`."""
        result = self.envs.recv()
        was_alive, self.acted = self.alive, self.acting
        self._note(result)
        terminated, truncated = self.rows.join(result.terminated), self.rows.join(result.truncated)
        rewards, ended = self.rows.join(result.rewards), terminated | truncated
        self.lost = ended & self.rows.spread(result.fault)
        self._sums.add(rewards, was_alive)
        now, first = split_infos(result, self.envs.agents)
        ours, cut = self._driver_infos(), truncated & ~terminated
        for row in np.flatnonzero(cut).tolist():
            ours[row]["TimeLimit.truncated"] = True
        leaves = self._copy_rows(result.obs_leaves[0])
        if ended.any():
            self._end(result, ended, ours)
            leaves = cleared(leaves, ended & ~self.rows.spread(result.done))
        self._leaves = leaves
        blank: list[dict[str, Any]] = [{} for _ in ours]
        return RowStep(
            self._tree(),
            rewards.copy(),
            terminated.copy(),
            truncated.copy(),
            self._merge_infos(now, ours),
            self._merge_infos(first, blank),
        )

    def _note(self, result: VectorStep) -> None:
        self.alive, self.acting = self.rows.join(result.alive).copy(), self.rows.join(result.acting).copy()
        mask = result.action_masks[0]
        self._mask = None if mask is None else self.rows.join(mask).copy()

    def _copy_rows(self, leaves: list[NDArray[Any]]) -> list[NDArray[Any]]:
        """Return leaves as rows, copied if they belong to the vectorizer."""
        return [self.rows.join(leaf if self.envs.copy else leaf.copy()) for leaf in leaves]

    def _tree(self) -> Any:
        return self.rows.group.observation_tree.unflatten(self._leaves)

    def _merge_infos(self, infos: list[Info], ours: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if not any(infos):  # most envs have no infos in most steps
            return ours
        given = ((info.get(agent, {}), info.get(COMMON, {})) for info in infos for agent in self.envs.agents)
        return [merged(own, common, mine) for (own, common), mine in zip(given, ours, strict=True)]

    def _driver_infos(self) -> list[dict[str, Any]]:
        ours: list[dict[str, Any]] = [
            {"TimeLimit.truncated": False, "alive": alive, "acting": acting}
            for alive, acting in zip(self.alive.tolist(), self.acting.tolist(), strict=True)
        ]
        if self._mask is not None:
            for info, mask in zip(ours, self._mask, strict=True):
                info["action_mask"] = mask
        return ours

    def _end(self, result: VectorStep, ended: NDArray[np.bool_], ours: list[dict[str, Any]]) -> None:
        tree, final = self.rows.group.observation_tree, [self.rows.join(leaf) for leaf in result.final_leaves[0]]
        for row in np.flatnonzero(ended).tolist():
            info, lost = ours[row], bool(self.lost[row])
            info["terminal_observation"] = value_at(tree, self._leaves if lost else final, (row,))
            if lost:
                info["fault"] = True  # its return is unknown
            else:
                info["episode"] = self._sums.at(row)
        self._sums.clear(ended)

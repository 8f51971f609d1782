"""A marlvec vectorizer as a Gymnasium vector env: its agents are rows.

Axis letters: N envs, A agents, R = N * A rows; the agents of env i are rows i * A to i * A + A - 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from marlvec.errors import ArgumentError
from marlvec.interop.rows.agent_rows import AgentRows, cleared
from marlvec.interop.rows.infos import InfoEntry, lay_out, pick_rows, read_entries
from marlvec.interop.rows.view_checks import render_mode_of, value_at
from marlvec.spaces import batch_space
from marlvec.vector.vector_env import VectorEnv

__all__ = ["GymnasiumVectorEnv"]

_FINAL = ("final_obs", "final_info")
_AGENT_AXIS = ("alive", "acting", "reset_mask")  # says nothing that is new where an env has one agent
_STATES = ("state", "final_state")


class GymnasiumVectorEnv(gymnasium.vector.VectorEnv[Any, Any, NDArray[Any]]):
    """A view of a `VectorEnv` with one group of agents, for code that is written for Gymnasium's vector envs.

    With one agent an env, rows are envs, and all that comes back is what Gymnasium's own vector envs give, infos
    included. With more, each agent has a row, and what differs is this:

    * An agent's flag goes up once, in the step in which the agent ends. If its env goes on, its row is padding from
      then on, as it is before a late birth: zeros, reward 0, no flags, whatever action it is given, until the env's
      next episode begins. ``infos["alive"]`` and ``infos["acting"]``, (R,) bool, tell padding and waiting rows.
    * Envs are what is reset: all their rows together, when the last agent has ended (with ``done_on="any"``, when the
      first has; then no row is ever padding, unless agents are born late). ``infos["reset_mask"]``, (R,) bool, marks
      the rows of a next-step autoreset, whose actions were ignored.
    * In same-step mode, ``infos["final_obs"]`` and ``infos["final_info"]`` have an entry in each row whose flag is up
      (but for those whose episode was lost to a fault), and that row's observation is the first one of the next
      episode, or zeros where its env goes on. In the other modes the row's observation is the agent's last one, and it
      is zeros from the next step on.
    * What an env says as a whole is repeated in the rows of its agents.

    Everywhere ``infos["action_mask"]``, (R, k) bool, has the masks, if the env gives them.

    Errors are marlvec's. The view reads and writes through ``envs`` and keeps nothing of what passes, so that
    ``envs`` may be used directly, too.

    Args:
        envs: The vectorizer; made with ``copy=True`` if wrappers are to write into what they are given, as some of
            Gymnasium's do.

    Raises:
        ArgumentError: There are several groups.

    Attributes:
        envs: The vectorizer.
        num_envs: R, the number of rows.
        single_observation_space, single_action_space: Of one row.
        observation_space, action_space: Of all rows, as `gymnasium.vector.utils.batch_space` makes them.
        metadata: The envs' own, and Gymnasium's ``AutoresetMode`` under ``"autoreset_mode"``.
        render_mode: What the envs have in common, or None.
        np_random: For wrappers and users; an int seed in `reset` starts it anew, and no env draws from it.
    """

    def __init__(self, envs: VectorEnv) -> None:
        self._layout = AgentRows(envs, type(self).__name__)
        group = self._layout.group
        self.envs = envs
        self.num_envs = self._layout.row_num
        # Copies: whoever samples or seeds these must not disturb the spaces that an env in this process draws from.
        self.single_observation_space = deepcopy(group.observation_space)
        self.single_action_space = deepcopy(group.action_space)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata = {**envs.metadata, "autoreset_mode": AutoresetMode[envs.autoreset.mode.name]}
        self.render_mode = render_mode_of(envs)
        self._group = group
        self._same_step = envs.autoreset.begins_at_once
        # Keys of the view itself; what an env says under one of them is put aside.
        self._taken = {*_FINAL, *(_AGENT_AXIS if envs.agent_num > 1 else ())}
        self._taken |= set() if group.mask_size is None else {"action_mask"}
        self._is_plain = envs.agent_num == 1 and not envs.grouped and group.observation_tree.is_leaf

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin new episodes.

        Args:
            seed: One int, spread over the envs by `marlvec.env_seeds`; or a list of one int or None per env (N, also
                where envs have several rows), given as they are.
            options: For the envs. ``"reset_mask"``, (R,) bool, is taken out of a copy: only those envs are reset.

        Returns:
            ``(obs, infos)`` of all rows; rows that are not reset keep their observation.

        Raises:
            ArgumentError: Wrong seed or options; a mask of wrong shape or dtype, without a True, or not the same for
                all rows of an env. Nothing was reset.
        """
        env_ids, options = self._chosen(options)
        seeds = seed
        if isinstance(seed, (list, tuple, np.ndarray)) and np.ndim(seed):
            if len(seed) != self.envs.num_envs:
                raise ArgumentError(f"seed: expected one per env, {self.envs.num_envs} in all, got {len(seed)}")
            seeds = seed if env_ids is None else [seed[i] for i in env_ids]
        obs, infos = self.envs.reset(seed=seeds, options=options, env_ids=env_ids)
        if isinstance(seed, (int, np.integer)):
            super().reset(seed=int(seed))
        leaves = self._rows(obs)
        if self._same_step:
            leaves = cleared(leaves, ~infos["alive"].reshape(-1))  # an agent may have ended in the step before
        return self._group.observation_tree.unflatten(leaves), self._infos(infos)

    def step(
        self, actions: Any
    ) -> tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Step all envs.

        Args:
            actions: (R, …), or a tree of such arrays. Those of rows that are not acting may be anything.

        Returns:
            ``(obs, rewards, terminated, truncated, infos)``: obs (R, …), rewards (R,) float64, both flags (R,) bool.

        Raises:
            ActionError: Wrong structure, shape, dtype or value; nothing was sent.
            NotResetError: An env's episode is over, and nothing resets it in ``"disabled"`` mode.
        """
        obs, rewards, terminated, truncated, infos = self.envs.step(self._layout.split(actions))
        if self._is_plain and len(infos) == 3:  # alive, acting and reset_mask: nothing was said, and nobody has ended
            return self._layout.join(obs), rewards[:, 0], terminated[:, 0], truncated[:, 0], {}
        leaves = self._rows(obs)
        ended = terminated | truncated
        out = self._infos(infos)
        if "final_state" in infos:
            out |= {key: infos[key].repeat(self.envs.agent_num, axis=0) for key in ("final_state", "_final_state")}
        if self._same_step and np.count_nonzero(ended):
            lost = infos.get("fault", np.zeros(len(ended), np.bool_))
            early = (ended & ~(infos["_final_observation"] | lost)[:, None]).reshape(-1)
            leaves = cleared(leaves, early)
            if (known := ended & ~lost[:, None]).any():  # nobody saw the last observations of a lost episode
                out |= self._final(infos, np.flatnonzero(known), early)
        tree = self._group.observation_tree.unflatten(leaves)
        return tree, rewards.reshape(-1), terminated.reshape(-1), truncated.reshape(-1), out

    def render(self) -> tuple[Any, ...]:
        """One frame per row: what its env's own ``render()`` returns, the same one for all agents of an env."""
        return tuple(frame for frame in self.envs.render() for _ in range(self.envs.agent_num))

    def close_extras(self, timeout: float = 5.0) -> None:
        """Close the vectorizer; `close` calls this.

        Args:
            timeout: Seconds to let envs finish.
        """
        self.envs.close(timeout)

    def _chosen(self, options: Mapping[str, Any] | None) -> tuple[list[int] | None, dict[str, Any] | None]:
        """Envs that ``options`` asks to reset, None for all, and the options without that."""
        if options is None or "reset_mask" not in options:
            return None, None if options is None else dict(options)
        mask = np.asarray(options["reset_mask"])
        if mask.shape != (self.num_envs,) or mask.dtype != np.bool_:
            raise ArgumentError(
                f"options['reset_mask']: expected shape ({self.num_envs},), dtype bool, "
                f"got shape {mask.shape}, dtype {mask.dtype}"
            )
        if not mask.any():
            raise ArgumentError("options['reset_mask']: expected at least one True, got none")
        per_env = mask.reshape(self.envs.num_envs, self.envs.agent_num)
        chosen = per_env.any(axis=1)
        if torn := np.flatnonzero(chosen & ~per_env.all(axis=1)).tolist():
            i, agent_num = torn[0], self.envs.agent_num
            raise ArgumentError(
                f"options['reset_mask']: expected the same for all {agent_num} agents of an env, since envs are what "
                f"is reset; env {i} (rows {i * agent_num} to {(i + 1) * agent_num - 1}) has {per_env[i].tolist()}"
            )
        rest = {key: value for key, value in options.items() if key != "reset_mask"}
        return np.flatnonzero(chosen).tolist(), rest or None

    def _rows(self, tree: Any) -> list[NDArray[Any]]:
        """(N, A, …) to the leaves (R, …)."""
        if self.envs.grouped:
            tree = tree[self._group.name]
        leaves: list[NDArray[Any]] = self._group.observation_tree.flatten(tree)
        return [self._layout.join(leaf) for leaf in leaves]

    def _infos(self, infos: dict[str, Any]) -> dict[str, Any]:
        """Infos of all rows, but for what belongs to the last step of an episode."""
        agent_num = self.envs.agent_num
        own: dict[str, NDArray[Any]] = {}
        if agent_num > 1:
            own = {key: infos[key].reshape(-1) for key in ("alive", "acting")}
            own["reset_mask"] = infos["reset_mask"].repeat(agent_num)
        if "action_mask" in infos:
            mask = infos["action_mask"][self._group.name] if self.envs.grouped else infos["action_mask"]
            own["action_mask"] = mask.reshape(self.num_envs, -1)
        if "state" in infos:
            own["state"] = infos["state"].repeat(agent_num, axis=0)
        out: dict[str, Any] = {}
        for key, rows in own.items():
            out[key], out["_" + key] = rows, np.ones(self.num_envs, np.bool_)
        taken = self._taken.union(_STATES) if "state" in infos else self._taken
        return out | lay_out(read_entries(infos, agent_num), taken)

    def _final(self, infos: dict[str, Any], rows: NDArray[np.int64], early: NDArray[np.bool_]) -> dict[str, Any]:
        """What Gymnasium's same-step mode keeps of the rows whose flag is up."""
        leaves = self._rows(infos["final_observation"])
        final_obs = np.full(self.num_envs, None, object)
        for row in rows.tolist():
            final_obs[row] = value_at(self._group.observation_tree, leaves, (row,))
        present = np.zeros(self.num_envs, np.bool_)
        present[rows] = True
        return {
            "final_obs": final_obs,
            "_final_obs": present,
            "final_info": lay_out(self._last_entries(infos, rows, early), ()),
            "_final_info": present.copy(),
        }

    def _last_entries(
        self, infos: dict[str, Any], rows: NDArray[np.int64], early: NDArray[np.bool_]
    ) -> list[InfoEntry]:
        """What was said in these rows' last step: apart where a new episode has begun, else among the rest."""
        now = read_entries(infos, self.envs.agent_num)
        last = read_entries(infos.get("final_info", {}), self.envs.agent_num)
        if not now and not last:
            return []
        return pick_rows({row: now if early[row] else last for row in rows.tolist()}, self.num_envs)

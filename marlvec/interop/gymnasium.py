"""A marlvec vectorizer as a Gymnasium vector env: its agents become rows.

Axis letters: N envs, A agents, R = N * A rows; the agents of env i are rows i * A to i * A + A - 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from marlvec.errors import ArgumentError, EnvRaised
from marlvec.interop.rows import (
    AgentRows,
    InfoEntry,
    cleared,
    lay_out_infos,
    missing_is_attribute_error,
    pick_rows,
    read_entries,
    render_mode_of,
    value_at,
)
from marlvec.spaces import batch_space
from marlvec.vector.calls import PerEnv
from marlvec.vector.vector_env import VectorEnv

__all__ = ["GymnasiumVectorEnv"]

_FINAL = ("final_obs", "final_info")
_ALWAYS = frozenset({"alive", "acting", "reset_mask"})  # infos that are redundant with one agent,
_AT_ENDS = frozenset({"final_observation", "final_obs", "_final_observation", "_final_obs"})  # if not in same-step mode
_STATES = ("state", "final_state")


class GymnasiumVectorEnv(gymnasium.vector.VectorEnv[Any, Any, NDArray[Any]]):
    """A view of a `VectorEnv` with one group of agents, for code written for Gymnasium's vector envs.

    With one agent per env, rows are envs, and all results equal those of Gymnasium's own vector envs, including infos.
    With several agents, each agent has a row, with these differences:

    * An agent's flag is True once, in the step in which the agent ends. If its env continues, its row becomes padding,
      as for an agent that has not joined: zeros, reward 0, no flags, any action ignored, until the env's next episode.
      ``infos["alive"]`` and ``infos["acting"]``, (R,) bool, mark padding and waiting rows.
    * Envs are reset as a whole: all their rows together, when the last agent has ended (with ``done_on="any"``, when
      the first has; then no row is ever padding, unless agents join late). ``infos["reset_mask"]``, (R,) bool, marks
      the rows of a next-step autoreset, whose actions were ignored.
    * In same-step mode, ``infos["final_obs"]`` and ``infos["final_info"]`` have an entry for each row whose flag is
      True (except rows whose episode was lost to a fault); that row's observation is the first one of the next episode,
      or zeros if its env continues. In the other modes the row's observation is the agent's last one, and zeros from
      the next step on.
    * Infos of an env as a whole are repeated in the rows of its agents.

    ``infos["action_mask"]``, (R, k) bool, has the masks, if the env has any.

    The calls are those of `gymnasium.vector.AsyncVectorEnv`, including ``reset_async`` / ``reset_wait`` and so on, on
    any backend. Errors are both marlvec's and Gymnasium's: `BusyError` is an ``AlreadyPendingCallError``, for example.
    The view reads and writes through ``envs`` and stores no results, so ``envs`` may also be used directly.

    Args:
        envs: The vectorizer; make it with ``copy=True`` if wrappers write into the arrays they receive, as some of
            Gymnasium's do.

    Raises:
        ArgumentError: There are several groups.

    Attributes:
        envs: The vectorizer.
        num_envs: R, the number of rows.
        single_observation_space, single_action_space: Spaces of one row.
        observation_space, action_space: Spaces of all rows, as made by `gymnasium.vector.utils.batch_space`.
        metadata: The envs' metadata, with Gymnasium's ``AutoresetMode`` under ``"autoreset_mode"``.
        render_mode: The render mode that all envs share, or None.
        spec: The first env's `gymnasium.envs.registration.EnvSpec`, or None.
    """

    def __init__(self, envs: VectorEnv) -> None:
        self._layout = AgentRows(envs, type(self).__name__)
        group = self._layout.group
        self.envs = envs
        self.num_envs = self._layout.row_num
        # Copies: sampling or seeding them must not affect the spaces of an env in this process.
        self.single_observation_space = deepcopy(group.observation_space)
        self.single_action_space = deepcopy(group.action_space)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata = {**envs.metadata, "autoreset_mode": AutoresetMode[envs.autoreset.mode.name]}
        self.render_mode = render_mode_of(envs)
        self.spec = _spec_of(envs)
        self._group = group
        self._same_step = envs.autoreset.begins_at_once
        # Keys of the view; an env's infos under the same keys move to "__agents__" or "__common__".
        self._taken = {*_FINAL, *(_ALWAYS if envs.agent_num > 1 else ())}
        self._taken |= set() if group.mask_size is None else {"action_mask"}
        self._redundant_keys = _ALWAYS if self._same_step else _ALWAYS | _AT_ENDS
        self._is_plain = envs.agent_num == 1 and not envs.grouped and group.observation_tree.is_leaf

    def __del__(self) -> None:
        """Do nothing: up to 1.2, Gymnasium would close ``envs`` with a view, even a half-built one."""

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin new episodes.

        Args:
            seed: One int, spread over the envs by `marlvec.env_seeds`; or a list of one int or None per env (N, also
                if envs have several rows), used as they are.
            options: For the envs. ``"reset_mask"``, (R,) bool, selects the envs to reset; the envs do not receive it.

        Returns:
            ``(obs, infos)`` of all rows; rows without a reset keep their observation.

        Raises:
            ArgumentError: Invalid seed or options; a mask of wrong shape or dtype, without a True, or different for
                rows of one env. Nothing was reset.
        """
        return self._first_rows(*self.envs.reset(**self._reset_arguments(seed, options)))

    def reset_async(
        self, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> None:
        """Request a reset; `reset_wait` returns the result. Arguments and errors as in `reset`.

        Raises:
            BusyError: Another call is pending.
        """
        self.envs.reset_send(**self._reset_arguments(seed, options))

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Wait for the reset requested by `reset_async`; return what `reset` does.

        Raises:
            NothingPendingError: No reset is pending.
            FetchTimeout: Not all envs replied within ``timeout`` seconds. Unlike in Gymnasium, the call is still
                pending.
        """
        return self._first_rows(*self.envs.reset_fetch(timeout))

    def step(
        self, actions: Any
    ) -> tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Step all envs.

        Args:
            actions: (R, …), or a tree of such arrays. Rows that do not act may have any action.

        Returns:
            ``(obs, rewards, terminated, truncated, infos)``: obs (R, …), rewards (R,) float64, both flags (R,) bool.

        Raises:
            ActionError: Wrong structure, shape, dtype or value; nothing was sent.
            NotResetError: An env's episode is over, and the mode is ``"disabled"``.
        """
        return self._next_rows(*self.envs.step(self._layout.split(actions)))

    def step_async(self, actions: Any) -> None:
        """Send actions to all envs; `step_wait` returns the result. Arguments and errors as in `step`.

        Raises:
            BusyError: Another call is pending.
        """
        self.envs.step_send(self._layout.split(actions))

    def step_wait(
        self, timeout: float | None = None
    ) -> tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Wait for the step started by `step_async`; return what `step` does.

        Raises:
            NothingPendingError: No step is pending.
            FetchTimeout: Not all envs replied within ``timeout`` seconds. Unlike in Gymnasium, the call is still
                pending.
        """
        return self._next_rows(*self.envs.step_fetch(timeout))

    def _next_rows(
        self,
        obs: Any,
        rewards: NDArray[np.float64],
        terminated: NDArray[np.bool_],
        truncated: NDArray[np.bool_],
        infos: dict[str, Any],
    ) -> tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        if self._is_plain and infos.keys() <= self._redundant_keys:
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
            if (known := ended & ~lost[:, None]).any():  # lost episodes have no last observations
                out |= self._final(infos, np.flatnonzero(known), early)
        tree = self._group.observation_tree.unflatten(leaves)
        return tree, rewards.reshape(-1), terminated.reshape(-1), truncated.reshape(-1), out

    def render(self) -> tuple[Any, ...]:
        """One frame per row, from its env's ``render()``; the same one for all agents of an env."""
        return self._layout.of_envs(self.envs.render())

    # --- the envs behind the rows

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of the envs, once for each env, or read a property.

        Args:
            name: Its name. ``reset``, ``step``, ``seed`` and ``close`` are refused.
            args: Its positional arguments; every env gets a copy.
            kwargs: Its keyword arguments.

        Returns:
            The returned values, one per row: the same one for all agents of an env.

        Raises:
            AttributeError: The envs have no such attribute.
        """
        with missing_is_attribute_error():
            return self._layout.of_envs(self.envs.call(name, *args, **kwargs))

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Start a `call`; `call_wait` returns the results.

        Raises:
            BusyError: Another call is pending.
        """
        self.envs.call_send(name, *args, **kwargs)

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Wait for the results of `call_async`; return what `call` does.

        Raises:
            NothingPendingError: No call is pending.
            FetchTimeout: Not all envs replied within ``timeout`` seconds. Unlike in Gymnasium, the call is still
                pending.
            AttributeError: As `call`.
        """
        with missing_is_attribute_error():
            return self._layout.of_envs(self.envs.call_fetch(timeout))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Read an attribute of the envs. A method is returned; Gymnasium's `get_attr` calls it.

        Returns:
            Its value, one entry per row: the same one for all agents of an env.

        Raises:
            AttributeError: The envs have no such attribute.
        """
        with missing_is_attribute_error():
            return self._layout.of_envs(self.envs.get_attr(name))

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of the envs.

        Args:
            name: Its name.
            values: A list or tuple: one value per row, the same one for all rows of an env, as returned by `get_attr`.
                Any other value is set in every env.

        Raises:
            ArgumentError: A list of another length, or different values for rows of one env.
        """
        if isinstance(values, (list, tuple)):
            values = PerEnv(self._layout.per_env(values, "values"))
        self.envs.set_attr(name, values)

    @property  # type: ignore[misc]  # not to be set, as in AsyncVectorEnv
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]  # as AsyncVectorEnv has it
        """The envs' random generators, one per row; copies if envs run in other processes."""
        return self.get_attr("np_random")

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]  # likewise
        """The seeds of the envs' random generators, one per row."""
        return self.get_attr("np_random_seed")

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Close the vectorizer, also with a call pending; `close` calls this.

        Args:
            timeout: Seconds for envs to finish; processes that are still running are killed then. None: 5, since
                closing never waits for ever.
            terminate: Whether to kill them at once.
        """
        self.envs.close(0.0 if terminate else 5.0 if timeout is None else timeout)

    def _reset_arguments(
        self, seed: int | Sequence[int | None] | None, options: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        env_ids, options = self._chosen(options)
        if isinstance(seed, (list, tuple, np.ndarray)) and np.ndim(seed):
            if len(seed) != self.envs.num_envs:
                raise ArgumentError(f"seed: expected one per env, {self.envs.num_envs} in all, got {len(seed)}")
            seed = seed if env_ids is None else [seed[i] for i in env_ids]
        return {"seed": seed, "options": options, "env_ids": env_ids}

    def _first_rows(self, obs: Any, infos: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        leaves = self._rows(obs)
        if self._same_step:
            leaves = cleared(leaves, ~infos["alive"].reshape(-1))  # an agent may have ended in its first step
        return self._group.observation_tree.unflatten(leaves), self._infos(infos)

    def _chosen(self, options: Mapping[str, Any] | None) -> tuple[list[int] | None, dict[str, Any] | None]:
        """Return the envs that ``options`` selects (None: all), and the options without ``"reset_mask"``."""
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
                f"options['reset_mask']: expected the same for all {agent_num} agents of an env, which are reset "
                f"together; env {i} (rows {i * agent_num} to {(i + 1) * agent_num - 1}) has {per_env[i].tolist()}"
            )
        rest = {key: value for key, value in options.items() if key != "reset_mask"}
        return np.flatnonzero(chosen).tolist(), rest or None

    def _rows(self, tree: Any) -> list[NDArray[Any]]:
        """Convert (N, A, …) to leaves (R, …)."""
        if self.envs.grouped:
            tree = tree[self._group.name]
        leaves: list[NDArray[Any]] = self._group.observation_tree.flatten(tree)
        return [self._layout.join(leaf) for leaf in leaves]

    def _infos(self, infos: dict[str, Any]) -> dict[str, Any]:
        """Return infos of all rows, without those of episodes' last steps."""
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
        return out | lay_out_infos(read_entries(infos, agent_num), taken)

    def _final(self, infos: dict[str, Any], rows: NDArray[np.int64], early: NDArray[np.bool_]) -> dict[str, Any]:
        """Return Gymnasium's same-step infos of the rows whose flag is True."""
        leaves = self._rows(infos["final_observation"])
        final_obs = np.full(self.num_envs, None, object)
        for row in rows.tolist():
            final_obs[row] = value_at(self._group.observation_tree, leaves, (row,))
        present = np.zeros(self.num_envs, np.bool_)
        present[rows] = True
        return {
            "final_obs": final_obs,
            "_final_obs": present,
            "final_info": self._final_info(self._last_entries(infos, rows, early), rows),
            "_final_info": present.copy(),
        }

    def _final_info(self, entries: list[InfoEntry], rows: NDArray[np.int64]) -> Any:
        """Return these rows' infos of the last step, as the caller receives them."""
        return lay_out_infos(entries, ())

    def _last_entries(
        self, infos: dict[str, Any], rows: NDArray[np.int64], early: NDArray[np.bool_]
    ) -> list[InfoEntry]:
        """Return these rows' infos of the last step: from ``final_info``, or from the step if no new episode began."""
        now = read_entries(infos, self.envs.agent_num)
        last = read_entries(infos.get("final_info", {}), self.envs.agent_num)
        if not now and not last:
            return []
        return pick_rows({row: now if early[row] else last for row in rows.tolist()}, self.num_envs)


def _spec_of(envs: VectorEnv) -> EnvSpec | None:
    """Return the first env's spec, if `gymnasium.make` made it."""
    try:
        (spec,) = envs.get_attr("spec", [0])
    except EnvRaised:  # no spec, or one that cannot be pickled
        return None
    return spec if isinstance(spec, EnvSpec) else None

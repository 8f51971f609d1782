"""Native envs whose agents differ in their spaces, as one group: `marlvec.envs.wrappers.padding` for all at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

from marlvec.env_ids import rows_of
from marlvec.envs.spec import EnvSpec, Info, refuse_masks
from marlvec.envs.wrappers.padding import padded_spec
from marlvec.errors import ActionError
from marlvec.native.native_env import Ids, NativeEnv, Rows, refuse

__all__ = ["PaddedNativeEnv"]

AnyArray = NDArray[Any]


@dataclass
class _OwnRows:
    """Rows of the wrapped envs: their own observations and actions, and the padded env's other arrays."""

    outer: Rows
    obs: list[list[AnyArray]]
    actions: list[list[AnyArray]]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.outer, name)


class PaddedNativeEnv(NativeEnv):
    """A native env whose agents share one observation space and one action space, large enough for all.

    Raises ContractError if the spaces cannot be padded, ArgumentError if one is not a Box or Discrete, or has a mask.
    """

    def __init__(self, env: NativeEnv) -> None:
        self._env = env
        self._own = env.spec()
        self._padded = padded_spec(self._own)
        spaces = [*self._own.observation_spaces, *self._own.action_spaces]
        if any(self._own.mask_sizes) or not all(isinstance(space, (Box, Discrete)) for space in spaces):
            raise refuse(env.name, "pad=True")
        self.num_envs, self.rng = env.num_envs, env.rng
        self.name, self.agents, self.metadata = env.name, env.agents, env.metadata
        self.state_space, self.has_infos = env.state_space, env.has_infos
        most = np.iinfo(np.int64).max
        self._sizes = np.array([getattr(space, "n", most) for space in self._own.action_spaces])
        for name in ("write_state", "state_obstacle", "state_limits", "check_limits", "reference", "render"):
            setattr(self, name, getattr(env, name))  # padding does not change these

    def spec(self) -> EnvSpec:
        return self._padded

    def attach(self, rows: Rows) -> None:
        super().attach(rows)
        n, groups = self.num_envs, self._own.groups
        self._members = [list(group.agents) for group in groups]
        obs = [group.observation_tree.zeros(n, len(group.agents)) for group in groups]
        actions = [group.action_tree.zeros(n, len(group.agents)) for group in groups]
        self._inner = _OwnRows(rows, obs, actions)
        self._env.attach(self._inner)

    def check_actions(self, ids: Ids) -> None:
        (given,) = self.rows.actions[0]
        if given.ndim != 2:
            return
        bad = np.argwhere((given[ids] >= self._sizes) & self.rows.acting[ids])
        if len(bad):
            k, a = bad[0].tolist()
            action, space = given[ids[k], a], self._own.action_spaces[a]
            raise ActionError(f"actions: env {ids[k]}, agent {self.agents[a]!r}: expected one of {space}, got {action}")

    def infos(self, ids: Ids) -> dict[int, Info]:
        found = self._env.infos(ids)
        for i, info in found.items():
            refuse_masks(self._own, info, f"{self.name}: env {i}: ")  # the padded spec has masks
        return found

    def reset(self, ids: Ids) -> None:
        self._env.reset(ids)
        self._show(ids)

    def step(self, ids: Ids) -> None:
        rows = rows_of(ids)
        (given,) = self.rows.actions[0]
        for members, (actions,) in zip(self._members, self._inner.actions, strict=True):
            own: Any = (slice(None), members, *map(slice, actions.shape[2:]))
            actions[rows] = given[rows][own]
        self._env.step(ids)
        self._show(ids)

    def cut_short(self, ids: Ids) -> None:
        self._env.cut_short(ids)
        self._show(ids)

    def state_arrays(self) -> dict[str, AnyArray]:
        own = {f"obs/{g}": leaves[0] for g, leaves in enumerate(self._inner.obs)}
        return {**self._env.state_arrays(), **own}

    def _show(self, ids: Ids) -> None:
        """Copy the envs' own observations into the first corner of the padded ones; the rest stays zero."""
        rows = rows_of(ids)
        (shown,) = self.rows.obs[0]
        for members, (obs,) in zip(self._members, self._inner.obs, strict=True):
            for j, a in enumerate(members):
                shown[rows, a, *map(slice, obs.shape[2:])] = obs[rows, j]

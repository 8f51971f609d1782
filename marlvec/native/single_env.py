"""`NativeSingleEnv`: a `NativeEnv` of one env, for backends that run envs one by one."""

from __future__ import annotations

from typing import Any

import numpy as np

from marlvec.envs.env import MultiAgentEnv
from marlvec.envs.slot import Slot
from marlvec.envs.spec import EnvSpec, Info
from marlvec.native.native_env import NativeEnv, NativeEnvView
from marlvec.native.rng_kernels import seed_envs

__all__ = ["NativeSingleEnv"]

_ONLY = np.zeros(1, np.int64)


class NativeSingleEnv(MultiAgentEnv):
    """A native env with a batch of one, for envs without a Python form; it is not faster than a Python env."""

    def __init__(self, env: NativeEnv) -> None:
        self._env = env
        self._spec = env.spec()
        self._rows = _OneRow(self._spec)
        self._view = NativeEnvView(env, 0, None)
        env.attach(self._rows)
        self.name, self.agents, self.metadata = env.name, env.agents, env.metadata
        self.observation_spaces, self.action_spaces = env.observation_spaces, env.action_spaces
        self.mask_sizes, self.state_space = env.mask_sizes, env.state_space

    @property
    def unwrapped(self) -> NativeEnvView:
        return self._view

    def reset(self, slot: Slot, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Info | None:
        rows = self._rows
        if seed is not None:
            seed_envs(self._env.rng, _ONLY, [seed])
        rows.alive[:] = rows.acting[:] = False
        for mask in rows.action_masks:
            if mask is not None:
                mask[:] = True
        self._env.reset(_ONLY)
        return self._copy_out(slot)

    def step(self, slot: Slot) -> Info | None:
        rows = self._rows
        rows.reward[:] = 0
        rows.terminated[:] = rows.truncated[:] = False
        rows.done[:] = False
        actions = slot.read_actions()
        for group, leaves in zip(self._spec.groups, rows.actions, strict=True):
            for j, a in enumerate(group.agents):
                if rows.acting[0, a]:  # actions of waiting agents may be anything
                    for leaf, part in zip(leaves, group.action_tree.flatten(actions[a]), strict=True):
                        leaf[0, j] = part
        self._env.step(_ONLY)
        for a in range(len(self.agents)):
            slot.reward[a] = rows.reward[0, a]
            slot.terminated[a], slot.truncated[a] = rows.terminated[0, a], rows.truncated[0, a]
        slot.done = bool(rows.done[0])
        return self._copy_out(slot)

    def cut_short(self, slot: Slot) -> None:
        self._env.cut_short(_ONLY)
        self._copy_out(slot)
        super().cut_short(slot)

    def write_state(self, slot: Slot) -> None:
        self._env.write_state(_ONLY)
        assert self._rows.state is not None
        slot.write_state(self._rows.state[0])

    def state_obstacle(self) -> str | None:
        return self._env.state_obstacle()

    def get_state(self) -> dict[str, Any]:
        return {name: array.copy() for name, array in self._state_arrays().items()}

    def set_state(self, state: dict[str, Any]) -> None:
        self._env.check_limits(state)
        for name, array in self._state_arrays().items():
            array[...] = state[name]

    def _state_arrays(self) -> dict[str, Any]:
        rows = self._rows
        found = self._env.state_arrays() | {"alive": rows.alive, "acting": rows.acting}
        for g, leaves in enumerate(rows.obs):
            found |= {f"obs/{g}/{k}": leaf for k, leaf in enumerate(leaves)}
        return found | {f"mask/{g}": mask for g, mask in enumerate(rows.action_masks) if mask is not None}

    def _copy_out(self, slot: Slot) -> Info | None:
        rows = self._rows
        for g, group in enumerate(self._spec.groups):
            mask = rows.action_masks[g]
            for j, a in enumerate(group.agents):
                slot.write_obs(a, group.observation_tree.unflatten([leaf[0, j, ...] for leaf in rows.obs[g]]))
                slot.alive[a], slot.acting[a] = rows.alive[0, a], rows.acting[0, a]
                if mask is not None and group.mask_size is not None:
                    slot.write_mask(a, mask[0, j])
        return self._env.infos(_ONLY).get(0) if self._env.has_infos else None


class _OneRow:
    """The rows of one env; see `marlvec.native.native_env.Rows`."""

    def __init__(self, spec: EnvSpec) -> None:
        agent_num, groups = len(spec.agents), spec.groups
        self.obs = [group.observation_tree.zeros(1, len(group.agents)) for group in groups]
        self.actions = [group.action_tree.zeros(1, len(group.agents)) for group in groups]
        self.action_masks = [
            None if group.choices is None else np.ones((1, len(group.agents), group.choices), np.bool_)
            for group in groups
        ]
        self.reward = np.zeros((1, agent_num))
        self.terminated = np.zeros((1, agent_num), np.bool_)
        self.truncated, self.alive, self.acting = (self.terminated.copy() for _ in range(3))
        self.done = np.zeros(1, np.bool_)
        space = spec.state_space
        self.state = None if space is None else np.zeros((1, *(space.shape or ())), space.dtype)

"""Converts a vectorizer's steps to RLlib's dicts, one per env and agent, and RLlib's actions to arrays.

Axis letters: N envs, A agents, A_g agents of a group.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Space

from marlvec.envs.spec import COMMON, AgentGroup
from marlvec.errors import ActionError
from marlvec.interop.rows.infos import merged
from marlvec.interop.rows.view_checks import join_actions, places_of, value_at
from marlvec.vector.data.infos import infos_to_list
from marlvec.vector.vector_env import VectorEnv
from marlvec.vector.vector_step import VectorStep

__all__ = ["ALL", "MASK", "OBSERVATIONS", "AgentDicts", "EnvDicts"]

ALL = "__all__"
OBSERVATIONS, MASK = "observations", "action_mask"  # the keys of RLlib's own modules with masks


class EnvDicts(NamedTuple):
    """RLlib's five results for some envs: one dict per env in each list."""

    obs: list[dict[str, Any]]
    rewards: list[dict[str, float]]
    terminateds: list[dict[str, bool]]
    truncateds: list[dict[str, bool]]
    infos: list[dict[str, dict[str, Any]]]


class AgentDicts:
    """Converts between the arrays of a `VectorEnv` and RLlib's dicts.

    * RLlib requests an action for every observation, so only agents that must act get one, and agents that ended, as
      their last. An agent that waits for its turn gets only a reward; RLlib adds it to the agent's previous action.
    * If any agent reached the time limit, ``truncateds`` is True under ``"__all__"`` alone: with a flag per agent,
      RLlib would treat the episode as terminated, and bootstrap no agent.
    * RLlib ends an episode when all agents that it has seen have ended. If others live that it has not seen, these ends
      are reported one step later.
    * After a fault an agent's last observation is the one before it, and ``infos[agent]["fault"]`` is True.
    * With ``action_masks``, masks of discrete actions are float32 in the observations; else int8 in the infos.
    """

    def __init__(self, envs: VectorEnv, *, action_masks: bool) -> None:
        self._envs = envs
        spec = envs.spec
        self._names = spec.agents
        self._mask_sizes = [group.choices if action_masks else None for group in spec.groups]
        self._places = places_of(spec)
        self._arrays = [_array_leaf(group) for group in spec.groups]
        self.observation_spaces: dict[str, Space[Any]] = OrderedDict()
        self.action_spaces: dict[str, Space[Any]] = OrderedDict()
        for name in self._names:
            g, _ = self._places[name]
            self.observation_spaces[name] = _with_mask(spec.groups[g].observation_space, self._mask_sizes[g])
            self.action_spaces[name] = deepcopy(spec.groups[g].action_space)
        self._acting = np.zeros((envs.num_envs, envs.agent_num), np.bool_)
        # Agents of the running episode that RLlib has seen and that have not ended; ends to report later.
        self._open: list[set[str]] = [set() for _ in range(envs.num_envs)]
        self._late: list[dict[str, list[Any]]] = [{} for _ in range(envs.num_envs)]
        # Last observations; only needed after faults.
        self._last: list[dict[str, Any]] | None = None
        if envs.on_fault != "raise":
            self._last = [{} for _ in range(envs.num_envs)]

    def read(self, result: VectorStep, *, begins: bool = False) -> EnvDicts:
        """Convert a step of all envs, or a reset if ``begins``."""
        self._acting = result.acting.copy()
        raw_infos = infos_to_list(result.infos, self._names, len(result))
        ended = result.ended
        arrays = ended, result.acting | ended, result.alive | ended, result.rewards, result.terminated, result.truncated
        envs = result.done, result.fault, result.reset_mask
        # Plain lists, since reading single array entries is slow.
        rows = zip(*(array.tolist() for array in (*arrays, *envs)), strict=True)
        found = [self._env(result, i, row, raw_infos[i], begins=begins) for i, row in enumerate(rows)]
        return EnvDicts(*map(list, zip(*found, strict=True)))

    def _env(
        self, result: VectorStep, i: int, row: tuple[Any, ...], raw_infos: Mapping[str, Any], *, begins: bool
    ) -> tuple[dict[str, Any], ...]:
        is_over, seen, present, *values, done, fault, was_reset = row
        if begins or was_reset:
            begins, self._open[i], self._late[i] = True, set(), {}
        ended = set(compress(self._names, is_over))
        obs = {
            name: self._observation(result, i, name)
            for a, name in enumerate(self._names)
            if seen[a] and not (fault and name in ended)
        }
        if self._last is not None:
            last = self._last[i]
            obs.update((name, last[name]) for name in self._names if fault and name in ended and name in last)
            self._last[i] = {} if done else {**({} if begins else last), **obs}
        here = [] if begins else [(a, name) for a, name in enumerate(self._names) if present[a]]
        rewards, terminated, truncated = ({name: of_agent[a] for a, name in here} for of_agent in values)
        given = obs, rewards, terminated, truncated, self._infos(result, i, obs, raw_infos, fault=fault)
        self._write_ends(i, given, ended, done=done)
        return given

    def _write_ends(self, i: int, given: tuple[dict[str, Any], ...], ended: set[str], *, done: bool) -> None:
        obs, _, terminated, truncated, _ = given
        late, self._late[i] = self._late[i], {}
        known = self._open[i]
        if not done and known and known <= ended:
            self._late[i] = {name: [column.pop(name) for column in given] for name in known}
        for name, entries in late.items():
            for column, entry in zip(given, entries, strict=True):
                column[name] = entry
        # An agent that is both terminated and truncated counts as terminated; RLlib does not know agents without an
        # observation.
        cut = done and any(
            truncated[name] and not terminated[name] for name in truncated.keys() & (known | late.keys())
        )
        if done:
            truncated.update(dict.fromkeys(truncated, False))
        terminated[ALL], truncated[ALL] = done and not cut, cut
        self._open[i] = (known | obs.keys()) - ended - late.keys()

    def arrays(self, actions: Sequence[Mapping[str, Any]]) -> Any:
        """Convert one dict of actions per env to the form of `VectorEnv.step`; see `join_actions`."""
        n_envs = self._envs.num_envs
        if len(actions) != n_envs:
            raise ActionError(f"actions: expected one dict per env, {n_envs} in all, got {len(actions)}")
        return join_actions(self._envs, actions, self._acting)

    def _observation(self, result: VectorStep, i: int, name: str) -> Any:
        g, j = self._places[name]
        leaves = result.obs_leaves[g]
        # Results are copies already, so a view of a plain array is enough.
        tree = self._envs.spec.groups[g].observation_tree
        obs = leaves[0][i, j] if self._arrays[g] else value_at(tree, leaves, (i, j))
        if (size := self._mask_sizes[g]) is None:
            return obs
        mask = result.action_masks[g]
        allowed = np.ones(size, np.float32) if mask is None else mask[i, j].astype(np.float32)
        return {OBSERVATIONS: obs, MASK: allowed}

    def _infos(
        self, result: VectorStep, i: int, obs: Mapping[str, Any], raw_infos: Mapping[str, Any], *, fault: bool
    ) -> dict[str, dict[str, Any]]:
        """Return infos of agents with an observation: RLlib keeps no info without one."""
        common, infos = raw_infos.get(COMMON, {}), {}
        for name in self._names:
            if name not in obs:
                continue
            ours: dict[str, Any] = {"fault": True} if fault else {}
            g, j = self._places[name]
            mask = result.action_masks[g]
            if mask is not None and self._mask_sizes[g] is None:
                ours[MASK] = mask[i, j].astype(np.int8)
            infos[name] = merged(raw_infos.get(name, {}), common, ours)
        return infos


def _array_leaf(group: AgentGroup) -> bool:
    """Return whether an observation is one array, or one Discrete number."""
    leaves = group.observation_tree.leaves
    return (
        len(leaves) == 1
        and not leaves[0].path
        and not leaves[0].is_object
        and (bool(leaves[0].shape) or isinstance(leaves[0].space, Discrete))
    )


def _with_mask(space: Space[Any], size: int | None) -> Space[Any]:
    space = deepcopy(space)
    return space if size is None else Dict({OBSERVATIONS: space, MASK: Box(0.0, 1.0, (size,), np.float32)})

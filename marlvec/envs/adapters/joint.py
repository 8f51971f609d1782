"""`JointAdapter`: Gymnasium envs of several agents; their spaces are joint: a Tuple, or a Dict by agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Tuple

from marlvec.envs.adapters.base import ENDED, LIVE, Adapter
from marlvec.envs.adapters.gymnasium import PLAIN_REWARDS, joint_keys, pair_tree, split_reset
from marlvec.envs.adapters.return_values import (
    AgentId,
    common_info,
    contract_error,
    five_values,
    only_element,
    refuse_unknown,
)
from marlvec.envs.adapters.self_reset import OBSERVATION_KEYS
from marlvec.envs.slot import Slot
from marlvec.envs.spec import COMMON, Info
from marlvec.envs.wrapper_chain import wrapper_chain
from marlvec.errors import ArgumentError, ContractError
from marlvec.spaces import SpaceTree
from marlvec.spaces.action_masks import read_mask

__all__ = ["AGENTS", "MASKS", "JointAdapter", "has_joint_spaces"]

AGENTS = ("auto", "tuple", "dict", "single")
"""Values of ``agents`` in `marlvec.make`."""

_COUNTS = ("n_agents", "num_agents")
_TEAM_HINT = "Expected one number for the team, or one for each agent"
MASKS = ("action_mask", "avail_actions")  # the second is SMAC's name
"""Keys of the common info that may have a mask for each agent."""


class JointAdapter(Adapter):
    """A Gymnasium env whose observation and action are joint: one entry per agent, in a Tuple or a Dict.

    Agents of a Tuple are named ``"agent_0"``, ``"agent_1"``, …, agents of a Dict by their keys. All agents act in every
    step. Each result of `step` may be one value for all agents, or one for each:

    * rewards: one number is the team's reward, which each alive agent gets; or one number for each agent.
    * flags: one flag ends every agent; or one flag for each agent, and the episode is over when all have ended. For an
      agent that has ended, the env gets an action of zeros (or, if its space has no zeros, a fixed action).
    * infos: one dict, in which ``"action_mask"`` or ``"avail_actions"`` may have a mask for each agent; or one dict
      for each agent.

    Old envs are supported, too: ``step`` may return 4 values (done means terminated, unless
    ``info["TimeLimit.truncated"]`` is True), and ``reset`` the observations alone.
    """

    def __init__(self, env: Any) -> None:
        joint = env.observation_space, env.action_space
        self.is_dict = isinstance(joint[0], Dict)  # the spaces are Dicts
        self.keys: list[Any] = joint_keys(*joint) or []  # the agents' keys in the Dicts, or indices in the Tuples
        ids = self.keys if self.is_dict else [f"agent_{key}" for key in self.keys]
        super().__init__(env, ids, *([space.spaces[key] for key in self.keys] for space in joint))
        self._idle_actions: dict[int, Any] = {}
        self._pair = pair_tree(joint[0])

    def reset(self, slot: Slot, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Info | None:
        obs, info = self.split_reset(self._call_reset(seed, options))
        self._begin(slot, obs, "reset()")
        return self._take_masks(slot, self._by_agent(slot, info))

    def _begin(self, slot: Slot, obs: Any, call: str) -> None:
        entries = self._observations(obs, call, everyone=True)
        for a in range(len(self.ids)):
            self._join(slot, a, entries[a])

    def step(self, slot: Slot) -> Info | None:
        actions, live = slot.read_actions(), []
        for a, status in enumerate(self._status):
            if status == LIVE:
                live.append(a)
            else:
                actions[a] = self.idle_action(a)
        result = self.env.step(self.join(actions))
        obs, rewards, terminated, truncated, info = five_values(result, self.name)
        self._write_rewards(slot, rewards)
        if terminated is not False or truncated is not False:
            self._write_flags(slot, terminated, truncated)
        new_infos = self._by_agent(slot, info)
        if self.resets_itself and all(slot.terminated[a] or slot.truncated[a] for a in live):
            new_infos = self._end_and_begin(slot, new_infos)
            self._begin(slot, obs, "step()")
            return self._take_masks(slot, new_infos)
        entries = self._observations(obs, "step()", everyone=False)
        for a in live:
            stays = not (slot.terminated[a] or slot.truncated[a])
            self._observe(slot, a, entries[a], stays)
            if not stays:
                slot.alive[a] = slot.acting[a] = False
                self._status[a] = ENDED
        slot.done = LIVE not in self._status
        return self._take_masks(slot, new_infos)

    def space_of(self, kind: str, agent: AgentId) -> Any:
        joint = self.env.observation_space if kind == "observation" else self.env.action_space
        return joint.spaces[self.keys[self._index[agent]]]

    def join(self, actions: Sequence[Any]) -> tuple[Any, ...] | dict[Any, Any]:
        """Join one action per agent to an action of the env. It is a tuple, not a list: some envs require that."""
        return dict(zip(self.keys, actions, strict=True)) if self.is_dict else tuple(actions)

    def idle_action(self, a: int) -> Any:
        """Return the action for an agent that has ended: the env requires actions of all agents."""
        if a not in self._idle_actions:
            space = self.action_spaces[a]
            tree = SpaceTree(space)
            action = tree.unflatten([0 if isinstance(leaf.space, Discrete) else leaf.blank() for leaf in tree.leaves])
            try:
                has_zeros = space.contains(action)
            except Exception:  # contains() of a user's space may raise
                has_zeros = False
            if not has_zeros:
                twin = deepcopy(space)
                twin.seed(0)
                action = twin.sample()
            self._idle_actions[a] = action
        return deepcopy(self._idle_actions[a])

    def _write_rewards(self, slot: Slot, rewards: Any) -> None:
        entries = self._entries(rewards, "rewards", "step()")
        for a, agent in enumerate(self.ids):
            value = rewards if entries is None else entries[a]
            if self._status[a] == LIVE:
                slot.reward[a] = value if value.__class__ in PLAIN_REWARDS else self._reward(value, agent, _TEAM_HINT)
            elif entries is not None and value is not None and self._reward(value, agent) != 0.0:
                contract_error(self.name, "step()", f"agent {agent!r} has ended and gets a reward, {value!r}")

    def _write_flags(self, slot: Slot, terminated: Any, truncated: Any) -> None:
        ended, cut = (
            (value, self._entries(value, what, "step()"), what)
            for value, what in ((terminated, "terminated"), (truncated, "truncated"))
        )
        for a, agent in enumerate(self.ids):
            if self._status[a] == LIVE:
                slot.terminated[a], slot.truncated[a] = (
                    self._flag(value if entries is None else entries[a], agent, what)
                    for value, entries, what in (ended, cut)
                )

    def _observations(self, obs: Any, call: str, *, everyone: bool) -> Sequence[Any]:
        entries = self._entries(obs, "observations", call, everyone=everyone)
        if entries is None:
            got = type(obs).__name__
            contract_error(self.name, call, f"observations: expected one per agent, {len(self.ids)} in all, got {got}")
        return entries

    def _entries(self, value: Any, what: str, call: str, *, everyone: bool = False) -> Sequence[Any] | None:
        """Return one entry per agent, in order of the agent axis; None if ``value`` is one value for all.

        In a dict, entries of agents that have ended may be missing; they are None.
        """
        if isinstance(value, Mapping):
            refuse_unknown(value, self._index, self.name, call, what)
            needed = [agent for a, agent in enumerate(self.ids) if everyone or self._status[a] == LIVE]
            if missing := [agent for agent in needed if agent not in value]:
                contract_error(self.name, call, f"{what}: expected one for each agent, got none for {missing}")
            return [value.get(agent) for agent in self.ids]
        if not isinstance(value, (list, tuple)) and not (isinstance(value, np.ndarray) and value.ndim):
            return None
        if self.is_lenient and len(value) == 1 < len(self.ids) and only_element(value) is not None:
            return None
        if len(value) != len(self.ids):
            contract_error(self.name, call, f"{what}: expected one per agent, {len(self.ids)} in all, got {len(value)}")
        return value  # type: ignore[return-value]  # or an array, whose rows are the entries

    def split_reset(self, result: Any) -> tuple[Any, Any]:
        """Split the result of a reset into observations and info; old envs return observations alone."""
        return split_reset(result, self._pair, _is_info)

    def _by_agent(self, slot: Slot, info: Any) -> Info | None:
        if isinstance(info, (list, tuple)):
            entries = self._entries(info, "infos", "info")
            info = dict(zip(self.ids, entries or (), strict=True))
        elif not self.is_dict or not isinstance(info, Mapping):
            new_infos = common_info(info, self.name)
            if new_infos is not None:
                self._deal_out(slot, new_infos)
            return new_infos
        return self._infos_by_agent(info)

    def _deal_out(self, slot: Slot, new_infos: Info) -> None:
        """Move each agent's mask and final observation from the common info to the agent's own info."""
        shared = new_infos[COMMON]
        # Beside masks in the observations, or Boxes, these are entries like others.
        takes_masks = None in self.mask_sizes and not all(isinstance(space, Box) for space in self.action_spaces)
        have_masks = any(row is not None for row in slot.action_mask)
        for key in MASKS if takes_masks else ():
            if shared.get(key) is not None or (have_masks and key in shared):
                masks = self._masks(slot, key, shared.pop(key))
                for agent, mask in zip(self.agents, masks, strict=True):
                    if mask is not None:
                        new_infos.setdefault(agent, {})["action_mask"] = mask
        for key in OBSERVATION_KEYS if self.resets_itself else ():
            if isinstance(shared.get(key), (list, tuple, np.ndarray)) and len(shared[key]) == len(self.ids):
                for agent, obs in zip(self.agents, shared.pop(key), strict=True):
                    new_infos.setdefault(agent, {})[key] = obs
        if not shared:
            del new_infos[COMMON]

    def _masks(self, slot: Slot, key: str, value: Any) -> list[Any]:
        """Return one mask per agent. A mask longer than the agent's number of actions must be False beyond it.

        Entries of agents whose action spaces cannot have a mask are returned as they are.
        """
        if not isinstance(value, (list, tuple, np.ndarray)) or len(value) != len(self.ids):
            got = f"{len(value)}" if isinstance(value, (list, tuple, np.ndarray)) else type(value).__name__
            contract_error(
                self.name, "infos", f"{key!r}: expected {len(self.ids)} action masks, one per agent, got {got}"
            )
        found = []
        for a, one in enumerate(value):
            row = slot.action_mask[a]
            if row is None:
                found.append(one)
                continue
            try:
                mask = read_mask(one)
            except ContractError as error:
                contract_error(self.name, "infos", f"{key!r}: action mask of agent {self.agents[a]!r}: {error}")
            found.append(mask[: len(row)] if len(mask) > len(row) and not mask[len(row) :].any() else mask)
        return found


def has_joint_spaces(env: Any, agents: str = "auto") -> bool:
    """Return whether a Gymnasium env has several agents.

    It has if its observation and action spaces are Tuples of equal length, or Dicts with equal keys, and either its
    ``n_agents`` or ``num_agents`` is that number, or the keys are ints; with ``agents`` not ``"auto"``, if that says
    so.
    """
    if agents == "single":
        return False
    observation, action = (getattr(env, name, None) for name in ("observation_space", "action_space"))
    keys = joint_keys(observation, action)
    if agents != "auto":
        wanted = Tuple if agents == "tuple" else Dict
        if keys is None or not isinstance(observation, wanted):
            expected = "Tuples of one length" if agents == "tuple" else "Dicts of the same keys"
            raise ArgumentError(
                f"agents={agents!r}: expected observation and action spaces that are {expected}, got {observation} and "
                f"{action}"
            )
        return True
    if keys is None:
        return False
    if isinstance(observation, Dict) and all(isinstance(key, (int, np.integer)) for key in keys):
        return True
    counts = (getattr(layer, name, None) for layer in wrapper_chain(env) for name in _COUNTS)
    return any(isinstance(number, (int, np.integer)) and number == len(keys) for number in counts)


def _is_info(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_info, value))
    return value is None or isinstance(value, Mapping)

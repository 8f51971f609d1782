"""`GymnasiumAdapter`: Gymnasium envs as multi-agent envs with one agent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium.spaces import Dict, Tuple

from marlvec.envs.adapters.base import Adapter
from marlvec.envs.adapters.return_values import AgentId, common_info, contract_error, five_values
from marlvec.envs.slot import Slot
from marlvec.envs.spec import COMMON, Info
from marlvec.errors import ContractError
from marlvec.spaces import SpaceTree

__all__ = ["AGENT", "PLAIN_REWARDS", "GymnasiumAdapter", "joint_keys", "pair_tree", "split_reset"]

AGENT = "agent_0"
"""Name of the only agent of a Gymnasium env."""


PLAIN_REWARDS: frozenset[Any] = frozenset({float, np.float64})
"""Classes of rewards that need no check."""

_VECTOR_HINT = "If it is one number per objective, combine them: mo_gymnasium.wrappers.LinearReward(env, weight=…)"


class GymnasiumAdapter(Adapter):
    """A Gymnasium env as a multi-agent env with the single agent ``"agent_0"``.

    Its infos belong to the env, so they are under `COMMON`. Old envs are supported, too: ``step`` may return 4 values
    (done means terminated, unless ``info["TimeLimit.truncated"]`` is True), and ``reset`` the observation alone.
    """

    _declaration = "{}_space"

    def __init__(self, env: Any) -> None:
        spaces = [getattr(env, kind, None) for kind in ("observation_space", "action_space")]
        super().__init__(env, (AGENT,), spaces[:1], spaces[1:])
        space = self.env.observation_space
        joint = joint_keys(space, self.env.action_space)
        form = "tuple" if isinstance(space, Tuple) else "dict"
        self._flags_hint = (
            f"If it is one per agent, as the spaces seem to be: make(…, agents={form!r})" if joint else ""
        )
        self._vector_hint = ". ".join(filter(None, (self._flags_hint, _VECTOR_HINT)))
        self._info_keys = (COMMON,)
        self._pair = pair_tree(space)
        self._slot: Slot | None = None  # the slot that `_read_actions` reads
        self._read_actions: Callable[[], list[Any]] = list

    def close(self) -> None:
        """Close the env and drop references to the buffers."""
        self._slot, self._read_actions = None, list
        super().close()

    def reset(self, slot: Slot, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Info | None:
        if slot is not self._slot:
            self._bind(slot)
        obs, info = split_reset(self._call_reset(seed, options), self._pair, _is_dict)
        self._join(slot, 0, obs)
        return self._take_masks(slot, common_info(info, self.name) if info else None)

    def _check_spaces(self) -> None:
        (_, _, space), (_, _, action_space) = self._declared
        try:
            same = self.env.observation_space is space and self.env.action_space is action_space
        except Exception:  # the other space can still be checked
            same = False
        if not same:
            super()._check_spaces()

    def space_of(self, kind: str, agent: AgentId) -> Any:
        return self.env.observation_space if kind == "observation" else self.env.action_space

    def step(self, slot: Slot) -> Info | None:
        if slot is not self._slot:
            self._bind(slot)
        return self.read_step(slot, self.env.step(self._read_actions()[0]))

    def read_step(self, slot: Slot, result: Any) -> Info | None:
        """Check the result of the env's ``step``, and write it into the slot; return infos, or None if empty."""
        name = self.name
        obs, reward, terminated, truncated, info = five_values(result, name)
        ended = (
            terminated
            if terminated.__class__ is bool
            else self._flag(terminated, AGENT, "terminated", self._flags_hint)
        )
        cut = truncated if truncated.__class__ is bool else self._flag(truncated, AGENT, "truncated", self._flags_hint)
        slot.reward[0] = reward if reward.__class__ in PLAIN_REWARDS else self._reward(reward, AGENT, self._vector_hint)
        over = ended or cut
        new_infos = None
        if info.__class__ is not dict or info:
            if not isinstance(info, Mapping):
                contract_error(name, "step()", f"info: expected a dict, got {type(info).__name__}")
            new_infos = common_info(info, name)
        if over:
            slot.terminated[0] = ended
            slot.truncated[0] = cut
            if self.resets_itself:
                new_infos, over = self._end_and_begin(slot, new_infos), False
            else:
                slot.done = True
            slot.alive[0] = slot.acting[0] = not over
        self._observe(slot, 0, obs, not over)
        return self._take_masks(slot, new_infos)

    def _bind(self, slot: Slot) -> None:
        self._slot = slot
        self._read_actions = slot.fast_actions or slot.read_actions


def _is_dict(value: Any) -> bool:
    return value.__class__ is dict or isinstance(value, Mapping)  # the first test is faster, and nearly always enough


def joint_keys(observation: Any, action: Any) -> list[Any] | None:
    """Return the keys of the agents in joint spaces; None if the two are not joint, or their agents differ."""
    if isinstance(observation, Tuple) and isinstance(action, Tuple):
        size = len(observation.spaces)
        return list(range(size)) if 0 < size == len(action.spaces) else None
    if isinstance(observation, Dict) and isinstance(action, Dict):
        keys = list(observation.spaces)
        return keys if keys and action.spaces.keys() == observation.spaces.keys() else None
    return None


def pair_tree(space: Any) -> SpaceTree | None:
    """Return the structure of a space whose values ``(first, {…})`` look like an observation and its info, or None."""
    is_pair = isinstance(space, Tuple) and len(space.spaces) == 2 and isinstance(space.spaces[1], Dict)
    return SpaceTree(space) if is_pair else None


def split_reset(result: Any, pair: SpaceTree | None, is_info: Callable[[Any], bool]) -> tuple[Any, Any]:
    """Split the result of a reset into observation, and info or None; old envs return the observation alone.

    `pair` is the `pair_tree` of the observation space; `is_info` returns whether an object can be an info.
    """
    if not isinstance(result, tuple) or len(result) != 2 or not is_info(result[1]):
        return result, None
    if pair is not None:
        try:
            pair.flatten(result[0])  # checks dicts and tuples only, not values
        except ContractError:
            return result, None
    return result

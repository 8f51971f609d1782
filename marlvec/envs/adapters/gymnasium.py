"""Gymnasium envs behind the slot contract: multi-agent envs with one agent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium.spaces import Dict, Tuple

from marlvec.envs.adapters import infos as info_dicts
from marlvec.envs.adapters.base import Adapter
from marlvec.envs.adapters.return_values import AgentId, as_flag, as_reward, contract_error, step_length
from marlvec.envs.slot import Slot
from marlvec.envs.spec import COMMON, Info
from marlvec.errors import ContractError
from marlvec.spaces import SpaceTree

__all__ = ["AGENT", "GymnasiumAdapter"]

AGENT = "agent_0"
"""Name of the one agent of a Gymnasium env."""


_BOOLS: frozenset[Any] = frozenset({bool, np.bool_})


class GymnasiumAdapter(Adapter):
    """A Gymnasium env as a multi-agent env with the one agent ``"agent_0"``.

    Its infos are the env's own, so they are found under `COMMON`. Old envs fit too: ``step`` may return 4 values (done
    means terminated, unless ``info["TimeLimit.truncated"]`` is True), and ``reset`` the observation alone.

    Args:
        env: The env. Needs ``observation_space`` and ``action_space``.

    Raises:
        ContractError: Here, if a space is missing. In ``reset`` and ``step``, if the env gives something that is no
            observation, reward or flag.
    """

    def __init__(self, env: Any) -> None:
        spaces = [getattr(env, kind, None) for kind in ("observation_space", "action_space")]
        super().__init__(env, (AGENT,), spaces[:1], spaces[1:])
        space = self.env.observation_space
        self._info_keys = (COMMON,)
        # With such a space, (first, {...}) may be an observation as well as an observation with its info.
        pair_like = isinstance(space, Tuple) and len(space.spaces) == 2 and isinstance(space.spaces[1], Dict)
        self._pair = SpaceTree(space) if pair_like else None
        self._slot: Slot | None = None  # the one that `_row` and `_read_actions` are of
        self._row: memoryview | None = None
        self._read_actions: Callable[[], list[Any]] = list

    def close(self) -> None:
        """Close the env and let go of the buffers."""
        self._slot, self._row, self._read_actions = None, None, list
        super().close()

    def reset(self, slot: Slot, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Info | None:
        """Begin an episode."""
        if slot is not self._slot:
            self._bind(slot)
        result = self._call_reset(seed, options)
        obs, info = result, None
        pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)
        if pair and (self._pair is None or _has_form_of(self._pair, result[0])):
            obs, info = result
        self._observe(slot, 0, obs, True)
        slot.alive[0] = slot.acting[0] = True
        return self._take_masks(slot, info_dicts.common(info, self.name) if info else None)

    def _check_spaces(self) -> None:
        (_, _, space), (_, _, action_space) = self._declared
        try:
            same = self.env.observation_space is space and self.env.action_space is action_space
        except Exception:  # the other one may still be looked at
            same = False
        if not same:
            super()._check_spaces()

    def _space_of(self, kind: str, agent: AgentId) -> Any:
        return self.env.observation_space if kind == "observation" else self.env.action_space

    def step(self, slot: Slot) -> Info | None:
        """Step the env."""
        if slot is not self._slot:
            self._bind(slot)
        result = self.env.step(self._read_actions()[0])
        # Most steps say nothing but an observation, a float and two bools: then there is little to check.
        if result.__class__ is tuple and len(result) == 5:
            obs, reward, ended, cut, info = result
            if (
                (reward.__class__ is float or reward.__class__ is np.float64)
                and (ended is False or ended.__class__ in _BOOLS)
                and (cut is False or cut.__class__ in _BOOLS)
                and info.__class__ is dict
                and not info
                and not slot.gave_mask[0]
                and not ((ended or cut) and self.resets_itself)
            ):
                slot.reward[0] = reward
                over = False
                if ended or cut:
                    slot.terminated[0], slot.truncated[0] = ended, cut
                    slot.alive[0] = slot.acting[0] = False
                    slot.done = over = True
                if (row := self._row) is not None:
                    try:
                        row[:] = obs
                    except (ValueError, TypeError):  # of another form: `write_obs` knows what to do, and all messages
                        pass
                    else:
                        return None
                self._observe(slot, 0, obs, not over)
                return None
        if step_length(result, self.name, "values") == 5:
            obs, reward, terminated, truncated, info = result
        else:
            obs, reward, terminated, info = result
            truncated = False
            if isinstance(info, Mapping) and info.get("TimeLimit.truncated", False) is True:
                terminated, truncated = False, terminated
        name = self.name
        ended = as_flag(terminated, name, AGENT, "terminated")
        cut = as_flag(truncated, name, AGENT, "truncated")
        slot.reward[0] = as_reward(reward, name, AGENT)
        over = ended or cut
        told = None
        if info.__class__ is not dict or info:
            if not isinstance(info, Mapping):
                contract_error(name, "step()", f"info: expected a dict, got {type(info).__name__}")
            told = info_dicts.common(info, name)
        if over:
            slot.terminated[0] = ended
            slot.truncated[0] = cut
            if self.resets_itself:
                told, over = self._end_and_begin(slot, told), False
            else:
                slot.done = True
            slot.alive[0] = slot.acting[0] = not over
        self._observe(slot, 0, obs, not over)
        return self._take_masks(slot, told)

    def _bind(self, slot: Slot) -> None:
        """Note the quickest ways into and out of this slot."""
        self._slot = slot
        self._row = slot.fast_rows[0] if self.mask_sizes[0] is None else None
        self._read_actions = slot.fast_actions or slot.read_actions


def _has_form_of(tree: SpaceTree, value: Any) -> bool:
    """Whether a value has the dicts and tuples of this space. Its numbers are another matter."""
    try:
        tree.flatten(value)
    except ContractError:
        return False
    return True

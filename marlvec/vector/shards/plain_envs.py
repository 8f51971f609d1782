"""`PlainEnvs`: a shard's envs if all are Gymnasium envs with vectors as observations, arrays or numbers as actions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from gymnasium.spaces import Discrete
from numpy.typing import NDArray

from marlvec.envs.adapters.gymnasium import GymnasiumAdapter
from marlvec.envs.env import MultiAgentEnv
from marlvec.envs.slot import Slot
from marlvec.vector.data.buffers import Buffers, Selection

__all__ = ["PlainEnvs"]


class PlainEnvs:
    """Data of the loop that steps such envs; their adapters are used only in rare cases. Made by `of`."""

    def __init__(self, adapters: Sequence[GymnasiumAdapter], obs_rows: list[memoryview], buffers: Buffers) -> None:
        self.adapters = list(adapters)
        self.envs = [adapter.env for adapter in adapters]
        self.obs_rows = obs_rows
        self.rewards = cast("memoryview[float]", buffers.reward[:, 0].data)
        self._actions: NDArray[Any] = buffers.actions[0][0][:, 0]
        self._is_number = self._actions.ndim == 1
        self._gave_mask = buffers.gave_mask

    @classmethod
    def of(cls, envs: Sequence[MultiAgentEnv], slots: Sequence[Slot], buffers: Buffers) -> PlainEnvs | None:
        """Return a `PlainEnvs` of these envs, or None if one of them is of another kind."""
        adapters = [env for env in envs if env.__class__ is GymnasiumAdapter and not env.resets_itself]
        rows = [row for slot in slots if (row := slot.fast_rows[0]) is not None]
        tree = buffers.spec.groups[0].action_tree
        acts_plainly = tree.is_leaf and not tree.leaves[0].is_object
        if not len(envs) == len(adapters) == len(rows) or buffers.spec.mask_sizes[0] is not None or not acts_plainly:
            return None
        leaf = tree.leaves[0]
        return cls(adapters, rows, buffers) if leaf.shape or isinstance(leaf.space, Discrete) else None

    @property
    def have_masks(self) -> bool:
        """Whether an env has returned an action mask in its infos: then the row must be cleared after each step."""
        return bool(np.count_nonzero(self._gave_mask))

    def actions(self, rows: Selection) -> list[Any]:
        """Return these envs' actions: Python numbers, or copies of arrays that the envs may keep."""
        actions = self._actions[rows]
        return actions.tolist() if self._is_number else list(actions.copy())

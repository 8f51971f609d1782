"""`BatchedShard`: base of shards of native envs and pools: many envs in one call, each in its own phase."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.env_ids import rows_of
from marlvec.envs.autoreset import AutoresetRules
from marlvec.envs.spec import EnvSpec
from marlvec.vector.data.buffers import Buffers, Selection
from marlvec.vector.shards.phase import BatchedPhases

__all__ = ["BatchedShard"]

Ids = NDArray[np.int64]


class BatchedShard(ABC):
    """All envs of a native env or a pool: their rows, their phases, their final observations."""

    def __init__(self, spec: EnvSpec, num_envs: int, autoreset_mode: str) -> None:
        self.spec = spec
        self._autoreset = AutoresetRules.of(autoreset_mode)
        self._phases = BatchedPhases(num_envs)
        self._finals_kept = np.zeros(num_envs, np.bool_)  # the row has final observations of the last episode
        self._any_finals_kept = False

    def attach(self, buffers: Buffers) -> None:
        """Set the rows of the envs. Must be called before the first request."""
        self._buffers = buffers

    @abstractmethod
    def get_state(self, ids: Ids) -> dict[str, Any]:
        """Copy the states of these envs, name → (n, …)."""

    @abstractmethod
    def check_state(self, state: Any, n: int) -> None:
        """Validate a state from `get_state` of ``n`` envs."""

    @abstractmethod
    def set_state(self, ids: Ids, state: Mapping[str, Any], places: Ids) -> None:
        """Restore these envs; ``places`` are the indices of their states in ``state``."""

    def _note_finals(self, rows: Selection) -> None:
        """Note that these rows have final observations, until the first step of the next episode."""
        self._finals_kept[rows] = True
        self._any_finals_kept = True

    def _clear_finals(self, ids: Ids) -> None:
        """Clear final observations in these envs' rows."""
        ids = ids[self._finals_kept[rows_of(ids)]]
        if not len(ids):
            return
        self._finals_kept[ids] = False
        self._any_finals_kept = bool(self._finals_kept.any())
        for leaves in self._buffers.final_obs:
            for leaf in leaves:
                leaf[ids] = 0

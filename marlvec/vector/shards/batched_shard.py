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
from marlvec.errors import ArgumentError
from marlvec.serialization.state_fields import check_array
from marlvec.vector.data.buffers import Buffers, Selection
from marlvec.vector.shards.phase import BatchedPhases, EnvPhase

__all__ = ["BatchedShard"]

Ids = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


class BatchedShard(ABC):
    """All envs of a native env or a pool: their rows, their phases, their final observations."""

    _inner: str  # name, in a state, of the states that the native env or the pool has
    _advice: str = ""  # for a state with other names

    def __init__(self, spec: EnvSpec, num_envs: int, autoreset_mode: str) -> None:
        self.spec = spec
        self._autoreset = AutoresetRules.of(autoreset_mode)
        self._phases = BatchedPhases(num_envs)
        self._finals_kept = np.zeros(num_envs, np.bool_)  # the row has final observations of the last episode
        # State of the shard, (N, …) each, by its name in a state.
        self._saved: dict[str, NDArray[Any]] = {"phase": self._phases.values, "finals_kept": self._finals_kept}

    def attach(self, buffers: Buffers) -> None:
        """Set the rows of the envs. Must be called before the first request."""
        self._buffers = buffers

    # --- states

    def get_state(self, ids: Ids) -> dict[str, Any]:
        """Copy the states of these envs, name → (n, …)."""
        saved = {name: array[ids] for name, array in self._saved.items()}
        return {**saved, self._inner: self._get_inner(ids)}

    def check_state(self, state: Any, n: int) -> None:
        """Validate a state from `get_state` of ``n`` envs."""
        expected = {*self._saved, self._inner}
        if not isinstance(state, Mapping) or state.keys() != expected:
            got = sorted(map(str, state)) if isinstance(state, Mapping) else f"{state!r:.200}"
            raise ArgumentError(f"set_state(): envs: expected {sorted(expected)}, got {got}{self._advice}")
        for name, own in self._saved.items():
            check_array(state, name, own.dtype, (n, *own.shape[1:]), "set_state()")
        self._phases.check_saved(state["phase"])
        self._check_inner(state[self._inner], n)

    def set_state(self, ids: Ids, state: Mapping[str, Any], places: Ids) -> None:
        """Restore these envs; ``places`` are the indices of their states in ``state``."""
        self._set_inner(ids, state[self._inner], places)
        for name, array in self._saved.items():
            array[ids] = state[name][places]

    @abstractmethod
    def _get_inner(self, ids: Ids) -> dict[str, Any]:
        """Copy the states that the native env or the pool has of these envs."""

    @abstractmethod
    def _check_inner(self, inner: Any, n: int) -> None:
        """Validate states from `_get_inner`."""

    @abstractmethod
    def _set_inner(self, ids: Ids, inner: Mapping[str, Any], places: Ids) -> None:
        """Restore states from `_get_inner`."""

    # --- steps

    def _split(self, ids: Ids, rows: Selection) -> tuple[Ids | None, BoolArray | None]:
        """Return the envs that have just begun, and whose episode is over, (n,) bool; None for none, or if all run."""
        if self._phases.are_all(rows, EnvPhase.RUNNING):
            return None, None
        over = self._phases.where(rows, EnvPhase.OVER)
        return ids[self._phases.where(rows, EnvPhase.BEGUN)], over if np.count_nonzero(over) else None

    def _note_finals(self, rows: Selection) -> None:
        """Note that these rows have final observations, until the first step of the next episode."""
        self._finals_kept[rows] = True

    def _clear_finals(self, ids: Ids) -> None:
        """Clear final observations in these envs' rows."""
        ids = ids[self._finals_kept[rows_of(ids)]]
        if not len(ids):
            return
        self._finals_kept[ids] = False
        for leaves in self._buffers.final_obs:
            for leaf in leaves:
                leaf[ids] = 0

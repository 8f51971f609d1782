"""`BatchedShard`: base of shards of native envs and pools: many envs in one call, each in its own phase."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from marlvec.env_ids import rows_of
from marlvec.envs.autoreset import AutoresetRules
from marlvec.envs.spec import EnvSpec
from marlvec.errors import ArgumentError
from marlvec.vector.data.buffers import Buffers, Selection

__all__ = ["BATCHED_TRANSITIONS", "BatchedEvent", "BatchedPhase", "BatchedPhases", "BatchedShard"]

Ids = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


class BatchedPhase(IntEnum):
    """Phase of an env's episode, and its pending request."""

    RUNNING = 0
    """The episode runs; the env was stepped."""
    STEPPING = 1
    """A step is requested."""
    BEGUN = 2
    """The episode has begun; the next step is its first."""
    BEGINNING = 3
    """A new episode is requested."""
    REPLACING = 4
    """A new episode is requested within the step that ended the last one; the row still shows the end."""
    OVER = 5
    """The episode has ended; the next step, or the caller, begins another."""
    UNREADY = 6
    """No episode was begun yet."""


class BatchedEvent(IntEnum):
    """Events that change the phase of an env."""

    ASK_RESET = 0
    """The caller requests a new episode."""
    ASK_STEP = 1
    """The caller requests a step; after an end, this requests the next episode."""
    REPLY = 2
    """The env has replied; its episode continues."""
    END = 3
    """The episode has ended with that reply or step."""
    FOLLOW = 4
    """The episode has ended; the env has already begun the next one by itself."""
    REPLACE = 5
    """The episode has ended; the next one is requested at once."""
    BEGIN = 6
    """The env has begun an episode, in one call."""
    STEP = 7
    """The env was stepped, in one call."""


_RUNNING, _STEPPING, _BEGUN, _BEGINNING, _REPLACING, _OVER, _UNREADY = BatchedPhase

BATCHED_TRANSITIONS: Mapping[BatchedEvent, Mapping[BatchedPhase, BatchedPhase]] = {
    BatchedEvent.ASK_RESET: dict.fromkeys(BatchedPhase, _BEGINNING),
    BatchedEvent.ASK_STEP: {_RUNNING: _STEPPING, _BEGUN: _STEPPING, _OVER: _BEGINNING},
    BatchedEvent.REPLY: {_STEPPING: _RUNNING, _BEGINNING: _BEGUN, _REPLACING: _BEGUN},
    BatchedEvent.END: {_RUNNING: _OVER},
    BatchedEvent.FOLLOW: {_RUNNING: _BEGUN},
    BatchedEvent.REPLACE: {_RUNNING: _REPLACING},
    BatchedEvent.BEGIN: {_RUNNING: _BEGUN, _BEGUN: _BEGUN, _OVER: _BEGUN, _UNREADY: _BEGUN},
    BatchedEvent.STEP: {_RUNNING: _RUNNING, _BEGUN: _RUNNING},
}
"""Event, phase before → phase after. A missing pair is a bug and raises KeyError."""

_SAVED = [int(phase) for phase in (_RUNNING, _BEGUN, _OVER, _UNREADY)]
_IMPOSSIBLE = 255
_AFTER = [  # per event, a table for `bytes.translate`
    bytes(BATCHED_TRANSITIONS[event].get(phase, _IMPOSSIBLE) for phase in BatchedPhase).ljust(256, b"\xff")
    for event in BatchedEvent
]


class BatchedPhases:
    """The phases of a batch of envs; changed only by `BATCHED_TRANSITIONS`, and by restoring saved states.

    Args:
        num_envs: N.

    Attributes:
        values: (N,) uint8, values of `BatchedPhase`; read only.
    """

    def __init__(self, num_envs: int) -> None:
        self.values: NDArray[np.uint8] = np.full(num_envs, _UNREADY, np.uint8)

    def on(self, rows: Selection, event: BatchedEvent) -> None:
        """Apply an event to these envs.

        Raises:
            KeyError: The event is invalid in an env's phase; no phase was changed.
        """
        before = self.values[rows].tobytes()
        after = before.translate(_AFTER[event])
        if _IMPOSSIBLE in after:
            wrong = {BatchedPhase(a).name for a, b in zip(before, after, strict=True) if b == _IMPOSSIBLE}
            raise KeyError(f"{event.name} of envs that are {', '.join(sorted(wrong))}")
        self.values[rows] = np.frombuffer(after, np.uint8)

    def restore(self, rows: Selection, values: NDArray[np.uint8]) -> None:
        """Set the phases of these envs to saved ones; see `check_saved`."""
        self.values[rows] = values

    @staticmethod
    def check_saved(values: NDArray[np.uint8]) -> None:
        """Validate saved phases: an env with a pending request cannot be saved.

        Raises:
            ArgumentError: A phase is invalid.
        """
        if not np.isin(values, _SAVED).all():
            raise ArgumentError(f"set_state(): phases: expected some of {_SAVED}, got {np.unique(values).tolist()}")

    def are_all(self, rows: Selection, phase: BatchedPhase) -> bool:
        """Return whether all of these envs are in this phase, which each step checks first."""
        values = self.values[rows].tobytes()
        return values.count(phase) == len(values)

    def where(self, rows: Selection, phase: BatchedPhase) -> BoolArray:
        """Return which of these envs are in this phase, (n,) bool."""
        found: BoolArray = self.values[rows] == int(phase)
        return found


class BatchedShard:
    """All envs of a native env or a pool: their rows, their phases, their final observations.

    Args:
        spec: Agents and spaces of one env.
        num_envs: N.
        autoreset_mode: ``"same_step"``, ``"next_step"`` or ``"disabled"``.

    Attributes:
        spec: As given.
    """

    def __init__(self, spec: EnvSpec, num_envs: int, autoreset_mode: str) -> None:
        self.spec = spec
        self._autoreset = AutoresetRules.of(autoreset_mode)
        self._phases = BatchedPhases(num_envs)
        self._finals_kept = np.zeros(num_envs, np.bool_)  # the row has final observations of the last episode
        self._any_finals_kept = False

    def attach(self, buffers: Buffers) -> None:
        """Set the rows of the envs. Must be called before the first request."""
        self._buffers = buffers

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

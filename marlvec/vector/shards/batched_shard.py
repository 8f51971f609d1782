"""What native envs and pools have in common as shards: many envs in one call, each in a phase of its own."""

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
    """What an env's episode is doing, and what was asked of it."""

    RUNNING = 0
    """It has been stepped."""
    STEPPING = 1
    """It was asked for a step."""
    BEGUN = 2
    """Its first rows are there; the next step is its first."""
    BEGINNING = 3
    """It was asked for an episode."""
    REPLACING = 4
    """Likewise, within the step that ended the one before, whose end its row still shows."""
    OVER = 5
    """It has ended; the next step, or the caller, begins another."""
    UNREADY = 6
    """It was never begun."""


class BatchedEvent(IntEnum):
    """What happens to an env."""

    ASK_RESET = 0
    """It is asked for a new episode by the caller."""
    ASK_STEP = 1
    """It is asked for a step, which after an end is for its next episode."""
    REPLY = 2
    """It has answered; its episode goes on."""
    END = 3
    """Its episode has ended with that answer, or that step."""
    FOLLOW = 4
    """Likewise, and it has begun the next one by itself."""
    REPLACE = 5
    """Likewise, and it is asked for the next one at once."""
    BEGIN = 6
    """It has begun an episode, asked and answered at once."""
    STEP = 7
    """It is stepped, asked and answered at once."""


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
"""Event, phase before → phase after. What is not here cannot happen: it raises KeyError."""

_SAVED = [int(phase) for phase in (_RUNNING, _BEGUN, _OVER, _UNREADY)]
_IMPOSSIBLE = 255
_AFTER = [  # per event, what `bytes.translate` takes
    bytes(BATCHED_TRANSITIONS[event].get(phase, _IMPOSSIBLE) for phase in BatchedPhase).ljust(256, b"\xff")
    for event in BatchedEvent
]


class BatchedPhases:
    """The phases of a batch of envs; changed by `BATCHED_TRANSITIONS` alone, but where saved states are put back.

    Args:
        num_envs: How many envs.

    Attributes:
        values: (N,) uint8, of `BatchedPhase`; to be read only.
    """

    def __init__(self, num_envs: int) -> None:
        self.values: NDArray[np.uint8] = np.full(num_envs, _UNREADY, np.uint8)

    def on(self, rows: Selection, event: BatchedEvent) -> None:
        """Note what happened to these envs.

        Raises:
            KeyError: It cannot happen to one of them; none has changed.
        """
        before = self.values[rows].tobytes()
        after = before.translate(_AFTER[event])
        if _IMPOSSIBLE in after:
            wrong = {BatchedPhase(a).name for a, b in zip(before, after, strict=True) if b == _IMPOSSIBLE}
            raise KeyError(f"{event.name} of envs that are {', '.join(sorted(wrong))}")
        self.values[rows] = np.frombuffer(after, np.uint8)

    def restore(self, rows: Selection, values: NDArray[np.uint8]) -> None:
        """These envs go on in the phases in which their states were saved; see `check_saved`."""
        self.values[rows] = values

    @staticmethod
    def check_saved(values: NDArray[np.uint8]) -> None:
        """Make sure that saved phases are some: none of an env that waits for an answer.

        Raises:
            ArgumentError: They are not.
        """
        if not np.isin(values, _SAVED).all():
            raise ArgumentError(f"set_state(): phases: expected some of {_SAVED}, got {np.unique(values).tolist()}")

    def are_all(self, rows: Selection, phase: BatchedPhase) -> bool:
        """Whether all of these envs are in this phase: what a step asks first."""
        values = self.values[rows].tobytes()
        return values.count(phase) == len(values)

    def where(self, rows: Selection, phase: BatchedPhase) -> BoolArray:
        """Which of these envs are in this phase, (n,) bool."""
        found: BoolArray = self.values[rows] == int(phase)
        return found


class BatchedShard:
    """All envs of a native env or a pool: their rows, their phases, their final observations.

    Args:
        spec: What one env looks like.
        num_envs: N.
        autoreset_mode: ``"same_step"``, ``"next_step"`` or ``"disabled"``.

    Attributes:
        spec: As given.
    """

    def __init__(self, spec: EnvSpec, num_envs: int, autoreset_mode: str) -> None:
        self.spec = spec
        self._autoreset = AutoresetRules.of(autoreset_mode)
        self._phases = BatchedPhases(num_envs)
        self._finals_kept = np.zeros(num_envs, np.bool_)  # final observations of an episode before are in the row
        self._any_finals_kept = False

    def attach(self, buffers: Buffers) -> None:
        """Give the envs their rows. Must come before the first request."""
        self._buffers = buffers

    def _note_finals(self, rows: Selection) -> None:
        """Final observations are in these rows, until the first step of the next episode."""
        self._finals_kept[rows] = True
        self._any_finals_kept = True

    def _clear_finals(self, ids: Ids) -> None:
        """Clear the final observations of those of these envs that have any."""
        ids = ids[self._finals_kept[rows_of(ids)]]
        if not len(ids):
            return
        self._finals_kept[ids] = False
        self._any_finals_kept = bool(self._finals_kept.any())
        for leaves in self._buffers.final_obs:
            for leaf in leaves:
                leaf[ids] = 0

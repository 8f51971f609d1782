"""The phases of a shard's envs, and one table of allowed changes: for one env at a time, or for many in one call."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from marlvec.errors import ArgumentError
from marlvec.vector.data.buffers import Selection

__all__ = ["SAVED", "TRANSITIONS", "BatchedPhases", "EnvEvent", "EnvPhase", "EnvPhases"]


class EnvPhase(IntEnum):
    """Phase of an env's episode; from `STEPPING` on, only of a pool, whose requests are answered later."""

    UNREADY = 0
    """The env has no episode: none was begun, or it was lost to a fault."""
    BEGUN = 1
    """The episode has begun, and its next step is the first; the row still has final observations of the last one."""
    RUNNING = 2
    """The episode runs; the env was stepped."""
    OVER = 3
    """The episode has ended, or was lost, and the autoreset or the caller begins the next one."""
    ABSENT = 4
    """The env was closed and could not be built again."""
    STEPPING = 5
    """A step is requested."""
    BEGINNING = 6
    """A new episode is requested."""
    REPLACING = 7
    """A new episode is requested within the step that ended the last one; the row still shows the end."""


class EnvEvent(IntEnum):
    """Events that change the phase of an env."""

    BEGIN = 0
    """The env has begun an episode."""
    STEP = 1
    """The env is stepped, with an action."""
    END = 2
    """The episode has ended."""
    FOLLOW = 3
    """The episode has ended, and the env has already begun the next one by itself."""
    FAIL = 4
    """The env raised, or violated its contract."""
    WAIT = 5
    """The episode was lost; the next one begins as if it had ended."""
    CLOSE = 6
    """The env was closed, to be rebuilt."""
    BUILD = 7
    """The env was rebuilt."""
    ASK_RESET = 8
    """The caller requests a new episode from a pool."""
    ASK_STEP = 9
    """The caller requests a step from a pool; after an end, this requests the next episode."""
    REPLY = 10
    """The pool has replied; the env's episode continues."""
    REPLACE = 11
    """The episode has ended; the next one is requested at once."""


_UNREADY, _BEGUN, _RUNNING, _OVER, _ABSENT, _STEPPING, _BEGINNING, _REPLACING = EnvPhase
SAVED = (_UNREADY, _BEGUN, _RUNNING, _OVER)
"""Phases in which an env can be saved: it is there, and nothing is requested."""

TRANSITIONS: Mapping[EnvEvent, Mapping[EnvPhase, EnvPhase]] = {
    EnvEvent.BEGIN: dict.fromkeys(SAVED, _BEGUN),
    EnvEvent.STEP: {_BEGUN: _RUNNING, _RUNNING: _RUNNING},
    EnvEvent.END: {_RUNNING: _OVER},
    EnvEvent.FOLLOW: {_RUNNING: _BEGUN},
    EnvEvent.FAIL: {**dict.fromkeys(SAVED, _UNREADY), _ABSENT: _ABSENT},
    EnvEvent.WAIT: dict.fromkeys(SAVED, _OVER),
    EnvEvent.CLOSE: dict.fromkeys((*SAVED, _ABSENT), _ABSENT),
    EnvEvent.BUILD: {_ABSENT: _UNREADY},
    EnvEvent.ASK_RESET: dict.fromkeys((*SAVED, _STEPPING, _BEGINNING, _REPLACING), _BEGINNING),
    EnvEvent.ASK_STEP: {_RUNNING: _STEPPING, _BEGUN: _STEPPING, _OVER: _BEGINNING},
    EnvEvent.REPLY: {_STEPPING: _RUNNING, _BEGINNING: _BEGUN, _REPLACING: _BEGUN},
    EnvEvent.REPLACE: {_RUNNING: _REPLACING},
}
"""Event, phase before → phase after. A missing pair is a bug and raises KeyError."""


class EnvPhases:
    """The phases of a shard's envs, one by one; changed only by `TRANSITIONS`, and by restoring saved states.

    `special` has the envs that are not RUNNING, which a step handles apart. Empty in most steps.
    """

    def __init__(self, num_envs: int) -> None:
        self._phases = [_UNREADY] * num_envs
        self.special = set(range(num_envs))

    def __getitem__(self, i: int) -> EnvPhase:
        return self._phases[i]

    def restore(self, i: int, phase: EnvPhase) -> None:
        """Set env ``i``, which must not be absent, to a saved phase."""
        self._phases[i] = phase
        if phase is _RUNNING:
            self.special.discard(i)
        else:
            self.special.add(i)

    def on(self, i: int, event: EnvEvent) -> None:
        self.restore(i, TRANSITIONS[event][self._phases[i]])


_IMPOSSIBLE = 255
_AFTER = [  # per event, a table for `bytes.translate`
    bytes(TRANSITIONS[event].get(phase, _IMPOSSIBLE) for phase in EnvPhase).ljust(256, b"\xff") for event in EnvEvent
]


class BatchedPhases:
    """The phases of many envs, ``values`` (N,) uint8; changed only by `TRANSITIONS`, and by restoring saved states."""

    def __init__(self, num_envs: int) -> None:
        self.values: NDArray[np.uint8] = np.full(num_envs, _UNREADY, np.uint8)

    def on(self, rows: Selection, event: EnvEvent) -> None:
        """Apply an event to these envs. If it is invalid in a phase, it raises `KeyError`, and no phase was changed."""
        before = self.values[rows].tobytes()
        after = before.translate(_AFTER[event])
        if _IMPOSSIBLE in after:
            wrong = {EnvPhase(a).name for a, b in zip(before, after, strict=True) if b == _IMPOSSIBLE}
            raise KeyError(f"{event.name} of envs that are {', '.join(sorted(wrong))}")
        self.values[rows] = np.frombuffer(after, np.uint8)

    @staticmethod
    def check_saved(values: NDArray[np.uint8]) -> None:
        """Validate saved phases: an env with a pending request cannot be saved."""
        if not np.isin(values, SAVED).all():
            saved = [int(phase) for phase in SAVED]
            raise ArgumentError(f"set_state(): phases: expected some of {saved}, got {np.unique(values).tolist()}")

    def are_all(self, rows: Selection, phase: EnvPhase) -> bool:
        """Return whether all of these envs are in this phase, which each step checks first."""
        values = self.values[rows].tobytes()
        return values.count(phase) == len(values)

    def where(self, rows: Selection, phase: EnvPhase) -> NDArray[np.bool_]:
        """Return which of these envs are in this phase, (n,) bool."""
        found: NDArray[np.bool_] = self.values[rows] == int(phase)
        return found

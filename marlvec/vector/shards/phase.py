"""`EnvPhases`: the phase of each env of a shard, and a table of allowed changes."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

__all__ = ["TRANSITIONS", "EnvEvent", "EnvPhase", "EnvPhases"]


class EnvPhase(IntEnum):
    """Phase of an env's episode."""

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


class EnvEvent(IntEnum):
    """Events that change the phase of an env."""

    RESET = 0
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


_UNREADY, _BEGUN, _RUNNING, _OVER, _ABSENT = EnvPhase
_THERE = (_UNREADY, _BEGUN, _RUNNING, _OVER)

TRANSITIONS: Mapping[EnvEvent, Mapping[EnvPhase, EnvPhase]] = {
    EnvEvent.RESET: dict.fromkeys(_THERE, _BEGUN),
    EnvEvent.STEP: {_BEGUN: _RUNNING, _RUNNING: _RUNNING},
    EnvEvent.END: {_RUNNING: _OVER},
    EnvEvent.FOLLOW: {_RUNNING: _BEGUN},
    EnvEvent.FAIL: {**dict.fromkeys(_THERE, _UNREADY), _ABSENT: _ABSENT},
    EnvEvent.WAIT: dict.fromkeys(_THERE, _OVER),
    EnvEvent.CLOSE: dict.fromkeys(EnvPhase, _ABSENT),
    EnvEvent.BUILD: {_ABSENT: _UNREADY},
}
"""Event, phase before → phase after. A missing pair is a bug and raises KeyError."""


class EnvPhases:
    """The phases of a shard's envs; changed only by `TRANSITIONS`, and by restoring saved states.

    Args:
        num_envs: Number of envs.

    Attributes:
        special: Indices of envs that are not RUNNING, which a step handles apart. Empty in most steps.
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
        """Apply an event to env ``i``."""
        after = self._phases[i] = TRANSITIONS[event][self._phases[i]]
        if after is _RUNNING:
            self.special.discard(i)
        else:
            self.special.add(i)

"""What the episode of each env of a shard is doing, and how it may go on: a table."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

__all__ = ["TRANSITIONS", "EnvEvent", "EnvPhase", "EnvPhases"]


class EnvPhase(IntEnum):
    """What an env's episode is doing."""

    UNREADY = 0
    """There is none: never begun, or lost to a fault."""
    BEGUN = 1
    """Its first rows are there, beside the final observations of the one before; the next step is its first."""
    RUNNING = 2
    """It has been stepped."""
    OVER = 3
    """It has ended, or was lost, and the mode or the caller begins the next one."""
    ABSENT = 4
    """The env was closed and could not be built again."""


class EnvEvent(IntEnum):
    """What happens to an env."""

    RESET = 0
    """It has begun an episode."""
    STEP = 1
    """It is stepped, with an action."""
    END = 2
    """Its episode has ended."""
    FOLLOW = 3
    """Its episode has ended, and it has begun the next one by itself."""
    FAIL = 4
    """It raised, or did what it must not."""
    WAIT = 5
    """Its episode was lost, and is to be followed by the next one as if it had ended."""
    CLOSE = 6
    """It is closed, to be built anew."""
    BUILD = 7
    """It has been built anew."""


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
"""Event, phase before → phase after. What is not here cannot happen: it raises KeyError."""


class EnvPhases:
    """The phases of a shard's envs; changed by `TRANSITIONS` alone, but where a saved state is put back.

    Args:
        num_envs: How many envs.

    Attributes:
        special: Indices of those that are not RUNNING: all that a step must look at. Empty in most steps.
    """

    def __init__(self, num_envs: int) -> None:
        self._phases = [_UNREADY] * num_envs
        self.special = set(range(num_envs))

    def __getitem__(self, i: int) -> EnvPhase:
        return self._phases[i]

    def restore(self, i: int, phase: EnvPhase) -> None:
        """Env ``i``, which is there, goes on in the phase in which its state was saved."""
        self._phases[i] = phase
        if phase is _RUNNING:
            self.special.discard(i)
        else:
            self.special.add(i)

    def on(self, i: int, event: EnvEvent) -> None:
        """Note what happened to env ``i``."""
        after = self._phases[i] = TRANSITIONS[event][self._phases[i]]
        if after is _RUNNING:
            self.special.discard(i)
        else:
            self.special.add(i)

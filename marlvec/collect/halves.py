"""Whether it pays to let half of the envs step while policies answer for the others."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

__all__ = ["Halves"]

_TRIAL = 64  # rounds in which a way shows what it can
_ENOUGH = 16  # rounds after which one that is far behind is given up
_FAR = 1.25  # times the other's seconds
_KEPT = 2048  # rounds for which the quicker one is kept
_SETTLING = 2  # rounds after a change that count for neither


class Halves:
    """Tries rounds in halves and rounds as a whole, keeps what is quicker, and looks again every now and then.

    Halves pay where policies or envs are waited for. Where workers fill all cores, two ticks for half of the envs each
    cost those more than one for all. What counts are seconds per env step, within calls of the collector's.

    Args:
        num_envs: N.
        clock: Seconds.

    Attributes:
        pay: Whether rounds are to be halved now.
    """

    def __init__(self, num_envs: int, clock: Callable[[], float] = perf_counter) -> None:
        self.pay = True
        self._num_envs, self._clock = num_envs, clock
        self._told: dict[bool, float] = {}  # seconds per env step of the ways that were tried
        self._kept = False
        self._since = clock()
        self._seconds, self._steps = 0.0, -_SETTLING * num_envs

    def begin_call(self) -> None:
        """What has passed since the last step was not the collector's."""
        self._since = self._clock()

    def note(self, env_steps: int) -> None:
        """So many env steps have come back."""
        now = self._clock()
        self._steps += env_steps
        if self._steps > 0:
            self._seconds += now - self._since
        self._since = now
        rounds = self._steps / self._num_envs
        if rounds >= (_KEPT if self._kept else _TRIAL) or (rounds >= _ENOUGH and self._is_far_behind()):
            self._decide()

    def _is_far_behind(self) -> bool:
        other = self._told.get(not self.pay)
        return other is not None and not self._kept and self._seconds > _FAR * other * self._steps

    def _decide(self) -> None:
        if self._kept:
            self._told.clear()  # the machine may do other things by now
        self._kept = False
        self._told[self.pay] = self._seconds / self._steps
        if len(self._told) == 1:
            self.pay = not self.pay
        else:
            self.pay = self._told[True] <= self._told[False]
            self._kept = True
        self._seconds, self._steps = 0.0, -_SETTLING * self._num_envs

"""`CheckSchedule`: checks values in every call, in the first calls and every 16th after that, or never."""

from __future__ import annotations

__all__ = ["CheckSchedule"]

_FIRST, _EVERY = 16, 16
_NEVER = -1  # counting down from here never reaches 0


class CheckSchedule:
    """Counts calls. The caller decrements ``countdown`` itself, which saves a function call if no check is due.

        schedule.countdown -= 1
        if not schedule.countdown:
            schedule.restart()
            ...

    Args:
        validate: ``"strict"`` and ``"warn"``: every call is due; ``"sample"``: the first 16 and every 16th after that;
            ``"off"``: none.

    Attributes:
        countdown: Number of calls until the next check, including the checked call.
    """

    __slots__ = ("_left", "_mode", "countdown")

    def __init__(self, validate: str) -> None:
        self._mode = validate
        self._left = _FIRST  # remaining calls of the first 16
        self.countdown = _NEVER if validate == "off" else 1

    def restart(self) -> None:
        """Count down to the next call that is due."""
        if self._mode == "sample" and self._left > 0:
            self._left -= 1
        self.countdown = _EVERY if self._mode == "sample" and not self._left else 1

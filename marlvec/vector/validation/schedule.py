"""When values are checked: in every call, in the first ones and now and then after that, or never."""

from __future__ import annotations

__all__ = ["CheckSchedule"]

_FIRST, _EVERY = 16, 16
_NEVER = -1  # counted down from here, no number of calls comes to 0


class CheckSchedule:
    """Counts calls. The caller counts down by hand, which costs no call where nothing is due.

        schedule.countdown -= 1
        if not schedule.countdown:
            schedule.restart()
            ...

    Args:
        validate: ``"strict"`` and ``"warn"``: every call is due; ``"sample"``: the first 16 and every 16th after that;
            ``"off"``: none.

    Attributes:
        countdown: How many calls there are until one is due, that one included.
    """

    __slots__ = ("_left", "_mode", "countdown")

    def __init__(self, validate: str) -> None:
        self._mode = validate
        self._left = _FIRST  # of the first ones
        self.countdown = _NEVER if validate == "off" else 1

    def restart(self) -> None:
        """Count down to the next call that is due."""
        if self._mode == "sample" and self._left > 0:
            self._left -= 1
        self.countdown = _EVERY if self._mode == "sample" and not self._left else 1

"""`RestartLimit` and `RestartBudget`: how many restarts are allowed, and after what pause."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from marlvec.errors import (
    ArgumentError,
    MissingExtraError,
    NotResetError,
    ResourceError,
    SerialisationError,
    UnsupportedSpaceError,
)

__all__ = ["NOT_RESTARTABLE", "RestartBudget", "RestartLimit"]

NOT_RESTARTABLE = (
    ArgumentError,
    MissingExtraError,
    NotResetError,
    ResourceError,
    SerialisationError,
    UnsupportedSpaceError,
)
"""Errors that a restart cannot cure: the new env would raise them again."""

_LONGEST = 2.0  # seconds between two restarts
_LISTED = 5  # different reasons that a history lists


@dataclass(frozen=True)
class RestartLimit:
    """How often an env, or a worker, may be restarted: at most ``count`` times within ``seconds``.

    The first restart comes at once, the k-th within that time after ``backoff * 2 ** (k - 2)`` seconds, but at most two
    seconds.

    Args:
        count: Maximum number of restarts of one env, or of one worker.
        seconds: Length of the time window, in seconds.
        backoff: Pause before the second restart, in seconds.

    Raises:
        ArgumentError: An argument is negative, or not a number.
    """

    count: int = 10
    seconds: float = 60.0
    backoff: float = 0.05

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 0:
            raise ArgumentError(f"max_restarts: expected a count of at least 0, got {self.count!r}")
        for name in ("seconds", "backoff"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
                raise ArgumentError(f"RestartLimit({name}={value!r}): expected seconds, at least 0")

    def pause(self, k: int) -> float:
        """Return the seconds to wait before the k-th restart, k from 1."""
        return 0.0 if k < 2 else min(_LONGEST, self.backoff * 2.0 ** min(k - 2, 60))


@dataclass
class RestartBudget:
    """Counts restarts, and refuses one that exceeds the limit."""

    limit: RestartLimit
    _spent: dict[Hashable, deque[tuple[float, str]]] = field(default_factory=dict, init=False)

    def try_restart(self, who: Hashable, why: str) -> float | None:
        """Request one more restart; return the seconds to wait before it, or None if the limit is reached."""
        now = time.monotonic()
        spent = self._spent.setdefault(who, deque())
        while spent and now - spent[0][0] > self.limit.seconds:
            spent.popleft()
        if len(spent) >= self.limit.count:
            return None
        spent.append((now, why))
        return self.limit.pause(len(spent))

    def history(self, who: Hashable) -> str:
        """Return in words why the restart limit was reached."""
        spent = self._spent.get(who, ())
        reasons = Counter(why for _, why in spent).most_common()
        listed = "; ".join(f"{count} x {why}" for why, count in reasons[:_LISTED])
        more = f"; and {len(reasons) - _LISTED} other reasons" if len(reasons) > _LISTED else ""
        times = "time" if len(spent) == 1 else "times"
        return (
            f"Gave up: it was restarted {len(spent)} {times} within {self.limit.seconds:g} s, as often as "
            f"max_restarts allows ({listed}{more})."
            if spent
            else "Gave up: max_restarts=0 allows no restart."
        )

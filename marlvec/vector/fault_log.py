"""What went wrong and was survived."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from marlvec.errors import Failure

__all__ = ["Fault", "FaultLog", "Survived", "survived_failures"]

_LOG = logging.getLogger("marlvec")
_KEPT = 1000  # faults that are remembered
_IN_WORDS = {"restart": "built anew after a fault", "mask": "masked after a fault", "lose": "without its episode"}

Survived = tuple[tuple[int, ...], str]
"""Envs that were built at another try, and what went wrong before."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that went wrong and was survived.

    Attributes:
        env_ids: The envs to blame; all of a worker's where it could not be told which.
        lost_env_ids: The envs that were lost with them.
        operation: What was being done, e.g. ``"step"``.
        summary: What happened, in one line.
        action: ``"restart"`` or ``"mask"``; ``"lose"`` where nothing is to be built anew: the episode alone is gone.
        quiet: Whether the env asked for it with `RestartQuietly`.
        time: When it was noticed, by `time.monotonic`.
    """

    env_ids: tuple[int, ...]
    lost_env_ids: tuple[int, ...]
    operation: str
    summary: str
    action: str
    quiet: bool
    time: float


class FaultLog:
    """The last faults of one vectorizer; each is also told, once, as a warning of the logger ``marlvec``.

    Attributes:
        faults: Oldest first.
    """

    def __init__(self) -> None:
        self.faults: deque[Fault] = deque(maxlen=_KEPT)

    def note(
        self, culprits: Sequence[int], lost: Sequence[int], operation: str, summary: str, action: str, *, quiet: bool
    ) -> None:
        """Note one; the arguments are a `Fault`'s. Quiet ones are not told."""
        self.faults.append(Fault(tuple(culprits), tuple(lost), operation, summary, action, quiet, time.monotonic()))
        if not quiet:
            who = f"env {lost[0]} is" if len(lost) == 1 else f"envs {list(lost)} are"
            _LOG.warning("%s %s: %s", who, _IN_WORDS[action], summary)


def survived_failures(failures: Iterable[Failure]) -> list[Survived]:
    """The same of failures that were caught where they happened."""
    return [((failure.env_id,), failure.summary) for failure in failures]

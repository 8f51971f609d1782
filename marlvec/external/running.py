"""An episode that a thread runs."""

from __future__ import annotations

import queue
from typing import Any

from marlvec.errors import BusyError
from marlvec.external.episode import Episode

__all__ = ["Running"]


class Running:
    """A running episode and the way back.

    Args:
        episode: The episode.
        box: Where its answers come in, and why it was lost.

    Attributes:
        asked: Whether an answer is due that nobody has taken out of the box.
    """

    __slots__ = ("asked", "box", "episode")

    def __init__(self, episode: Episode, box: queue.SimpleQueue[Any]) -> None:
        self.episode, self.box, self.asked = episode, box, False

    def check_idle(self, call: str) -> None:
        """Raise if the next answer in the box would be one to an earlier question."""
        if self.asked:
            raise BusyError(f"{call}(): what was asked before is still to be taken; wait_for_action() first")

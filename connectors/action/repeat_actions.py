"""One decision for several steps."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from marlvec.connectors.action.held_actions import HeldActions
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError

__all__ = ["RepeatActions"]


class RepeatActions(HeldActions):
    """Sends the policy's action of every k-th decision k times; what it gives in between is not sent.

    Counts each agent's decisions from the start of its episode. The policy is asked every time, and the batch has every
    row. Where it need not be asked, skip the rows themselves: `FrameSkip`, on the agent side.

    Args:
        k: How often an action is sent, at least 1.

    Raises:
        ArgumentError: ``k`` is no int from 1 on.
        UnsupportedSpaceError: Where a space is first seen: a leaf has no fixed size.
        ContractError: In a call: an action does not fit the dtype of a leaf of ints.
    """

    def __init__(self, k: int) -> None:
        if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or k < 1:
            raise ArgumentError(f"k must be an int from 1 on, got {k!r}")
        super().__init__()
        self.k = int(k)

    def _holds(self, rows: Rows, age_n: NDArray[np.int64]) -> NDArray[np.bool_]:
        return age_n < self.k

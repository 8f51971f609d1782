"""Actions that stick."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from marlvec.connectors.action.held_actions import HeldActions
from marlvec.connectors.row_random import RowRandom
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError

__all__ = ["StickyActions"]


class StickyActions(HeldActions):
    """Sends an agent's last sent action again with probability ``p``, whatever the policy chose.

    Never at the start of an episode: there is nothing yet to repeat. As this makes the env less predictable, and is no
    exploration, it works in evaluation as in training: Machado et al., "Revisiting the Arcade Learning Environment",
    JAIR 2018. A repeated action may be one that ``action_mask`` forbids by now: let `MaskInvalid` follow.

    Args:
        p: Probability.
        seed: Equal seeds give equal draws.

    Raises:
        ArgumentError: ``p`` is not in [0, 1].
        UnsupportedSpaceError: Where a space is first seen: a leaf has no fixed size.
        ContractError: In a call: an action does not fit the dtype of a leaf of ints.
    """

    def __init__(self, p: float = 0.25, *, seed: int = 0) -> None:
        if not 0 <= p <= 1:
            raise ArgumentError(f"p must be a probability in [0, 1], got {p}")
        super().__init__()
        self.p = p
        self.seed = seed
        self._random = RowRandom(seed, "StickyActions")

    def _holds(self, rows: Rows, age_n: NDArray[np.int64]) -> NDArray[np.bool_]:
        return self._random.uniform(rows)[:, 0] < self.p

"""Dealing cards from per-env random streams."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from marlvec.native.jit import kernel
from marlvec.native.rng_kernels import bounded
from marlvec.native.rng_streams import Streams

__all__ = ["deal"]


@kernel
def deal(rng: Streams, i: int, size: int, hand: NDArray[np.int8]) -> None:
    """Deal ``hand``, (n,), from a shuffled deck of cards 0 to ``size`` - 1, each with one draw from env ``i``'s stream.

    ``Generator.integers(cards left)`` is an index into the remaining cards, in ascending order.
    """
    for k in range(len(hand)):
        card = bounded(rng, i, size - k)
        # Skip the cards dealt before, lowest first.
        lowest = -1
        for _ in range(k):
            following = size
            for j in range(k):
                if lowest < hand[j] < following:
                    following = hand[j]
            if following <= card:
                card += 1
            lowest = following
        hand[k] = card

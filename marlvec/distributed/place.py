"""`Place`: which collector a function that builds one is to build."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["Place", "seed_at"]

_STREAM = 0x706C616365  # "place"


@dataclass(frozen=True, slots=True)
class Place:
    """Which collector is built; its numbers are those of this incarnation alone.

    Attributes:
        index: Number of the collector, 0 to ``num_collectors - 1``.
        incarnation: How often it was built before.
        stream: What its ``eps_id`` and ``unroll_id`` begin with; `marlvec.Collector` gets it.
        seed: For envs and policies: a function of the head's seed, the index and the incarnation.
        num_collectors: How many there are.
    """

    index: int
    incarnation: int
    stream: int
    seed: int
    num_collectors: int


def seed_at(entropy: int, index: int, incarnation: int) -> int:
    """The seed of a place."""
    sequence = np.random.SeedSequence(entropy, spawn_key=(_STREAM, index, incarnation))
    return int(sequence.generate_state(1, np.uint64)[0])

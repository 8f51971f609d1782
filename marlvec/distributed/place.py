"""`Place`: describes the collector to build."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["Place", "seed_at"]

_STREAM = 0x706C616365  # "place"


@dataclass(frozen=True, slots=True)
class Place:
    """The collector to build; each incarnation has its own stream and seed.

    Attributes:
        index: Number of the collector, from 0 to ``num_collectors - 1``.
        incarnation: Number of earlier builds.
        stream: Prefix of its ``eps_id`` and ``unroll_id``; pass it to `marlvec.Collector`.
        seed: Seed for envs and policies, computed from the head's seed, the index and the incarnation.
        num_collectors: Number of collectors.
    """

    index: int
    incarnation: int
    stream: int
    seed: int
    num_collectors: int


def seed_at(entropy: int, index: int, incarnation: int) -> int:
    """Return the seed of a place."""
    sequence = np.random.SeedSequence(entropy, spawn_key=(_STREAM, index, incarnation))
    return int(sequence.generate_state(1, np.uint64)[0])

"""Moments that are learnt by several copies at once, and joined now and then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from marlvec.connectors.agent.moments import Moments
from marlvec.errors import ArgumentError

__all__ = ["RunningMoments", "load_moments", "merge_moments", "save_moments"]

_KEYS = ("moments", "own", "shared")


class RunningMoments:
    """The moments one copy knows. Never changed once made.

    Copies that load a merged state have it in common, and each goes on from there. What is theirs alone is kept apart,
    so that joining them again counts what they share once, and subtracts nothing.

    Args:
        own: Of the data that this copy alone has seen.
        shared: Of the data behind the merged state that it last loaded.

    Attributes:
        own: As given.
        shared: As given.
        total: Of all of it.
    """

    __slots__ = ("own", "shared", "total")

    def __init__(self, own: Moments, shared: Moments) -> None:
        self.own = own
        self.shared = shared
        self.total = shared.joined(own) if shared.count.any() else own

    @classmethod
    def empty(cls, groups: int, shape: tuple[int, ...]) -> RunningMoments:
        """Moments of no data."""
        return cls(Moments(groups, shape), Moments(groups, shape))

    def learnt(self, data: Moments) -> RunningMoments:
        """The same with the moments of further data."""
        return RunningMoments(self.own.joined(data), self.shared)

    def grown(self, groups: int) -> RunningMoments:
        """The same with room for ``groups`` groups, or itself where it has that."""
        if groups <= len(self.own.count):
            return self
        return RunningMoments(self.own.grown(groups), self.shared.grown(groups))


def merge_moments(copies: Sequence[RunningMoments]) -> RunningMoments:
    """Moments that all copies can go on from: of the data of all, what they share counted once.

    Args:
        copies: One at least.

    Raises:
        ArgumentError: Two copies last loaded different merged states, so nobody can tell what they have in common; or
            the pooled moments are too large for float64.
    """
    groups = max(len(copy.own.count) for copy in copies)
    copies = [copy.grown(groups) for copy in copies]
    known = [copy.shared for copy in copies if copy.shared.count.any()]
    if any(not shared.same_as(known[0]) for shared in known):
        raise ArgumentError("the states go back to different merged states")
    total = known[0] if known else copies[0].shared
    with np.errstate(over="ignore", invalid="ignore"):
        for copy in copies:
            total = total.joined(copy.own)
    if not total.finite:
        raise ArgumentError("the pooled statistics are too large for float64")
    return RunningMoments(Moments(groups, total.shape), total)


def save_moments(leaves: Mapping[str, RunningMoments]) -> dict[str, Any]:
    """Exact copy of the moments of some leaves, by path. ``moments`` is what the other two give together."""
    return {
        "moments": {path: leaf.total.state_dict() for path, leaf in leaves.items()},
        "own": {path: leaf.own.state_dict() for path, leaf in leaves.items()},
        "shared": {path: leaf.shared.state_dict() for path, leaf in leaves.items()},
    }


def load_moments(state: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> list[RunningMoments]:
    """Build them again, in the order of ``shapes``.

    Raises:
        ArgumentError: The state is of other leaves or shapes, or its numbers are those of no data.
    """
    for key in _KEYS:
        if key not in state or state[key].keys() != shapes.keys():
            raise ArgumentError(f"expected {key} of the leaves {list(shapes)}, got {state}")
    leaves = []
    for path, shape in shapes.items():
        own, shared = (Moments.from_state(state[key][path], shape) for key in ("own", "shared"))
        if len(own.count) != len(shared.count):
            raise ArgumentError(f"expected as many groups that are shared as own, got {state}")
        leaves.append(RunningMoments(own, shared))
    return leaves

"""Spaces as flat lists of leaves: structure, members, equality, padding, objects."""

from __future__ import annotations

from marlvec.spaces.equality import describe_difference
from marlvec.spaces.members import Contained, Finite, Membership, check_member, membership
from marlvec.spaces.objects import (
    MAX_BYTES,
    AnyText,
    ObjectArray,
    batch_space,
    check_size,
    own_objects,
    pack,
    snapshot,
    unpack,
)
from marlvec.spaces.tree import Leaf, SpaceTree

__all__ = [
    "AnyText",
    "MAX_BYTES",
    "Contained",
    "Finite",
    "Leaf",
    "Membership",
    "ObjectArray",
    "SpaceTree",
    "batch_space",
    "check_member",
    "check_size",
    "describe_difference",
    "membership",
    "own_objects",
    "pack",
    "snapshot",
    "unpack",
]

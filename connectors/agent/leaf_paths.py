"""Leaves picked by path: ``"camera"`` stands for ``camera`` and for all below it."""

from __future__ import annotations

from collections.abc import Sequence

from marlvec.errors import ArgumentError
from marlvec.spaces import SpaceTree

__all__ = ["check_keys", "is_below"]


def is_below(path: str, key: str) -> bool:
    """Whether a leaf's path is ``key`` or lies below it."""
    return path == key or path.startswith(f"{key}/")


def check_keys(keys: Sequence[str], tree: SpaceTree) -> None:
    """Check that each key stands for at least one leaf.

    Raises:
        ArgumentError: One does not; names it and the leaves there are.
    """
    for key in keys:
        if not any(is_below(leaf.path, key) for leaf in tree.leaves):
            raise ArgumentError(f"no key {key!r} in the space; its leaves are {[leaf.path for leaf in tree.leaves]}")

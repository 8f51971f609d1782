"""Which numbers may stand for an action."""

from __future__ import annotations

from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete

from marlvec.spaces import Leaf

__all__ = ["kinds_for"]


def kinds_for(leaf: Leaf) -> str:
    """Dtype kinds that go into a leaf without changing their meaning."""
    if leaf.is_object:
        return "OU"
    if isinstance(leaf.space, (Discrete, MultiDiscrete)):
        return "iu"
    if isinstance(leaf.space, MultiBinary) or leaf.dtype.kind == "b":
        return "iub"
    assert isinstance(leaf.space, Box)  # there are no other array leaves
    return "fiu" if leaf.dtype.kind == "f" else "iu"

"""The continuous part of an action."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Space
from numpy.typing import NDArray

from marlvec.errors import UnsupportedSpaceError
from marlvec.spaces import Leaf, SpaceTree
from marlvec.trees import Tree

__all__ = ["FloatBoxes"]


class FloatBoxes:
    """All float Boxes of an action space, whose elements are D numbers in a row.

    Args:
        space: Space of one action.

    Attributes:
        tree: Structure of the space.
        parts: Each Box: position and leaf in the tree, the Box, and its elements' place among the D.
        size: D.
    """

    def __init__(self, space: Space[Any]) -> None:
        self.tree = SpaceTree(space)
        self.parts: list[tuple[int, Leaf, Box, slice]] = []
        self.size = 0
        for i, leaf in enumerate(self.tree.leaves):
            if isinstance(leaf.space, Box) and leaf.dtype.kind == "f":
                end = self.size + math.prod(leaf.shape)
                self.parts.append((i, leaf, leaf.space, slice(self.size, end)))
                self.size = end

    def need(self, what: str) -> None:
        """Make sure that there is one.

        Raises:
            UnsupportedSpaceError: There is none; says that ``what`` needs it.
        """
        if not self.parts:
            raise UnsupportedSpaceError(
                f"{what} needs a Box of floats, got {self.tree.space}; for choices there is EpsilonGreedy"
            )

    def add(self, actions: Tree, noise_nD: NDArray[np.float64], *, clip: bool) -> Tree:
        """Add noise to (n, …) actions, in the Boxes' own dtypes; with ``clip``, what comes out is in their bounds."""
        leaves = self.tree.flatten(actions)
        for i, leaf, box, part in self.parts:
            noise = noise_nD[:, part].reshape(-1, *leaf.shape)
            noisy = (np.asarray(leaves[i]) + noise).astype(leaf.dtype)
            leaves[i] = np.clip(noisy, box.low, box.high) if clip else noisy
        return self.tree.unflatten(leaves)

"""Actions within the bounds of the env: clipped, or stretched from [-1, 1]."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Space
from numpy.typing import NDArray

from marlvec.connectors._support.executed_actions import ExecutedActions
from marlvec.connectors.connector import ActionConnector
from marlvec.connectors.rows import Rows
from marlvec.errors import ContractError, UnsupportedSpaceError
from marlvec.spaces import Leaf, SpaceTree
from marlvec.spaces.tree import map_space
from marlvec.trees import Tree

__all__ = ["FloatBoxes", "ClipActions", "UnsquashActions"]


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


class ClipActions(ActionConnector):
    """Clips the actions of every Box that has a bound, and casts them to its dtype; other leaves pass unchanged.

    A NaN has no nearest bound and raises ContractError. Float actions for a Box of ints keep their dtype: they are not
    rounded here.
    """

    def __init__(self) -> None:
        self._tree: SpaceTree | None = None
        self._executed: ExecutedActions | None = None
        self._boxes: list[tuple[int, Leaf, Any, Any]] = []

    def __call__(self, rows: Rows) -> Rows:
        if self._tree is None or self._executed is None:
            raise self._not_set_up()
        leaves = self._tree.flatten(rows.actions_for_env)
        for i, leaf, low, high in self._boxes:
            clipped = np.minimum(np.maximum(leaves[i], low), high)
            if np.isnan(clipped).any():
                row = int(np.argwhere(np.isnan(clipped))[0, 0])
                raise ContractError(f"the policy gave NaN for {leaf} in row {row}")
            if np.can_cast(clipped.dtype, leaf.dtype, "same_kind"):
                clipped = clipped.astype(leaf.dtype, copy=False)
            leaves[i] = clipped
        return self._executed.send(rows, self._tree.unflatten(leaves))

    @property
    def is_identity(self) -> bool:
        return self._tree is not None and not self._boxes

    def setup(self, space: Space[Any]) -> None:
        self._tree = SpaceTree(space)
        self._executed = ExecutedActions(space, self.action_space)
        self._boxes = []
        for i, leaf in enumerate(self._tree.leaves):
            if isinstance(leaf.space, Box) and (leaf.space.bounded_below.any() or leaf.space.bounded_above.any()):
                self._boxes.append((i, leaf, leaf.space.low, leaf.space.high))


class UnsquashActions(ActionConnector):
    """Stretches actions in [-1, 1] to the bounds of every bounded float Box; other leaves pass unchanged.

    Exact at the ends: -1 becomes low and 1 becomes high. What is between stays between; what is beyond goes as far
    beyond, for `ClipActions` to see to. The policy then acts in ``Box(-1, 1)`` of the leaf's shape and dtype.
    """

    def __init__(self) -> None:
        self._tree: SpaceTree | None = None
        self._boxes: list[tuple[int, _Stretch]] = []

    def __call__(self, rows: Rows) -> Rows:
        if self._tree is None:
            raise self._not_set_up()
        leaves = self._tree.flatten(rows.actions_for_env)
        for i, stretch in self._boxes:
            leaves[i] = stretch(leaves[i])
        return rows.replace(actions_for_env=self._tree.unflatten(leaves))

    @property
    def is_identity(self) -> bool:
        return self._tree is not None and not self._boxes

    def setup(self, space: Space[Any]) -> None:
        self._tree = SpaceTree(space)
        self._boxes = [(i, _Stretch(s)) for i, s in enumerate(leaf.space for leaf in self._tree.leaves) if _bounded(s)]

    def policy_space(self, space: Space[Any]) -> Space[Any]:
        return map_space(lambda s: Box(-1, 1, s.shape, _float(s)) if _bounded(s) else s, space)


class _Stretch:
    """Linear from [-1, 1] to a Box's bounds, worked out from the nearer end so that both ends are exact."""

    def __init__(self, space: Space[Any]) -> None:
        assert isinstance(space, Box)
        self.low, self.high = space.low, space.high
        self.half = self.high / 2 - self.low / 2  # halved first: high - low may overflow
        self.dtype = space.low.dtype

    def __call__(self, action_n: Any) -> NDArray[Any]:
        action = np.asarray(action_n)
        upper = action > 0
        with np.errstate(over="ignore"):  # an action far beyond may become infinite; ClipActions brings it back
            step = (1 - np.abs(action)) * self.half
            out: NDArray[Any] = np.where(upper, self.high, self.low) + np.where(upper, -step, step)
            return out.astype(self.dtype, copy=False)


def _bounded(space: Space[Any]) -> bool:
    return isinstance(space, Box) and np.issubdtype(space.low.dtype, np.floating) and space.is_bounded("both")


def _float(space: Space[Any]) -> Any:
    assert isinstance(space, Box)
    return space.low.dtype.type

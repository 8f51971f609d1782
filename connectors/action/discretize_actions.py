"""`DiscretizeActions`: a Discrete policy for an env with continuous (Box) actions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete, Space
from numpy.typing import NDArray

from marlvec.connectors.action.valid_actions import Choices
from marlvec.connectors.connector import ActionConnector
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, UnsupportedSpaceError
from marlvec.spaces import SpaceTree
from marlvec.spaces.tree import map_space

__all__ = ["DiscretizeActions"]


class DiscretizeActions(ActionConnector):
    """Lets the policy choose among evenly spaced values of each element of a bounded Box, both bounds among them.

    The policy acts in a MultiDiscrete of the Box's shape, or in a Discrete where the Box has one element and no axes.
    With ``joint`` it acts in one Discrete over the grid of all elements, whose last element changes fastest: 3 bins for
    2 elements are 9 choices, of which 0 is (low, low) and 1 is (low, middle). Leaves other than Boxes pass unchanged.

    Args:
        bins: Values of each element, at least 2; or a number for each, of every Box.
        joint: Whether the policy makes one choice for the whole Box.

    Raises:
        ArgumentError: ``bins`` has no number, or one below 2.
        UnsupportedSpaceError: Where a space is first seen: it has no Box; one has no bounds, or not as many elements as
            ``bins``, or ints and fewer values than bins, or more joint choices than an int64 can count.
        ContractError: In a call: an action is not of the policy's space.
    """

    def __init__(self, bins: int | Sequence[int], *, joint: bool = False) -> None:
        numbers = np.asarray(bins)
        if numbers.dtype.kind not in "iu" or numbers.ndim > 1 or not numbers.size or numbers.min() < 2:
            raise ArgumentError(f"bins must be ints from 2 on, got {bins!r}")
        self.bins: int | tuple[int, ...] = int(numbers) if not numbers.ndim else tuple(int(n) for n in numbers)
        self.joint = joint
        self._tree: SpaceTree | None = None
        self._grids: list[tuple[int, _Grid]] = []

    def __call__(self, rows: Rows) -> Rows:
        if self._tree is None:
            raise self._not_set_up()
        leaves = self._tree.flatten(rows.actions_for_env)
        for i, grid in self._grids:
            leaves[i] = grid.values(leaves[i], rows)
        return rows.replace(actions_for_env=self._tree.unflatten(leaves))

    def setup(self, space: Space[Any]) -> None:
        self._tree = SpaceTree(space)
        self._grids = []
        for i, leaf in enumerate(self._tree.leaves):
            if isinstance(leaf.space, Box):
                self._grids.append((i, _Grid(leaf.space, self.bins, joint=self.joint)))

    def policy_space(self, space: Space[Any]) -> Space[Any]:
        if not any(isinstance(leaf.space, Box) for leaf in SpaceTree(space).leaves):
            raise UnsupportedSpaceError(f"DiscretizeActions needs a Box, got {space}; leave it out")
        return map_space(
            lambda leaf: _Grid(leaf, self.bins, joint=self.joint).space if isinstance(leaf, Box) else leaf, space
        )


class _Grid:
    """The values that stand for the choices in one Box of d elements."""

    def __init__(self, box: Box, bins: int | tuple[int, ...], *, joint: bool) -> None:
        self._box = box
        self._sizes = _sizes(box, bins)
        self._joint = joint
        self.space = self._choices()
        self._read = Choices(self.space)
        self._levels = self._table()

    def values(self, action_n: Any, rows: Rows) -> NDArray[Any]:
        """Turn (n, …) actions of the policy into (n, *shape) of the Box."""
        chosen = self._read.read(action_n, rows)
        if self._joint:
            chosen = np.stack(np.unravel_index(chosen[:, 0], self._sizes), axis=1)
        found: NDArray[Any] = self._levels[np.arange(len(self._sizes)), chosen]
        return found.reshape(len(found), *self._box.shape)

    def _choices(self) -> Discrete | MultiDiscrete:
        if self._joint:
            count = math.prod(self._sizes)
            if count > np.iinfo(np.int64).max:
                raise UnsupportedSpaceError(
                    f"{count:.3g} joint choices for {self._box} are too many; use fewer bins, or joint=False"
                )
            return Discrete(count)
        if not self._box.shape:
            return Discrete(self._sizes[0])
        return MultiDiscrete(np.array(self._sizes, np.int64).reshape(self._box.shape))

    def _table(self) -> NDArray[Any]:
        """(d, most bins): each element's values in order, in the Box's dtype; beyond its own last, that one again."""
        low, high = self._box.low.ravel(), self._box.high.ravel()
        table = np.repeat(high[:, None], max(self._sizes), axis=1)
        table[:, 0] = low
        for row, size, start, end in zip(table, self._sizes, low, high, strict=True):
            share = np.arange(1, size - 1) / (size - 1)
            # Not from high - low, which may overflow; sorted, because bounds this close round to either side.
            between = np.sort(float(start) * (1 - share) + float(end) * share)
            row[1 : size - 1] = np.clip(between if row.dtype.kind == "f" else np.rint(between), start, end)
        return table


def _sizes(box: Box, bins: int | tuple[int, ...]) -> tuple[int, ...]:
    """Number of bins of each element."""
    d = math.prod(box.shape)
    if not box.is_bounded("both"):
        raise UnsupportedSpaceError(
            f"DiscretizeActions needs bounds, got {box}; give the env a bounded action space, or put a MapActions with "
            f"a bounded policy_space behind it"
        )
    sizes = (bins,) * d if isinstance(bins, int) else bins
    if len(sizes) != d:
        raise UnsupportedSpaceError(f"bins has {len(sizes)} numbers for the {d} elements of {box}")
    if box.low.dtype.kind != "f":
        for size, low, high in zip(sizes, box.low.ravel().tolist(), box.high.ravel().tolist(), strict=True):
            if size > high - low + 1:
                raise UnsupportedSpaceError(
                    f"{size} bins are more than the {high - low + 1} ints from {low} to {high} in {box}; use fewer"
                )
    return sizes

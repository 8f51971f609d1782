"""Any observation as one vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete, Space
from numpy.typing import NDArray

from marlvec.connectors.connector import AgentConnector
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, ContractError, UnsupportedSpaceError
from marlvec.spaces import Leaf, SpaceTree

__all__ = ["FlattenObs"]


class FlattenObs(AgentConnector):
    """Joins all leaves of an observation into one vector ``(n, d)``, in the order of the space.

    Box and MultiBinary leaves of any rank are raveled; Discrete and each entry of MultiDiscrete become one-hot. The
    vector is float32, or float64 if any leaf that is kept is float64.

    Leaves are named by path: ``"camera/left"`` in nested Dicts, ``"0"`` in a Tuple. A path stands for all below it.

    Args:
        keys: Paths to keep; all where None.
        drop: Paths to leave out.

    Raises:
        ArgumentError: Both ``keys`` and ``drop`` are given; or, where a space is first seen, a path is not in it.
        UnsupportedSpaceError: Where a space is first seen: it has no leaves, or one of those to keep has no fixed size.
    """

    def __init__(self, *, keys: Sequence[str] | None = None, drop: Sequence[str] | None = None) -> None:
        if keys is not None and drop is not None:
            raise ArgumentError("give keys to keep or keys to drop, not both")
        self.keys = None if keys is None else tuple(keys)
        self.drop = None if drop is None else tuple(drop)
        self._tree: SpaceTree | None = None
        self._writers: list[tuple[int, _Part]] = []
        self._width = 0
        self._dtype: np.dtype[Any] = np.dtype(np.float32)
        self._unchanged = False

    def __call__(self, rows: Rows) -> Rows:
        if self._tree is None:
            raise self._not_set_up()
        if self._unchanged and len(rows) and rows.obs.dtype == self._dtype:
            return rows
        leaves = self._tree.flatten(rows.obs)
        flat = np.empty((len(rows), self._width), self._dtype)
        for i, part in self._writers:
            part.write(leaves[i], flat)
        return rows.replace(obs=flat)

    def setup(self, space: Space[Any]) -> None:
        tree = SpaceTree(space)
        chosen = self._choose(tree)
        self._writers, start = [], 0
        for i, leaf in chosen:
            self._writers.append((i, _Part(leaf, start)))
            start = self._writers[-1][1].stop
        self._tree, self._width = tree, start
        self._dtype = _dtype(leaf for _, leaf in chosen)
        leaf = tree.leaves[0]
        self._unchanged = tree.is_leaf and isinstance(leaf.space, Box) and len(leaf.shape) == 1

    def output_space(self, space: Space[Any]) -> Space[Any]:
        leaves = [leaf for _, leaf in self._choose(SpaceTree(space))]
        dtype = _dtype(leaves)
        bounds = [_bounds(leaf) for leaf in leaves]
        low = np.concatenate([low for low, _ in bounds]).astype(dtype)
        high = np.concatenate([high for _, high in bounds]).astype(dtype)
        return Box(low, high, dtype=dtype.type)

    def _choose(self, tree: SpaceTree) -> list[tuple[int, Leaf]]:
        chosen = self._named(tree)
        if not chosen:
            raise UnsupportedSpaceError(f"{self!r}: there is nothing to flatten in {tree.space}")
        for _, leaf in chosen:
            if leaf.is_object:
                raise UnsupportedSpaceError(
                    f"{self!r}: {leaf} is {type(leaf.space).__name__}, which has no fixed size and cannot be part of a "
                    f"vector; name it in drop=[…], or encode it before"
                )
        return chosen

    def _named(self, tree: SpaceTree) -> list[tuple[int, Leaf]]:
        wanted = self.keys if self.keys is not None else self.drop
        if wanted is None:
            return list(enumerate(tree.leaves))
        for key in wanted:
            if not any(_below(leaf.path, key) for leaf in tree.leaves):
                raise ArgumentError(f"no key {key!r} in the space; its leaves are {[at.path for at in tree.leaves]}")
        keep = self.keys is not None
        chosen = [(i, leaf) for i, leaf in enumerate(tree.leaves) if any(_below(leaf.path, k) for k in wanted) is keep]
        if not chosen:
            raise ArgumentError(f"{self!r} leaves nothing of the leaves {[leaf.path for leaf in tree.leaves]}")
        return chosen


class _Part:
    """Writes one leaf into its columns of the vector."""

    def __init__(self, leaf: Leaf, start: int) -> None:
        self.leaf = leaf
        self.start = start
        self.one_hot = isinstance(leaf.space, (Discrete, MultiDiscrete))
        self.size = int(np.prod(leaf.shape, dtype=np.int64))
        width = self.size
        if self.one_hot:
            count, first = _categories(leaf)
            self.low, self.high = first, first + count - 1
            # Column j of the one-hot is entry owner[j] of the leaf compared with level[j].
            self.owner = np.repeat(np.arange(len(count)), count)
            self.level = np.concatenate([np.arange(c) + f for c, f in zip(count, first, strict=True)])
            width = len(self.level)
        self.stop = start + width

    def write(self, value_n: Any, flat_nd: NDArray[Any]) -> None:
        """Write (n, *leaf.shape) into columns start to stop of (n, d)."""
        values = value_n.reshape(len(flat_nd), self.size)
        if self.one_hot:
            wrong = (values < self.low) | (values > self.high)
            if wrong.any():
                row, entry = np.argwhere(wrong)[0]
                raise ContractError(f"{self.leaf} is {values[row, entry]} in row {row}, outside of {self.leaf.space}")
            values = values[:, self.owner] == self.level
        flat_nd[:, self.start : self.stop] = values


def _categories(leaf: Leaf) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Number of categories and the first one, for each entry of a Discrete or MultiDiscrete leaf, raveled."""
    if isinstance(leaf.space, Discrete):
        return np.array([leaf.space.n], np.int64), np.array([leaf.space.start], np.int64)
    assert isinstance(leaf.space, MultiDiscrete)
    return leaf.space.nvec.ravel().astype(np.int64), leaf.space.start.ravel().astype(np.int64)


def _bounds(leaf: Leaf) -> tuple[NDArray[Any], NDArray[Any]]:
    if isinstance(leaf.space, Box):
        return leaf.space.low.ravel(), leaf.space.high.ravel()
    width = _Part(leaf, 0).stop
    return np.zeros(width), np.ones(width)


def _dtype(leaves: Any) -> np.dtype[Any]:
    return np.dtype(np.float64 if any(leaf.dtype == np.float64 for leaf in leaves) else np.float32)


def _below(path: str, key: str) -> bool:
    return path == key or path.startswith(f"{key}/")

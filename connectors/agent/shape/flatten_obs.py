"""`FlattenObs`: any observation space as one vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete, Space
from numpy.typing import NDArray

from marlvec.connectors.agent._support.leafwise_obs import OneHot, check_keys, is_below
from marlvec.connectors.connector import AgentConnector
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, UnsupportedSpaceError
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
        check_keys(wanted, tree)
        keep = self.keys is not None
        chosen = [
            (i, leaf) for i, leaf in enumerate(tree.leaves) if any(is_below(leaf.path, k) for k in wanted) is keep
        ]
        if not chosen:
            raise ArgumentError(f"{self!r} leaves nothing of the leaves {[leaf.path for leaf in tree.leaves]}")
        return chosen


class _Part:
    """Writes one leaf into its columns of the vector."""

    def __init__(self, leaf: Leaf, start: int) -> None:
        self.start = start
        self.one_hot = OneHot(leaf) if isinstance(leaf.space, (Discrete, MultiDiscrete)) else None
        self.stop = start + (int(np.prod(leaf.shape, dtype=np.int64)) if self.one_hot is None else self.one_hot.width)

    def write(self, value_n: Any, flat_nd: NDArray[Any]) -> None:
        """Write (n, *leaf.shape) into columns start to stop of (n, d)."""
        part = value_n.reshape(len(flat_nd), self.stop - self.start) if self.one_hot is None else self.one_hot(value_n)
        flat_nd[:, self.start : self.stop] = part


def _bounds(leaf: Leaf) -> tuple[NDArray[Any], NDArray[Any]]:
    if isinstance(leaf.space, Box):
        return leaf.space.low.ravel(), leaf.space.high.ravel()
    width = _Part(leaf, 0).stop
    return np.zeros(width), np.ones(width)


def _dtype(leaves: Any) -> np.dtype[Any]:
    return np.dtype(np.float64 if any(leaf.dtype == np.float64 for leaf in leaves) else np.float32)

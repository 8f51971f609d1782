"""A named column of a buffer that grows: a tree of arrays with room to spare."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.errors import ContractError
from marlvec.trees import Tree, map_tree, to_array, tree_leaves

__all__ = ["ColumnForm"]

Where = slice | NDArray[np.int64]

AnyArray = NDArray[Any]


class ColumnForm:
    """A column that learns its structure, shapes and dtypes from the first value, and holds every other one to them.

    Args:
        owner: Who fills it, for messages, e.g. ``"policy 'main'"``.
        name: The column's name.
        value: A first value, a tree of arrays (n, …); only its form is taken.
        capacity: Entries to make room for.

    Attributes:
        leaves: Per leaf: (capacity, …).
    """

    __slots__ = ("_dtype", "_names", "_owner", "_shape", "_skeleton", "leaves", "name")

    def __init__(self, owner: str, name: str, value: Tree, capacity: int) -> None:
        self._owner, self.name = owner, name
        found = [(path, to_array(leaf)) for path, leaf in tree_leaves(value)]
        for path, leaf in found:
            if leaf.ndim == 0:
                raise ContractError(f"{owner}: {_where(name, path)} must be an array with the rows on its first axis")
        numbers = count()
        self._skeleton = map_tree(lambda _: next(numbers), value)
        self._names = [path for path, _ in found]
        self.leaves = [np.zeros((capacity, *leaf.shape[1:]), leaf.dtype) for _, leaf in found]
        # What one bare array must be, in a form that is quick to compare; None for a tree.
        bare = self.leaves[0] if isinstance(self._skeleton, int) else None
        self._dtype = None if bare is None else bare.dtype
        self._shape = None if bare is None else bare.shape[1:]

    def fit(self, value: Tree) -> list[AnyArray]:
        """Leaves of a value of the right form.

        Raises:
            ContractError: It differs from the first value in structure, shape or dtype.
        """
        if value.__class__ is np.ndarray and value.dtype == self._dtype and value.shape[1:] == self._shape:
            return [value]
        found = [(path, to_array(leaf)) for path, leaf in tree_leaves(value)]
        if [path for path, _ in found] != self._names:
            raise ContractError(
                f"{self._owner}: column {self.name!r} had the leaves {self._names} until now, "
                f"got {[path for path, _ in found]}"
            )
        for (path, leaf), own in zip(found, self.leaves, strict=True):
            if leaf.shape[1:] != own.shape[1:] or leaf.dtype != own.dtype or leaf.ndim == 0:
                raise ContractError(
                    f"{self._owner}: {_where(self.name, path)} was {own.dtype} of shape {_per_row(own.shape)} "
                    f"until now, got {leaf.dtype} of shape {leaf.shape}"
                )
        return [leaf for _, leaf in found]

    def write(self, where: Where, value: Tree) -> None:
        """Write a value of the right form.

        Raises:
            ContractError: As `fit`.
        """
        if value.__class__ is np.ndarray and value.dtype == self._dtype and value.shape[1:] == self._shape:
            self.leaves[0][where] = value
        else:
            self.put(where, self.fit(value))

    def put(self, where: Where, parts: list[AnyArray]) -> None:
        """Write what `fit` returned."""
        for leaf, part in zip(self.leaves, parts, strict=True):
            leaf[where] = part

    def get(self, where: Where) -> Tree:
        """Copy of some entries, as a tree."""
        if self._dtype is not None:
            return _copy(self.leaves[0], where)
        parts = [_copy(leaf, where) for leaf in self.leaves]
        return map_tree(parts.__getitem__, self._skeleton)

    def grow(self, capacity: int, used: int) -> None:
        """Make room; the first ``used`` entries stay."""
        for k, leaf in enumerate(self.leaves):
            more = np.zeros((capacity, *leaf.shape[1:]), leaf.dtype)
            more[:used] = leaf[:used]
            self.leaves[k] = more

    def keep(self, where: NDArray[np.int64]) -> None:
        """Move some entries to the front."""
        for leaf in self.leaves:
            leaf[: len(where)] = leaf.take(where, axis=0)


def _copy(leaf: AnyArray, where: Where) -> AnyArray:
    return leaf[where].copy() if isinstance(where, slice) else leaf.take(where, axis=0)


def _per_row(shape: tuple[int, ...]) -> str:
    return f"(n,{''.join(f' {length},' for length in shape[1:])})"


def _where(name: str, path: str) -> str:
    return f"column {name!r}" + (f" at {path}" if path else "")

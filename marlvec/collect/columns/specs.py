"""`ColumnSpecs`: allowed dtypes and shapes of columns in saved states."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Space
from numpy.typing import NDArray

from marlvec.collect.columns.table import COLUMNS, NUMBER
from marlvec.errors import ArgumentError, ContractError
from marlvec.spaces import Leaf, SpaceTree
from marlvec.trees import Tree, to_array, tree_leaves

__all__ = ["ColumnSpecs"]


class _Spec(NamedTuple):
    """A leaf's dtype, or allowed kinds of dtypes (`numpy.dtype.kind`); and the shape of one row (None: any)."""

    dtype: np.dtype[Any] | str
    shape: tuple[int, ...] | None

    def allows(self, array: NDArray[Any]) -> bool:
        """Return whether an array of rows may be this leaf."""
        is_kind = array.dtype.kind in self.dtype if isinstance(self.dtype, str) else array.dtype == self.dtype
        return is_kind and self.shape in (None, array.shape[1:])


_COLLECTOR_COLUMNS = {
    name: _Spec(column.kinds, None if column.is_wide else ())
    for name, column in COLUMNS.items()
    if column.kinds is not None
}


class ColumnSpecs:
    """Required forms of saved columns, from spaces and from the table of the collector's columns.

    Columns that connectors and policies add are in no table; if a column is saved twice, `ColumnForms` compares them.
    The space of ``obs`` is the one after the agent connectors. ``exact`` columns must have their space's dtypes, others
    may have any numeric dtype. ``any_shape``: learner connectors may have changed the rows' shapes and structure.
    """

    def __init__(
        self, spaces: Mapping[str, Space[Any]], exact: Collection[str] = (), *, any_shape: bool = False
    ) -> None:
        self._trees = {name: SpaceTree(space) for name, space in spaces.items()}
        if "obs" in spaces:
            self._trees["next_obs"] = self._trees["obs"]
        self._exact, self._any_shape = exact, any_shape

    def check(self, columns: Mapping[str, Tree], where: str) -> None:
        """Refuse columns of n rows with an impossible dtype or shape."""
        for name, column in columns.items():
            for path, leaf, spec in self._specs(name, column, where):
                got = to_array(leaf)
                if not spec.allows(got):
                    at = f"column {name!r}" + (f" at {path}" if path else "")
                    kind = f"one of the kinds {spec.dtype!r}" if isinstance(spec.dtype, str) else spec.dtype
                    shape = "" if spec.shape is None else f" of shape {spec.shape} a row"
                    raise ArgumentError(f"{where}: {at}: expected {kind}{shape}, got {got.dtype} of {got.shape}")

    def _specs(self, name: str, column: Tree, where: str) -> list[tuple[str, Any, _Spec]]:
        """Return the leaves of a column with a known form, each with its path."""
        tree = self._trees.get(name)
        if tree is None or self._any_shape:
            spec = _COLLECTOR_COLUMNS.get(name) if tree is None else _Spec("".join(map(_kinds, tree.leaves)), None)
            if spec is not None and self._any_shape:
                spec = spec._replace(shape=None)
            return [] if spec is None else [(path, leaf, spec) for path, leaf in tree_leaves(column)]
        try:
            leaves = tree.flatten(column)
        except ContractError as error:
            raise ArgumentError(f"{where}: column {name!r}: {error}") from error
        specs = [
            _Spec(leaf.dtype if name in self._exact and not leaf.is_object else _kinds(leaf), leaf.shape)
            for leaf in tree.leaves
        ]
        return [(leaf.path, one, spec) for leaf, one, spec in zip(tree.leaves, leaves, specs, strict=True)]


def _kinds(leaf: Leaf) -> str:
    return "OU" if leaf.is_object else NUMBER

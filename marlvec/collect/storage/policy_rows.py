"""`PolicyRows`: rows as a policy is given them, each column in an array of its own once it is read."""

from __future__ import annotations

from collections.abc import Collection, KeysView, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.connectors import Rows
from marlvec.trees import Tree, map_tree

__all__ = ["PolicyRows", "copied_rows", "part_of"]


def part_of(column: Tree, part: slice | None) -> Tree:
    """Rows of a column, as views; None: all of them."""
    if part is None:
        return column
    return column[part] if column.__class__ is np.ndarray else map_tree(lambda leaf: leaf[part], column)


def copied_rows(rows: Rows) -> Rows:
    """Rows with copies of all columns."""
    columns = dict(rows.items())
    for name, column in columns.items():
        columns[name] = column.copy() if isinstance(column, np.ndarray) else map_tree(_copy, column)
    return Rows.of_length(columns, len(rows))


class PolicyRows(Rows):
    """Rows that their policy may write into: a column is copied when it is first read.

    A policy reads two or three of a dozen columns, and there may be many policies. Nothing writes into ``source``, of
    which these are ``part``. With a length of -1 they are columns of the caller's own, as those of `Rows`. ``owned``
    columns are in no other code's hands, so they need not be copied.
    """

    __slots__ = ("_copied", "_owned", "_part", "_source")

    _source: Mapping[str, Tree]
    _copied: dict[str, Tree]

    def __init__(
        self, source: Mapping[str, Tree], part: slice | None = None, length: int = -1, owned: Collection[str] = ()
    ) -> None:
        if length < 0:
            super().__init__(source)
            return
        self._source, self._part, self._copied, self._owned = source, part, {}, owned
        self._n = length

    @property
    def _columns(self) -> dict[str, Tree]:  # of `Rows` a plain attribute
        return {name: self[name] for name in self._source}

    @_columns.setter
    def _columns(self, columns: dict[str, Tree]) -> None:
        self._source = self._copied = columns  # of rows that `replace` and others make of these

    def __getitem__(self, name: str) -> Tree:
        found = self._copied.get(name)
        if found is not None:
            return found
        if name not in self._source:
            raise KeyError(f"no column {name!r}; the columns are {list(self._source)}")
        found = part_of(self._source[name], self._part)
        if name not in self._owned:
            found = found.copy() if isinstance(found, np.ndarray) else map_tree(_copy, found)
        self._copied[name] = found
        return found

    def __getattr__(self, name: str) -> Tree:
        if name in PolicyRows.__slots__ or name.startswith("__"):  # a half-built instance has none
            raise AttributeError(name)
        return self[name] if name in self._source else super().__getattr__(name)

    def __contains__(self, name: object) -> bool:
        return name in self._source

    def __reduce__(self) -> tuple[Any, ...]:
        return Rows, (self._columns,)

    def keys(self) -> KeysView[str]:
        """Names of the columns, in order."""
        return self._source.keys()

    def get(self, name: str, default: Tree = None) -> Tree:
        """The column of this name, or ``default`` where there is none."""
        return self[name] if name in self._source else default


def _copy(leaf: Any) -> NDArray[Any]:
    return np.array(leaf)

"""`ColumnForm`: structure, shapes and dtypes of a column, fixed by its first value."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.columns.plain import columns_from, plain_columns
from marlvec.collect.columns.specs import ColumnSpecs
from marlvec.collect.columns.table import COLUMNS, Source, names
from marlvec.errors import ArgumentError, ContractError
from marlvec.serialization.state_fields import State, check_fields, flag_field
from marlvec.trees import Tree, map_tree, to_array, tree_leaves

__all__ = ["BATCH_COLUMNS", "LATE", "ROW_COLUMNS", "ColumnForm", "ColumnForms", "Empty", "Leaves", "order_columns"]

AnyArray = NDArray[Any]
Leaves = list[AnyArray]
Empty = Callable[[tuple[int, ...], Any], AnyArray]
"""Takes shape and dtype, and makes an array that may hold anything."""

ROW_COLUMNS = names(Source.ROW, Source.OUTCOME, Source.NONE)
"""Columns of rows that the collector itself gives; what else comes out of the connectors, they added."""

BATCH_COLUMNS = names(Source.ANSWER, Source.READ)
"""Names that the collector gives to columns of its own."""

LATE = {name for name, column in COLUMNS.items() if column.is_late}
"""Columns that may come at any time."""

_READ_COLUMNS = names(Source.READ)
_LATE_ANSWERS = LATE & set(names(Source.ANSWER))
_FIRST = tuple(name for name in COLUMNS if name not in _LATE_ANSWERS)


def order_columns(columns: Mapping[str, Tree]) -> dict[str, Tree]:
    """Sort a batch's columns: the collector's first, then those that connectors and policy added, in their order."""
    names = [name for name in _FIRST if name in columns]
    names += [name for name in columns if name not in COLUMNS]
    return {name: columns[name] for name in (*names, *(name for name in columns if name in _LATE_ANSWERS))}


_NARROW = 16  # bytes


class ColumnForm:
    """The form of one column: structure, dtypes and shapes of its first value, a tree of arrays (n, …)."""

    __slots__ = ("_kinds", "_names", "_owner", "_skeleton", "dtype", "name", "shape")

    def __init__(self, owner: str, name: str, value: Tree) -> None:
        self._owner, self.name = owner, name
        found = [(path, to_array(leaf)) for path, leaf in tree_leaves(value)]
        for path, leaf in found:
            if leaf.ndim == 0:
                raise ContractError(f"{owner}: {_where(name, path)} must be an array with the rows on its first axis")
        numbers = count()
        self._skeleton = map_tree(lambda _: next(numbers), value)
        self._names = [path for path, _ in found]
        self._kinds = [(leaf.dtype, leaf.shape[1:]) for _, leaf in found]
        is_bare = isinstance(self._skeleton, int)
        self.dtype: np.dtype[Any] | None = self._kinds[0][0] if is_bare else None  # of a bare array; None: a tree
        self.shape: tuple[int, ...] | None = self._kinds[0][1] if is_bare else None  # without the first axis

    def fit(self, value: Tree) -> Leaves:
        """Return the leaves of a value of this form; refuse another structure, shape or dtype."""
        if value.__class__ is np.ndarray and value.dtype == self.dtype and value.shape[1:] == self.shape:
            return [value]
        found = [(path, to_array(leaf)) for path, leaf in tree_leaves(value)]
        if [path for path, _ in found] != self._names:
            raise ContractError(
                f"{self._owner}: column {self.name!r} had the leaves {self._names} until now, "
                f"got {[path for path, _ in found]}"
            )
        for (path, leaf), (dtype, shape) in zip(found, self._kinds, strict=True):
            if leaf.shape[1:] != shape or leaf.dtype != dtype or leaf.ndim == 0:
                before = f"{dtype} of shape (n,{''.join(f' {length},' for length in shape)})"
                raise ContractError(
                    f"{self._owner}: {_where(self.name, path)} was {before} until now, got {leaf.dtype} of shape "
                    f"{leaf.shape}"
                )
        return [leaf for _, leaf in found]

    def room(self, *lead: int, empty: Empty = np.empty) -> Leaves:
        """Allocate an uninitialized array per leaf, with these lengths as first axes."""
        return [empty((*lead, *shape), dtype) for dtype, shape in self._kinds]

    def table(self, lanes: int, length: int, empty: Empty = np.empty) -> Leaves:
        """Allocate an uninitialized array (lanes, length, …) per leaf, to be written one step (all lanes) at a time.

        Wide rows are in batch order. Narrow rows of one step are adjacent in memory: sorting them at the end is faster
        than writing each to its own cache line.
        """
        found = []
        for dtype, shape in self._kinds:
            wide = dtype.itemsize * math.prod(shape) > _NARROW
            leaf = empty((lanes, length, *shape) if wide else (length, lanes, *shape), dtype)
            found.append(leaf if wide else leaf.swapaxes(0, 1))
        return found

    def blanks(self, n: int) -> Leaves:
        """Return leaves (n, …) for rows stored before the column existed."""
        leaves = self.room(n)
        for leaf in leaves:
            if self.name == "action_mask":
                leaf[...] = True  # before an env's first mask, every action is allowed
            else:
                leaf[...] = np.nan if leaf.dtype.kind in "fc" and self.name not in _LATE_ANSWERS else 0
        return leaves

    def tree(self, leaves: Leaves) -> Tree:
        """Return these leaves in the column's structure."""
        return leaves[0] if self.dtype is not None else map_tree(leaves.__getitem__, self._skeleton)


class ColumnForms:
    """Forms of the columns of one policy's rows and answers; ``owner`` is for messages, e.g. ``"policy 'main'"``."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self.rows: dict[str, ColumnForm] = {}  # of the agent connectors' output
        self.answers: dict[str, ColumnForm] = {}  # of the output of the policy and its action connectors
        self._asked = False

    def get_state(self) -> State:
        """Return each form as a column without rows."""

        def blank(forms: Mapping[str, ColumnForm]) -> State:
            return plain_columns({name: form.tree(form.room(0)) for name, form in forms.items()}, self._owner)

        return {"rows": blank(self.rows), "answers": blank(self.answers), "asked": self._asked}

    @classmethod
    def from_state(cls, state: State, specs: ColumnSpecs, owner: str) -> ColumnForms:
        """Rebuild forms from a state of `get_state`; refuse impossible dtypes and shapes."""
        check_fields(state, ("rows", "answers", "asked"), owner)
        forms = cls(owner)
        forms._asked = flag_field(state, "asked", owner)
        for part in ("rows", "answers"):
            columns = columns_from(state[part], 0, f"{owner}: forms: {part}")
            specs.check(columns, f"{owner}: forms: {part}")
            setattr(forms, part, {name: ColumnForm(owner, name, value) for name, value in columns.items()})
        return forms

    def fit_saved(
        self, columns: Mapping[str, Tree], where: str, *, known: Collection[str] | None = None
    ) -> dict[str, Leaves]:
        """Return the leaves of saved columns in ``known`` (None: all); each must have the form of its name."""
        found = {}
        for name in columns if known is None else columns.keys() & set(known):
            form = self.rows.get(name) or self.answers.get(name)
            if form is None:
                raise ArgumentError(f"{where}: column {name!r}: expected a column of these rows, got an unknown one")
            try:
                found[name] = form.fit(columns[name])
            except ContractError as error:
                raise ArgumentError(f"{where}: {error}") from error
        return found

    def check_rows(self, rows: Mapping[str, Tree], *, final: bool = False) -> None:
        """Check that rows after the agent connectors have the columns of the first rows, none with a reserved name.

        ``final``: last rows, which may lack columns that connectors add.
        """
        if final:
            for name in self.rows:
                if name not in rows and name in ROW_COLUMNS:
                    raise ContractError(f"{self._owner}: its agent connectors dropped column {name!r} of last rows")
        elif rows.keys() != self.rows.keys():
            self._learn(rows)

    def _learn(self, columns: Mapping[str, Tree]) -> None:
        if self.rows and columns.keys() - self.rows.keys() == {"action_mask"} and self.rows.keys() < columns.keys():
            # An env gave its first mask, in its infos.
            self.rows["action_mask"] = ColumnForm(self._owner, "action_mask", columns["action_mask"])
            return
        if self.rows:
            raise ContractError(
                f"{self._owner}: its agent connectors gave the columns {sorted(columns)}, until now {sorted(self.rows)}"
            )
        for name in columns:
            if name in BATCH_COLUMNS or (name.startswith("next_") and name[5:] in columns):
                raise ContractError(f"{self._owner}: its agent connectors may not add a column named {name!r}")
        self.rows = {name: ColumnForm(self._owner, name, value) for name, value in columns.items()}

    @property
    def followed(self) -> list[str]:
        """Return the columns that a batch also has as ``next_…``; a recurrent ``…_in`` is the previous ``…_out``."""
        return [
            name
            for name in self.rows
            if (COLUMNS[name].from_env if name in COLUMNS else not _is_state_in(name, self.answers))
        ]

    @property
    def _following(self) -> list[str]:
        return [f"next_{name}" for name in self.followed]

    def check_answer(self, columns: Mapping[str, Tree], *, asked: bool = True) -> list[Leaves]:
        """Return the leaves of an answer's columns (n rows), per column of `answers`; refuse other columns or forms.

        ``asked``: whether the policy was called for any row; before its first call its columns are unknown.
        """
        if columns.keys() != self.answers.keys():
            new = {name: column for name, column in columns.items() if name not in self.answers}
            if self.answers and (
                len(new) + len(self.answers) > len(columns) or (self._asked and set(new) - _LATE_ANSWERS)
            ):
                raise ContractError(
                    f"{self._owner}: gave the columns {sorted(columns)}, until now {sorted(self.answers)}; "
                    f"they must stay the same"
                )
            taken = [name for name in new if name in self.rows or name in _READ_COLUMNS or name in self._following]
            if taken:
                raise ContractError(
                    f"{self._owner}: it or its action connectors add columns named {taken}, which exist already"
                )
            self.answers |= {name: ColumnForm(self._owner, name, value) for name, value in new.items()}
        self._asked |= asked
        found = []
        for name, form in self.answers.items():
            value = columns[name]
            if value.__class__ is np.ndarray and value.dtype == form.dtype and value.shape[1:] == form.shape:
                found.append([value])
            else:
                found.append(form.fit(value))
        return found


def _is_state_in(name: str, answers: Collection[str]) -> bool:
    """Return whether a column is a recurrent state ``…_in`` that the policy returns as ``…_out``."""
    return name.endswith("_in") and f"{name.removesuffix('_in')}_out" in answers


def _where(name: str, path: str) -> str:
    return f"column {name!r}" + (f" at {path}" if path else "")

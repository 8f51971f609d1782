"""`COLUMNS`: dtype and source of every column that the collector makes, in batch order.

`ColumnForm` is the structure of a column, fixed by its first value; `ColumnSpecs` says what saved states may hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from enum import Enum, auto
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Space
from numpy.typing import NDArray

from marlvec.connectors import Rows
from marlvec.errors import ArgumentError, ContractError
from marlvec.serialization.saved import State, check_fields, flag_field
from marlvec.serialization.values import array_from, plain_array
from marlvec.spaces import Leaf, SpaceTree
from marlvec.trees import Tree, blank_object, column_array, fill_objects, map_tree, tree_leaves


class Source(Enum):
    """The source of a column."""

    ROW = auto()
    """A row that an agent acted on."""
    OUTCOME = auto()
    """The row that closes the transition: the agent's next one, or its last."""
    ANSWER = auto()
    """The answer to the row."""
    READ = auto()
    """Made when a batch is read."""
    NONE = auto()
    """Rows have it, and no batch does."""


BOOL, INT, NUMBER, ANY = "b", "iu", "fiub", None
"""Dtype kinds (`numpy.dtype.kind`) of a column; ANY: those of its space."""


class ColumnSpec(NamedTuple):
    """One column."""

    name: str
    kinds: str | None  # dtype kinds; None: given by a space
    source: Source
    is_wide: bool = False  # whether a row may have any shape; else a single value
    from_env: bool = False  # a batch then also has next_…, from the agent's next row
    is_late: bool = False  # whether it may first appear later; earlier rows get `ColumnForm.blanks`


VERSION = "policy_version"
"""The column that has one number for all rows of an answer."""

_ROW, _OUTCOME, _ANSWER, _READ, _NONE = Source
COLUMNS: dict[str, ColumnSpec] = {
    column.name: column
    for column in (
        ColumnSpec("obs", ANY, _ROW, is_wide=True, from_env=True),
        ColumnSpec("actions", ANY, _ANSWER, is_wide=True),
        ColumnSpec("actions_for_env", ANY, _ANSWER, is_wide=True),
        ColumnSpec("rewards", NUMBER, _OUTCOME),
        ColumnSpec("next_obs", ANY, _READ, is_wide=True),
        ColumnSpec("terminated", BOOL, _OUTCOME),
        ColumnSpec("truncated", BOOL, _OUTCOME),
        ColumnSpec("next_obs_missing", BOOL, _READ),
        ColumnSpec("state", NUMBER, _ROW, is_wide=True, from_env=True),
        ColumnSpec("next_state", NUMBER, _READ, is_wide=True),
        ColumnSpec("action_mask", BOOL, _ROW, is_wide=True, from_env=True, is_late=True),
        ColumnSpec("next_action_mask", BOOL, _READ, is_wide=True),
        ColumnSpec("t", INT, _ROW),
        ColumnSpec("env_t", INT, _READ),
        ColumnSpec("next_env_t", INT, _READ),
        ColumnSpec("eps_id", INT, _ROW),
        ColumnSpec("unroll_id", INT, _READ),
        ColumnSpec("env_id", INT, _ROW),
        ColumnSpec("agent_index", INT, _ROW),
        ColumnSpec(VERSION, INT, _ANSWER),
        # After the columns of policies and connectors:
        ColumnSpec("off_policy", BOOL, _ANSWER, is_late=True),
        ColumnSpec("first", BOOL, _NONE),
        ColumnSpec("last", BOOL, _NONE),
    )
}
"""By name, in the order of a batch."""


def names(*sources: Source) -> tuple[str, ...]:
    """Names of the columns from these sources, in order."""
    return tuple(name for name, column in COLUMNS.items() if column.source in sources)


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
                got = column_array(leaf)
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


def plain_columns(columns: Mapping[str, Tree], where: str) -> dict[str, Tree]:
    """Return copies of columns, trees of arrays; columns of objects (one axis only), such as strings, become lists."""
    return {name: map_tree(partial(plain_array, where=f"{where}: column {name!r}"), columns[name]) for name in columns}


def plain_rows(rows: Rows, where: str) -> dict[str, Any]:
    """Convert rows to plain data."""
    return {"length": len(rows), "columns": plain_columns(dict(rows.items()), where)}


def rows_from(state: Any, where: str) -> Rows:
    """Rebuild rows from a result of `plain_rows`, in new arrays."""
    if not isinstance(state, Mapping) or state.keys() != {"length", "columns"}:
        raise ArgumentError(f"{where}: expected rows, got {state!r:.200}")
    n, columns = state["length"], columns_from(state["columns"], state["length"], where)
    return Rows.of_length(columns, n)


def columns_from(columns: Any, length: int, where: str) -> dict[str, Tree]:
    """Rebuild columns, each of this length, in new arrays."""
    if not isinstance(columns, Mapping):
        raise ArgumentError(f"{where}: expected a dict of columns, got {columns!r:.200}")
    for name, column in columns.items():
        for path, leaf in tree_leaves(column):
            is_array = isinstance(leaf, np.ndarray) and leaf.ndim > 0
            if not (is_array or isinstance(leaf, list)) or len(leaf) != length:
                raise ArgumentError(f"{where}: column {name!r} {path}: expected an array of {length} rows")
    return {name: map_tree(array_from, column) for name, column in columns.items()}


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

    __slots__ = ("_blanks", "_kinds", "_names", "_owner", "_skeleton", "dtype", "name", "shape")

    def __init__(self, owner: str, name: str, value: Tree) -> None:
        self._owner, self.name = owner, name
        found = [(path, column_array(leaf)) for path, leaf in tree_leaves(value)]
        for path, leaf in found:
            if leaf.ndim == 0:
                raise ContractError(f"{owner}: {_where(name, path)} must be an array with the rows on its first axis")
        numbers = count()
        self._skeleton = map_tree(lambda _: next(numbers), value)
        self._names = [path for path, _ in found]
        self._kinds = [(leaf.dtype, leaf.shape[1:]) for _, leaf in found]
        self._blanks = [blank_object(leaf) if leaf.dtype.hasobject else None for _, leaf in found]
        is_bare = isinstance(self._skeleton, int)
        self.dtype: np.dtype[Any] | None = self._kinds[0][0] if is_bare else None  # of a bare array; None: a tree
        self.shape: tuple[int, ...] | None = self._kinds[0][1] if is_bare else None  # without the first axis

    def fit(self, value: Tree) -> Leaves:
        """Return the leaves of a value of this form; refuse another structure, shape or dtype."""
        if value.__class__ is np.ndarray and value.dtype == self.dtype and value.shape[1:] == self.shape:
            return [value]
        found = [(path, column_array(leaf)) for path, leaf in tree_leaves(value)]
        if [path for path, _ in found] != self._names:
            raise ContractError(
                f"{self._owner}: column {self.name!r} had the leaves {self._names} until now, "
                f"got {[path for path, _ in found]}"
            )
        for (path, leaf), (dtype, shape) in zip(found, self._kinds, strict=True):
            if leaf.shape[1:] != shape or leaf.dtype != dtype or leaf.ndim == 0:
                before = f"{dtype} of shape (n,{''.join(f' {length},' for length in shape)})"
                advice = ""
                if self.name not in COLUMNS and len(shape) == 1 and leaf.ndim == 2:  # lists, perhaps a policy's
                    advice = (
                        f"; where a policy's are of unlike length, declare lists by ragged={{{self.name!r}: dtype}}"
                    )
                raise ContractError(
                    f"{self._owner}: {_where(self.name, path)} was {before} until now, got {leaf.dtype} of shape "
                    f"{leaf.shape}{advice}"
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
        for leaf, blank in zip(leaves, self._blanks, strict=True):
            if leaf.dtype.hasobject:
                fill_objects(leaf, blank)
            elif self.name == "action_mask":
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

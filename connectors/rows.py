"""`Rows`: columns over rows of envs and agents; `RowRandom`: random numbers that depend on the row alone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from marlvec.errors import ArgumentError, ContractError
from marlvec.trees import Tree, map_tree, to_array, tree_leaves, zip_trees

IntArray = NDArray[np.int64]
Index = NDArray[Any] | slice | Sequence[int] | Sequence[bool]


class Rows:
    """Named columns of equal leading length n; row i is entry i of every column.

    Immutable by convention: a connector returns new rows made with `replace`, and never writes to its arguments'
    arrays. Read a column as ``rows.obs`` or ``rows["obs"]``; if its name is also a method's, only ``rows["name"]``
    works. ``"obs" in rows`` tests for it, ``rows.get("obs")`` returns it or None, ``dict(rows)`` has all columns.

    In one call of a connector, no (env, agent) pair appears twice.

    Args:
        columns: Column name to an array of shape ``(n, ...)``, or to a dict or tuple of arrays; or other rows, whose
            columns are shared.
        **more: Further columns.

    Raises:
        ArgumentError: Columns differ in length, or a column has no length; names the column.
    """

    __slots__ = ("_columns", "_n")

    _columns: dict[str, Tree]

    def __init__(self, columns: Mapping[str, Tree] | Rows | None = None, /, **more: Tree) -> None:
        if isinstance(columns, Rows):
            columns = columns._columns
        self._columns = merged(columns, more) if columns is not None else more
        self._n = -1
        self._check(self._columns)
        if self._n < 0:
            self._n = 0

    def _check(self, columns: Mapping[str, Tree]) -> None:
        for name, column in as_stored(columns):
            if column.__class__ is Later or (type(column) is np.ndarray and column.ndim):
                length = len(column)
                if length != self._n and self._n >= 0:
                    raise self._unequal(name, "", length)
                self._n = length
                continue
            for path, leaf in tree_leaves(column):
                try:
                    length = len(leaf)
                except TypeError:
                    where = f"column {name!r}" + (f" at {path}" if path else "")
                    raise ArgumentError(
                        f"{where} must be an array with the rows on its first axis, got {type(leaf).__name__} "
                        f"without a length"
                    ) from None
                if length != self._n and self._n >= 0:
                    raise self._unequal(name, path, length)
                self._n = length

    def _unequal(self, name: str, path: str, length: int) -> ArgumentError:
        where = f"column {name!r}" + (f" at {path}" if path else "")
        return ArgumentError(f"{where} has {length} rows, the columns before it have {self._n}")

    @classmethod
    def of_length(cls, columns: dict[str, Tree], n: int) -> Self:
        """Build rows from columns of ``n`` entries each, without checks; the dict is used directly."""
        rows = cls.__new__(cls)
        rows._columns = columns
        rows._n = n
        return rows

    def __len__(self) -> int:
        return self._n

    def __getattr__(self, name: str) -> Tree:
        # Called if normal lookup fails. A half-built instance (copy, unpickling) has no columns yet.
        if name == "_columns" or name.startswith("__"):
            raise AttributeError(name)
        if name in self._columns:
            return self._columns[name]
        raise AttributeError(f"no column {name!r}; the columns are {list(self._columns)}")

    def __getitem__(self, name: str) -> Tree:
        if not isinstance(name, str):
            raise TypeError(
                f"a column is named by a string, got {type(name).__name__}; to choose rows, call slice() or take()"
            )
        try:
            return self._columns[name]
        except KeyError:
            raise KeyError(f"no column {name!r}; the columns are {list(self._columns)}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    __iter__ = None  # len() counts rows and [] names columns, so iterating could mean either

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._columns,)

    def __repr__(self) -> str:
        parts = []
        for name, column in self._columns.items():
            for path, leaf in tree_leaves(column):
                where = f"{name}/{path}" if path else name
                is_array = hasattr(leaf, "dtype") and hasattr(leaf, "shape")
                text = f"{tuple(leaf.shape)} {leaf.dtype}" if is_array else type(leaf).__name__
                parts.append(f"{where}: {text}")
        return f"Rows({self._n}; {', '.join(parts)})" if parts else f"Rows({self._n})"

    # --- columns

    def keys(self) -> KeysView[str]:
        """Names of the columns, in order."""
        return self._columns.keys()

    def items(self) -> ItemsView[str, Tree]:
        """Names and columns, in order."""
        return self._columns.items()

    def get(self, name: str, default: Tree = None) -> Tree:
        """Return the column of this name, or ``default``."""
        return self._columns.get(name, default)

    def replace(self, **columns: Tree) -> Self:
        """Return rows with these columns replaced or added; they share the others. ArgumentError if lengths differ."""
        if not self._columns:
            return type(self)(columns)
        for column in columns.values():
            if type(column) is not np.ndarray or not column.ndim or len(column) != self._n:
                self._check(columns)
                break
        rows = type(self).__new__(type(self))
        rows._columns = merged(self._columns, columns)
        rows._n = self._n
        return rows

    def drop(self, *names: str) -> Self:
        """Return rows without the columns ``names``; they share the others. KeyError if a column does not exist."""
        for name in names:
            if name not in self:
                self[name]
        kept = {name: column for name, column in as_stored(self._columns) if name not in names}
        return type(self)(with_later(kept))

    # --- choosing rows

    def slice(self, start: int, stop: int) -> Self:
        """Return rows ``start`` to ``stop``, as views; bounds as in Python's slices."""
        return self.take(slice(start, stop))

    def take(self, index: Index) -> Self:
        """Return the chosen rows, in the order of ``index``.

        Args:
            index: (k,) ints, a (n,) bool mask, or a slice. A slice gives views, the others copies.

        Returns:
            k rows: views for a slice, else copies.

        Raises:
            ArgumentError: The index is not one-dimensional ints or bools, or a mask's length is not n.
            IndexError: A position is out of range.
        """
        if isinstance(index, slice):
            length = len(range(*index.indices(self._n)))
            parts = {
                name: column.slice(index) if column.__class__ is Later else map_tree(lambda leaf: leaf[index], column)
                for name, column in as_stored(self._columns)
            }
            return self.of_length(with_later(parts), length)
        where = np.asarray(index)
        if where.ndim != 1 or (where.dtype.kind not in "biu" and where.size):
            raise ArgumentError(
                f"take() wants 1-D ints, a mask of {self._n} bools or a slice, got {where.dtype} of shape {where.shape}"
            )
        if where.dtype.kind == "b":
            if len(where) != self._n:
                raise ArgumentError(f"take() wants a mask of {self._n} bools, got one of {len(where)}")
            where = np.flatnonzero(where)
        elif where.dtype.kind != "i":
            where = where.astype(np.int64)
        if where.size and not self._columns:
            raise IndexError(f"{where.size} positions asked of rows without columns")
        chosen = {
            name: column.take(where, axis=0)
            if type(column) is np.ndarray
            else column.take(where)
            if column.__class__ is Later
            else map_tree(lambda leaf: _choose(leaf, where), column)
            for name, column in as_stored(self._columns)
        }
        return self.of_length(with_later(chosen), len(where))

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """Concatenate rows; without parts return rows without columns.

        Returns:
            New rows, as many as all parts have.

        Raises:
            ArgumentError: The parts do not have the same columns, or a column's structure differs; names the columns.
        """
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return cls()
        columns = join_columns([part._columns for part in parts], same_dtypes=False)
        return cls.of_length(columns, sum(len(part) for part in parts))


class Later:
    """A column of ``length`` rows that is made when it is read, once.

    ``make`` returns the rows of some positions, (k,) ints from 0, or all rows for None. Rows that are chosen before the
    column is read are made alone, when they are read themselves; a slice is a view of the whole.
    """

    __slots__ = ("_length", "_made", "_make")

    def __init__(self, length: int, make: Callable[[IntArray | None], Tree]) -> None:
        self._length = length
        self._make: Callable[[IntArray | None], Tree] | None = make
        self._made: Tree = None

    def __len__(self) -> int:
        return self._length

    def read(self) -> Tree:
        """The column."""
        make = self._make
        if make is not None:  # where two threads come at once, both make the same
            self._made = make(None)
            self._make = None  # what it was made of may go
        return self._made

    def take(self, where: IntArray) -> Tree | Later:
        """Rows of these positions, (k,) ints: now if the column was read, or else once they are."""
        make = self._make
        if make is None:
            return map_tree(lambda leaf: _choose(leaf, where), self._made)
        where = np.arange(self._length).take(where)  # from the end, too; and refused where there is none
        return Later(len(where), lambda inner: make(where if inner is None else where.take(inner)))

    def slice(self, index: slice) -> Later:
        """Rows of a slice, as views of the whole, which is made when one of its slices is read."""

        def make(inner: IntArray | None) -> Tree:
            part = map_tree(lambda leaf: leaf[index], self.read())
            return part if inner is None else map_tree(lambda leaf: _choose(leaf, inner), part)

        return Later(len(range(*index.indices(self._length))), make)


class LateColumns(dict[str, Tree]):
    """Columns of which some are made when they are read, `Later`; what takes all of them makes them."""

    __slots__ = ()

    def __getitem__(self, name: str) -> Tree:
        column = super().__getitem__(name)
        return column.read() if column.__class__ is Later else column

    def __iter__(self) -> Iterator[str]:  # where this is not dict's own, {**columns} and dict(columns) read columns
        return super().__iter__()

    def get(self, name: str, default: Tree = None) -> Tree:
        column = super().get(name, default)
        return column.read() if column.__class__ is Later else column

    def items(self) -> ItemsView[str, Tree]:  # type: ignore[override]  # of another dict
        return dict(self).items()

    def values(self) -> ValuesView[Tree]:  # type: ignore[override]
        return dict(self).values()

    def copy(self) -> dict[str, Tree]:
        return dict(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def as_stored(columns: Mapping[str, Tree]) -> ItemsView[str, Tree | Later]:
    """Names and columns, without making those that are made when they are read."""
    return dict.items(columns) if isinstance(columns, dict) else columns.items()


def with_later(columns: dict[str, Tree | Later]) -> dict[str, Tree]:
    """Return columns as `Rows` hold them: a plain dict where all are made."""
    return LateColumns(columns) if any(column.__class__ is Later for column in columns.values()) else columns


def merged(columns: Mapping[str, Tree], more: Mapping[str, Tree]) -> dict[str, Tree]:
    """Return columns with these replaced or added."""
    if columns.__class__ is not LateColumns:
        return {**columns, **more}
    return with_later(dict(as_stored(columns)) | dict(as_stored(more)))


def _reader(name: str) -> property:
    def read(rows: Rows) -> Tree:
        try:
            return rows[name]
        except KeyError:
            raise AttributeError(f"no column {name!r}; the columns are {list(rows._columns)}") from None

    return property(read, doc=f"The column ``{name}``.")


# Like `__getattr__`, but five times as fast: that is called only after a failed attribute lookup.
for _name in ("obs", "actions", "actions_for_env", "rewards", "env_id", "agent_index", "t", "first", "last"):
    setattr(Rows, _name, _reader(_name))


def _choose(leaf: Any, where: NDArray[Any]) -> Any:
    if isinstance(leaf, list):
        return [leaf[i] for i in where]
    # On arrays of many numbers a row, take() is many times as fast as indexing.
    return leaf.take(where, axis=0) if type(leaf) is np.ndarray else leaf[where]


def join_columns(parts: Sequence[Mapping[str, Tree]], *, same_dtypes: bool = True) -> dict[str, Tree]:
    """Concatenate columns by name; if dtypes differ, raise, so that no value changes, or use the wider one."""
    if not parts:
        raise ArgumentError("concat() needs at least one batch")
    first = parts[0]
    for i, part in enumerate(parts):
        if part.keys() != first.keys():
            missing = [name for name in first if name not in part]
            more = [name for name in part if name not in first]
            raise ArgumentError(
                f"batch {i} differs from batch 0: columns {missing} are missing, columns {more} are not in batch 0; "
                f"drop() or replace() columns until all batches have the same"
            )
    join = _joined_exactly if same_dtypes else np.concatenate
    joined = {}
    for name in first:
        try:
            joined[name] = zip_trees(join, [part[name] for part in parts])
        except ValueError as error:  # numpy's, and ArgumentError
            raise ArgumentError(f"column {name!r} cannot be concatenated: {error}") from error
    return joined


def _joined_exactly(leaves: list[Any]) -> NDArray[Any]:
    arrays = [to_array(leaf) for leaf in leaves]
    first = arrays[0]
    for i, array in enumerate(arrays):
        if array.shape[1:] != first.shape[1:] or not _same_dtype(array.dtype, first.dtype):
            raise ArgumentError(
                f"batch {i} has {array.dtype} of shape {array.shape}, batch 0 has {first.dtype} of {first.shape}"
            )
    return np.concatenate(arrays)


def _same_dtype(one: np.dtype[Any], other: np.dtype[Any]) -> bool:
    # Wider text dtypes keep all texts; any other promotion could change a number.
    return one == other or (one.kind == other.kind and one.kind in "US")


U64 = NDArray[np.uint64]

_STEP = np.uint64(0x9E3779B97F4A7C15)  # 2**64 divided by the golden ratio
_MULTIPLY = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFT = np.uint64(30), np.uint64(27), np.uint64(31)
_SPARE = np.uint64(11)  # a double holds 53 of 64 bits


class RowRandom:
    """Draws that depend only on ``(seed, stream, eps_id, agent_index, t)``, and in a collector on its seed.

    Each row has its own generator, seeded by a hash of these numbers. So it draws the same in batches of any size and
    order, in any process, and after a restart, without a state to save. Without ``eps_id`` the ``env_id`` replaces it;
    an env's episodes then draw equal numbers at equal ``t``.

    A row's first k draws do not depend on the number of draws, and all kinds of draw below use the same bits: give each
    purpose its own stream.

    The generator is SplitMix64, and its output function is the hash too: Steele, Lea and Flood, "Fast splittable
    pseudorandom number generators", OOPSLA 2014, with the constants of Vigna's ``splitmix64.c``. Normal numbers are
    made of uniform ones by Box and Muller, "A note on the generation of random normal deviates", 1958.

    Args:
        seed: An int of at least 0.
        stream: Name of the purpose; streams of one seed are independent.

    Raises:
        ArgumentError: ``seed`` is not an int, or below 0.
    """

    def __init__(self, seed: int, stream: str) -> None:
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
            raise ArgumentError(f"seed must be an int from 0 on, got {seed!r}")
        self.seed = int(seed)
        self.stream = stream
        self.follow_run(None)

    def follow_run(self, run_seed: int | None) -> None:
        """Draw other numbers for each ``run_seed``.

        Args:
            run_seed: From 0 to 2**64 - 1; None: draws as outside of collectors.
        """
        key = b"" if run_seed is None else run_seed.to_bytes(8, "little")
        # Not hash(), whose salt differs between processes.
        digest = hashlib.blake2b(f"{self.seed}/{self.stream}".encode(), key=key, digest_size=8).digest()
        self._key = np.frombuffer(digest, "<u8").astype(np.uint64)

    def __repr__(self) -> str:
        return f"RowRandom({self.seed}, {self.stream!r})"

    def uniform(self, rows: Rows, k: int = 1) -> NDArray[np.float64]:
        """Draw (n, k) numbers in [0, 1).

        Returns:
            (n, k) float64; a row's numbers do not depend on the other rows.

        Raises:
            ContractError: The rows lack ``t``, ``agent_index``, or both ``eps_id`` and ``env_id``.
        """
        words = self._words(rows, k)
        words >>= _SPARE
        drawn: NDArray[np.float64] = words * np.float64(2.0**-53)
        return drawn

    def normal(self, rows: Rows, k: int = 1) -> NDArray[np.float64]:
        """Draw (n, k) numbers of mean 0 and variance 1; for errors see `uniform`."""
        pairs = (k + 1) // 2
        u = self.uniform(rows, 2 * pairs)
        radius = np.sqrt(-2 * np.log1p(-u[:, 0::2]))  # of 1 - u, which is never 0
        angle = 2 * np.pi * u[:, 1::2]
        out = np.empty_like(u)
        out[:, 0::2] = radius * np.cos(angle)
        out[:, 1::2] = radius * np.sin(angle)
        return out[:, :k]

    def integers(self, rows: Rows, high_n: ArrayLike, k: int = 1) -> NDArray[np.int64]:
        """Draw (n, k) ints from 0 to below ``high_n``; for errors see `uniform`.

        Args:
            rows: n rows.
            high_n: One int for all rows, (n,) ints, or (n, k) ints; from 1 to 2**53.
            k: Number of draws per row.
        """
        high: NDArray[Any] = np.asarray(high_n)
        # Rounding never reaches high itself: the product is at least half a step of doubles below it.
        drawn: NDArray[Any] = self.uniform(rows, k) * (high[:, None] if high.ndim == 1 else high)
        return drawn.astype(np.int64)

    def _words(self, rows: Rows, k: int) -> U64:
        """(n, k) words of 64 random bits."""
        state = self._key
        for name in ("eps_id" if "eps_id" in rows else "env_id", "agent_index", "t"):
            if name not in rows:
                raise ContractError(
                    f"random numbers belong to rows by eps_id (or env_id), agent_index and t, and these rows have "
                    f"no {name!r}; the columns are {list(rows.keys())}. Give them that column"
                )
            # One more, so that a number's 0 is a step too.
            state = mix(state + (np.asarray(rows[name]).astype(np.uint64) + np.uint64(1)) * _STEP)
        return mix(state[:, None] + np.arange(1, k + 1, dtype=np.uint64) * _STEP)


def mix(words: U64) -> U64:
    """SplitMix64's output function, in place: one-to-one, and each bit in changes about half of the bits out."""
    for shift, factor in zip(_SHIFT, _MULTIPLY, strict=False):
        words ^= words >> shift
        words *= factor
    words ^= words >> _SHIFT[-1]
    return words

"""`RecordedRows`: one policy's rows of a recording, read on demand; `Minibatches`: all rows in random order."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from marlvec.arguments import count_from, whole_number
from marlvec.collect.batch import SampleBatch
from marlvec.collect.batch_files import Arrays, TableForm, dtype_of, split_rows
from marlvec.connectors.action.valid_actions import EXECUTED, EXECUTED_MISSING
from marlvec.errors import ArgumentError, CheckpointError
from marlvec.recording.files import BlockReader, Manifest, Part, PartFile, open_part_file, read_block
from marlvec.trees import Tree
from marlvec.vector.settings import check_seed

_OPEN_FILES = 32
_BLOCKS = 4  # decoded blocks kept in memory
_READ_BYTES = 1 << 18
_BLANKS = {"off_policy": False, "action_mask": True, "next_action_mask": True}
"""Columns that begin late, and their values in the rows before: as the collector's own `ColumnForm.blanks`."""
_NEVER_BLANK = {
    *("obs", "next_obs", "actions", "rewards", "terminated", "truncated"),
    *("t", "env_t", "next_env_t", "eps_id", "unroll_id", "env_id", "agent_index"),
}
"""Columns without which a row is no decision: no value is invented for them."""


class _Shelf(NamedTuple):
    """A part file, and the range of the policy's rows that it holds."""

    part: Part
    file: PartFile
    start: int


class BlockStore:
    """One policy's arrays in a recording's folder; each file is opened when it is first read.

    ``verify``: whether a file's checksum is compared then. ``form`` has all columns that any file has; raises
    `CheckpointError`, which names the file, if columns of two files do not fit together.

    A column that some files of any policy lack, such as a policy's ``values``, has NaN, 0, False or "" in their rows,
    and a bool column ``values_missing`` that marks these rows.
    """

    def __init__(self, folder: Path, manifest: Manifest, policy_id: str, *, verify: bool) -> None:
        self.policy_id = policy_id
        self._folder, self._manifest, self._verify = folder, manifest, verify
        self._shelves: list[_Shelf] = []
        self.rows = 0
        for part in manifest.parts:
            for file in part.files:
                if file.policy == policy_id:
                    self._shelves.append(_Shelf(part, file, self.rows))
                    self.rows += file.rows
        self._marks: dict[str, str] = {}  # name of a column that marks rows: the column that they lack
        self._starts = np.array([shelf.start for shelf in self._shelves], np.int64)
        self.form = self._join_forms()
        self._readers: OrderedDict[int, BlockReader] = OrderedDict()
        self._verified: set[int] = set()
        self._cached: OrderedDict[tuple[int, int, str], NDArray[Any]] = OrderedDict()

    def _join_forms(self) -> TableForm:
        """Return the form of all columns that any file has."""
        columns, forms = dict[str, Any](), dict[str, list[Any]]()
        for shelf in self._shelves:
            form = self._form_of(shelf)
            for name, tree in form.columns:
                if columns.setdefault(name, tree) != tree:
                    raise CheckpointError(self._path(shelf), f"has another structure of column {name!r} than before")
            for name, one in form.forms.items():
                if forms.setdefault(name, one) != one:
                    raise CheckpointError(self._path(shelf), f"has another dtype or shape of {name!r} than before")
        for name in self._late_columns():
            mark = f"{name}_missing"
            if name in columns and mark not in columns and mark not in forms:
                self._marks[mark] = name
                forms[mark] = ["|b1", []]
        return TableForm([*([name, tree] for name, tree in columns.items()), *([m, m] for m in self._marks)], forms)

    def _late_columns(self) -> list[str]:
        """Return the columns that only some files of a policy have, of any policy; not those with a known default."""
        used = {(file.policy, file.form) for part in self._manifest.parts for file in part.files}
        by_policy: dict[str, list[list[str]]] = {}
        for policy_id, number in sorted(used):
            by_policy.setdefault(policy_id, []).append([name for name, _ in self._manifest.forms[number][1].columns])
        found = [
            name
            for files in by_policy.values()
            for name in dict.fromkeys(name for columns in files for name in columns)
            if not all(name in columns for columns in files) and name not in _BLANKS and name not in _NEVER_BLANK
        ]
        return list(dict.fromkeys(found))

    @property
    def files(self) -> list[tuple[Path, PartFile]]:
        """Path and manifest entry of each file, in the order of their rows."""
        return [(self._path(shelf), shelf.file) for shelf in self._shelves]

    def close(self) -> None:
        """Close all files. A later read opens them again."""
        while self._readers:
            self._readers.popitem()[1].close()
        self._cached.clear()

    def numbers(self, rows: Sequence[int] | NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """Check row numbers (`IndexError`); return them as an array."""
        where_B = np.asarray(rows)
        if where_B.ndim != 1 or (where_B.dtype.kind not in "iu" and where_B.size):
            raise IndexError(f"expected whole numbers of rows along one axis, got {where_B.dtype} of {where_B.shape}")
        if where_B.size and (where_B.min() < 0 or where_B.max() >= self.rows):
            raise IndexError(f"expected numbers from 0 to {self.rows - 1}, got {where_B.min()} to {where_B.max()}")
        return where_B.astype(np.int64)

    def _form_of(self, shelf: _Shelf) -> TableForm:
        return self._manifest.forms[shelf.file.form][1]

    def _path(self, shelf: _Shelf) -> Path:
        return self._folder / shelf.part.path(shelf.file)

    def read_range(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Return a copy of some rows of one array."""
        pieces = []
        first = int(np.searchsorted(self._starts, start, "right")) - 1
        for k in range(max(0, first), len(self._shelves)):
            at = self._shelves[k].start
            if at >= stop:
                break
            for b, rows in enumerate(self._shelves[k].file.blocks):
                if at < stop and at + rows > start:
                    block = self.block(k, b, [name])[name]
                    pieces.append(block[max(0, start - at) : stop - at])
                at += rows
        if not pieces:
            dtype, shape = self.form.forms[name]
            return np.zeros((0, *shape), dtype_of(dtype))
        return np.concatenate(pieces)

    def gather(self, names: Sequence[str], where_B: NDArray[np.int64]) -> Arrays:
        """Return copies of some rows of some arrays; each block is read once."""
        order = np.argsort(where_B, kind="stable")
        found: Arrays = {}
        for name in names:
            dtype, shape = self.form.forms[name]
            found[name] = np.zeros((len(where_B), *shape), object if dtype[1] == "U" else dtype_of(dtype))
        sorted_B, done = where_B[order], 0
        while done < len(order):
            k = int(np.searchsorted(self._starts, sorted_B[done], "right")) - 1
            at = self._shelves[k].start
            for b, rows in enumerate(self._shelves[k].file.blocks):
                stop = int(np.searchsorted(sorted_B, at + rows, "left"))
                if stop > done:
                    block, here = self.block(k, b, names), sorted_B[done:stop] - at
                    for name in names:
                        found[name][order[done:stop]] = block[name][here]
                    done = stop
                at += rows
        for name in names:
            if self.form.forms[name][0][1] == "U":
                found[name] = found[name].astype(str)
        return found

    def block(self, k: int, b: int, names: Collection[str]) -> Arrays:
        """Return some arrays of a block, maybe read-only; the last blocks read stay in memory."""
        shelf = self._shelves[k]
        form, rows = self._form_of(shelf), shelf.file.blocks[b]
        found = {name: self._cached[k, b, name] for name in names if (k, b, name) in self._cached}
        if lacking := [name for name in names if name not in found and name in form.forms]:
            path = self._path(shelf)
            found |= read_block(self._reader(k), b, shelf.file, form, lacking, path)
        for name in names:
            if name not in found:
                found[name] = self._fill(name, rows, shelf)
            self._cached[k, b, name] = found[name]
            self._cached.move_to_end((k, b, name))
        while len(self._cached) > _BLOCKS * max(1, len(self.form.forms)):
            self._cached.popitem(last=False)
        return found

    def _fill(self, name: str, rows: int, shelf: _Shelf) -> NDArray[Any]:
        """Return an array that a file lacks: a mark, or fill values."""
        if name in self._marks:
            lacks = all(self._marks[name] != known for known, _ in self._form_of(shelf).columns)
            return np.full(rows, lacks, np.bool_)
        dtype, shape = self.form.forms[name]
        column, kind = name.partition("/")[0], dtype_of(dtype).kind
        if column in _NEVER_BLANK:
            raise CheckpointError(
                self._path(shelf), f"lacks {name!r}, which other files have: choose columns= without it"
            )
        if dtype.startswith("|O:"):
            return split_rows(np.empty(0, dtype[3:]), np.zeros(rows, np.int64))
        blank = {"f": np.nan, "U": "", "O": None}.get(kind, 0)
        return np.full((rows, *shape), _BLANKS.get(column, blank), dtype)

    def _reader(self, k: int) -> BlockReader:
        if (reader := self._readers.get(k)) is not None:
            self._readers.move_to_end(k)
            return reader
        shelf = self._shelves[k]
        path = self._path(shelf)
        if self._verify and k not in self._verified:
            _check_sum(path, shelf.file)
            self._verified.add(k)
        self._readers[k] = reader = open_part_file(
            path, shelf.file, self.policy_id, self._form_of(shelf), check_pages=not self._verify
        )
        while len(self._readers) > _OPEN_FILES:
            self._readers.popitem(last=False)[1].close()
        return reader


class Column:
    """One array of a recording, (n, …); indexing reads from disk. Made by `RecordedRows.column`.

    ``column[3]``, ``column[10:20]`` and ``column[[4, 1]]`` read rows, ``np.asarray(column)`` reads all.
    """

    def __init__(self, store: BlockStore, name: str) -> None:
        self._store, self._name = store, name

    def __repr__(self) -> str:
        return f"<Column {self._name!r} of policy {self._store.policy_id!r}: {self.dtype} of {self.shape}>"

    def __len__(self) -> int:
        return self._store.rows

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the array; text dtypes have no width."""
        dtype: str = self._store.form.forms[self._name][0]
        return dtype_of(dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """(n, …)."""
        return (self._store.rows, *self._store.form.forms[self._name][1])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1:
                return self._store.read_range(self._name, start, max(start, stop))
            index = np.arange(start, stop, step)
        if (number := whole_number(index)) is not None:
            return self._store.gather([self._name], self._store.numbers([number + (number < 0) * len(self)]))[
                self._name
            ][0]
        index = np.asarray(index)
        if index.dtype == np.bool_ and index.shape == (len(self),):
            index = np.flatnonzero(index)
        return self._store.gather([self._name], self._store.numbers(index))[self._name]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError(f"{self!r} is on disk: np.asarray() makes a copy")
        array: NDArray[Any] = self[:]
        return array if dtype is None else array.astype(dtype)


def _check_sum(path: Path, file: PartFile) -> None:
    found = 0
    try:
        with path.open("rb", buffering=0) as opened:
            piece = memoryview(bytearray(_READ_BYTES))  # stays in a cache
            while size := opened.readinto(piece):
                found = zlib.crc32(piece[:size], found)
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error}") from error
    if found != file.crc32:
        raise CheckpointError(
            path, f"was changed: expected the CRC-32 {file.crc32:08x} of the manifest, got {found:08x}"
        )


class FileBlock(NamedTuple):
    """A block of a file: rows that are read together."""

    shelf: int  # number of the file
    number: int  # of the block in the file
    rows: int


class Minibatches:
    """Iterates over minibatches of a recording; each ``iter()`` begins at the first epoch. See `RecordedRows`."""

    def __init__(
        self,
        form: TableForm,
        blocks: Sequence[FileBlock],
        read: Callable[[FileBlock], Arrays],
        *,
        size: int,
        seed: int | None,
        epochs: int | None,
        drop_last: bool,
        window: int,
    ) -> None:
        for name, value in (("size", size), ("epochs", 1 if epochs is None else epochs), ("window", window)):
            count_from(value, f"minibatches({name}={value!r})")
        self._form, self._blocks, self._read = form, list(blocks), read
        self._size, self._epochs, self._drop_last, self._window = size, epochs, drop_last, window
        self._sequence = np.random.SeedSequence(None if seed is None else check_seed(seed))
        self._rows = sum(block.rows for block in self._blocks)

    def __repr__(self) -> str:
        epochs = "endless epochs" if self._epochs is None else f"{self._epochs} epochs"
        return f"<Minibatches of {self._size} from {self._rows:,} rows, {epochs}>"

    def __len__(self) -> int:
        if self._epochs is None:
            raise ArgumentError("len() of minibatches(epochs=None): they have no end")
        return self._epochs * (self._rows // self._size + (not self._drop_last and self._rows % self._size > 0))

    def __iter__(self) -> Iterator[SampleBatch]:
        epoch = 0
        window = _Window(self._form, min(self._rows, self._capacity))
        while self._rows and (self._epochs is None or epoch < self._epochs):
            sequence = np.random.SeedSequence(self._sequence.entropy, spawn_key=(epoch,))
            yield from self._epoch(np.random.default_rng(sequence), window)
            epoch += 1

    @property
    def _capacity(self) -> int:
        """Most rows in a window: the rows that it mixes, and the rest of the window before."""
        return max(self._window, max(block.rows for block in self._blocks) + self._size)

    def _epoch(self, rng: np.random.Generator, window: _Window) -> Iterator[SampleBatch]:
        todo = [self._blocks[k] for k in rng.permutation(len(self._blocks)).tolist()]
        while todo:
            begun = False
            while todo and (not begun or window.rows + todo[-1].rows <= self._window):
                window.add(self._read(todo.pop()))
                begun = True
            window.mix(rng.permutation(window.rows))
            stop = window.rows if not todo and not self._drop_last else window.rows - window.rows % self._size
            for start in range(0, stop, self._size):
                yield window.copy(start, min(stop, start + self._size))
            window.drop(stop if todo else window.rows)


class _Window:
    """Buffer in which up to ``capacity`` rows are mixed.

    All rows are put in their order at once, column by column: a column of numbers fits into a cache where a window of
    all columns does not, and minibatches are then stretches.
    """

    def __init__(self, form: TableForm, capacity: int) -> None:
        self._form = form
        self.rows = 0
        self._kinds = {
            name: (np.dtype(object) if dtype[1] == "U" else dtype_of(dtype), tuple(shape))
            for name, (dtype, shape) in form.forms.items()
        }
        self._arrays = {name: np.empty((capacity, *shape), dtype) for name, (dtype, shape) in self._kinds.items()}
        self._spare = {kind: np.empty((capacity, *kind[1]), kind[0]) for kind in self._kinds.values()}

    def add(self, block: Arrays) -> None:
        """Add a block's rows."""
        rows = len(next(iter(block.values())))
        for name, array in block.items():
            self._arrays[name][self.rows : self.rows + rows] = array
        self.rows += rows

    def mix(self, order_B: NDArray[np.int64]) -> None:
        """Put all rows in an order, a permutation of their numbers."""
        for name, kind in self._kinds.items():
            array, spare = self._arrays[name], self._spare[kind]
            # The numbers are valid: "clip" saves take() a copy.
            np.take(array[: self.rows], order_B, axis=0, out=spare[: self.rows], mode="clip")
            self._arrays[name], self._spare[kind] = spare, array

    def copy(self, start: int, stop: int) -> SampleBatch:
        """Copy consecutive rows into a batch."""

        def array(name: str) -> NDArray[Any]:
            rows = self._arrays[name][start:stop]
            return rows.astype(str) if self._form.forms[name][0][1] == "U" else rows.copy()

        return SampleBatch(self._form.build(array))

    def drop(self, stop: int) -> None:
        """Keep only the rows from ``stop`` on."""
        for array in self._arrays.values():
            array[: self.rows - stop] = array[stop : self.rows]
        self.rows -= stop


class RecordedRows:
    """One policy's rows, in recorded order.

    Rows are read on demand, into new arrays. ``len(rows)`` is their number; ``rows.keys()`` names the columns, the
    same as of `SampleBatch`. Made by `load_dataset`.

    Batches may differ in their columns: with ``random_steps`` the first lack the policy's (``values``, ``logp``), and
    with ``append=True`` another policy may have others. If a file lacks such a column, its rows have NaN, 0, False or
    ``""``, and a bool column with the suffix ``_missing`` (``values_missing``) marks these rows. Columns without which
    a row is no decision (``obs``, ``actions``, ``eps_id``, …) are never filled: reading them raises.

    Attributes:
        policy_id: The policy.
    """

    def __init__(self, folder: Path, manifest: Manifest, policy_id: str, *, verify: bool) -> None:
        self.policy_id = policy_id
        self._store = BlockStore(folder, manifest, policy_id, verify=verify)
        self._n, self._form = self._store.rows, self._store.form

    def __len__(self) -> int:
        return self._n

    def __repr__(self) -> str:
        head = f"RecordedRows of policy {self.policy_id!r}: {self._n:,} rows in {len(self._store.files)} files"
        width = max(map(len, self._form.forms), default=0)
        lines = (f"  {name:<{width}}  {dtype:<4} {tuple(shape)}" for name, (dtype, shape) in self._form.forms.items())
        return "\n".join([head, *lines])

    def keys(self) -> list[str]:
        """Names of the columns, in order."""
        return [name for name, _ in self._form.columns]

    def __contains__(self, name: object) -> bool:
        return name in self.keys()

    @property
    def files(self) -> list[Path]:
        """Paths of the files, in the order of their rows: for polars, DuckDB or pandas."""
        return [path for path, _ in self._store.files]

    @property
    def size_bytes(self) -> int:
        """Bytes of the files."""
        return sum(file.bytes for _, file in self._store.files)

    # --- reading

    def column(self, name: str) -> Tree:
        """Return the column of this name, read from disk when indexed; for Dict and Tuple spaces a tree of columns.

        Returns:
            A `Column`, or a dict or tuple of these.

        Raises:
            KeyError: A column does not exist.
        """
        form = self._chosen([name])
        return form.build(lambda leaf: Column(self._store, leaf))[name]

    def read(self, start: int = 0, stop: int | None = None, columns: Sequence[str] | None = None) -> SampleBatch:
        """Read rows ``start`` to ``stop - 1``, as Python's slices count.

        Args:
            start: First row.
            stop: Row after the last; None for the end.
            columns: Names of columns; None for all.

        Returns:
            The rows.

        Raises:
            KeyError: A column does not exist.
            CheckpointError: A file is damaged; names it.
        """
        start, stop, _ = slice(start, stop).indices(self._n)
        form = self._chosen(columns)
        stop = max(start, stop)
        arrays = {name: self._store.read_range(name, start, stop) for name in form.forms}
        return SampleBatch(form.build(arrays.__getitem__))

    def take(self, rows: Sequence[int] | NDArray[np.integer[Any]], columns: Sequence[str] | None = None) -> SampleBatch:
        """Read some rows, in the given order.

        Args:
            rows: Numbers of rows, from 0.
            columns: Names of columns; None for all.

        Returns:
            The rows.

        Raises:
            IndexError: A row does not exist.
            KeyError: A column does not exist.
            CheckpointError: A file is damaged; names it.
        """
        form, where_B = self._chosen(columns), self._store.numbers(rows)
        arrays = self._store.gather(list(form.forms), where_B)
        return SampleBatch(form.build(arrays.__getitem__))

    def batches(self, size: int, columns: Sequence[str] | None = None) -> Iterator[SampleBatch]:
        """Yield all rows in order, ``size`` at a time.

        Args:
            size: Rows in each batch; the last batch may have fewer.
            columns: Names of columns; None for all.

        Returns:
            The batches.

        Raises:
            ArgumentError: ``size`` is not a positive integer.
            KeyError: A column does not exist.
        """
        count_from(size, f"batches(size={size!r})")
        self._chosen(columns)
        return (self.read(start, start + size, columns) for start in range(0, self._n, size))

    def minibatches(
        self,
        size: int,
        *,
        seed: int | None = None,
        epochs: int | None = 1,
        columns: Sequence[str] | None = None,
        drop_last: bool = False,
        window: int = 1 << 18,
    ) -> Minibatches:
        """Iterate over all rows in random order, ``size`` at a time.

        Blocks of some thousand rows are read in random order, from all files, until a ``window`` is full; its rows are
        mixed. So each row comes once an epoch, memory holds one window, and disk reads are long. If the window
        holds all rows, every order is equally likely. The same seed gives the same order.

            for rows in data["main"].minibatches(4096, seed=0, epochs=3, columns=["obs", "actions"]):
                loss = learn(rows.to_torch())

        Args:
            size: Rows in each minibatch; an epoch's last may have fewer.
            seed: Seeds the order; None: from the operating system.
            epochs: How often all rows come, in another order each time; None: endlessly.
            columns: Names of columns; None for all. Fewer are faster.
            drop_last: Drop each epoch's last minibatch if it has fewer rows.
            window: Number of rows that are mixed at a time.

        Returns:
            An iterator over `SampleBatch` with new arrays; its ``len()`` is the number of minibatches.

        Raises:
            ArgumentError: A number is not above 0, or the seed is not an integer from 0 to 2**64 - 1.
            KeyError: A column does not exist.
            CheckpointError: A file is damaged; names it.
        """
        form = self._chosen(columns)
        blocks = [
            FileBlock(k, b, rows) for k, (_, file) in enumerate(self._store.files) for b, rows in enumerate(file.blocks)
        ]
        names = list(form.forms)
        return Minibatches(
            form,
            blocks,
            lambda block: self._store.block(block.shelf, block.number, names),
            size=size,
            seed=seed,
            epochs=epochs,
            drop_last=drop_last,
            window=window,
        )

    def to_numpy(self, columns: Sequence[str] | None = None) -> dict[str, Tree]:
        """Read whole columns into memory.

        Args:
            columns: Names of columns; None for all.

        Returns:
            Name to array (n, …), or to a tree of arrays.

        Raises:
            KeyError: A column does not exist.
            CheckpointError: A file is damaged; names it.
        """
        return dict(self.read(columns=columns).items())

    def to_torch(self, columns: Sequence[str] | None = None, device: Any = None) -> dict[str, Tree]:
        """Read whole columns into memory, as tensors (n, …) by name; see `SampleBatch.to_torch`.

        Args:
            columns: Names of columns; None for all.
            device: Device of the tensors; None for the CPU.

        Raises:
            MissingExtraError: torch is not installed.
            KeyError: A column does not exist.
            CheckpointError: A file is damaged; names it.
        """
        return self.read(columns=columns).to_torch(device)

    def close(self) -> None:
        """Close all files. A later read opens them again."""
        self._store.close()

    # --- inside

    def _chosen(self, columns: Sequence[str] | None) -> TableForm:
        """Return the form of the chosen columns."""
        if columns is None:
            return self._form
        if isinstance(columns, str):
            raise ArgumentError(f"columns={columns!r}: expected a list of names; write columns=[{columns!r}]")
        known = dict(self._form.columns)
        if missing := [name for name in columns if name not in known]:
            raise KeyError(f"no columns {missing}; policy {self.policy_id!r} has {list(known)}")
        used: list[str] = []
        chosen = TableForm([[name, known[name]] for name in dict.fromkeys(columns)], self._form.forms)
        chosen.build(used.append)
        return chosen._replace(forms={name: self._form.forms[name] for name in used})


def executed_column(rows: RecordedRows, where: str) -> str:
    """Return the column of executed actions, for off-policy learners; ArgumentError if rows lack their action."""
    if EXECUTED_MISSING in rows and (missing := int(np.count_nonzero(rows.column(EXECUTED_MISSING)))):
        raise ArgumentError(
            f"{where}: expected the executed action of each row, got {missing} rows of policy {rows.policy_id!r} that "
            f"are marked in {EXECUTED_MISSING!r}: record with noise and masks before connectors that convert actions"
        )
    return EXECUTED if EXECUTED in rows else "actions"

"""`RecordedRows`: one policy's rows of a recording, read when they are asked for; `Column`: one array of them."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from marlvec.arguments import whole_number
from marlvec.collect.batch import SampleBatch
from marlvec.collect.batch.arrow_columns import Arrays, TableForm
from marlvec.errors import ArgumentError, CheckpointError
from marlvec.recording.files.manifest import Manifest, Part, PartFile
from marlvec.recording.files.part_file import BlockReader, open_part_file, read_block
from marlvec.recording.minibatches import Block, Minibatches
from marlvec.trees import Tree

__all__ = ["Column", "RecordedRows"]

_OPEN_FILES = 32
_BLOCKS = 4  # decoded blocks that are kept
_READ_BYTES = 1 << 20
_BLANKS = {"off_policy": False, "action_mask": True, "next_action_mask": True}
"""Columns that begin late, and their values in the rows before: as the collector's own `ColumnForm.blanks`."""


class _Shelf(NamedTuple):
    """A part file, and where its rows are among the policy's."""

    part: Part
    file: PartFile
    start: int


class RecordedRows:
    """One policy's rows, in the order in which they were recorded.

    Nothing is read before it is asked for. ``len(rows)`` is their number, ``rows.keys()`` names the columns, which are
    those of `SampleBatch`. Made by `load_dataset`.

    Args:
        folder: The recording's.
        manifest: Its content.
        policy_id: The policy.
        verify: Whether a file's checksum is compared when it is first read.

    Raises:
        CheckpointError: Columns of two files do not fit together; names the file.

    Attributes:
        policy_id: The policy.
    """

    def __init__(self, folder: Path, manifest: Manifest, policy_id: str, *, verify: bool) -> None:
        self.policy_id = policy_id
        self._folder, self._manifest, self._verify = folder, manifest, verify
        self._shelves: list[_Shelf] = []
        self._n = 0
        for part in manifest.parts:
            for file in part.files:
                if file.policy_id == policy_id:
                    self._shelves.append(_Shelf(part, file, self._n))
                    self._n += file.rows
        self._starts = np.array([shelf.start for shelf in self._shelves], np.int64)
        self._form = self._join_forms()
        self._readers: OrderedDict[int, BlockReader] = OrderedDict()
        self._verified: set[int] = set()
        self._cached: OrderedDict[tuple[int, int, str], NDArray[Any]] = OrderedDict()

    def _join_forms(self) -> TableForm:
        """The form of all columns, those that only some files have included."""
        columns, forms = dict[str, Any](), dict[str, list[Any]]()
        for shelf in self._shelves:
            form = self._form_of(shelf)
            for name, tree in form.columns:
                if columns.setdefault(name, tree) != tree:
                    raise CheckpointError(self._path(shelf), f"has another structure of column {name!r} than before")
            for name, one in form.forms.items():
                if forms.setdefault(name, one) != one:
                    raise CheckpointError(self._path(shelf), f"has another dtype or shape of {name!r} than before")
        return TableForm([[name, tree] for name, tree in columns.items()], forms)

    def __len__(self) -> int:
        return self._n

    def __repr__(self) -> str:
        head = f"RecordedRows of policy {self.policy_id!r}: {self._n:,} rows in {len(self._shelves)} files"
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
        return [self._path(shelf) for shelf in self._shelves]

    @property
    def size_bytes(self) -> int:
        """Bytes of the files."""
        return sum(shelf.file.size for shelf in self._shelves)

    # --- reading

    def column(self, name: str) -> Tree:
        """Return a column that is read where it is indexed; a tree of them for Dict and Tuple spaces.

        Args:
            name: Name of the column.

        Returns:
            A `Column`, or a dict or tuple of `Column`.

        Raises:
            KeyError: There is no such column.
        """
        form = self._chosen([name])
        return form.build(lambda leaf: Column(self, leaf))[name]

    def read(self, start: int = 0, stop: int | None = None, columns: Sequence[str] | None = None) -> SampleBatch:
        """Read rows ``start`` to ``stop - 1``, as Python's slices count.

        Args:
            start: First row.
            stop: Row after the last; None for the end.
            columns: Names of columns; None for all.

        Returns:
            The rows; arrays are new.

        Raises:
            KeyError: There is no such column.
            CheckpointError: A file is damaged; names it.
        """
        start, stop, _ = slice(start, stop).indices(self._n)
        form = self._chosen(columns)
        stop = max(start, stop)
        arrays = {name: self._range(name, start, stop) for name in form.forms}
        return SampleBatch(form.build(arrays.__getitem__))

    def take(self, rows: Sequence[int] | NDArray[np.integer[Any]], columns: Sequence[str] | None = None) -> SampleBatch:
        """Read some rows, in the order of their numbers given.

        Args:
            rows: Numbers of rows, from 0.
            columns: Names of columns; None for all.

        Returns:
            The rows; arrays are new.

        Raises:
            IndexError: There is no such row.
            KeyError: There is no such column.
            CheckpointError: A file is damaged; names it.
        """
        form, where_B = self._chosen(columns), self._numbers(rows)
        arrays = self._gather(list(form.forms), where_B)
        return SampleBatch(form.build(arrays.__getitem__))

    def batches(self, size: int, columns: Sequence[str] | None = None) -> Iterator[SampleBatch]:
        """Yield all rows in order, ``size`` at a time.

        Args:
            size: Rows in each batch, but for the last, which has what is left.
            columns: Names of columns; None for all.

        Returns:
            The batches; their arrays are new.

        Raises:
            ArgumentError: ``size`` is no whole number above 0.
            KeyError: There is no such column.
        """
        if (whole_number(size) or 0) < 1:
            raise ArgumentError(f"batches(size={size!r}): expected a whole number of at least 1")
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

        Blocks of some thousand rows are read in random order, from all files; the rows of as many blocks as make a
        ``window`` are mixed. So each row comes once an epoch, memory holds one window, and the disk is read in long
        stretches. Where the recording has no more rows than the window, every order of them is as likely. One seed
        gives one order.

            for rows in data["main"].minibatches(4096, seed=0, epochs=3, columns=["obs", "actions"]):
                loss = learn(rows.to_torch())

        Args:
            size: Rows in each, but for an epoch's last, which has what is left.
            seed: Seeds the order; None: from the operating system.
            epochs: How many times all rows come, each time in another order; None: without end.
            columns: Names of columns; None for all. Fewer are faster.
            drop_last: Leave out each epoch's last minibatch where it would be shorter.
            window: Rows that are mixed.

        Returns:
            An iterator over `SampleBatch`, whose arrays are new; ``len()`` of it is how many there are.

        Raises:
            ArgumentError: A number is not above 0, or the seed is not an integer from 0 to 2**64 - 1.
            KeyError: There is no such column.
            CheckpointError: A file is damaged; names it.
        """
        form = self._chosen(columns)
        blocks = [
            Block(k, b, rows) for k, shelf in enumerate(self._shelves) for b, rows in enumerate(shelf.file.blocks)
        ]
        names = list(form.forms)
        return Minibatches(
            form,
            blocks,
            lambda block: self._block(block.shelf, block.number, names),
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
            KeyError: There is no such column.
            CheckpointError: A file is damaged; names it.
        """
        return dict(self.read(columns=columns).items())

    def to_torch(self, columns: Sequence[str] | None = None, device: Any = None) -> dict[str, Tree]:
        """Read whole columns into memory, as tensors.

        Args:
            columns: Names of columns; None for all.
            device: Where the tensors are to be; None for the CPU.

        Returns:
            Name to tensor (n, …), or to a tree of tensors, as `SampleBatch.to_torch`.

        Raises:
            MissingExtraError: torch is not installed.
            KeyError: There is no such column.
            CheckpointError: A file is damaged; names it.
        """
        return self.read(columns=columns).to_torch(device)

    def close(self) -> None:
        """Close all files. What is read later opens them again."""
        while self._readers:
            self._readers.popitem()[1].close()
        self._cached.clear()

    # --- inside

    def _chosen(self, columns: Sequence[str] | None) -> TableForm:
        """The form of these columns."""
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

    def _numbers(self, rows: Sequence[int] | NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        where_B = np.asarray(rows)
        if where_B.ndim != 1 or (where_B.dtype.kind not in "iu" and where_B.size):
            raise IndexError(f"expected whole numbers of rows along one axis, got {where_B.dtype} of {where_B.shape}")
        if where_B.size and (where_B.min() < 0 or where_B.max() >= self._n):
            raise IndexError(f"expected numbers from 0 to {self._n - 1}, got {where_B.min()} to {where_B.max()}")
        return where_B.astype(np.int64)

    def _form_of(self, shelf: _Shelf) -> TableForm:
        return self._manifest.forms[shelf.file.form][1]

    def _path(self, shelf: _Shelf) -> Path:
        return self._folder / shelf.part.path(shelf.file)

    def _range(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Rows of one array, as a copy."""
        pieces = []
        first = int(np.searchsorted(self._starts, start, "right")) - 1
        for k in range(max(0, first), len(self._shelves)):
            at = self._shelves[k].start
            if at >= stop:
                break
            for b, rows in enumerate(self._shelves[k].file.blocks):
                if at < stop and at + rows > start:
                    block = self._block(k, b, [name])[name]
                    pieces.append(block[max(0, start - at) : stop - at])
                at += rows
        if not pieces:
            dtype, shape = self._form.forms[name]
            return np.zeros((0, *shape), dtype)
        return np.concatenate(pieces)

    def _gather(self, names: Sequence[str], where_B: NDArray[np.int64]) -> Arrays:
        """Rows of some arrays, as copies: block by block, each read once."""
        order = np.argsort(where_B, kind="stable")
        found: Arrays = {}
        for name in names:
            dtype, shape = self._form.forms[name]
            found[name] = np.zeros((len(where_B), *shape), object if dtype[1] == "U" else dtype)
        sorted_B, done = where_B[order], 0
        while done < len(order):
            k = int(np.searchsorted(self._starts, sorted_B[done], "right")) - 1
            at = self._shelves[k].start
            for b, rows in enumerate(self._shelves[k].file.blocks):
                stop = int(np.searchsorted(sorted_B, at + rows, "left"))
                if stop > done:
                    block, here = self._block(k, b, names), sorted_B[done:stop] - at
                    for name in names:
                        found[name][order[done:stop]] = block[name][here]
                    done = stop
                at += rows
        for name in names:
            if found[name].dtype == object:
                found[name] = found[name].astype(str)
        return found

    def _block(self, k: int, b: int, names: Collection[str]) -> Arrays:
        """Some arrays of a block, which may be read-only; the last ones that were read are kept."""
        shelf = self._shelves[k]
        form, rows = self._form_of(shelf), shelf.file.blocks[b]
        found = {name: self._cached[k, b, name] for name in names if (k, b, name) in self._cached}
        if lacking := [name for name in names if name not in found and name in form.forms]:
            path = self._path(shelf)
            found |= read_block(self._reader(k), b, shelf.file, form, lacking, path)
        for name in names:
            if name not in found:
                found[name] = self._blank(name, rows, shelf)
            self._cached[k, b, name] = found[name]
            self._cached.move_to_end((k, b, name))
        while len(self._cached) > _BLOCKS * max(1, len(self._form.forms)):
            self._cached.popitem(last=False)
        return found

    def _blank(self, name: str, rows: int, shelf: _Shelf) -> NDArray[Any]:
        """An array that a file lacks."""
        dtype, shape = self._form.forms[name]
        if name not in _BLANKS:
            raise CheckpointError(
                self._path(shelf), f"lacks {name!r}, which other files have: choose columns= without it"
            )
        return np.full((rows, *shape), _BLANKS[name], dtype)

    def _reader(self, k: int) -> BlockReader:
        if (reader := self._readers.get(k)) is not None:
            self._readers.move_to_end(k)
            return reader
        shelf = self._shelves[k]
        path = self._path(shelf)
        if self._verify and k not in self._verified:
            _check_sum(path, shelf.file)
            self._verified.add(k)
        self._readers[k] = reader = open_part_file(path, shelf.file, self.policy_id, self._form_of(shelf))
        while len(self._readers) > _OPEN_FILES:
            self._readers.popitem(last=False)[1].close()
        return reader


class Column:
    """One array of a recording, (n, …), of which as much is read as is asked for. Made by `RecordedRows.column`.

    ``column[3]``, ``column[10:20]`` and ``column[[4, 1]]`` read rows, ``np.asarray(column)`` reads all.

    Args:
        rows: Whose it is.
        name: Its name in the files.
    """

    def __init__(self, rows: RecordedRows, name: str) -> None:
        self._rows, self._name = rows, name

    def __repr__(self) -> str:
        return f"<Column {self._name!r} of policy {self._rows.policy_id!r}: {self.dtype} of {self.shape}>"

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Its dtype; of texts without their width."""
        dtype: str = self._rows._form.forms[self._name][0]
        return np.dtype(dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """(n, …)."""
        return (len(self._rows), *self._rows._form.forms[self._name][1])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1:
                return self._rows._range(self._name, start, max(start, stop))
            index = np.arange(start, stop, step)
        if (number := whole_number(index)) is not None:
            return self._rows._gather([self._name], self._rows._numbers([number + (number < 0) * len(self)]))[
                self._name
            ][0]
        index = np.asarray(index)
        if index.dtype == np.bool_ and index.shape == (len(self),):
            index = np.flatnonzero(index)
        return self._rows._gather([self._name], self._rows._numbers(index))[self._name]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError(f"{self!r} is on disk: np.asarray() makes a copy")
        array: NDArray[Any] = self[:]
        return array if dtype is None else array.astype(dtype)


def _check_sum(path: Path, file: PartFile) -> None:
    found = 0
    try:
        with path.open("rb") as opened:
            while piece := opened.read(_READ_BYTES):
                found = zlib.crc32(piece, found)
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error}") from error
    if found != file.crc32:
        raise CheckpointError(
            path, f"was changed: expected the CRC-32 {file.crc32:08x} of the manifest, got {found:08x}"
        )

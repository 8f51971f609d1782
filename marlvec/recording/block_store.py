"""`BlockStore`: one policy's arrays in the files of a recording, read block by block; `Column`: one array."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from marlvec.arguments import whole_number
from marlvec.collect.batch.arrow_columns import Arrays, TableForm
from marlvec.errors import CheckpointError
from marlvec.recording.files.manifest import Manifest, Part, PartFile
from marlvec.recording.files.part_file import BlockReader, open_part_file, read_block

__all__ = ["BlockStore", "Column"]

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
                if file.policy_id == policy_id:
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
        used = {(file.policy_id, file.form) for part in self._manifest.parts for file in part.files}
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
            return np.zeros((0, *shape), dtype)
        return np.concatenate(pieces)

    def gather(self, names: Sequence[str], where_B: NDArray[np.int64]) -> Arrays:
        """Return copies of some rows of some arrays; each block is read once."""
        order = np.argsort(where_B, kind="stable")
        found: Arrays = {}
        for name in names:
            dtype, shape = self.form.forms[name]
            found[name] = np.zeros((len(where_B), *shape), object if dtype[1] == "U" else dtype)
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
            if found[name].dtype == object:
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
        column, kind = name.partition("/")[0], np.dtype(dtype).kind
        if column in _NEVER_BLANK:
            raise CheckpointError(
                self._path(shelf), f"lacks {name!r}, which other files have: choose columns= without it"
            )
        return np.full((rows, *shape), _BLANKS.get(column, np.nan if kind == "f" else "" if kind == "U" else 0), dtype)

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
        return np.dtype(dtype)

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

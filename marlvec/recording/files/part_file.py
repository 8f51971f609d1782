"""Part files, written block by block and read block by block, in Parquet or Arrow's file format.

`PartFileWriter` writes a file, `open_part_file` opens a file for reading. A block is a row group or a record batch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from marlvec.collect.batch.arrow_columns import Arrays, TableForm, arrow_array, arrow_libraries, numpy_array
from marlvec.errors import CheckpointError
from marlvec.recording.files.draft_file import DraftFile
from marlvec.recording.files.manifest import FORMAT, PartFile

__all__ = ["BlockReader", "Format", "PartFileWriter", "open_part_file", "read_block"]

Format: TypeAlias = Literal["parquet", "arrow"]

_BLOCK_BYTES = 4 << 20
_MOST_ROWS = 1 << 16  # rows in a block
_BUFFER_BYTES = 1 << 16  # shorter writes are joined; longer ones write a column's bytes without a copy
_KEY = b"marlvec"


class PartFileWriter:
    """Writes one policy's rows of one part; ``number`` is that of the columns' form in the manifest."""

    def __init__(self, draft: DraftFile, policy_id: str, form: TableForm, number: int, format: Format) -> None:
        self._arrow, self._parquet = arrow_libraries()
        self._draft, self._format = draft, format
        self.policy_id, self.form, self._number = policy_id, form, number
        self._block_rows = max(1, min(_MOST_ROWS, _BLOCK_BYTES // max(1, form.row_bytes)))
        self._waiting: list[tuple[Arrays, int]] = []
        self._waiting_rows = 0
        self._blocks: list[int] = []
        self._stream: Any = None
        self._writer: Any = None

    @property
    def rows(self) -> int:
        """Number of rows added so far."""
        return sum(self._blocks) + self._waiting_rows

    def add(self, arrays: Arrays, n: int) -> None:
        """Add n rows; each full block is written."""
        self._waiting.append((arrays, n))
        self._waiting_rows += n
        if self._waiting_rows >= self._block_rows:
            self._write_waiting()

    def close(self) -> PartFile:
        """Write the remaining rows and the file's footer; publish the file."""
        self._write_waiting()
        self._writer.close()
        self._stream.close()
        self._draft.publish()
        blocks, draft = tuple(self._blocks), self._draft
        return PartFile(self.policy_id, self._format, self._number, sum(blocks), blocks, draft.size, draft.crc32)

    def discard(self) -> None:
        """Delete the file and its rows."""
        self._draft.discard()
        if self._writer is not None:  # they write when they are garbage-collected, too: into nothing now
            self._writer.close()
            self._stream.close()

    def _write_waiting(self) -> None:
        waiting, rows = self._waiting, self._waiting_rows
        if not rows:
            return
        arrays = waiting[0][0]
        if len(waiting) > 1:
            arrays = {name: np.concatenate([part[name] for part, _ in waiting]) for name in arrays}
        self._write(arrays, rows)
        self._waiting, self._waiting_rows = [], 0

    def _write(self, arrays: Arrays, rows: int) -> None:
        """Write rows as blocks, in few calls: each call may wait for the collecting thread (GIL)."""
        made = {name: part for name, array in arrays.items() if (part := arrow_array(array)) is not None}
        fields = [self._arrow.field(name, part.type, nullable=False) for name, part in made.items()]
        table = self._arrow.Table.from_arrays(list(made.values()), schema=self._arrow.schema(fields))
        if self._writer is None:
            note = json.dumps({"format": FORMAT, "policy": self.policy_id, **self.form._asdict()})
            self._writer = self._begin(table.schema.with_metadata({_KEY: note}))
        if made:
            self._writer.write_table(table, self._block_rows)
            self._draft.catch_up()
        self._blocks += [min(self._block_rows, rows - start) for start in range(0, rows, self._block_rows)]

    def _begin(self, schema: Any) -> Any:
        stream = self._arrow.PythonFile(self._draft, mode="w")
        self._stream = self._arrow.BufferedOutputStream(stream, _BUFFER_BYTES)
        if self._format == "arrow":
            return self._arrow.ipc.new_file(self._stream, schema)
        return self._parquet.ParquetWriter(
            self._stream,
            schema,
            compression="lz4",  # zstd: an eighth smaller, but 50 % slower
            use_dictionary=False,
            write_statistics=False,
            write_page_checksum=True,
        )


class BlockReader(Protocol):
    """Reads the blocks of an open part file."""

    def read(self, block: int, names: Collection[str]) -> dict[str, Any]:
        """Return a block's Arrow arrays, one per table column."""

    def close(self) -> None:
        """Close the file."""


def open_part_file(path: Path, file: PartFile, policy_id: str, form: TableForm, *, check_pages: bool) -> BlockReader:
    """Open a part file, and compare it with the manifest; ``check_pages``: verify Parquet pages when they are read."""
    arrow, _ = arrow_libraries()
    reader: BlockReader
    try:
        reader = _ParquetBlocks(path, check_pages) if file.format == "parquet" else _ArrowBlocks(path)
    except (OSError, arrow.ArrowException, ValueError) as error:
        raise CheckpointError(path, f"cannot be read: {error!r:.300}") from error
    try:
        about = json.loads((reader.metadata or {})[_KEY])
        expected = {"format": FORMAT, "policy": policy_id, **form._asdict()}
        if differing := [name for name in expected if about.get(name) != json.loads(json.dumps(expected[name]))]:
            raise CheckpointError(path, f"is not the manifest's file: its {', '.join(differing)} differ")
        if (blocks := reader.blocks) is not None and blocks != list(file.blocks):
            raise CheckpointError(path, f"is not the manifest's file: expected blocks of {file.blocks} rows")
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        reader.close()
        raise CheckpointError(path, f"is not a file of a recording: {error!r:.300}") from error
    except BaseException:
        reader.close()
        raise
    return reader


def read_block(
    reader: BlockReader, block: int, file: PartFile, form: TableForm, names: Collection[str], path: Path
) -> Arrays:
    """Read some of a block's columns; arrays may be read-only. A damaged block raises `CheckpointError`."""
    arrow, _ = arrow_libraries()
    rows = file.blocks[block]
    try:
        columns = reader.read(block, names)
        return {name: numpy_array(columns.get(name), rows, *form.forms[name]) for name in names}
    except (OSError, arrow.ArrowException, ValueError, LookupError, AttributeError) as error:
        raise CheckpointError(path, f"is damaged in its block {block}: {error!r:.300}") from error


class _ParquetBlocks:
    def __init__(self, path: Path, check_pages: bool) -> None:
        _, parquet = arrow_libraries()
        self._file = parquet.ParquetFile(path, page_checksum_verification=check_pages, memory_map=True)
        about = self._file.metadata
        self.metadata = about.metadata
        is_empty = not about.num_columns
        self.blocks = None if is_empty else [about.row_group(k).num_rows for k in range(about.num_row_groups)]

    def read(self, block: int, names: Collection[str]) -> dict[str, Any]:
        table = self._file.read_row_group(block, columns=list(names))
        columns = {name: table.column(name) for name in table.column_names}
        # combine_chunks() copies even a single chunk.
        return {name: one.chunk(0) if one.num_chunks == 1 else one.combine_chunks() for name, one in columns.items()}

    def close(self) -> None:
        self._file.close()


class _ArrowBlocks:
    def __init__(self, path: Path) -> None:
        arrow, _ = arrow_libraries()
        self._map = arrow.memory_map(os.fspath(path))
        try:
            self._file = arrow.ipc.open_file(self._map)
        except BaseException:
            self._map.close()
            raise
        self.metadata = self._file.schema.metadata
        self.blocks = None

    def read(self, block: int, names: Collection[str]) -> dict[str, Any]:
        batch = self._file.get_batch(block)
        known = set(self._file.schema.names)
        return {name: batch.column(name) for name in names if name in known}

    def close(self) -> None:
        self._map.close()

"""Batches in Parquet files, one row of the table per row, for pandas, polars, DuckDB and whatever else reads those.

A column of one number, bool or text a row is a column of the table; one of arrays becomes a fixed-size list a row, its
numbers in C order. Trees give a column per array, ``obs/camera``. What it takes to build the batch again, shapes and
dtypes among it, is JSON in the schema's metadata under ``marlvec``. An array without a number a row, (n, 0), is only
there.
"""

from __future__ import annotations

import json
import math
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.batch.batch_columns import named_leaves
from marlvec.collect.batch.npz import outline_columns, read_columns
from marlvec.errors import CheckpointError, SerialisationError
from marlvec.extras import import_extra
from marlvec.serialization.archive import FilePath, UniqueNames
from marlvec.serialization.atomic_file import atomic_file
from marlvec.trees import Tree, to_array

__all__ = ["read_parquet", "write_parquet"]

FORMAT = 1
_KEY = b"marlvec"


def write_parquet(path: FilePath, columns: Mapping[str, Tree], n: int) -> None:
    """Write columns to a file, so that a reader finds the old file or the new one.

    Raises:
        MissingExtraError: pyarrow is not installed.
        SerialisationError: A column is neither of bools, ints, floats nor texts; or is a tree with keys that JSON does
            not have.
        OSError: The file cannot be written; the old one is as it was.
    """
    arrow, parquet = _libraries()
    if bad := [f"{name} ({leaf.dtype})" for name, leaf in named_leaves(columns) if not _fits(to_array(leaf))]:
        raise SerialisationError(f"Parquet holds bools, ints, floats and texts, not the columns {bad}; drop() them")
    names, tables, forms = UniqueNames(), dict[str, Any](), dict[str, list[Any]]()

    def put(wanted: str, leaf: Any) -> str:
        name, array = names(wanted), to_array(leaf)
        forms[name] = [array.dtype.str, array.shape[1:]]
        if size := math.prod(array.shape[1:]):
            flat = np.ascontiguousarray(array, array.dtype.newbyteorder("=")).reshape(-1)
            # Of an array of texts, arrow would cut each at its first NUL.
            values = arrow.array(flat.tolist(), arrow.string()) if flat.dtype.kind == "U" else arrow.array(flat)
            tables[name] = values if array.ndim == 1 else arrow.FixedSizeListArray.from_arrays(values, size)
        return name

    outline = outline_columns(columns, "", put)
    version = sys.modules["marlvec"].__version__
    about = {"format": FORMAT, "marlvec": version, "rows": n, "columns": outline, "forms": forms}
    table = arrow.table(tables).replace_schema_metadata({_KEY: json.dumps(about)})
    with atomic_file(path) as file:
        parquet.write_table(table, file, write_page_checksum=True)


def read_parquet(path: FilePath) -> dict[str, Tree]:
    """Columns that `write_parquet` wrote.

    Raises:
        MissingExtraError: pyarrow is not installed.
        CheckpointError: There is no such file, or it is damaged, of a newer format, or none of marlvec's.
    """
    arrow, parquet = _libraries()
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):
            raise CheckpointError(path, "is not a file")
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            table = file.read()
        if _KEY not in (table.schema.metadata or {}):
            raise CheckpointError(path, "is a Parquet file, but holds no SampleBatch")
        about = json.loads(table.schema.metadata[_KEY])
        if about["format"] != FORMAT:
            raise CheckpointError(path, f"is of format {about['format']}; this marlvec reads {FORMAT}")
        return read_columns(about["columns"], lambda name: _array(table, name, about["rows"], *about["forms"][name]))
    except (OSError, arrow.ArrowException, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(path, f"cannot be read: {error!r}") from error
    except MemoryError as error:
        raise CheckpointError(path, "does not fit into memory") from error


def _array(table: Any, name: str, rows: int, dtype: str, shape: list[int]) -> NDArray[Any]:
    if not math.prod(shape):
        return np.zeros((rows, *shape), dtype)
    column = table.column(name).combine_chunks()
    values = column.flatten() if shape else column
    if column.null_count or values.null_count:
        raise ValueError(f"{name} has values that are missing")
    # A copy: what arrow hands out is read-only.
    return np.array(values.to_numpy(zero_copy_only=False), dtype).reshape(rows, *shape)


def _fits(array: NDArray[Any]) -> bool:
    return array.dtype.kind in "biufU" and (array.dtype.kind == "U" or array.dtype.itemsize <= 8)


def _libraries() -> tuple[Any, Any]:
    what, install = "a Parquet file", 'pip install "marlvec[parquet]"'
    return import_extra("pyarrow", what, install), import_extra("pyarrow.parquet", what, install)

"""Batches in Parquet files, a table row per row, for pandas, polars, DuckDB and other readers.

`marlvec.collect.batch.arrow_columns` converts columns to a table. Several policies' rows follow one another, with a
column ``policy``. Columns of one name and form share a column of the table, empty for policies that lack it; if forms
differ, the later policy's is ``policy/column``. The schema's metadata has, as JSON under ``marlvec``, what is needed to
rebuild the batches.
"""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from marlvec.collect.batch.arrow_columns import TableForm, arrow_array, arrow_libraries, numpy_array, table_form
from marlvec.errors import CheckpointError
from marlvec.serialization.archive import FilePath, UniqueNames
from marlvec.serialization.atomic_file import atomic_file
from marlvec.trees import Tree

__all__ = ["read_parquet", "read_parquets", "write_parquet", "write_parquets"]

FORMAT = 1
_KEY = b"marlvec"
_POLICY = "policy"
T = TypeVar("T")


def write_parquet(path: FilePath, columns: Mapping[str, Tree], n: int) -> None:
    """Write columns to a file, so that a reader finds the old file or the new one."""
    arrow_libraries()
    form, arrays = table_form(columns, "Parquet")
    about = {"rows": n, "columns": form.columns, "forms": form.forms}
    _write(path, {name: made for name, array in arrays.items() if (made := arrow_array(array)) is not None}, about)


def read_parquet(path: FilePath) -> dict[str, Tree]:
    """Read the columns that `write_parquet` wrote."""

    def columns(table: Any, about: Any) -> dict[str, Tree]:
        if "policies" in about:
            raise CheckpointError(path, "holds a MultiAgentBatch, not a SampleBatch: use MultiAgentBatch.load()")
        return _columns(table, 0, about)

    return _read(path, columns)


def write_parquets(
    path: FilePath, batches: Mapping[str, Mapping[str, Tree]], lengths: Mapping[str, int], facts: Mapping[str, Any]
) -> None:
    """Write several policies' columns and JSON-able facts to one file, atomically; ``lengths`` are numbers of rows."""
    arrow, _ = arrow_libraries()
    shared: dict[tuple[str, str], str] = {}  # (column of a policy's table, its type) to the column of the file
    names, types, parts = UniqueNames([_POLICY]), dict[str, Any](), list[dict[str, Any]]()
    policies = []
    for policy_id, columns in batches.items():
        form, arrays = table_form(columns, f"policy {policy_id!r}: Parquet")
        part, places = dict[str, Any](), dict[str, str]()
        for name, array in arrays.items():
            if (made := arrow_array(array)) is None:
                continue
            key = name, str(made.type)
            if key not in shared:
                taken = any(other == name for other, _ in shared)
                shared[key] = names(f"{policy_id}/{name}" if taken else name)
            places[name] = shared[key]
            part[places[name]], types[places[name]] = made, made.type
        parts.append(part)
        rows = lengths[policy_id]
        about = {"rows": rows, "columns": form.columns, "forms": form.forms, "places": places}
        policies.append({"id": policy_id, **about})
    counts = [lengths[policy_id] for policy_id in batches]
    ids = arrow.array(np.repeat(np.arange(len(counts), dtype=np.int32), counts))
    tables = {_POLICY: arrow.DictionaryArray.from_arrays(ids, arrow.array(list(batches), arrow.string()))}
    for name, kind in types.items():
        chunks = [part.get(name, arrow.nulls(rows, kind)) for part, rows in zip(parts, counts, strict=True)]
        tables[name] = arrow.chunked_array(chunks, kind)
    _write(path, tables, {"rows": sum(counts), "facts": facts, "policies": policies})


def read_parquets(path: FilePath) -> tuple[dict[str, dict[str, Tree]], dict[str, Any]]:
    """Read the policies' columns and facts that `write_parquets` wrote."""

    def policies(table: Any, about: Any) -> tuple[dict[str, dict[str, Tree]], dict[str, Any]]:
        if "policies" not in about:
            raise CheckpointError(path, "holds a SampleBatch, not a MultiAgentBatch: use SampleBatch.load()")
        found, start = {}, 0
        for one in about["policies"]:
            found[str(one["id"])] = _columns(table, start, one)
            start += one["rows"]
        return found, dict(about["facts"])

    return _read(path, policies)


def _write(path: FilePath, tables: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    arrow, parquet = arrow_libraries()
    note = {"format": FORMAT, "marlvec": sys.modules["marlvec"].__version__, **about}
    table = arrow.table(dict(tables)).replace_schema_metadata({_KEY: json.dumps(note)})
    with atomic_file(path) as file:
        parquet.write_table(table, file, write_page_checksum=True)


def _read(path: FilePath, build: Callable[[Any, Any], T]) -> T:
    arrow, parquet = arrow_libraries()
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):
            raise CheckpointError(path, "is not a file")
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            table = file.read(use_threads=False)
        if _KEY not in (table.schema.metadata or {}):
            raise CheckpointError(path, "is a Parquet file, but holds no SampleBatch")
        about = json.loads(table.schema.metadata[_KEY])
        if about["format"] != FORMAT:
            raise CheckpointError(path, f"is of format {about['format']}; this marlvec reads {FORMAT}")
        return build(table, about)
    except (OSError, arrow.ArrowException, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(path, f"cannot be read: {error!r}") from error
    except MemoryError as error:
        raise CheckpointError(path, "does not fit into memory") from error


def _columns(table: Any, start: int, about: Any) -> dict[str, Tree]:
    """Return the columns of some rows of a table."""
    rows, form = int(about["rows"]), TableForm(about["columns"], about["forms"])
    places = about.get("places")

    def array(name: str) -> Any:
        dtype, shape = form.forms[name]
        place = name if places is None else places.get(name)
        column = table.column(place).slice(start, rows).combine_chunks() if place in table.column_names else None
        # A copy: Arrow's arrays are read-only.
        return np.array(numpy_array(column, rows, dtype, shape), dtype)

    return form.build(array)

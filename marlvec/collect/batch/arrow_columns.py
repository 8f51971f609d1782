"""Columns of rows as columns of an Arrow table, and back, exactly.

A scalar column becomes a column of the table; an array column becomes fixed-size lists, in C order. A tree becomes a
column per array, e.g. ``obs/camera``. Empty rows, (n, 0), are only in the `TableForm`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.batch.batch_columns import named_leaves
from marlvec.collect.batch.npz import outline_columns, read_columns
from marlvec.errors import SerialisationError
from marlvec.extras import import_extra
from marlvec.serialization.archive import UniqueNames
from marlvec.trees import Tree, to_array

__all__ = ["TableForm", "arrow_array", "arrow_libraries", "numpy_array", "table_form"]

Arrays = dict[str, NDArray[Any]]

_DTYPE = re.compile(r"[<>|]([biuf][1248]|U[0-9]{1,9})", re.ASCII)


class TableForm(NamedTuple):
    """What is needed to rebuild columns from a table; JSON-able."""

    columns: list[list[Any]]  # [name, tree] in order; leaves of a tree are names of the table's columns
    forms: dict[str, list[Any]]  # [dtype, shape of a row] by the table's column

    @classmethod
    def from_json(cls, columns: Any, forms: Any) -> TableForm:
        """Check and return a form that was read from a file; `ValueError` if it is none."""
        forms = {str(name): [str(dtype), [int(size) for size in shape]] for name, (dtype, shape) in forms.items()}
        for name, (dtype, shape) in forms.items():
            if _DTYPE.fullmatch(dtype) is None or any(size < 0 for size in shape):
                raise ValueError(f"{name} has the dtype {dtype!r:.40} and the shape {shape!r:.80}")
        form = cls(columns, forms)
        form.build(lambda name: forms[name])
        return form

    def build(self, get: Callable[[str], Any]) -> dict[str, Tree]:
        """Return the columns, each leaf as ``get`` returns it for its name in the table."""
        return read_columns(self.columns, get)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's arrays."""
        return sum(np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in self.forms.values())


def table_form(columns: Mapping[str, Tree], where: str) -> tuple[TableForm, Arrays]:
    """Return the form of the columns' table, and its arrays by name; ``where`` holds them, e.g. ``"Parquet"``."""
    if bad := [f"{name} ({leaf.dtype})" for name, leaf in named_leaves(columns) if not _fits_arrow(to_array(leaf))]:
        raise SerialisationError(f"{where} holds bools, ints, floats and texts, not the columns {bad}; drop() them")
    names, arrays = UniqueNames(), Arrays()

    def put(wanted: str, leaf: Any) -> str:
        name = names(wanted)
        arrays[name] = to_array(leaf)
        return name

    outline = outline_columns(columns, "", put)
    return TableForm(outline, {name: [a.dtype.str, list(a.shape[1:])] for name, a in arrays.items()}), arrays


def arrow_array(array: NDArray[Any]) -> Any:
    """Return rows as an Arrow array, not copied if they are contiguous numbers; None if rows are empty."""
    arrow, _ = arrow_libraries()
    if not (size := math.prod(array.shape[1:])):
        return None
    flat = np.ascontiguousarray(array, array.dtype.newbyteorder("=")).reshape(-1)
    # Arrow would cut each string of a numpy array at its first NUL.
    values = arrow.array(flat.tolist(), arrow.string()) if flat.dtype.kind == "U" else arrow.array(flat)
    if array.ndim == 1:
        return values
    # For nullable values Parquet would write a flag each.
    kind = arrow.list_(arrow.field("item", values.type, nullable=False), size)
    return arrow.FixedSizeListArray.from_arrays(values, type=kind)


def numpy_array(column: Any, rows: int, dtype: str, shape: list[int]) -> NDArray[Any]:
    """Convert an Arrow array (None: of empty rows) to numpy, (rows, …); read-only if not copied.

    `ValueError` if values are missing or have another shape than ``shape``, that of a row.
    """
    if not math.prod(shape):
        return np.zeros((rows, *shape), dtype)
    values = column.flatten() if shape else column
    if column.null_count or values.null_count:
        raise ValueError("values are missing")
    return np.asarray(values.to_numpy(zero_copy_only=False), dtype).reshape(rows, *shape)


def arrow_libraries() -> tuple[Any, Any]:
    """Import ``pyarrow`` and ``pyarrow.parquet``."""
    what, install = "a Parquet file", 'pip install "marlvec[parquet]"'
    return import_extra("pyarrow", what, install), import_extra("pyarrow.parquet", what, install)


def _fits_arrow(array: NDArray[Any]) -> bool:
    return array.dtype.kind in "biufU" and (array.dtype.kind == "U" or array.dtype.itemsize <= 8)

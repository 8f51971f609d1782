"""Columns of rows as columns of an Arrow table, and back, exactly.

A column of one number, bool or text a row is a column of the table; one of arrays becomes a fixed-size list a row, its
numbers in C order. Trees give a column per array, ``obs/camera``. An array without a number a row, (n, 0), is only in
the `TableForm`.
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
    """What it takes to build columns from a table again, as JSON has it.

    Attributes:
        columns: ``[name, tree]`` pairs in order; leaves of the trees are names of the table's columns.
        forms: ``[dtype, shape of a row]`` by the table's column.
    """

    columns: list[list[Any]]
    forms: dict[str, list[Any]]

    @classmethod
    def from_json(cls, columns: Any, forms: Any) -> TableForm:
        """Check and return a form that was read from a file.

        Raises:
            ValueError: It is no form.
        """
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
    """Return the form of the columns' table, and its arrays by name.

    Args:
        columns: Columns of n rows.
        where: What holds them, for messages, e.g. ``"Parquet"``.

    Raises:
        SerialisationError: A column is neither of bools, ints, floats nor texts; or is a tree with keys that JSON does
            not have.
    """
    if bad := [f"{name} ({leaf.dtype})" for name, leaf in named_leaves(columns) if not _fits(to_array(leaf))]:
        raise SerialisationError(f"{where} holds bools, ints, floats and texts, not the columns {bad}; drop() them")
    names, arrays = UniqueNames(), Arrays()

    def put(wanted: str, leaf: Any) -> str:
        name = names(wanted)
        arrays[name] = to_array(leaf)
        return name

    outline = outline_columns(columns, "", put)
    return TableForm(outline, {name: [a.dtype.str, list(a.shape[1:])] for name, a in arrays.items()}), arrays


def arrow_array(array: NDArray[Any]) -> Any:
    """Return rows as an Arrow array, without a copy where they are contiguous numbers; None where a row has none."""
    arrow, _ = arrow_libraries()
    if not (size := math.prod(array.shape[1:])):
        return None
    flat = np.ascontiguousarray(array, array.dtype.newbyteorder("=")).reshape(-1)
    # Of an array of texts, arrow would cut each at its first NUL.
    values = arrow.array(flat.tolist(), arrow.string()) if flat.dtype.kind == "U" else arrow.array(flat)
    if array.ndim == 1:
        return values
    # Of values that may be missing, Parquet would write for each whether it is.
    kind = arrow.list_(arrow.field("item", values.type, nullable=False), size)
    return arrow.FixedSizeListArray.from_arrays(values, type=kind)


def numpy_array(column: Any, rows: int, dtype: str, shape: list[int]) -> NDArray[Any]:
    """Return an Arrow array of rows as numpy's, (rows, …); read-only where no copy was needed.

    Args:
        column: The Arrow array; None where a row has no number.
        rows: n.
        dtype: Of the numpy array.
        shape: Of a row.

    Raises:
        ValueError: Values are missing, or are of another shape.
    """
    if not math.prod(shape):
        return np.zeros((rows, *shape), dtype)
    values = column.flatten() if shape else column
    if column.null_count or values.null_count:
        raise ValueError("values are missing")
    return np.asarray(values.to_numpy(zero_copy_only=False), dtype).reshape(rows, *shape)


def arrow_libraries() -> tuple[Any, Any]:
    """``pyarrow`` and ``pyarrow.parquet``.

    Raises:
        MissingExtraError: pyarrow is not installed.
    """
    what, install = "a Parquet file", 'pip install "marlvec[parquet]"'
    return import_extra("pyarrow", what, install), import_extra("pyarrow.parquet", what, install)


def _fits(array: NDArray[Any]) -> bool:
    return array.dtype.kind in "biufU" and (array.dtype.kind == "U" or array.dtype.itemsize <= 8)

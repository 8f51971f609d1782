"""Batches as tensors of other libraries, and as ``.npz`` and Parquet files; no code in a file is ever executed."""

from __future__ import annotations

import json
import math
import re
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from marlvec.connectors.rows import Later, as_stored, with_later
from marlvec.errors import ArgumentError, CheckpointError, SerialisationError
from marlvec.extras import import_extra
from marlvec.serialization.archive import NamedArray, UniqueNames, read_archive, write_archive
from marlvec.serialization.atomic_file import FilePath, atomic_file
from marlvec.trees import Tree, list_to_array, map_tree, ragged_dtype, to_array, tree_leaves


def as_tensors(
    columns: Mapping[str, Tree], device: Any, *, pin_memory: bool = False, ragged: str | None = None
) -> dict[str, Tree]:
    """Convert to trees of tensors, which share the arrays' memory if possible; an error names the columns."""
    torch = import_extra("torch", "to_torch()", "pip install torch")
    if ragged not in (None, "pad", "nested"):
        raise ArgumentError(f"to_torch(): expected ragged='pad', 'nested' or None, got {ragged!r:.100}")
    nested: dict[str, Tree] = {}
    if ragged is not None:
        lists = {name: leaf for name, leaf in columns.items() if _is_ragged(leaf)}
        columns = {name: column for name, column in columns.items() if name not in lists}
        for name, rows in lists.items():
            if ragged == "pad":
                columns[name], columns[f"{name}_mask"] = pad_rows(rows, 0)
            else:
                tensors = [torch.from_numpy(row).to(device) for row in rows.tolist()]
                nested[name] = torch.nested.nested_tensor(tensors, layout=torch.jagged)
    if bad := [f"{name} ({leaf.dtype})" for name, leaf in named_leaves(columns) if not _fits_torch(torch, leaf)]:
        raise ArgumentError(f"to_torch(): expected columns of dtypes that torch has, got {bad}; drop() them first")

    if pin_memory and not torch.cuda.is_available():
        raise ArgumentError("to_torch(pin_memory=True): expected a GPU that torch can use, got none; leave it out")

    def tensor(leaf: Any) -> Any:
        made = leaf if isinstance(leaf, torch.Tensor) else torch.from_numpy(_shareable(to_array(leaf)))
        if pin_memory:
            made = made.pin_memory()
        return made if device is None else made.to(device, non_blocking=pin_memory)

    return {name: map_tree(tensor, column) for name, column in columns.items()} | nested


def _is_ragged(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) and ragged_dtype(leaf) is not None


def as_jax(columns: Mapping[str, Tree], device: Any) -> dict[str, Tree]:
    """Convert to trees of JAX arrays, which share the arrays' memory if possible; columns must be numeric."""
    jax = import_extra("jax", "to_jax()", "pip install jax")
    if bad := [f"{name} ({leaf.dtype})" for name, leaf in named_leaves(columns) if leaf.dtype.kind not in "biufc"]:
        raise ArgumentError(f"to_jax(): expected columns of numbers, got {bad}; leave them out with drop()")

    def array(leaf: Any) -> Any:
        plain = to_array(leaf)
        if not plain.dtype.isnative:
            plain = plain.astype(plain.dtype.newbyteorder("="))
        is_sharable = plain.flags.writeable and plain.flags.c_contiguous
        made = jax.numpy.from_dlpack(plain) if is_sharable else jax.numpy.asarray(plain)
        return made if device is None else jax.device_put(made, device)

    return {name: map_tree(array, column) for name, column in columns.items()}


def as_tensordict(columns: Mapping[str, Tree], n: int, device: Any) -> Any:
    """Convert to a ``TensorDict`` of batch size (n,); tuples become dicts with the keys ``"0"``, ``"1"``, …."""
    tensordict = import_extra("tensordict", "to_tensordict()", "pip install tensordict")
    nested = {name: _keyed_by_text(name, column) for name, column in as_tensors(columns, device).items()}
    return tensordict.TensorDict(nested, batch_size=[n], device=device)


def _fits_torch(torch: Any, leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return True
    try:
        torch.from_numpy(np.empty(0, leaf.dtype.newbyteorder("=")))
    except TypeError:
        return False
    return True


def _shareable(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array; copied if torch cannot share it: read-only, reversed, unaligned, or of foreign byte order."""
    size = array.dtype.itemsize
    plain = array.flags.writeable and array.flags.aligned and array.dtype.isnative
    if plain and all(stride >= 0 and stride % size == 0 for stride in array.strides):
        return array
    return array.astype(array.dtype.newbyteorder("="), order="C", copy=True)


def _keyed_by_text(name: str, tree: Tree) -> Tree:
    if not isinstance(tree, (dict, tuple)):
        return tree
    items = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree))
    found = {str(key): _keyed_by_text(f"{name}/{key}", item) for key, item in items}
    if len(found) < len(items):
        raise ArgumentError(f"column {name!r}: expected keys that differ as strings, got {[key for key, _ in items]}")
    return found


RLLIB_NAMES = {
    "next_obs": "new_obs",
    "terminated": "terminateds",
    "truncated": "truncateds",
    "logp": "action_logp",
    "values": "vf_preds",
}
"""Columns that RLlib calls otherwise; the others keep their names."""


def as_sample_batch(columns: Mapping[str, Tree]) -> Any:
    """Make a ``ray.rllib.policy.sample_batch.SampleBatch`` of these columns, not copied."""
    theirs = _module()
    if "seq_lens" in columns:
        raise ArgumentError("to_rllib(): expected rows (n, …), got sequences (B, T, …): call unpad() first")
    if taken := [RLLIB_NAMES[name] for name in columns if RLLIB_NAMES.get(name) in columns]:
        raise ArgumentError(f"to_rllib(): RLlib's names {taken} exist already as columns: drop() them first")
    return theirs.SampleBatch({RLLIB_NAMES.get(name, name): column for name, column in columns.items()})


def as_multi_agent(batches: Mapping[str, Mapping[str, Tree]], env_steps: int) -> Any:
    """Make a ``ray.rllib.policy.sample_batch.MultiAgentBatch``; see `as_sample_batch` for errors."""
    theirs = _module()
    return theirs.MultiAgentBatch({name: as_sample_batch(columns) for name, columns in batches.items()}, env_steps)


def _module() -> Any:
    return import_extra("ray.rllib.policy.sample_batch", "to_rllib()", 'pip install "ray[rllib]"')


def named_leaves(columns: Mapping[str, Tree]) -> Iterator[tuple[str, Any]]:
    """Yield every array with its name: the column's, and its path in the column's tree, e.g. ``"obs/camera"``."""
    for name, column in columns.items():
        for path, leaf in tree_leaves(column):
            yield f"{name}/{path}" if path else name, leaf


def with_arrays(columns: Mapping[str, Tree]) -> dict[str, Tree]:
    """Convert lists and bare numbers in columns to arrays; arrays of objects if no other dtype fits."""
    found = {}
    for name, column in as_stored(columns):
        plain = column.__class__ is Later or all(hasattr(leaf, "shape") for _, leaf in tree_leaves(column))
        found[name] = column if plain else map_tree(_as_array, column)
    return with_later(found)


def _as_array(leaf: Any) -> Any:
    if isinstance(leaf, list):
        return list_to_array(leaf)
    return leaf if hasattr(leaf, "shape") else np.asarray(leaf)


def outline_columns(columns: Mapping[str, Tree], prefix: str, put: Callable[[str, Any], Any]) -> list[list[Any]]:
    """Write columns down as ``[name, tree]`` pairs, in order; ``prefix`` is that of the arrays' names.

    A tree is a reference, as ``put(name, array)`` returns it, ``{"dict": [[key, tree], …]}`` or ``{"tuple": [tree,
    …]}``.
    """
    return [[name, _outline(column, f"{prefix}{name}", put)] for name, column in columns.items()]


def read_columns(outline: list[list[Any]], get: Callable[[Any], Any]) -> dict[str, Tree]:
    """Rebuild columns from a result of `outline_columns`; an invalid one raises any error."""
    return {str(name): _tree(tree, get) for name, tree in outline}


def _outline(tree: Tree, name: str, put: Callable[[str, Any], Any]) -> Any:
    if isinstance(tree, dict):
        if bad := [key for key in tree if key is not None and type(key) not in (str, int, bool)]:
            raise SerialisationError(
                f"{name!r} has the keys {bad}; a file holds dicts of texts, whole numbers, bools and None"
            )
        return {"dict": [[key, _outline(item, f"{name}/{key}", put)] for key, item in tree.items()]}
    if isinstance(tree, tuple):
        return {"tuple": [_outline(item, f"{name}/{i}", put) for i, item in enumerate(tree)]}
    return put(name, tree)


def _tree(outline: Any, get: Callable[[Any], Any]) -> Tree:
    if isinstance(outline, dict) and "tuple" in outline:
        return tuple(_tree(item, get) for item in outline["tuple"])
    if isinstance(outline, dict) and "dict" in outline:
        return {key: _tree(item, get) for key, item in outline["dict"]}
    return get(outline)


Batches = Mapping[str, Mapping[str, Tree]]


def write_npz(path: FilePath, kind: str, batches: Batches, facts: Mapping[str, Any]) -> None:
    """Write batches to a file, so that a reader finds the old file or the new one.

    ``kind`` is the batch's class, ``batches`` are columns by policy id (``""``: without a policy), ``facts`` JSON-able.
    """
    if bad := [f"{policy}/{name}".strip("/") for policy, columns in batches.items() for name in _objects(columns)]:
        raise SerialisationError(
            f"columns {bad} hold Python objects other than texts and None, which no data file does; drop() them first"
        )

    def put(name: str, leaf: Any) -> NamedArray | dict[str, Any]:
        array = as_column(leaf)
        if ragged_dtype(array) is not None:
            return {
                "ragged": [NamedArray(name, np.concatenate(array)), NamedArray(f"{name}.lengths", lengths_of(array))]
            }
        return NamedArray(name, array) if array.dtype != object else {"text": _packed_texts(name, array)}

    outlines = [[p, outline_columns(columns, f"{p}/" if p else "", put)] for p, columns in batches.items()]
    write_archive(path, {"kind": kind, **facts, "batches": outlines})


def read_npz(path: FilePath, kind: str) -> tuple[dict[str, dict[str, Tree]], dict[str, Any]]:
    """Read the batches and facts that `write_npz` wrote, of this kind only."""
    data = read_archive(path)
    found = data.pop("kind", None)
    if found != kind:
        hint = f": use {found}.load()" if found in ("SampleBatch", "MultiAgentBatch") else ""
        raise CheckpointError(path, f"holds {'no batch' if not hint else f'a {found}'}, not a {kind}{hint}")
    try:
        batches = {str(policy): read_columns(outline, _array) for policy, outline in data.pop("batches")}
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointError(path, f"holds no batch: {error!r:.300}") from error
    return batches, data


def _array(leaf: Any) -> Any:
    if isinstance(leaf, dict) and leaf.keys() == {"text"}:
        return _unpacked_texts(*map(_array, leaf["text"]))
    if isinstance(leaf, dict) and leaf.keys() == {"ragged"}:
        return split_rows(*map(_array, leaf["ragged"]))
    if not isinstance(leaf, np.ndarray):
        raise TypeError(f"expected an array, got {leaf!r:.100}")
    return leaf


def _objects(columns: Mapping[str, Tree]) -> list[str]:
    return [name for name, leaf in named_leaves(columns) if (a := as_column(leaf)).dtype.hasobject and not _is_known(a)]


def _is_known(array: NDArray[Any]) -> bool:
    return is_text(array) or ragged_dtype(array) is not None


def lengths_of(array: NDArray[Any]) -> NDArray[np.int64]:
    """Return the length of each row of an array of 1-D arrays."""
    return np.fromiter(map(len, array.tolist()), np.int64, len(array))


def split_rows(data: NDArray[Any], lengths: NDArray[Any]) -> NDArray[Any]:
    """Return an array of 1-D arrays, of the rows' numbers one after the other; `ValueError`: they do not fit."""
    if data.ndim != 1 or lengths.ndim != 1 or lengths.dtype.kind != "i" or (lengths < 0).any():
        raise ValueError("expected numbers on one axis, and lengths from 0")
    if lengths.sum() != len(data):
        raise ValueError("the lengths of rows are not those of their numbers")
    rows, stops = np.empty(len(lengths), object), np.cumsum(lengths).tolist()
    for i, (size, stop) in enumerate(zip(lengths.tolist(), stops, strict=True)):
        rows[i] = data[stop - size : stop].copy()
    return rows


def pad_rows(array: NDArray[Any], fill: Any) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return an array of 1-D arrays as (B, L), filled at the end, and where its numbers are, (B, L) bool."""
    lengths = lengths_of(array)
    mask = np.arange(lengths.max(initial=0)) < lengths[:, None]
    padded = np.full(mask.shape, fill, ragged_dtype(array))
    if len(array):
        padded[mask] = np.concatenate(array)
    return padded, mask


def as_column(leaf: Any) -> NDArray[Any]:
    """Return an array; numpy's ``StringDType`` becomes Python's texts, with None for missing ones."""
    array = to_array(leaf)
    if array.dtype.kind != "T":
        return array
    texts = array.astype(object)
    flat = [text if isinstance(text, str) else None for text in texts.ravel().tolist()]  # else the dtype's own missing
    texts.ravel()[:] = flat
    return texts


def is_text(array: NDArray[Any]) -> bool:
    """Return whether an array of objects holds nothing but texts and None."""
    return array.dtype == object and set(map(type, array.ravel().tolist())) <= {str, np.str_, type(None)}


def count_characters(leaf: Any) -> int:
    """Count the characters of texts, and the bytes of arrays, in an array of objects."""
    if not isinstance(leaf, np.ndarray) or leaf.dtype != object:
        return 0
    if ragged_dtype(leaf) is not None:
        return sum(row.nbytes for row in leaf.tolist())
    return sum(len(text) for text in leaf.ravel().tolist() if isinstance(text, str))


def _packed_texts(name: str, array: NDArray[Any]) -> list[NamedArray]:
    """Return a column of texts as UTF-8 bytes and the length of each text in bytes, -1 for None."""
    encoded = [None if text is None else text.encode("utf-8", "surrogatepass") for text in array.ravel().tolist()]
    lengths = np.array([-1 if data is None else len(data) for data in encoded], np.int64).reshape(array.shape)
    if not lengths.size or lengths.max() < 2**31:
        lengths = lengths.astype(np.int32)
    data = np.frombuffer(b"".join(filter(None, encoded)), np.uint8)
    return [NamedArray(name, data), NamedArray(f"{name}.lengths", lengths)]


def _unpacked_texts(data: Any, lengths: Any) -> NDArray[Any]:
    """Return the column that `_packed_texts` was called with; an invalid one raises `ValueError` or `TypeError`."""
    sizes = lengths.ravel()
    if data.dtype != np.uint8 or sizes.dtype.kind != "i" or (sizes < -1).any() or sizes[sizes > 0].sum() != data.size:
        raise ValueError("the lengths of texts are not those of their bytes")
    flat, text, at = np.full(sizes.size, None, object), data.tobytes(), 0
    for i, size in enumerate(sizes.tolist()):
        if size >= 0:
            flat[i] = text[at : at + size].decode("utf-8", "surrogatepass")
            at += size
    return flat.reshape(lengths.shape)


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
        return np.array(numpy_array(column, rows, dtype, shape), dtype_of(dtype))

    return form.build(array)


Arrays = dict[str, NDArray[Any]]

_DTYPE = re.compile(r"[<>|]([biuf][1248]|U[0-9]{1,9}|O(:[<>|][biuf][1248])?)", re.ASCII)
"""O: Python's texts and None; with a dtype: 1-D arrays of it."""


def dtype_of(text: str) -> np.dtype[Any]:
    """Return the dtype of a column's array, from its text in a `TableForm`."""
    return np.dtype(text.partition(":")[0])


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
        return sum(dtype_of(dtype).itemsize * math.prod(shape) for dtype, shape in self.forms.values())


def table_form(columns: Mapping[str, Tree], where: str) -> tuple[TableForm, Arrays]:
    """Return the form of the columns' table, and its arrays by name; ``where`` holds them, e.g. ``"Parquet"``."""
    if bad := [f"{name} ({leaf.dtype})" for name, leaf in named_leaves(columns) if not _fits_arrow(as_column(leaf))]:
        raise SerialisationError(f"{where} holds bools, ints, floats and texts, not the columns {bad}; drop() them")
    names, arrays = UniqueNames(), Arrays()

    def put(wanted: str, leaf: Any) -> str:
        name = names(wanted)
        arrays[name] = as_column(leaf)
        return name

    outline = outline_columns(columns, "", put)
    return TableForm(outline, {name: [_dtype_text(a), list(a.shape[1:])] for name, a in arrays.items()}), arrays


def _dtype_text(array: NDArray[Any]) -> str:
    ragged = ragged_dtype(array)
    return array.dtype.str if ragged is None else f"|O:{ragged.str}"


def arrow_array(array: NDArray[Any]) -> Any:
    """Return rows as an Arrow array, not copied if they are contiguous numbers; None if rows are empty."""
    arrow, _ = arrow_libraries()
    if not (size := math.prod(array.shape[1:])):
        return None
    if ragged_dtype(array) is not None:
        data, stops = arrow.array(np.concatenate(array)), np.cumsum([0, *lengths_of(array).tolist()])
        kind = arrow.large_list(arrow.field("item", data.type, nullable=False))
        return arrow.LargeListArray.from_arrays(arrow.array(stops, arrow.int64()), data, type=kind)
    flat = np.ascontiguousarray(array, array.dtype.newbyteorder("=")).reshape(-1)
    # Arrow would cut each string of a numpy array at its first NUL.
    kinds = {"U": arrow.string, "O": arrow.large_string}
    values = arrow.array(flat.tolist(), kinds[flat.dtype.kind]()) if flat.dtype.kind in kinds else arrow.array(flat)
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
    if dtype.startswith("|O:"):
        lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        data = np.asarray(column.flatten().to_numpy(zero_copy_only=False), dtype[3:])
        return split_rows(data, lengths.astype(np.int64))
    if dtype == "|O":
        texts = np.empty(rows, object)
        texts[:] = values.to_pylist()
        return texts
    if column.null_count or values.null_count:
        raise ValueError("values are missing")
    return np.asarray(values.to_numpy(zero_copy_only=False), dtype).reshape(rows, *shape)


def arrow_libraries() -> tuple[Any, Any]:
    """Import ``pyarrow`` and ``pyarrow.parquet``."""
    what, install = "a Parquet file", 'pip install "marlvec[parquet]"'
    return import_extra("pyarrow", what, install), import_extra("pyarrow.parquet", what, install)


def _fits_arrow(array: NDArray[Any]) -> bool:
    if array.dtype == object:
        if ragged_dtype(array) is not None:
            return True
        return array.ndim == 1 and is_text(array) and all(map(_is_unicode, array.tolist()))
    return array.dtype.kind in "biufU" and (array.dtype.kind == "U" or array.dtype.itemsize <= 8)


def _is_unicode(text: str | None) -> bool:
    """Return whether a text is None or has no half of a surrogate pair, which UTF-8 does not know."""
    try:
        (text or "").encode()
    except UnicodeEncodeError:
        return False
    return True

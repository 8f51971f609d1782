"""Batches in ``.npz`` files, which `numpy.load` opens anywhere, and of which nothing is ever executed.

Every array is an entry named after its column, policies first: ``learner/obs/camera``. The entry ``manifest`` holds
JSON as bytes: the format, marlvec's version, what kind of batch it is, its counts, and how the arrays make its columns.
A zip has a checksum of each entry, and all of them are looked at. Entries are not compressed, and a file in which one
is, is refused: so a batch takes no more memory than its file has bytes.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from marlvec.collect.batch.batch_columns import named_leaves
from marlvec.errors import CheckpointError, SerialisationError
from marlvec.serialization.archive import check_entries, read_entry
from marlvec.serialization.atomic_file import FilePath, atomic_file
from marlvec.trees import Tree, to_array

__all__ = ["ArrayNames", "outline_columns", "read_columns", "read_npz", "write_npz"]


class ArrayNames:
    """Gives every array a name that no other has and that any archive can hold, as close as can be to its own.

    Args:
        taken: Names that are not to be given.
    """

    def __init__(self, taken: Sequence[str] = ()) -> None:
        self._taken = set(taken)

    def __call__(self, wanted: str) -> str:
        """A free name."""
        plain = "".join(char if char.isprintable() else "_" for char in wanted).strip("/") or "_"
        name, number = plain, 1
        while name in self._taken:
            number += 1
            name = f"{plain}~{number}"
        self._taken.add(name)
        return name


def outline_columns(columns: Mapping[str, Tree], prefix: str, put: Callable[[str, Any], str]) -> list[list[Any]]:
    """Write columns down as ``[name, tree]`` pairs, in order.

    A tree is the name of its array, ``{"dict": [[key, tree], …]}`` or ``{"tuple": [tree, …]}``.

    Args:
        columns: The columns.
        prefix: What the arrays' names begin with.
        put: Keeps an array of about this name, and returns the name it got.

    Raises:
        SerialisationError: A key of a dict is neither a text, a whole number, a bool nor None.
    """
    return [[name, _outline(column, f"{prefix}{name}", put)] for name, column in columns.items()]


def read_columns(outline: list[list[Any]], get: Callable[[str], Any]) -> dict[str, Tree]:
    """Columns again, of what `outline_columns` gave; whatever is wrong with it raises an ordinary error."""
    return {str(name): _tree(tree, get) for name, tree in outline}


def _outline(tree: Tree, name: str, put: Callable[[str, Any], str]) -> Any:
    if isinstance(tree, dict):
        if bad := [key for key in tree if key is not None and type(key) not in (str, int, bool)]:
            raise SerialisationError(
                f"{name!r} has the keys {bad}; a file holds dicts of texts, whole numbers, bools and None"
            )
        return {"dict": [[key, _outline(item, f"{name}/{key}", put)] for key, item in tree.items()]}
    if isinstance(tree, tuple):
        return {"tuple": [_outline(item, f"{name}/{i}", put) for i, item in enumerate(tree)]}
    return put(name, tree)


def _tree(outline: Any, get: Callable[[str], Any]) -> Tree:
    if isinstance(outline, str):
        return get(outline)
    if "tuple" in outline:
        return tuple(_tree(item, get) for item in outline["tuple"])
    return {key: _tree(item, get) for key, item in outline["dict"]}


FORMAT = 1
Batches = Mapping[str, Mapping[str, Tree]]


def write_npz(path: FilePath, kind: str, batches: Batches, facts: Mapping[str, Any]) -> None:
    """Write batches to a file, so that whoever reads it finds the old file or the new one.

    Args:
        path: The file; its folder must be there.
        kind: Whose file it is, e.g. ``"SampleBatch"``.
        batches: Columns by policy id; ``""`` for a batch of no policy's.
        facts: What else there is to know, as JSON has it.

    Raises:
        SerialisationError: A column holds Python objects, or is a tree with keys that JSON does not have.
        OSError: The file cannot be written; the old one is as it was.
    """
    if bad := [f"{policy}/{name}".strip("/") for policy, columns in batches.items() for name in _objects(columns)]:
        raise SerialisationError(f"columns {bad} hold Python objects, which no data file does; drop() them first")
    names, arrays = ArrayNames(["manifest"]), dict[str, NDArray[Any]]()

    def put(wanted: str, leaf: Any) -> str:
        name = names(wanted)
        arrays[name] = to_array(leaf)
        return name

    outlines = [[p, outline_columns(columns, f"{p}/" if p else "", put)] for p, columns in batches.items()]
    about = {"format": FORMAT, "marlvec": sys.modules["marlvec"].__version__, "kind": kind, **facts}
    text = json.dumps({**about, "batches": outlines}).encode()
    with atomic_file(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in {"manifest": np.frombuffer(text, np.uint8), **arrays}.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as entry:
                npy.write_array(entry, array, allow_pickle=False)


def read_npz(path: FilePath, kind: str) -> tuple[dict[str, dict[str, Tree]], dict[str, Any]]:
    """Batches and facts that `write_npz` wrote.

    Raises:
        CheckpointError: There is no such file, or it is damaged, compressed, of another kind, or of a newer format.
    """
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):
            raise CheckpointError(path, "is not a file")
        with Path(path).open("rb") as file, zipfile.ZipFile(file) as archive:
            entries = check_entries(path, archive, os.fstat(file.fileno()).st_size)
            manifest = json.loads(read_entry(archive, entries.pop("manifest")).tobytes())
            _check_manifest(path, manifest, kind)
            batches = {
                # Each array once: asked for again and again, few bytes would become many.
                str(policy): read_columns(outline, lambda name: read_entry(archive, entries.pop(name)))
                for policy, outline in manifest.pop("batches")
            }
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror or error}") from error
    except (zipfile.BadZipFile, ValueError, LookupError, TypeError, ArithmeticError, RuntimeError, EOFError) as error:
        raise CheckpointError(path, f"holds no batch, or is damaged: {error!r:.300}") from error
    except MemoryError as error:
        raise CheckpointError(path, "does not fit into memory") from error
    return batches, manifest


def _objects(columns: Mapping[str, Tree]) -> list[str]:
    return [name for name, leaf in named_leaves(columns) if isinstance(leaf, np.ndarray) and leaf.dtype.hasobject]


def _check_manifest(path: FilePath, manifest: Any, kind: str) -> None:
    if manifest["format"] != FORMAT:
        own = sys.modules["marlvec"].__version__
        raise CheckpointError(path, f"is of format {manifest['format']!r:.20}; marlvec {own} reads {FORMAT}")
    if manifest["kind"] != kind:
        raise CheckpointError(path, f"holds a {manifest['kind']:.80}, not a {kind}: use {manifest['kind']:.80}.load()")

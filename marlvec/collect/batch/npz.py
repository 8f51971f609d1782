"""Batches in ``.npz`` files, which `numpy.load` can open; no code in them is ever executed.

They are archives like all of marlvec's files (`marlvec.serialization.archive`). Every array is an entry named after
its policy and column: ``learner/obs/camera``. The archive's data has the kind of batch, its counts, and how columns
are built from the arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from marlvec.collect.batch.batch_columns import named_leaves
from marlvec.errors import CheckpointError, SerialisationError
from marlvec.serialization.archive import FilePath, NamedArray, read_archive, write_archive
from marlvec.trees import Tree, to_array

__all__ = ["outline_columns", "read_columns", "read_npz", "write_npz"]


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
    if not isinstance(outline, dict):
        return get(outline)
    if "tuple" in outline:
        return tuple(_tree(item, get) for item in outline["tuple"])
    return {key: _tree(item, get) for key, item in outline["dict"]}


Batches = Mapping[str, Mapping[str, Tree]]


def write_npz(path: FilePath, kind: str, batches: Batches, facts: Mapping[str, Any]) -> None:
    """Write batches to a file, so that a reader finds the old file or the new one.

    ``kind`` is the batch's class, ``batches`` are columns by policy id (``""``: without a policy), ``facts`` JSON-able.
    """
    if bad := [f"{policy}/{name}".strip("/") for policy, columns in batches.items() for name in _objects(columns)]:
        raise SerialisationError(f"columns {bad} hold Python objects, which no data file does; drop() them first")

    def put(name: str, leaf: Any) -> NamedArray:
        return NamedArray(name, to_array(leaf))

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
    if not isinstance(leaf, np.ndarray):
        raise TypeError(f"expected an array, got {leaf!r:.100}")
    return leaf


def _objects(columns: Mapping[str, Tree]) -> list[str]:
    return [name for name, leaf in named_leaves(columns) if isinstance(leaf, np.ndarray) and leaf.dtype.hasobject]

"""`VaultStore`: the arrays of a flashbax Vault on disk.

A Vault is a folder. Its experience is a tree of dicts; each leaf is a zarr array (B, T, …) in tensorstore's key-value
store (OCDBT), under its keys with a dot after each. T is always 10**13; ``vault_index``, an array of one number, is the
number of filled time steps. ``metadata.json`` has the trees of shapes and dtypes. Source: flashbax/vault/vault.py,
version 1.2. Only tensorstore reads OCDBT.
"""

from __future__ import annotations

import json
from ast import literal_eval
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from marlvec.errors import CheckpointError
from marlvec.extras import import_extra
from marlvec.serialization.atomic_file import atomic_file

__all__ = ["Leaf", "VaultStore", "leaves_of", "tree_of"]

Leaf = tuple[str, ...]
"""Keys from the root of a tree to an array."""

_VERSION = 1.2
_METADATA, _STORE = "metadata.json", "manifest.ocdbt"
_INDEX = "vault_index"
_LONGEST = 10**13
_GZIP = {"id": "gzip", "level": 5}  # as flashbax compresses
_CACHE_BYTES = 1 << 27  # decoded chunks, which several reads share


class VaultStore:
    """A Vault open for reading, or a new one open for writing. Made by `open` and `create`."""

    def __init__(self, folder: Path, what: str) -> None:
        self.folder = folder
        self.shapes: dict[Leaf, tuple[int, ...]] = {}  # of each leaf, (B, T, …)
        self._library = import_extra("tensorstore", what, 'pip install "marlvec[vault]"')
        self._context = self._library.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
        self._arrays: dict[Leaf, Any] = {}

    @classmethod
    def create(cls, folder: Path, forms: Mapping[Leaf, tuple[np.dtype[Any], tuple[int, ...]]], what: str) -> Self:
        """Create the arrays of a Vault with B = 1; ``forms``: dtype, and shape after (B, T), of each leaf."""
        store = cls(folder, what)
        with store._writing():
            for leaf, (dtype, shape) in forms.items():
                options = {"shape": (1, _LONGEST, *shape), "dtype": dtype.name, "create": True}
                store._arrays[leaf] = store._array(_name(leaf), {"compressor": _GZIP}, **options)
        return store

    @classmethod
    def open(cls, folder: Path, what: str) -> Self:
        """Open a Vault for reading. Nothing in it is executed, and nothing outside of the folder is opened."""
        store = cls(folder, what)
        root = folder.resolve()
        for name in (_METADATA, _STORE):
            if not (folder / name).is_file():
                raise CheckpointError(folder / name, "is missing: expected the folder of a Vault, VAULTS/NAME.vlt/UID")
        if outside := [path for path in folder.rglob("*") if not path.resolve().is_relative_to(root)]:
            raise CheckpointError(outside[0], f"leads out of {folder}")
        expected = _read_metadata(folder / _METADATA)
        with store._reading(_INDEX):
            index = int(store._array(_INDEX, {}, open=True, read=True).read().result()[0])
            if not 0 <= index <= _LONGEST:
                raise ValueError(f"its index is {index}")
        for leaf, (dtype, shape) in expected.items():
            with store._reading(_name(leaf)):
                array = store._arrays[leaf] = store._array(_name(leaf), {}, open=True, read=True)
                found = array.dtype.name, (array.shape[0], *array.shape[2:])
                if found != (dtype, (shape[0], *shape[2:])) or array.shape[1] < index:
                    raise ValueError(
                        f"expected {dtype} of {shape}, as {_METADATA} has it, got {found[0]} of {array.shape}"
                    )
                store.shapes[leaf] = shape[0], index, *shape[2:]
        return store

    def write(self, arrays: Mapping[Leaf, NDArray[Any]], at: int) -> None:
        """Write arrays (n, …) of all leaves as time steps ``at`` to ``at + n - 1``."""
        with self._writing():
            for leaf, array in arrays.items():
                self._arrays[leaf][0, at : at + len(array)].write(array).result()

    def finish(self, steps: int, notes: Mapping[str, Any]) -> None:
        """Write the number of time steps and the metadata, without which the folder is not a valid Vault."""
        shapes: dict[Leaf, Any] = {
            leaf: str((1, steps, *map(int, array.shape[2:]))) for leaf, array in self._arrays.items()
        }
        dtypes: dict[Leaf, Any] = {leaf: array.dtype.name for leaf, array in self._arrays.items()}
        about = {"version": _VERSION, "structure_shape": tree_of(shapes), "structure_dtype": tree_of(dtypes), **notes}
        with self._writing():
            index = self._array(_INDEX, {}, shape=(1,), dtype="int32", create=True)
            index.write(np.array([steps], np.int32)).result()
        with atomic_file(self.folder / _METADATA) as file:
            file.write(json.dumps(about).encode())

    def read(self, leaf: Leaf, b: int, start: int, stop: int) -> NDArray[Any]:
        """Read a leaf's time steps, (stop - start, …)."""
        with self._reading(_name(leaf)):
            array: NDArray[Any] = self._arrays[leaf][b, start:stop].read().result()
            return array

    def _array(self, name: str, metadata: Mapping[str, Any], **options: Any) -> Any:
        files = {"driver": "file", "path": f"{self.folder.resolve().as_posix()}/"}
        store = {"driver": "ocdbt", "base": files, "path": name}
        spec = {"driver": "zarr", "kvstore": store, "metadata": metadata}
        return self._library.open(spec, context=self._context, **options).result()

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        try:
            yield
        except _LIBRARY_ERRORS as error:
            raise CheckpointError(self.folder, f"is damaged in its array {name!r}: {error!r:.400}") from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except _LIBRARY_ERRORS as error:
            raise OSError(f"the Vault {str(self.folder)!r} cannot be written: {error!r:.400}") from error


_LIBRARY_ERRORS = (ValueError, LookupError, NotImplementedError, OSError)
"""What tensorstore raises for errors of files, by the kind of the error."""


def leaves_of(tree: Any, path: Leaf = ()) -> Iterator[tuple[Leaf, Any]]:
    """Yield the leaves of a tree of dicts, each with its keys."""
    if not isinstance(tree, dict):
        yield path, tree
        return
    for key, part in tree.items():
        yield from leaves_of(part, (*path, str(key)))


def tree_of(leaves: Mapping[Leaf, Any]) -> dict[str, Any]:
    """Return the tree of dicts that has these leaves."""
    tree: dict[str, Any] = {}
    for path, value in leaves.items():
        place = tree
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = value
    return tree


def _name(leaf: Leaf) -> str:
    return "".join(f"{key}." for key in leaf)


def _read_metadata(path: Path) -> dict[Leaf, tuple[str, tuple[int, ...]]]:
    """Read the dtype and shape of each leaf."""
    try:
        about = json.loads(path.read_bytes())
        version = about["version"]
        if type(version) not in (int, float) or version // 1 != _VERSION // 1:
            raise CheckpointError(path, f"is of the Vaults' version {version!r:.50}; this marlvec reads 1")
        shapes = dict(leaves_of(about["structure_shape"]))
        dtypes = dict(leaves_of(about["structure_dtype"]))
        if shapes.keys() != dtypes.keys():
            raise ValueError("shapes and dtypes are of different trees")
        found = {leaf: (str(dtypes[leaf]), literal_eval(shape)) for leaf, shape in shapes.items()}
        for leaf, (_, shape) in found.items():
            if type(shape) is not tuple or len(shape) < 2 or any(type(size) is not int for size in shape):
                raise ValueError(f"the shape of {_name(leaf)!r} is {shape!r:.100}")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, SyntaxError, RecursionError) as error:
        raise CheckpointError(path, f"cannot be read: {error!r:.300}") from error
    return found

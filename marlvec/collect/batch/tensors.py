"""Columns as torch tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.batch.leaves import named_leaves
from marlvec.errors import ArgumentError
from marlvec.extras import import_extra
from marlvec.trees import Tree, map_tree, to_array

__all__ = ["as_tensordict", "as_tensors"]


def as_tensors(columns: Mapping[str, Tree], device: Any) -> dict[str, Tree]:
    """Trees of tensors that share the arrays' memory where they can.

    Raises:
        MissingExtraError: torch is not installed.
        ArgumentError: torch has no such dtype; names the columns.
    """
    torch = import_extra("torch", "to_torch()", "pip install torch")
    if bad := [f"{name} ({leaf.dtype})" for name, leaf in named_leaves(columns) if not _fits(torch, leaf)]:
        raise ArgumentError(f"torch has no tensors for the columns {bad}; leave them out with drop()")

    def tensor(leaf: Any) -> Any:
        made = leaf if isinstance(leaf, torch.Tensor) else torch.from_numpy(_shareable(to_array(leaf)))
        return made if device is None else made.to(device)

    return {name: map_tree(tensor, column) for name, column in columns.items()}


def as_tensordict(columns: Mapping[str, Tree], n: int, device: Any) -> Any:
    """A ``TensorDict`` of batch size (n,); tuples become dicts with the keys ``"0"``, ``"1"``, ….

    Raises:
        MissingExtraError: tensordict or torch is not installed.
        ArgumentError: torch has no such dtype, or two keys of one dict are the same as texts.
    """
    tensordict = import_extra("tensordict", "to_tensordict()", "pip install tensordict")
    nested = {name: _keyed_by_text(name, column) for name, column in as_tensors(columns, device).items()}
    return tensordict.TensorDict(nested, batch_size=[n], device=device)


def _fits(torch: Any, leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return True
    try:
        torch.from_numpy(np.empty(0, leaf.dtype.newbyteorder("=")))
    except TypeError:
        return False
    return True


def _shareable(array: NDArray[Any]) -> NDArray[Any]:
    """The array, or a copy where torch cannot have it: read-only, reversed, unaligned or of foreign byte order."""
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
        raise ArgumentError(f"column {name!r} has keys that are the same as texts: {[key for key, _ in items]}")
    return found

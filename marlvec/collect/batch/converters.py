"""Batches as torch tensors, TensorDicts, JAX arrays and RLlib's batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.batch.batch_columns import named_leaves
from marlvec.errors import ArgumentError
from marlvec.extras import import_extra
from marlvec.trees import Tree, map_tree, to_array

__all__ = ["as_jax", "as_tensordict", "as_tensors", "RLLIB_NAMES", "as_multi_agent", "as_sample_batch"]


def as_tensors(columns: Mapping[str, Tree], device: Any, *, pin_memory: bool = False) -> dict[str, Tree]:
    """Convert to trees of tensors, which share the arrays' memory if possible; an error names the columns."""
    torch = import_extra("torch", "to_torch()", "pip install torch")
    if bad := [f"{name} ({leaf.dtype})" for name, leaf in named_leaves(columns) if not _fits_torch(torch, leaf)]:
        raise ArgumentError(f"to_torch(): expected columns of dtypes that torch has, got {bad}; drop() them first")

    if pin_memory and not torch.cuda.is_available():
        raise ArgumentError("to_torch(pin_memory=True): expected a GPU that torch can use, got none; leave it out")

    def tensor(leaf: Any) -> Any:
        made = leaf if isinstance(leaf, torch.Tensor) else torch.from_numpy(_shareable(to_array(leaf)))
        if pin_memory:
            made = made.pin_memory()
        return made if device is None else made.to(device, non_blocking=pin_memory)

    return {name: map_tree(tensor, column) for name, column in columns.items()}


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

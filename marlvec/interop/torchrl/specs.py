"""Spaces as TorchRL's specs, and conversion of actions. Needs torchrl."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple
from numpy.typing import NDArray
from torch import Tensor
from torchrl.data import Binary, Bounded, Categorical, Composite, MultiCategorical, MultiOneHot, OneHot, Unbounded

from marlvec.errors import UnsupportedSpaceError
from marlvec.spaces import Leaf, SpaceTree

__all__ = ["ActionReader", "action_spec", "flags_spec", "nested", "observation_spec"]


def observation_spec(tree: SpaceTree, *lead: int) -> Any:
    """Return the spec of observations (*lead, …), with bounds that include 0, the observation of absent agents."""
    return _build(tree.space, "observation", lead, _observation_leaf)


def action_spec(tree: SpaceTree, *lead: int, categorical: bool) -> Any:
    """Return the spec of actions (*lead, …), of choices as numbers from 0, or one-hot with one more axis."""

    def leaf_spec(space: Space[Any], lead: tuple[int, ...], dtype: torch.dtype) -> Any:
        if isinstance(space, Discrete):
            n = int(space.n)
            return Categorical(n, lead, dtype=dtype) if categorical else OneHot(n, (*lead, n), dtype=torch.bool)
        if _is_flat(space):
            nvec = [int(n) for n in space.nvec]
            if categorical:
                return MultiCategorical(nvec, (*lead, len(nvec)), dtype=dtype)
            return MultiOneHot(nvec, (*lead, sum(nvec)), dtype=torch.bool)
        if isinstance(space, MultiDiscrete):
            return Bounded(space.start, space.start + space.nvec - 1, space.shape, dtype=dtype).expand(
                *lead, *space.shape
            )
        return _array_leaf(space, lead, dtype)

    return _build(tree.space, "action", lead, leaf_spec)


def flags_spec(*shape: int) -> Any:
    """Return the spec of bools."""
    return Categorical(2, shape, dtype=torch.bool)


def nested(space: Space[Any], values: Any) -> Any:
    """Convert a tree of tensors to TensorDict's form: nested dicts with string keys, also for tuples."""
    if isinstance(space, Dict):
        return {str(key): nested(sub, values[key]) for key, sub in space.spaces.items()}
    if isinstance(space, Tuple):
        return {str(i): nested(sub, values[i]) for i, sub in enumerate(space.spaces)}
    return values


class ActionReader:
    """Reads actions from a tensordict, as numbers of their space."""

    def __init__(self, tree: SpaceTree, *, categorical: bool) -> None:
        self.tree = tree
        self._readers = [_reader(leaf, categorical=categorical) for leaf in tree.leaves]

    def leaves(self, actions: Any) -> list[NDArray[Any]]:
        """Read a tensor, or nested tensordicts, with any leading axes; KeyError: a part is missing."""
        found: list[Tensor] = []
        _collect(self.tree.space, actions, found)
        return [read(part) for read, part in zip(self._readers, found, strict=True)]


def _build(space: Space[Any], path: str, lead: tuple[int, ...], leaf_spec: Callable[..., Any]) -> Any:
    if isinstance(space, (Dict, Tuple)):
        parts = space.spaces.items() if isinstance(space, Dict) else enumerate(space.spaces)
        specs = {str(key): _build(sub, f"{path}/{key}", lead, leaf_spec) for key, sub in parts}
        if len(specs) < len(space.spaces):
            raise UnsupportedSpaceError(f"{path}: expected keys that differ as strings, got {space}")
        return Composite(specs, shape=lead)
    try:
        dtype = torch.from_numpy(np.zeros(0, space.dtype)).dtype
    except TypeError as error:
        raise UnsupportedSpaceError(f"{path}: {space} has values that no tensor can hold ({error})") from None
    return leaf_spec(space, lead, dtype)


def _observation_leaf(space: Space[Any], lead: tuple[int, ...], dtype: torch.dtype) -> Any:
    if isinstance(space, Discrete):
        if space.start == 0:
            return Categorical(int(space.n), lead, dtype=dtype)
        last = int(space.start + space.n - 1)
        return Bounded(min(0, int(space.start)), max(0, last), lead, dtype=dtype)
    if isinstance(space, MultiDiscrete):
        low, high = np.minimum(space.start, 0), np.maximum(space.start + space.nvec - 1, 0)
        return Bounded(low, high, space.shape, dtype=dtype).expand(*lead, *space.shape)
    return _array_leaf(space, lead, dtype, with_zero=True)


def _array_leaf(space: Space[Any], lead: tuple[int, ...], dtype: torch.dtype, *, with_zero: bool = False) -> Any:
    assert space.shape is not None
    if isinstance(space, MultiBinary):
        return Binary(shape=(*lead, *space.shape), dtype=dtype)
    assert isinstance(space, Box)
    if not (space.bounded_below.any() or space.bounded_above.any()):
        return Unbounded((*lead, *space.shape), dtype=dtype)
    low, high = (np.minimum(space.low, 0), np.maximum(space.high, 0)) if with_zero else (space.low, space.high)
    bounds = [torch.from_numpy(np.array(bound, space.dtype)) for bound in (low, high)]
    return Bounded(*bounds, space.shape, dtype=dtype).expand(*lead, *space.shape)


def _is_flat(space: Space[Any]) -> TypeGuard[MultiDiscrete]:
    return isinstance(space, MultiDiscrete) and space.nvec.ndim == 1


def _collect(space: Space[Any], actions: Any, found: list[Tensor]) -> None:
    if isinstance(space, (Dict, Tuple)):
        keys = space.spaces if isinstance(space, Dict) else range(len(space.spaces))
        parts: Mapping[str, Any] = dict(actions.items())
        for key in keys:
            _collect(space.spaces[key], parts[str(key)], found)  # type: ignore[index]  # both can be asked so
    else:
        found.append(actions)


def _reader(leaf: Leaf, *, categorical: bool) -> Callable[[Tensor], NDArray[Any]]:
    space: Any = leaf.space
    if isinstance(space, Discrete):
        start = int(space.start)
        if categorical:
            return lambda actions: _numpy(actions) + start if start else _numpy(actions)
        return lambda actions: _numpy(actions.int().argmax(dim=-1)) + start
    if _is_flat(space):
        if categorical:
            return lambda actions: _numpy(actions) + space.start
        sizes = [int(n) for n in space.nvec]
        return lambda actions: (
            _numpy(torch.stack([part.int().argmax(dim=-1) for part in actions.split(sizes, dim=-1)], dim=-1))
            + space.start
        )
    return _numpy


def _numpy(tensor: Tensor) -> NDArray[Any]:
    array: NDArray[Any] = tensor.detach().cpu().numpy()
    return array

"""Spaces as flat lists of leaves; a space is walked once, at the start, and the hot path uses lists of leaf arrays.

Box, Discrete, MultiDiscrete and MultiBinary are array leaves. Every other space except Dict and Tuple (Text, Sequence,
Graph, OneOf, a user's class) is an object leaf: its values are objects, in cells of arrays of dtype object. So is a
subclass of one of the four with its own ``contains`` if its samples are not plain arrays.

Leaf order is the order of `gymnasium.spaces.Dict` (sorted keys if built from a plain dict) and of Tuple.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from marlvec.errors import ContractError

_ARRAY_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
_KNOWN = frozenset(kind.contains for kind in _ARRAY_SPACES)
_OBJECT = np.dtype(np.object_)
AnySpace = spaces.Space[Any]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One part of a space that is neither a Dict nor a Tuple."""

    path: str  # e.g. "camera/left"; "" if the space itself is the leaf
    shape: tuple[int, ...]  # of one value; () for Discrete and for object leaves
    dtype: np.dtype[Any]
    space: spaces.Space[Any]
    is_object: bool = False  # values are objects without a fixed-size array form

    def blank(self, *lead: int) -> NDArray[Any]:
        """Return an empty array, shape ``(*lead, *shape)``: zeros, or None in every cell of an object leaf."""
        if self.is_object:
            return np.full(lead, None, _OBJECT)
        return np.zeros((*lead, *self.shape), self.dtype)

    def __str__(self) -> str:
        return f"leaf {self.path!r}" if self.path else "the value"


class SpaceTree:
    """A space's structure: from values to lists of leaves and back. Dict and Tuple are split at any depth."""

    __slots__ = ("_skeleton", "is_leaf", "leaves", "space")

    def __init__(self, space: spaces.Space[Any]) -> None:
        found: list[Leaf] = []
        self.space = space
        self._skeleton = _walk(space, "", found)
        self.leaves: tuple[Leaf, ...] = tuple(found)
        self.is_leaf = not isinstance(self._skeleton, (dict, tuple))

    def __repr__(self) -> str:
        return f"SpaceTree({self.space!r})"

    def flatten(self, value: Any) -> list[Any]:
        """List the leaves of a value, or of a tree of batched arrays, uncopied; `ContractError` names a wrong path."""
        if self.is_leaf:
            return [value]
        out: list[Any] = []
        _flatten(self._skeleton, value, "", out)
        return out

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """Build the tree with these leaves."""
        if self.is_leaf:
            return leaves[0]
        return _unflatten(self._skeleton, leaves)

    def zeros(self, *lead: int) -> list[NDArray[Any]]:
        """Return one empty array per leaf, shape ``(*lead, *leaf.shape)``; see `Leaf.blank`."""
        return [leaf.blank(*lead) for leaf in self.leaves]


def _walk(space: spaces.Space[Any], path: str, found: list[Leaf]) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _walk(sub, f"{path}/{key}" if path else str(key), found) for key, sub in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_walk(sub, f"{path}/{i}" if path else str(i), found) for i, sub in enumerate(space.spaces))
    if isinstance(space, _ARRAY_SPACES) and (type(space).contains in _KNOWN or has_arrays(space)):
        assert space.shape is not None  # of all four kinds
        found.append(Leaf(path, tuple(int(n) for n in space.shape), np.dtype(space.dtype), space))
    else:
        found.append(Leaf(path, (), _OBJECT, space, is_object=True))
    return len(found) - 1


def map_space(function: Callable[[AnySpace], AnySpace], space: AnySpace) -> AnySpace:
    """Replace every leaf space by ``function(leaf)``; Dicts keep the order of their keys."""
    if isinstance(space, spaces.Dict):
        # Pairs, because Dict sorts the keys of a dict.
        return spaces.Dict([(key, map_space(function, sub)) for key, sub in space.spaces.items()])
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([map_space(function, sub) for sub in space.spaces])
    return function(space)


def has_arrays(space: spaces.Space[Any]) -> bool:
    """Return whether all values of a space are plain arrays, or numbers, of one shape and dtype."""
    if not isinstance(space, _ARRAY_SPACES):
        return False
    if type(space).contains in _KNOWN:
        return True
    # A subclass with its own `contains` may have other values, e.g. texts by number (multigrid's missions).
    twin = deepcopy(space)
    twin.seed(0)
    try:
        value = twin.sample()
    except Exception:  # its values are unknown
        return False
    known: Any = next(kind for kind in _ARRAY_SPACES if isinstance(space, kind))
    is_plain = type(value) is np.ndarray or isinstance(value, (int, np.integer))
    return is_plain and bool(known.contains(twin, value))


def _flatten(skeleton: Any, value: Any, path: str, out: list[Any]) -> None:
    if isinstance(skeleton, dict):
        if not isinstance(value, Mapping) or value.keys() != skeleton.keys():
            got = sorted(map(str, value)) if isinstance(value, Mapping) else type(value).__name__
            raise ContractError(f"expected a dict with keys {sorted(map(str, skeleton))} at {path or '/'}, got {got}")
        for key, sub in skeleton.items():
            _flatten(sub, value[key], f"{path}/{key}", out)
    elif isinstance(skeleton, tuple):
        if not isinstance(value, (tuple, list)) or len(value) != len(skeleton):
            got = f"length {len(value)}" if isinstance(value, (tuple, list)) else type(value).__name__
            raise ContractError(f"expected a tuple of length {len(skeleton)} at {path or '/'}, got {got}")
        for i, (sub, item) in enumerate(zip(skeleton, value, strict=True)):
            _flatten(sub, item, f"{path}/{i}", out)
    else:
        out.append(value)


def _unflatten(skeleton: Any, leaves: Sequence[Any]) -> Any:
    if isinstance(skeleton, dict):
        return {key: _unflatten(sub, leaves) for key, sub in skeleton.items()}
    if isinstance(skeleton, tuple):
        return tuple(_unflatten(sub, leaves) for sub in skeleton)
    return leaves[skeleton]

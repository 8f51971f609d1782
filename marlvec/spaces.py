"""Spaces as flat lists of array leaves.

A space is walked once, when it is known; from then on the hot path sees lists of leaf arrays. `SpaceTree` is that walk:
it knows each leaf's path, shape and dtype, and goes from a value to its leaves and back.

Leaf order is the order of `gymnasium.spaces.Dict` (sorted keys where it was built from a plain dict) and of
`gymnasium.spaces.Tuple`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from marlvec.errors import ContractError, UnsupportedSpaceError

__all__ = ["Leaf", "SpaceTree", "describe_difference"]

_ARRAY_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


@dataclass(frozen=True, slots=True)
class Leaf:
    """One fixed-size array inside a space.

    Attributes:
        path: Where it is, e.g. ``"camera/left"``; ``""`` when the space itself is the leaf.
        shape: Shape of one value; ``()`` for Discrete.
        dtype: Its dtype.
        space: The leaf's own space.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    space: spaces.Space[Any]

    def __str__(self) -> str:
        return f"leaf {self.path!r}" if self.path else "the value"


class SpaceTree:
    """A space's structure: from values to lists of leaves and back.

    Args:
        space: Box, Discrete, MultiDiscrete, MultiBinary, or Dict/Tuple of those at any depth.

    Raises:
        UnsupportedSpaceError: A leaf has no fixed-size array form (Text, Graph, Sequence, custom, …); names the leaf.

    Attributes:
        space: The space.
        leaves: Its leaves, in order.
        is_leaf: Whether the space itself is the one leaf.
    """

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
        """List the leaves of one value, or of a tree of batched arrays; nothing is copied.

        Raises:
            ContractError: A key is missing or unknown, or a tuple has the wrong length; names the path.
        """
        if self.is_leaf:
            return [value]
        out: list[Any] = []
        _flatten(self._skeleton, value, "", out)
        return out

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """Build the tree whose leaves these are."""
        if self.is_leaf:
            return leaves[0]
        return _unflatten(self._skeleton, leaves)

    def zeros(self, *lead: int) -> list[NDArray[Any]]:
        """One zero-filled array per leaf, shape ``(*lead, *leaf.shape)``."""
        return [np.zeros((*lead, *leaf.shape), leaf.dtype) for leaf in self.leaves]


def _walk(space: spaces.Space[Any], path: str, found: list[Leaf]) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _walk(sub, f"{path}/{key}" if path else str(key), found) for key, sub in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_walk(sub, f"{path}/{i}" if path else str(i), found) for i, sub in enumerate(space.spaces))
    if not isinstance(space, _ARRAY_SPACES) or space.dtype is None or space.shape is None:
        where = f"leaf {path!r} of the space" if path else "the space"
        raise UnsupportedSpaceError(
            f"{where} is {type(space).__name__}, which has no fixed-size array form; "
            f"expected Box, Discrete, MultiDiscrete, MultiBinary, or Dict/Tuple of those"
        )
    found.append(Leaf(path, tuple(int(n) for n in space.shape), np.dtype(space.dtype), space))
    return len(found) - 1


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


def describe_difference(expected: spaces.Space[Any], got: spaces.Space[Any], path: str = "") -> str | None:
    """Say where two spaces first differ, or None when they are equal."""
    where = path or "/"
    if type(expected) is not type(got):
        return f"at {where}: expected {type(expected).__name__}, got {type(got).__name__}"
    if isinstance(expected, spaces.Dict) and isinstance(got, spaces.Dict):
        if expected.spaces.keys() != got.spaces.keys():
            return f"at {where}: expected keys {sorted(expected.spaces)}, got {sorted(got.spaces)}"
        pairs = [(str(key), sub, got.spaces[key]) for key, sub in expected.spaces.items()]
        return next((d for key, a, b in pairs if (d := describe_difference(a, b, f"{path}/{key}"))), None)
    if isinstance(expected, spaces.Tuple) and isinstance(got, spaces.Tuple):
        if len(expected.spaces) != len(got.spaces):
            return f"at {where}: expected length {len(expected.spaces)}, got {len(got.spaces)}"
        both = enumerate(zip(expected.spaces, got.spaces, strict=True))
        return next((d for i, (a, b) in both if (d := describe_difference(a, b, f"{path}/{i}"))), None)
    return None if expected == got else f"at {where}: expected {expected}, got {got}"

"""Trees of Dict and Tuple spaces, by hand."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np

__all__ = ["flatten", "is_object", "leaf_spaces", "leaves_in", "pick", "stack"]


def is_object(space: Any) -> bool:
    """Whether values of this leaf have no fixed-size array form."""
    kinds = gymnasium.spaces
    return not isinstance(space, (kinds.Box, kinds.Discrete, kinds.MultiDiscrete, kinds.MultiBinary))


def leaf_spaces(space: Any) -> list[Any]:
    if isinstance(space, gymnasium.spaces.Dict):
        return [leaf for sub in space.spaces.values() for leaf in leaf_spaces(sub)]
    if isinstance(space, gymnasium.spaces.Tuple):
        return [leaf for sub in space.spaces for leaf in leaf_spaces(sub)]
    return [space]


def flatten(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for sub in value.values() for leaf in flatten(sub)]
    return [leaf for sub in value for leaf in flatten(sub)] if isinstance(value, tuple) else [value]


def leaves_in(space: Any, value: Any) -> list[Any]:
    """The leaves of one value, in the order of the space, whatever the order of its dicts."""
    if isinstance(space, gymnasium.spaces.Dict):
        return [leaf for key, sub in space.spaces.items() for leaf in leaves_in(sub, value[key])]
    if isinstance(space, gymnasium.spaces.Tuple):
        return [leaf for sub, part in zip(space.spaces, value, strict=True) for leaf in leaves_in(sub, part)]
    return [value]


def pick(space: Any, batch: Any, k: int, j: int) -> Any:
    """One agent's action out of a tree of (n, A_g, ...)."""
    if isinstance(space, gymnasium.spaces.Dict):
        return {key: pick(sub, batch[key], k, j) for key, sub in space.spaces.items()}
    if isinstance(space, gymnasium.spaces.Tuple):
        return tuple(pick(sub, part, k, j) for sub, part in zip(space.spaces, batch, strict=True))
    value = batch[k, j]
    if is_object(space):
        return deepcopy(value)
    return int(value) if isinstance(space, gymnasium.spaces.Discrete) else np.array(value)


def stack(space: Any, rows: list[list[Any]]) -> Any:
    """Actions of (n, A_g) agents as a tree of arrays."""
    if isinstance(space, gymnasium.spaces.Dict):
        return {key: stack(sub, [[x[key] for x in row] for row in rows]) for key, sub in space.spaces.items()}
    if isinstance(space, gymnasium.spaces.Tuple):
        return tuple(stack(sub, [[x[p] for x in row] for row in rows]) for p, sub in enumerate(space.spaces))
    if is_object(space):
        out = np.full((len(rows), len(rows[0])), None, object)
        for where in np.ndindex(out.shape):
            out[where] = rows[where[0]][where[1]]
        return out
    return np.array(rows, space.dtype).reshape(len(rows), len(rows[0]), *space.shape)

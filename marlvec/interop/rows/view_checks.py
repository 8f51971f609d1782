"""What views look up in batched envs: single values out of leaves, and the render mode."""

from __future__ import annotations

from typing import Any

from gymnasium.spaces import Discrete
from numpy.typing import NDArray

from marlvec.errors import ArgumentError, EnvRaised
from marlvec.spaces import SpaceTree
from marlvec.vector.vector_env import VectorEnv

__all__ = ["value_at", "render_mode_of"]


def value_at(tree: SpaceTree, leaves: list[NDArray[Any]], where: tuple[int, ...]) -> Any:
    """One value of a space, as a single env would give it: a copy, a scalar only where the space is Discrete.

    Args:
        tree: The space.
        leaves: Per leaf, (…, *leaf.shape).
        where: Index of the value on the leading axes.
    """
    index: tuple[Any, ...] = (*where, ...)  # with the dots numpy gives 0-d arrays instead of scalars
    parts = [array[index].copy() for array in leaves]
    return tree.unflatten(
        [
            part[()] if leaf.is_object or isinstance(leaf.space, Discrete) else part
            for leaf, part in zip(tree.leaves, parts, strict=True)
        ]
    )


def render_mode_of(envs: VectorEnv) -> str | None:
    """The render mode that all envs have; None if they have none, or not the same one."""
    try:
        modes = set(envs.get_attr("render_mode"))
    except EnvRaised as error:
        if isinstance(error.__cause__, ArgumentError):  # they have no such attribute
            return None
        raise
    return modes.pop() if len(modes) == 1 else None

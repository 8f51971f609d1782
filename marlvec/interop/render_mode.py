"""The render mode of a vectorizer's envs, where they agree on one."""

from __future__ import annotations

from marlvec.errors import ArgumentError, EnvRaised
from marlvec.vector.vector_env import VectorEnv

__all__ = ["render_mode_of"]


def render_mode_of(envs: VectorEnv) -> str | None:
    """The render mode that all envs have; None if they have none, or not the same one."""
    try:
        modes = set(envs.get_attr("render_mode"))
    except EnvRaised as error:
        if isinstance(error.__cause__, ArgumentError):  # they have no such attribute
            return None
        raise
    return modes.pop() if len(modes) == 1 else None

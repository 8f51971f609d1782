"""From one recipe per env to one native env for all of them, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from marlvec.envs.making.recipe import Recipe
from marlvec.errors import ArgumentError
from marlvec.native.catalog import NativeEntry, native_entry
from marlvec.native.native_env import NativeEnv, refuse
from marlvec.native.padding import PaddedNative

__all__ = ["NativePlan", "plan"]


@dataclass(frozen=True)
class NativePlan:
    """All it takes to build the worlds.

    Attributes:
        entry: The native form.
        kwargs: For its constructor.
        render_modes: One mode or None per world.
        max_episode_steps: After how many steps episodes are truncated, or None.
        pad: Whether agents of different spaces are padded to one group.
    """

    entry: NativeEntry
    kwargs: dict[str, Any]
    render_modes: tuple[str | None, ...]
    max_episode_steps: int | None
    pad: bool

    def build(self, num_worlds: int | None = None) -> NativeEnv:
        """Build the worlds.

        Args:
            num_worlds: How many; None: all.

        Raises:
            MissingExtraError: numba is not installed.
            ArgumentError: An argument is wrong, or not supported.
            ContractError: The agents' spaces cannot be padded.
            TypeError: There is no such argument.
        """
        env = self.entry.load()(num_worlds or len(self.render_modes), **self.kwargs)
        known = env.metadata.get("render_modes", ())
        for mode in self.render_modes:
            if mode is not None and mode not in known:
                supported = ", ".join(map(repr, known)) or "none at all"
                raise ArgumentError(f"render_mode={mode!r}: {self.entry.id} supports {supported}")
            if mode == "human":  # the reference draws in every step
                raise refuse(self.entry.id, "render_mode='human'")
        return PaddedNative(env) if self.pad and len(env.spec().groups) > 1 else env


def plan(recipes: Sequence[Recipe]) -> NativePlan:
    """Find the native form of what these recipes ask for.

    Args:
        recipes: One per env.

    Raises:
        ArgumentError: There is none; says why, and what to do.
    """
    first = recipes[0]
    name = first.factory.entry.id
    entry = native_entry(name)
    if entry is None:
        raise ArgumentError(f"env {name!r} has no native form; backend='async' runs every env")
    kwargs = _arguments(first)
    for recipe in recipes:
        if recipe.factory.entry != first.factory.entry:
            raise refuse(name, f"another env beside it ({recipe.factory.entry.id!r})")
        if _arguments(recipe) != kwargs:
            raise refuse(name, f"envs of different arguments (env 0 has {kwargs}, env {recipe.env_index} others)")
    if first.wrappers:
        raise refuse(name, "wrappers")
    modes = tuple(recipe.render_mode or kwargs.get("render_mode") for recipe in recipes)
    kwargs.pop("render_mode", None)
    return NativePlan(entry, kwargs, modes, first.max_episode_steps, first.pad)


def _arguments(recipe: Recipe) -> dict[str, Any]:
    return {**recipe.factory.entry.kwargs, **recipe.factory.kwargs}

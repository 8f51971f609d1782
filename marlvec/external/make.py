"""`make`: create a vectorizer whose slots are filled from outside, from an env's name or spaces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymnasium.spaces import Space

from marlvec.envs.detect import adapt
from marlvec.envs.making.recipe import write_recipes
from marlvec.envs.spec import EnvSpec
from marlvec.errors import ArgumentError
from marlvec.external.vector_env import ExternalVectorEnv
from marlvec.registry import EnvLike, resolve_all
from marlvec.spaces.action_masks import split_action_mask

__all__ = ["make"]

Spaces = Mapping[str, tuple[Space[Any], Space[Any]]]
"""Agent name → its observation space and its action space."""


def make(
    env: EnvLike | Spaces | EnvSpec,
    num_envs: int = 1,
    *,
    batch_size: int | None = None,
    batch_wait: float = 0.002,
    max_backlog: int = 64,
    lockstep: bool = False,
    max_episode_steps: int | None = None,
    idle_timeout: float | None = None,
    copy: bool = True,
    grouped: bool = False,
    validate: str = "sample",
    **kwargs: Any,
) -> ExternalVectorEnv:
    """Make a vectorizer for episodes that run outside.

    Args:
        env: The env that runs outside: a dict of agent name to ``(observation space, action space)``; or anything that
            `marlvec.make` takes for one env (it is built here once for its spaces, and closed); or an `EnvSpec`. An
            ``action_mask`` in an observation space is a mask, as in `marlvec.make`.
        num_envs: How many episodes can run at a time.
        batch_size: See `ExternalVectorEnv`.
        batch_wait: See `ExternalVectorEnv`.
        max_backlog: See `ExternalVectorEnv`.
        lockstep: See `ExternalVectorEnv`.
        max_episode_steps: See `ExternalVectorEnv`.
        idle_timeout: See `ExternalVectorEnv`.
        copy: As in `marlvec.make`.
        grouped: As in `marlvec.make`.
        validate: As in `marlvec.make`; see also `ExternalVectorEnv`.
        kwargs: For the env's constructor.

    Returns:
        A vectorizer whose slots are filled from outside, for a `Collector`.

    Raises:
        ArgumentError: An argument is wrong, or a space is not a Gymnasium space.
        Exception: As `marlvec.make`, if an env is built.
    """
    return ExternalVectorEnv(
        _spec_of(env, kwargs),
        num_envs,
        batch_size=batch_size,
        batch_wait=batch_wait,
        max_backlog=max_backlog,
        lockstep=lockstep,
        max_episode_steps=max_episode_steps,
        idle_timeout=idle_timeout,
        copy=copy,
        grouped=grouped,
        validate=validate,
    )


def _spec_of(env: EnvLike | Spaces | EnvSpec, kwargs: Mapping[str, Any]) -> EnvSpec:
    if isinstance(env, (Mapping, EnvSpec)):
        if kwargs:
            raise ArgumentError(
                f"make(): {sorted(kwargs)} are for an env's constructor, but env is a dict of spaces or a spec; "
                f"leave them out"
            )
        return env if isinstance(env, EnvSpec) else _spec_of_spaces(env)
    (recipe,) = write_recipes(resolve_all(env, 1), kwargs=kwargs)
    built = adapt(recipe())
    try:
        return built.spec()
    finally:
        built.close()


def _spec_of_spaces(spaces: Spaces) -> EnvSpec:
    if not spaces:
        raise ArgumentError("make(env): expected at least one agent with its spaces, got an empty dict")
    for name, pair in spaces.items():
        if (
            not isinstance(name, str)
            or not isinstance(pair, tuple)
            or [isinstance(s, Space) for s in pair] != [True] * 2
        ):
            raise ArgumentError(
                f"make(env): expected agent name -> (observation space, action space), got {name!r}: {pair!r}"
            )
    pairs = [split_action_mask(observation, action) for observation, action in spaces.values()]
    return EnvSpec(
        name="external",
        agents=tuple(spaces),
        observation_spaces=tuple(space for space, _ in pairs),
        action_spaces=tuple(action for _, action in spaces.values()),
        mask_sizes=tuple(size for _, size in pairs),
    )

"""Detects the kind of a pool object, and builds one pool from recipes for single envs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import gymnasium
import numpy as np

from marlvec.envs.autoreset import AutoresetMode
from marlvec.envs.making.catalog import JAX, JAXMARL, JUMANJI, PGX, gymnasium_entry
from marlvec.envs.making.factory import EnvFactory
from marlvec.envs.making.recipe import EnvRecipe
from marlvec.errors import ArgumentError, ContractError
from marlvec.vector.pools.envpool import EnvPoolAdapter
from marlvec.vector.pools.envpool_reader import form_of
from marlvec.vector.pools.gymnasium import GYMNASIUM_MODES, GymnasiumPool
from marlvec.vector.pools.jax.pool import JaxPool
from marlvec.vector.pools.jax.world import JaxWorld
from marlvec.vector.pools.pool import Pool

__all__ = ["adapt_pool", "build_pool"]


def adapt_pool(pool: Any, *, num_envs: int | None = None) -> Pool:
    """Wrap an EnvPool pool (``send``, ``recv``, ``reset``) or a Gymnasium vector env in its adapter; return a `Pool`.

    `num_envs`: number of envs that callers see; the others are spares that fill batches. None: all.
    """
    # EnvPool's pools are Gymnasium vector envs by name, so this comes first.
    if not isinstance(pool, Pool) and all(callable(getattr(pool, name, None)) for name in ("send", "recv", "reset")):
        return EnvPoolAdapter(form_of(pool), pool=pool, make_pool=_maker_of(pool), num_envs=num_envs)
    if not isinstance(pool, (Pool, gymnasium.vector.VectorEnv)):
        is_env = callable(getattr(pool, "reset", None)) and callable(getattr(pool, "step", None))
        hint = ", which is a single env; backend='async' runs those" if is_env else ""
        raise ContractError(
            f"expected a pool (send, recv and reset, as EnvPool's have them) or a Gymnasium vector env, "
            f"got {type(pool).__name__}{hint}"
        )
    found = pool if isinstance(pool, Pool) else GymnasiumPool(pool)
    if num_envs not in (None, found.num_envs):
        raise ArgumentError(f"num_envs={num_envs}, but {found.spec.name} has {found.num_envs}")
    return found


def _maker_of(pool: Any) -> Any:
    """Return a function that builds the same EnvPool pool with other seeds, from its spec; None for other pools."""
    spec = getattr(pool, "spec", None)
    config = getattr(spec, "config", None)
    if config is None or not {"env_seed", "seed"} <= set(getattr(config, "_fields", ())):
        return None
    kind: Any = type(pool)
    spec_kind: Any = type(spec)
    wrapping = {name: value for name, value in vars(pool).items() if name.startswith("_render_")}

    def make(seeds: list[int] | None) -> Any:
        assert seeds is not None  # the first pool exists already
        made: Any = kind(spec_kind(config._replace(seed=0, env_seed=seeds)))
        for name, value in wrapping.items():
            setattr(made, name, value)
        return made

    return make


def build_pool(recipes: Sequence[EnvRecipe], autoreset_mode: str) -> Pool:
    """Build one pool of all the envs that the recipes describe, one per env, all alike.

    Their builder is called once, for all envs: with ``num_envs``, ``seed`` (one per env, or None) if the pool can be
    rebuilt with other seeds, and ``autoreset_mode`` if it serves several.
    """
    first = recipes[0]
    name, factory = first.factory.entry.id, first.factory
    for recipe in recipes:
        if recipe.factory.entry != factory.entry or recipe.factory.kwargs != factory.kwargs:
            raise ArgumentError(
                f"{name}: expected equal envs in one pool, but env {recipe.env_index} differs from env 0"
            )
        if recipe.render_mode != first.render_mode:
            raise ArgumentError(
                f"{name}: expected one render mode in a pool, but env {recipe.env_index} differs from env 0"
            )
    if first.wrappers:
        names = ", ".join(getattr(wrapper, "__name__", None) or repr(wrapper) for wrapper in first.wrappers)
        raise ArgumentError(
            f"wrappers=[{names}]: {name} is a pool, whose envs cannot be wrapped one by one; leave them out, or use "
            f"backend='async' where it has such envs"
        )
    if first.agents != "auto":
        raise ArgumentError(f"{name}: a pool says itself who its agents are; leave agents={first.agents!r} out")
    if first.lenient:
        raise ArgumentError(
            f"{name}: lenient=True is for envs that are stepped one by one, and a pool steps all at once"
        )
    if factory.entry.family == JAX or is_world_class(factory.entry.load()):
        return _world_pool(_world(factory), first, len(recipes), autoreset_mode)
    asked = {"render_mode": first.render_mode, "max_episode_steps": first.max_episode_steps}
    given = {key: value for key, value in asked.items() if value is not None}
    if factory.entry.family == "gymnasium":
        found = GymnasiumPool(_gymnasium_envs(factory, len(recipes), given, autoreset_mode))
        found.promised_limit = _limit_of(first)
        return found
    factory = factory.with_kwargs(**given)
    if factory.takes("autoreset_mode"):
        factory = factory.with_kwargs(autoreset_mode=autoreset_mode)
    takes_seeds = factory.takes("seed")

    def make(seeds: list[int] | None) -> Any:
        seeded = factory.with_kwargs(seed=seeds) if takes_seeds and seeds is not None else factory
        return seeded(num_envs=len(recipes))

    built = make(_fresh_seeds(len(recipes)) if takes_seeds and "seed" not in factory.kwargs else None)
    if isinstance(built, JaxWorld):
        return _world_pool(built, first, len(recipes), autoreset_mode)
    try:
        pool = adapt_pool(built)
        if pool.num_envs != len(recipes):
            raise ContractError(f"{name}: expected a pool of num_envs={len(recipes)}, got one of {pool.num_envs}")
        _refuse_padding(pool, first)
        pool.promised_limit = _limit_of(first)
    except BaseException:
        if hasattr(built, "close"):
            built.close()
        raise
    if isinstance(pool, EnvPoolAdapter) and pool is not built and takes_seeds:
        pool.made_by(make)
    return pool


def _limit_of(recipe: EnvRecipe) -> int | None:
    limit = recipe.max_episode_steps
    return limit if limit is not None and limit > 0 else None  # Gymnasium's -1 means no limit


def is_world_class(target: Any) -> bool:
    """Return whether the builder is a `JaxWorld` class, or a `functools.partial` of a `JaxWorld` class."""
    found = target.func if isinstance(target, partial) else target
    return isinstance(found, type) and issubclass(found, JaxWorld)


_suite_worlds: WeakValueDictionary[Any, JaxWorld] = WeakValueDictionary()
"""Worlds of suites that are in use, by id and arguments: pools of the same world share what was compiled."""


def _world(factory: EnvFactory) -> JaxWorld:
    """Build a world; suites' worlds, which are pure functions, come from a cache."""
    entry = factory.entry
    world: JaxWorld
    key: Any
    try:
        key = entry.id, frozenset({**entry.kwargs, **factory.kwargs}.items())
    except TypeError:  # unhashable arguments
        key = None
    if entry.family not in (JAXMARL, JUMANJI, PGX) or key is None:
        world = factory()
        return world
    if (known := _suite_worlds.get(key)) is not None:
        return known
    _suite_worlds[key] = world = factory()
    return world


def _world_pool(world: JaxWorld, recipe: EnvRecipe, num_envs: int, autoreset_mode: str) -> JaxPool:
    if recipe.render_mode is not None:
        raise ArgumentError(f"render_mode={recipe.render_mode!r}: {world.name} draws nothing; leave it out")
    pool = JaxPool(world, num_envs, autoreset_mode=autoreset_mode, max_episode_steps=recipe.max_episode_steps)
    _refuse_padding(pool, recipe)
    return pool


def _refuse_padding(pool: Pool, recipe: EnvRecipe) -> None:
    if recipe.pad and len(pool.spec.groups) > 1:
        raise ArgumentError(
            f"pad=True: {pool.spec.name} is a pool, whose agents keep their own spaces; leave it out, and take "
            f"observations and actions as dicts of the groups {[group.name for group in pool.spec.groups]}"
        )


def _fresh_seeds(num_envs: int) -> list[int]:
    return [int(word) >> 1 for word in np.random.SeedSequence().generate_state(num_envs)]


def _gymnasium_envs(factory: EnvFactory, num_envs: int, given: Mapping[str, Any], autoreset_mode: str) -> Any:
    """Return Gymnasium's own vector env, in the wanted mode if the env lets callers choose."""
    env_id = factory.entry.id.removeprefix("gymnasium/")
    kwargs = {
        key: value for key, value in {**factory.kwargs, **given}.items() if (key, value) != ("max_episode_steps", -1)
    }
    kwargs.setdefault("vectorization_mode", "sync")
    options = dict(kwargs.pop("vector_kwargs", {}))
    if str(getattr(kwargs["vectorization_mode"], "value", kwargs["vectorization_mode"])) != "vector_entry_point":
        options.setdefault("autoreset_mode", GYMNASIUM_MODES[AutoresetMode(autoreset_mode)])
        kwargs.setdefault("disable_env_checker", True)
    try:
        return gymnasium.make_vec(env_id, num_envs, vector_kwargs=options, **kwargs)
    except (ImportError, gymnasium.error.DependencyNotInstalled) as error:
        raise gymnasium_entry(env_id).missing(error) from error

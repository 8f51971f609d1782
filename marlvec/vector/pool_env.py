"""`PoolVectorEnv`: envs in one object of another library: EnvPool's pools, Gymnasium's vector envs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any, Unpack
from weakref import WeakValueDictionary

import gymnasium
import numpy as np
from numpy.typing import NDArray

from marlvec.env_ids import EnvIds, Options, check_env_ids, spread_options
from marlvec.envs.builtin_ids import JAX, JAXMARL, JUMANJI, PGX, gymnasium_entry
from marlvec.envs.recipes import EnvFactory, EnvRecipe
from marlvec.envs.spec import AutoresetMode
from marlvec.errors import ArgumentError, BrokenError, BusyError, ContractError, MarlvecError
from marlvec.vector.buffers import Buffers
from marlvec.vector.calls import STREAM_CALLS, CallEvent, EnvHandle, run_commands
from marlvec.vector.failures import capture, raise_failures
from marlvec.vector.in_process import InProcessVectorEnv
from marlvec.vector.infos import ShardReport
from marlvec.vector.pools.envpool import EnvPoolAdapter, form_of
from marlvec.vector.pools.gymnasium import GYMNASIUM_MODES, GymnasiumPool
from marlvec.vector.pools.jax import JaxPool, JaxWorld
from marlvec.vector.pools.pool import Pool, PoolShard
from marlvec.vector.settings import Settings, SettingsArguments, spread_seeds


class PoolVectorEnv(InProcessVectorEnv):
    """The envs of one pool.

    Every autoreset mode works with true final observations, whatever the pool does by itself; steps in which it only
    resets an env are marked, or not seen at all. A pool that hands out ``batch_size`` rows at a time continues to do
    so: `send` and `recv` overlap with its threads, and its spare envs, if any, fill up batches that would never become
    full.

    The pool owns its envs: none is restarted (``on_fault`` has no effect), wrappers cannot reach them, and an exception
    of the pool leaves it broken. Actions are checked against their spaces in every call, whatever ``validate`` is:
    with a wrong action, compiled code would read outside its arrays.

    EnvPool's pools take their seeds when they are made: ``reset(seed=…)`` of all envs closes the old pool and makes a
    new one; it raises if the pool cannot be made again.

    Args:
        pool: A pool of EnvPool or of its interface, a Gymnasium vector env, or a `marlvec.vector.pools.pool.Pool`. The
            vectorizer owns it from now on, and closes it.
        num_envs: How many of the pool's envs are for use; None: all. The others are spares.
        settings: ``autoreset_mode``, ``done_on``, ``copy``, ``grouped`` and ``validate``, as in `marlvec.make`;
            ``spaces``, ``on_fault`` and ``max_restarts`` are accepted and have no effect.

    Raises:
        ArgumentError: The pool cannot do that.
        ContractError: It is no pool.
    """

    backend = "pool"
    _always_checks_actions = True
    _place_name = "the pool"

    def __init__(self, pool: Any, *, num_envs: int | None = None, **settings: Unpack[SettingsArguments]) -> None:
        chosen = Settings(**settings)
        self._pool: Pool = adapt_pool(pool, num_envs=num_envs)
        spec = self._pool.spec
        if chosen.env_state is not None:
            raise ArgumentError(f"env_state={chosen.env_state!r}: a pool keeps its envs' states")
        if chosen.state and spec.state_space is None:
            raise ArgumentError(f"state=True: expected envs with a global state, and {spec.name} has none")
        self._pool.brings_state = bool(chosen.state)
        if chosen.done_on != "all" and len(spec.agents) > 1:
            raise ArgumentError(f"done_on={chosen.done_on!r}: {spec.name} decides by itself when an episode is over")
        super().__init__(self._pool.num_envs, chosen)
        self._batch = self._shard = PoolShard(self._pool, chosen.autoreset_mode)
        self._env_handle = cache(partial(_env_handle, self._pool))
        buffers = Buffers(spec, self.num_envs)
        self._shard.attach(buffers)
        self._bind(spec, buffers)
        self._pool.warm_up()

    def _request_reset(self, call: str, seed: Any, options: Options, env_ids: EnvIds | None) -> None:
        ids = self._everyone if env_ids is None else check_env_ids(env_ids, self.num_envs)
        self._call_state.check_free(ids, call)
        self._pool.check_reset(ids, spread_seeds(seed, ids.tolist(), self.num_envs), spread_options(options, len(ids)))
        self._check_batch(call, len(ids))
        super()._request_reset(call, seed, options, env_ids)

    def _check_batch(self, call: str, count: int) -> None:
        """Check that a call that is pending alone can end."""
        if call not in STREAM_CALLS and (missing := self._shard.queue.missing_for(count)):
            raise ArgumentError(
                f"{call}() of {count} envs: {self.spec.name} hands out {self._pool.batch_size} rows at a time, and has "
                f"no spare envs to fill up the last batch; {missing} are missing. Take a number that divides"
            )

    def _request_step(self, call: str, actions: Any, ids: NDArray[np.int64]) -> None:
        self._call_state.check_episodes(ids, call)
        if self._pool.steps_all and len(ids) < self.num_envs:
            raise ArgumentError(f"{call}(): {self.spec.name} steps all its envs at once, got {ids.tolist()}")
        super()._request_step(call, actions, ids)

    def _send_request(self, operation: str, env_ids: NDArray[np.int64], arguments: tuple[Sequence[Any], ...]) -> None:
        if operation in ("control", "state"):
            super()._send_request(operation, env_ids, arguments)
            return
        self._is_sending = True
        if operation == "reset":
            self._shard.ask_reset(env_ids, *arguments, alone=self._call_state.outstanding == len(env_ids))
        else:
            self._shard.ask_step(env_ids)

    def _receive(self, timeout: float | None, everyone: bool) -> bool:
        queue = self._shard.queue
        if self._requests or queue.empty:
            return super()._receive(timeout, everyone)
        try:
            reply = queue.receive(timeout)
            if reply is None:
                return False
            ids, report = self._shard.read(reply)
            self._replies.append((ids, report))
            return True
        except BusyError:  # nothing was done
            raise
        except Exception as error:  # what of it was done is not known
            text = f"the pool is left in the middle of a call: {type(error).__name__}: {error}"
            self._call_state.on(CallEvent.BREAK, BrokenError(text))
            raise
        except BaseException as error:  # likewise, but it is not the pool's fault: another one may take its place
            self._tear(f"the pool is left in the middle of a call: {type(error).__name__}")
            raise

    def _forget_requests(self) -> bool:
        super()._forget_requests()
        queue = self._shard.queue
        is_idle = not self._is_sending and queue.empty  # else the pool goes on with what it was asked
        return is_idle or queue.forget()

    _state_kind = "pool"

    def _find_obstacles(self) -> dict[int, str]:
        problem = self._pool.state_obstacle()
        return {} if problem is None else dict.fromkeys(range(self.num_envs), problem)

    def _run(
        self, operation: str, env_ids: NDArray[np.int64], arguments: tuple[Sequence[Any], ...]
    ) -> ShardReport | None:
        if operation == "state":
            assert self._buffers.state is not None
            self._buffers.state[...] = self._pool.state()
            return ShardReport()
        return run_commands(env_ids.tolist(), arguments[0], self._env_handle)

    def _shut_down(self, timeout: float) -> None:
        self._shard.queue.close(timeout)
        self._pool.close()


def _env_handle(pool: Pool, i: int) -> EnvHandle:
    return EnvHandle(pool.env(i), pool.spec.name)


def make_pool(recipes: Sequence[EnvRecipe], **settings: Unpack[SettingsArguments]) -> PoolVectorEnv:
    """Build the pool that recipes, one per env, describe (see `build_pool`), and the vectorizer of its envs."""
    chosen = Settings(**settings)
    try:
        pool = build_pool(recipes, chosen.autoreset_mode)
    except MarlvecError:
        raise
    except Exception as error:
        raise_failures([capture(0, "__init__", error)], PoolVectorEnv._place_name)
        raise
    try:
        return PoolVectorEnv(pool, **settings)
    except BaseException:
        pool.close()
        raise


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

"""`WorldProgram`: a world's functions over N worlds, jitted: first episodes, a step of all, new episodes of some.

Axis letters: N worlds, k worlds that begin an episode, A agents, A_g agents of a group.

Every world has a key of its own and counts the calls that used it: call ``t`` gets ``fold_in(key, t)``. So its numbers
depend on its seed alone, and not on N, on other worlds or on the autoreset mode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from marlvec.vector.pools.jax.form import WorldForm, import_jax
from marlvec.vector.pools.jax.world import JaxRows, JaxWorld
from marlvec.vector.pools.pool import harmless_action

__all__ = ["Carry", "WorldFlags", "WorldProgram", "WorldRows", "padded"]


class Carry(NamedTuple):
    """State between two calls, on the device; first axis N."""

    keys: Any  # (N, 2) uint32
    counts: Any  # (N,) uint32, calls that used the keys so far
    elapsed: Any  # (N,) int32, steps of the running episodes
    alive: Any  # (N, A) bool
    acting: Any  # (N, A) bool
    world: Any  # the worlds' states


class WorldRows(NamedTuple):
    """Rows on the device."""

    obs: list[list[Any]]  # per group, per leaf (N, A_g, …)
    flags: Any  # one flat bool array, so that one download brings all; see `WorldFlags`
    rewards: Any  # (N, A), or None after a reset
    state: Any  # (N, …), or None
    infos: list[Any]  # those of envs, then those of agents


class WorldFlags(NamedTuple):
    """The flags of n worlds, as `WorldProgram` packs them: one array after the other, all bool.

    Agents that do not act have masks that allow everything. After a reset, ``alive`` and those below it are None.
    """

    masks: list[Any]  # per group that has masks (n, A_g, choices)
    acting: Any  # (n, A); None if the world does not report who acts: all that are alive
    alive: Any = None  # (n, A), agents in the episode after this step
    terminated: Any = None  # (n, A), in this step
    truncated: Any = None  # (n, A), in this step
    over: Any = None  # (n,), this step ends the episode


class WorldProgram:
    """The functions of one world, for any N; all but ``begin`` and ``look`` consume the carry that they are given.

    ``limit``: truncate the agents that are alive after so many steps. ``brings_state``: rows have the global state.

    Attributes:
        begin: ``(keys, counts) → (carry, rows)``: episodes of all worlds.
        step: ``(carry, actions) → (carry, rows)``.
        step_some: ``(carry, actions, chosen) → (carry, rows)``: of the worlds that are ``chosen``, (N,) bool; the rows
            of the others are undefined.
        renew: ``(carry, ids) → (carry, rows)``: new episodes of the worlds ``ids`` (k,), without ids of N or more; its
            rows are (k, …).
        replace: ``(carry, obs, state, ids) → (carry, obs, state, final rows, new rows)``: as ``renew``, within the step
            that ended them. Consumes the observations (and global states), and returns them with the new ones in their
            places. Of the rows of (k, …) the final ones have observations and state.
        look: ``carry → (N, …)``: the global states.
    """

    def __init__(self, world: JaxWorld, form: WorldForm, *, limit: int | None, brings_state: bool) -> None:
        jax = import_jax(world.name)
        jnp, lax = jax.numpy, jax.lax
        groups, agent_num = form.spec.groups, len(form.spec.agents)
        harmless = [[harmless_action(leaf.space) for leaf in group.action_tree.leaves] for group in groups]
        members = [list(group.agents) for group in groups]

        def strong(x: Any) -> Any:
            """Without JAX's weak types, which would have the next call compiled again."""
            x = jnp.asarray(x)
            return x if jnp.issubdtype(x.dtype, jax.dtypes.extended) else lax.convert_element_type(x, x.dtype)

        def of(flags: Any, who: list[int]) -> Any:
            """Those of a group; nothing is gathered where all are in it."""
            return flags if len(who) == agent_num else flags[np.array(who)]

        def over(flags: Any, leaf: Any) -> Any:
            return flags.reshape(flags.shape + (1,) * (leaf.ndim - flags.ndim))

        def key_of(key: Any, count: Any) -> Any:
            return jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), count)

        def may(rows: JaxRows, alive: Any) -> tuple[Any, WorldFlags]:
            """Who acts, (A,), and flags with masks that allow everything to all others."""
            acting = alive if rows.acting is None else rows.acting & alive
            places = [who for who, has in zip(members, form.masked, strict=True) if has]
            found = zip(places, form.masks(rows), strict=True) if places else ()
            masks = [mask | ~of(acting, who)[:, None] for who, mask in found]
            return acting, WorldFlags(masks, acting if form.has_acting else None)

        def packed(rows: WorldRows) -> WorldRows:
            """Rows with flat flags."""
            parts = [part.reshape(-1) for part in jax.tree.leaves(rows.flags)]
            return rows._replace(flags=jnp.concatenate([*parts, jnp.zeros(0, bool)]))

        def begin_one(key: Any, count: Any) -> tuple[Carry, WorldRows]:
            state, rows = world.reset(key_of(key, count))
            state = jax.tree.map(strong, state)
            alive = jnp.ones(agent_num, bool)
            acting, flags = may(rows, alive)
            carry = Carry(key, count + np.uint32(1), jnp.zeros((), jnp.int32), alive, acting, state)
            shown = world.global_state(state) if brings_state else None
            return carry, WorldRows(form.obs_leaves(rows), flags, None, shown, [])

        def step_one(carry: Carry, actions: list[list[Any]]) -> tuple[Carry, WorldRows]:
            alive, running = carry.alive, carry.alive.any()
            chosen = [
                [
                    jnp.where(over(of(carry.acting, who), leaf), leaf, filler)
                    for leaf, filler in zip(leaves, fillers, strict=True)
                ]
                for who, leaves, fillers in zip(members, actions, harmless, strict=True)
            ]
            state, rows = world.step(key_of(carry.keys, carry.counts), carry.world, form.join(chosen))
            state = jax.tree.map(strong, state)
            elapsed = carry.elapsed + running
            terminated, truncated = rows.terminated & alive, rows.truncated & alive
            if limit is not None:
                truncated |= alive & ~terminated & (elapsed >= limit)
            left = alive & ~terminated & ~truncated
            acting, flags = may(rows, left)
            over_now = running & ~left.any()
            flags = flags._replace(alive=left, terminated=terminated, truncated=truncated, over=over_now)
            obs = [
                [jnp.where(over(of(alive, who), leaf), leaf, jnp.zeros((), leaf.dtype)) for leaf in leaves]
                for who, leaves in zip(members, form.obs_leaves(rows), strict=True)
            ]
            infos = [rows.infos[name] for name in form.infos] + [rows.agent_infos[name] for name in form.agent_infos]
            shown = world.global_state(state) if brings_state else None
            count = carry.counts + running.astype(jnp.uint32)
            after = Carry(carry.keys, count, elapsed, left, acting, state)
            return after, WorldRows(obs, flags, jnp.where(alive, rows.rewards, 0), shown, infos)

        def begin(keys: Any, counts: Any) -> tuple[Carry, WorldRows]:
            carry, rows = jax.vmap(begin_one)(keys, counts)
            return carry, packed(rows)

        def step(carry: Carry, actions: list[list[Any]]) -> tuple[Carry, WorldRows]:
            carry, rows = jax.vmap(step_one)(carry, actions)
            return carry, packed(rows)

        def step_some(carry: Carry, actions: list[list[Any]], chosen: Any) -> tuple[Carry, WorldRows]:
            after, rows = step(carry, actions)
            return jax.tree.map(lambda old, new: jnp.where(over(chosen, new), new, old), carry, after), rows

        def put(old: Any, new: Any, ids: Any) -> Any:
            return jax.tree.map(lambda a, b: a.at[ids].set(b, mode="drop"), old, new)

        def renew(carry: Carry, ids: Any) -> tuple[Carry, WorldRows]:
            keys, counts = carry.keys[ids], carry.counts[ids]  # those that are left out: of the last world
            fresh, rows = begin(keys, counts)
            return put(carry, fresh, ids), rows

        def replace(carry: Carry, obs: Any, state: Any, ids: Any) -> tuple[Carry, Any, Any, WorldRows, WorldRows]:
            last = jax.tree.map(lambda leaf: leaf[ids], (obs, state))
            carry, rows = renew(carry, ids)
            finals = WorldRows(last[0], None, None, last[1], [])
            return carry, put(obs, rows.obs, ids), put(state, rows.state, ids), finals, rows

        self.begin = jax.jit(begin)
        self.step = jax.jit(step, donate_argnums=0)
        self.step_some = jax.jit(step_some, donate_argnums=0)
        self.renew = jax.jit(renew, donate_argnums=0)
        self.replace = jax.jit(replace, donate_argnums=(0, 1, 2))
        self.look = jax.jit(lambda carry: jax.vmap(world.global_state)(carry.world))
        self._mask_shapes = [(len(group.agents), group.mask_size) for group in groups if group.mask_size is not None]
        self._agent_num, self._has_acting = agent_num, form.has_acting

    def flags_of(self, rows: WorldRows, n: int) -> WorldFlags:
        """Read the flags of rows of ``n`` worlds to the host, once computed: views of one array that is read-only."""
        flat, at = np.asarray(rows.flags), 0

        def take(*shape: int) -> NDArray[np.bool_]:
            nonlocal at
            begin, at = at, at + n * math.prod(shape)
            return flat[begin:at].reshape(n, *shape)

        masks = [take(*shape) for shape in self._mask_shapes]
        acting = take(self._agent_num) if self._has_acting else None
        if rows.rewards is None:
            return WorldFlags(masks, acting)
        alive, terminated, truncated = (take(self._agent_num) for _ in range(3))
        return WorldFlags(masks, acting, alive, terminated, truncated, take())


def padded(ids: Sequence[int] | np.ndarray[Any, Any], num_envs: int, sizes: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return ids in an array of the next of these sizes; the rest is ``num_envs``, the id of no world."""
    size = next(size for size in sizes if size >= len(ids))
    out = np.full(size, num_envs, np.int32)
    out[: len(ids)] = ids
    return out

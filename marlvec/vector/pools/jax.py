"""JAX worlds: `JaxWorld`, the protocol that users write, and `JaxPool`: N worlds in one jitted, vmapped call.

`WorldForm` converts between a world's trees by group and flat lists of leaves; `WorldProgram` holds the jitted calls.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

import numpy as np
from gymnasium.spaces import Space
from numpy.typing import NDArray

from marlvec.envs.spec import AgentGroup, AutoresetMode, EnvSpec
from marlvec.errors import ArgumentError, ContractError, MarlvecError
from marlvec.extras import import_extra
from marlvec.serialization.saved import check_array
from marlvec.spaces import Leaf
from marlvec.spaces.action_masks import count_choices
from marlvec.vector.infos import OF_AGENTS, Path
from marlvec.vector.pools.pool import FinalRows, Leaves, Pool, PoolReply, harmless_action

Ids = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

_SIZES = (16, 256, 4_096, 65_536)
"""How many worlds may begin an episode in one call; more are filled up to the next of these, or to all."""
_TRIAL_STEPS = 3


class JaxPool(Pool):
    """N worlds, each with its own random stream: its numbers depend on its seed alone, not on N.

    World ``i``'s key is ``jax.random.key(seed)`` (threefry) of its seed, whose upper 32 bits count, too; its ``t``-th
    call since it was seeded, reset or step, gets ``jax.random.fold_in(key, t)``, t from 0. Worlds whose episode is over
    are reset alone, in few fixed sizes that are compiled before the first call.
    """

    fills_idle = True

    def __init__(
        self, world: JaxWorld, num_envs: int, *, autoreset_mode: str = "same_step", max_episode_steps: int | None = None
    ) -> None:
        self._jax = jax = import_jax(world.name)
        self._is_remote = jax.default_backend() != "cpu"
        self.world = world
        self._form = WorldForm(world)
        self.spec = self._form.spec
        self.num_envs = self.batch_size = num_envs
        self.autoreset = AutoresetMode(autoreset_mode)
        self._limit = max_episode_steps
        self._everyone = np.arange(num_envs)
        self._sizes = (*(size for size in _SIZES if size < num_envs), num_envs)
        self._program: WorldProgram | None = None
        self._keys = _keys_of(_fresh_seeds(num_envs))
        self._counts = np.zeros(num_envs, np.uint32)  # of worlds that are not on the device
        self._carry: Carry | None = None
        self._over = np.zeros(num_envs, np.bool_)  # the next step begins their next episode
        self._request: Callable[[], PoolReply] | None = None
        trees = [group.observation_tree for group in self.spec.groups]
        self._gives = all(self._form.canonical(leaf.dtype) == leaf.dtype for tree in trees for leaf in tree.leaves)

    def warm_up(self) -> None:
        """Compile all that later calls need, and try the world: three steps with actions in its spaces."""
        # ContractError: a reward is not finite, or an observation is NaN.
        program = self._programs()
        carry, rows = program.begin(self._on_device(self._keys), self._on_device(self._counts))
        for _ in range(_TRIAL_STEPS):
            self._check_values("reset" if rows.rewards is None else "step", rows)
            carry, rows = program.step(carry, self._trial_actions(rows))
        self._check_values("step", rows)
        for size in self._sizes:
            nobody = np.full(size, self.num_envs, np.int32)
            if self.autoreset is AutoresetMode.DISABLED:
                carry, _ = program.renew(carry, nobody)
            else:
                carry, *rest = program.replace(carry, rows.obs, rows.state, nobody)
                rows = rows._replace(obs=rest[0], state=rest[1])
        self._jax.block_until_ready(carry)

    def action_dtype(self, leaf: Leaf) -> np.dtype[Any]:
        return self._form.canonical(leaf.dtype)

    def check_reset(self, ids: Ids, seeds: Sequence[int | None], options: Sequence[dict[str, Any] | None]) -> None:
        if any(option is not None for option in options):
            raise ArgumentError(f"reset(options=…): expected none, since {self.spec.name} takes none, got some")

    def reset(self, ids: Ids, seeds: Sequence[int | None], options: Sequence[dict[str, Any] | None]) -> None:
        self._request = partial(self._reset, ids, list(seeds))

    def send(self, ids: Ids, actions: Leaves, acting: BoolArray) -> None:
        assert self._carry is not None
        carry, self._carry = self._carry, None
        if len(ids) == self.num_envs:
            self._carry, rows = self._programs().step(carry, actions)
            self._fetch(rows)
            self._request = partial(self._answer, rows)
            return
        chosen = np.zeros(self.num_envs, np.bool_)
        chosen[ids] = True
        spread = [[np.zeros((self.num_envs, *leaf.shape[1:]), leaf.dtype) for leaf in leaves] for leaves in actions]
        for targets, leaves in zip(spread, actions, strict=True):
            for target, leaf in zip(targets, leaves, strict=True):
                target[ids] = leaf
        self._carry, rows = self._programs().step_some(carry, spread, chosen)
        self._fetch(rows)
        self._request = partial(self._answer, rows, chosen)

    def recv(self) -> PoolReply:
        request, self._request = self._request, None
        assert request is not None
        return request()

    def forget(self) -> bool:
        """The next call is a reset; worlds that get no seed there continue with fresh ones."""
        self._request = self._carry = None
        self._over[:] = False
        self._keys, self._counts = _keys_of(_fresh_seeds(self.num_envs)), np.zeros(self.num_envs, np.uint32)
        return True

    def env(self, i: int) -> JaxEnvView:
        return JaxEnvView(self, i)

    def close(self) -> None:
        self._request = self._carry = self._program = None

    # --- resets

    def _reset(self, ids: Ids, seeds: Sequence[int | None]) -> PoolReply:
        given = [k for k, seed in enumerate(seeds) if seed is not None]
        self._over[ids] = False
        places: NDArray[Any] = ids
        if len(ids) == self.num_envs:
            self._unload(given_all=len(given) == len(ids))
            self._seed(ids[given], [seeds[k] for k in given])
            self._carry, rows = self._programs().begin(self._on_device(self._keys), self._on_device(self._counts))
            places = ids = self._everyone  # the order of the rows, whatever the order of the request
        else:
            carry = self._loaded()
            if given:
                self._unload(given_all=False)
                self._seed(ids[given], [seeds[k] for k in given])
                carry = carry._replace(keys=self._on_device(self._keys), counts=self._on_device(self._counts))
            self._carry = None
            places = padded(ids, self.num_envs, self._sizes)
            self._carry, rows = self._programs().renew(carry, places)
        self._fetch(rows)
        n = len(ids)
        flags = self._programs().flags_of(rows, len(places))
        shape = (n, len(self.spec.agents))
        nothing = np.zeros(shape, np.bool_)
        return PoolReply(
            env_ids=ids,
            obs=[[np.asarray(leaf)[:n] for leaf in leaves] for leaves in rows.obs],
            reward=np.zeros(shape),
            terminated=nothing,
            truncated=nothing,
            acting=None if flags.acting is None else flags.acting[:n],
            masks=self._masks_by_group([mask[:n] for mask in flags.masks]),
            alive=~nothing,
            done=nothing[:, 0],
            state=None if rows.state is None else np.asarray(rows.state)[:n],
            gives_obs=self._gives and n == self.num_envs,
        )

    def _seed(self, ids: Ids, seeds: Sequence[int | None]) -> None:
        self._keys[ids] = _keys_of([seed or 0 for seed in seeds])
        self._counts[ids] = 0

    def _unload(self, *, given_all: bool) -> None:
        """Copy keys and counts from the device, unless all will be replaced."""
        if self._carry is not None and not given_all:
            self._keys, self._counts = np.array(self._carry.keys), np.array(self._carry.counts)

    def _loaded(self) -> Carry:
        """Return the carry; before the first reset of all, of worlds in episodes that are never shown."""
        if self._carry is None:
            carry, _ = self._programs().begin(self._on_device(self._keys), self._on_device(self._counts))
            self._carry = carry._replace(counts=self._on_device(self._counts))
        return self._carry

    def _on_device(self, array: NDArray[Any]) -> Any:
        return self._jax.numpy.array(array)

    # --- steps

    def _fetch(self, *trees: Any) -> None:
        """Start copies of all these arrays to the host at once, so that reading them waits only once."""
        if self._is_remote:
            for leaf in self._jax.tree.leaves(trees):
                leaf.copy_to_host_async()

    def _answer(self, rows: WorldRows, chosen: BoolArray | None = None) -> PoolReply:
        """Read a step's rows, of the chosen worlds or of all; begin the episodes that the mode requires."""
        program = self._programs()
        flags = program.flags_of(rows, self.num_envs)
        masks, acting, alive, terminated, truncated, over = flags
        done = over if chosen is None else over & chosen
        finals: FinalRows | None = None
        begin = done if self.autoreset is AutoresetMode.SAME_STEP else self._over
        if self.autoreset is AutoresetMode.NEXT_STEP:
            begin, waiting = (begin, False) if chosen is None else (begin & chosen, begin & ~chosen)
            self._over = done | waiting
        begins = np.count_nonzero(begin) > 0
        if begins:
            ids = np.flatnonzero(begin)
            n, some = len(ids), padded(ids, self.num_envs, self._sizes)
            carry, self._carry = self._carry, None
            self._carry, obs, state, last, new = program.replace(carry, rows.obs, rows.state, some)
            self._fetch(new.flags, obs, state, last if self.autoreset is AutoresetMode.SAME_STEP else None)
            rows = rows._replace(obs=obs, state=state)
            fresh = program.flags_of(new, len(some))
            masks = [_with(mask, ids, own[:n]) for mask, own in zip(masks, fresh.masks, strict=True)]
            alive = _with(alive, ids, True)
            if acting is not None:
                acting = _with(acting, ids, fresh.acting[:n])
            if self.autoreset is AutoresetMode.SAME_STEP:
                finals = FinalRows(
                    rows=ids,
                    obs=[[np.asarray(leaf)[:n] for leaf in leaves] for leaves in last.obs],
                    state=None if last.state is None else np.asarray(last.state)[:n],
                )
        reply = PoolReply(
            env_ids=self._everyone,
            obs=[[np.asarray(leaf) for leaf in leaves] for leaves in rows.obs],
            reward=np.asarray(rows.rewards),
            terminated=terminated,
            truncated=truncated,
            acting=acting,
            masks=self._masks_by_group(masks),
            alive=alive,
            done=done,
            columns=self._columns(rows.infos),
            has_columns=~begin if begins and self.autoreset is AutoresetMode.NEXT_STEP else None,
            finals=finals,
            state=None if rows.state is None else np.asarray(rows.state),
            gives_obs=self._gives,
        )
        return reply if chosen is None else reply.select(chosen)

    def _masks_by_group(self, masks: Sequence[BoolArray]) -> list[BoolArray | None] | None:
        """None where a group has no masks; None for all if no group has."""
        if not masks:
            return None
        own = iter(masks)
        return [next(own) if has else None for has in self._form.masked]

    def _columns(self, infos: Sequence[Any]) -> dict[Path, NDArray[Any]]:
        paths: list[Path] = [(name,) for name in self._form.infos]
        paths += [(OF_AGENTS, name) for name in self._form.agent_infos]
        return {path: np.asarray(column) for path, column in zip(paths, infos, strict=True)}

    # --- states

    def state(self) -> NDArray[Any]:
        return np.asarray(self._programs().look(self._loaded()))

    def state_obstacle(self) -> str | None:
        return None

    def get_state(self, ids: Ids) -> dict[str, Any]:
        return {"over": self._over[ids]} | {name: leaf[ids] for name, leaf in self._arrays(self._loaded()).items()}

    def check_state(self, state: Any, n: int) -> None:
        own = {"over": self._over} | self._arrays(self._loaded())
        if not isinstance(state, Mapping) or state.keys() != own.keys():
            got = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise ArgumentError(f"set_state(): pool: expected the arrays {sorted(own)}, got {got}")
        for name, array in own.items():
            check_array(state, name, array.dtype, (n, *array.shape[1:]), "set_state(): pool")

    def set_state(self, ids: Ids, state: Mapping[str, Any], places: Ids) -> None:
        carry = self._loaded()
        arrays = {name: np.array(leaf) for name, leaf in self._arrays(carry).items()}
        for name, array in arrays.items():
            array[ids] = state[name][places]
        jax = self._jax
        leaves, tree = jax.tree.flatten(carry)
        made = []
        for leaf, array in zip(leaves, arrays.values(), strict=True):
            if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                made.append(jax.random.wrap_key_data(self._on_device(array), impl=jax.random.key_impl(leaf)))
            else:
                made.append(self._on_device(array))
        self._carry = jax.tree.unflatten(tree, made)
        self._over[ids] = state["over"][places]

    def _arrays(self, carry: Carry) -> dict[str, NDArray[Any]]:
        """Return the leaves of the carry by their paths; keys as numbers."""
        jax = self._jax
        found, _ = jax.tree_util.tree_flatten_with_path(carry)
        out = {}
        for path, leaf in found:
            is_key = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            # A copy on the device: the next step takes the carry's own memory.
            out[jax.tree_util.keystr(path)] = np.asarray(jax.random.key_data(leaf) if is_key else leaf.copy())
        return out

    # --- the first calls

    def _programs(self) -> WorldProgram:
        if self._program is None:
            # Pools of one world, as it is, share what was compiled.
            known = vars(self.world).setdefault("_programs", {})
            before = vars(self.world).setdefault("_compiled_from", now := _plain_values(self._jax, self.world))
            if changed := sorted(name for name, value in before.items() if now.get(name, value) != value):
                raise ContractError(
                    f"{self.spec.name}: expected a world as it was when it was first compiled, got changed attributes "
                    f"{changed}, which compiled code does not read; build another world"
                )
            settings = self._limit, self.brings_state
            if settings not in known:
                known[settings] = WorldProgram(
                    self.world, self._form, limit=self._limit, brings_state=self.brings_state
                )
            self._program = known[settings]
        return self._program

    def _trial_actions(self, rows: WorldRows) -> Leaves:
        """Return a valid action for every agent; the first that a mask allows, where there is one."""
        masks = self._masks_by_group(self._programs().flags_of(rows, self.num_envs).masks)
        out: Leaves = []
        for g, group in enumerate(self.spec.groups):
            shape = (self.num_envs, len(group.agents))
            leaves = []
            for leaf in group.action_tree.leaves:
                space = deepcopy(leaf.space)  # whose random stream is its owner's
                space.seed(0)
                value = np.asarray(space.sample())
                leaves.append(np.broadcast_to(value, (*shape, *leaf.shape)).astype(self.action_dtype(leaf)))
            mask = None if masks is None else masks[g]
            if mask is not None and not leaves[0].shape[2:]:
                leaves[0] = (mask.argmax(axis=2) + getattr(group.action_space, "start", 0)).astype(leaves[0].dtype)
            out.append(leaves)
        return out

    def _check_values(self, call: str, rows: WorldRows) -> None:
        agents = self.spec.agents
        if rows.rewards is not None and not np.isfinite(rewards := np.asarray(rows.rewards)).all():
            i, a = np.argwhere(~np.isfinite(rewards))[0].tolist()
            raise ContractError(
                f"{self.spec.name}.{call}(): rewards: expected finite numbers, got {rewards[i, a]} for agent "
                f"{agents[a]!r}"
            )
        for group, leaves in zip(self.spec.groups, rows.obs, strict=True):
            for leaf, found in zip(group.observation_tree.leaves, leaves, strict=True):
                array = np.array(found)  # a copy: no view of what is handed on
                if array.dtype.kind == "f" and np.isnan(array).any():
                    j = int(np.argwhere(np.isnan(array))[0][1])
                    raise ContractError(
                        f"{self.spec.name}.{call}(): observations: expected numbers, got NaN for agent "
                        f"{agents[group.agents[j]]!r}" + (f", leaf {leaf.path!r}" if leaf.path else "")
                    )


class JaxEnvView:
    """World ``index`` of a `JaxPool`, for control calls."""

    def __init__(self, pool: JaxPool, index: int) -> None:
        self._pool, self.world, self.index = pool, pool.world, index

    def __repr__(self) -> str:
        return f"<env {self.index} of {self._pool.spec.name}>"

    @property
    def state(self) -> Any:
        """The world's state now, a pytree of arrays."""
        index = self.index
        return self._pool._jax.tree.map(lambda leaf: leaf[index], self._pool._loaded().world)


def _plain_values(jax: Any, owner: Any, path: str = "", depth: int = 2) -> dict[str, Any]:
    """Return numbers, texts and arrays among the public attributes of an object and its attributes, by path."""
    found: dict[str, Any] = {}
    for name, value in getattr(owner, "__dict__", {}).items():
        where = f"{path}{name}"
        if name.startswith("_"):
            continue
        if isinstance(value, (bool, int, float, str, bytes)):
            found[where] = value
        elif isinstance(value, np.ndarray) or (isinstance(value, jax.Array) and value.is_fully_addressable):
            is_key = isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)
            array = np.asarray(jax.random.key_data(value) if is_key else value)
            found[where] = array.shape, array.tolist() if array.dtype == object else array.tobytes()
        elif isinstance(value, (tuple, list)):
            found[where] = [item for item in value if isinstance(item, (bool, int, float, str))]
        elif depth and not isinstance(value, (type, ModuleType, Space)) and not callable(value):
            found |= _plain_values(jax, value, f"{where}.", depth - 1)
    return found


def _fresh_seeds(num_envs: int) -> list[int]:
    return [int(word) for word in np.random.SeedSequence().generate_state(num_envs, np.uint64)]


def _with(array: NDArray[Any], ids: Ids, values: Any) -> NDArray[Any]:
    """Return a copy in which the rows ``ids`` have these values."""
    out = array.copy()
    out[ids] = values
    return out


def _keys_of(seeds: Sequence[int]) -> NDArray[np.uint32]:
    """Return raw threefry keys of these seeds, (n, 2): those of ``jax.random.key(seed)`` for seeds below 2**32."""
    words = np.array(seeds, np.uint64)
    return np.stack([words >> np.uint64(32), words & np.uint64(0xFFFFFFFF)], axis=1).astype(np.uint32)


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


def import_jax(what: str) -> Any:
    """Import jax, or raise `MissingExtraError`; ``what`` needs it."""
    return import_extra("jax", what, "pip install 'marlvec[jax]'")


class WorldForm:
    """Structure of one world's trees: `reset` and `step` are traced once, without running them.

    Raises `ContractError` with the world's name if it breaks the protocol: another structure, shape or dtype than
    declared, spaces that change. `masked` is per group, whether it has action masks.
    """

    def __init__(self, world: JaxWorld) -> None:
        self._jax = jax = import_jax(world.name)
        self._world, self._name = world, world.name
        is_wide = jax.config.jax_enable_x64
        self._hint = ", or leave JAX_ENABLE_X64 out, which not every suite's envs support" if is_wide else ""
        self.spec = self._read_spec()
        self._groups = self.spec.groups
        self._lone = len(self._groups) == 1
        self.masked = [group.mask_size is not None for group in self._groups]
        key = jax.eval_shape(lambda: jax.random.key(0))
        state, first = self._trace("reset", world.reset, key)
        actions = self.join(
            [
                [
                    jax.ShapeDtypeStruct((len(group.agents), *leaf.shape), self.canonical(leaf.dtype))
                    for leaf in group.action_tree.leaves
                ]
                for group in self._groups
            ]
        )
        after, rows = self._trace("step", world.step, key, state, actions)
        self.has_acting = first.acting is not None
        self.infos, self.agent_infos = sorted(rows.infos), sorted(rows.agent_infos)
        self._check_rows("reset", first, stepped=False)
        self._check_rows("step", rows, stepped=True)
        self._check_state(state, after)
        if self.spec.state_space is not None:
            space = self.spec.state_space
            found = self._run("global_state", lambda: jax.eval_shape(world.global_state, state))
            self._check("global_state", "the global state", found, tuple(space.shape or ()), space.dtype)

    def canonical(self, dtype: Any) -> np.dtype[Any]:
        """Return JAX's dtype in place of this one: 32 bits, unless it is configured for 64."""
        found: np.dtype[Any] = np.dtype(self._jax.dtypes.canonicalize_dtype(dtype))
        return found

    def join(self, leaves: list[list[Any]]) -> Any:
        """Convert leaves of actions by group to the argument of `JaxWorld.step`."""
        trees = [group.action_tree.unflatten(own) for group, own in zip(self._groups, leaves, strict=True)]
        if self._lone:
            return trees[0]
        return {group.name: tree for group, tree in zip(self._groups, trees, strict=True)}

    def obs_leaves(self, rows: JaxRows) -> list[list[Any]]:
        return [list(group.observation_tree.flatten(self._of(group, rows.obs, "obs"))) for group in self._groups]

    def masks(self, rows: JaxRows) -> list[Any]:
        """Return the action masks of the groups that have them."""
        chosen = [group for group, has in zip(self._groups, self.masked, strict=True) if has]
        return [self._of(group, rows.action_masks, "action_masks") for group in chosen]

    def _of(self, group: AgentGroup, tree: Any, what: str) -> Any:
        if self._lone:
            return tree
        if not isinstance(tree, Mapping) or group.name not in tree:
            got = sorted(map(str, tree)) if isinstance(tree, Mapping) else type(tree).__name__
            names = [one.name for one in self._groups]
            raise ContractError(f"{self._name}: {what}: expected a dict of the groups {names}, got {got}")
        return tree[group.name]

    def _read_spec(self) -> EnvSpec:
        spec = self._world.spec()
        if (differs := spec.difference(self._world.spec())) is not None:
            self._refuse("spec", "spaces", "the same at every look", f"others at the second one: {differs}")
        for group in spec.groups:
            for what, tree in (("observation", group.observation_tree), ("action", group.action_tree)):
                for leaf in tree.leaves:
                    if leaf.is_object:
                        self._refuse("spec", f"{what} space of {group.name!r}", "arrays of a fixed size", leaf.space)
        return spec

    def _refuse(self, call: str, what: str, expected: str, got: Any) -> NoReturn:
        raise ContractError(
            f"{self._name}.{call}(): {what}: expected {expected}, got {got}; correct the world{self._hint}"
        )

    def _run(self, call: str, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except MarlvecError:
            raise
        except Exception as error:
            raise ContractError(f"{self._name}.{call}(): raised {type(error).__name__}: {error}{self._hint}") from error

    def _trace(self, call: str, function: Callable[..., Any], *arguments: Any) -> tuple[Any, JaxRows]:
        found = self._run(call, lambda: self._jax.eval_shape(function, *arguments))
        if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], JaxRows):
            got = type(found).__name__ if not isinstance(found, tuple) else [type(part).__name__ for part in found]
            self._refuse(call, "the result", "(state, JaxRows)", got)
        return found

    def _check_rows(self, call: str, rows: JaxRows, *, stepped: bool) -> None:
        agent_num = len(self.spec.agents)
        for group in self._groups:
            leaves = self._run(call, partial(group.observation_tree.flatten, self._of(group, rows.obs, "obs")))
            for leaf, got in zip(group.observation_tree.leaves, leaves, strict=True):
                where = f"observations of {group.name!r}" + (f", leaf {leaf.path!r}" if leaf.path else "")
                self._check(call, where, got, (len(group.agents), *leaf.shape), leaf.dtype)
            if group.mask_size is not None:
                mask = None if rows.action_masks is None else self._of(group, rows.action_masks, "action_masks")
                where = f"action masks of {group.name!r}"
                self._check(call, where, mask, (len(group.agents), group.mask_size), np.bool_)
            elif rows.action_masks is not None and (self._lone or _entry(rows.action_masks, group.name) is not None):
                self._refuse(call, f"action masks of {group.name!r}", "None, since mask_sizes declares none", "masks")
        for what in ("rewards", "terminated", "truncated"):
            got = getattr(rows, what)
            if not stepped:
                if got is not None:
                    self._refuse(call, what, "None after a reset", got)
                continue
            self._check(call, what, got, (agent_num,), None if what == "rewards" else np.bool_)
            if what == "rewards" and np.dtype(got.dtype).kind != "f":
                self._refuse(call, what, "floats", got.dtype)
        if (rows.acting is not None) is not self.has_acting:
            self._refuse(call, "acting", "it in both of reset() and step(), or in none", rows.acting)
        if rows.acting is not None:
            self._check(call, "acting", rows.acting, (agent_num,), np.bool_)
        for what, infos in (("infos", rows.infos), ("agent_infos", rows.agent_infos)):
            if infos and not stepped:
                self._refuse(call, what, "none after a reset", sorted(infos))
            for name, got in infos.items():
                if what == "agent_infos" and tuple(got.shape[:1]) != (agent_num,):
                    self._refuse(call, f"{what}[{name!r}]", f"a first axis of {agent_num} agents", got.shape)

    def _check(self, call: str, what: str, got: Any, shape: tuple[int, ...], dtype: Any) -> None:
        wanted = f"shape {shape}" if dtype is None else f"{self.canonical(dtype)} of shape {shape}"
        if got is None or not hasattr(got, "shape"):
            self._refuse(call, what, wanted, got)
        if tuple(got.shape) != shape or (dtype is not None and np.dtype(got.dtype) != self.canonical(dtype)):
            self._refuse(call, what, f"{wanted}, as declared", f"{got.dtype} of shape {tuple(got.shape)}")

    def _check_state(self, before: Any, after: Any) -> None:
        """Check that a step returns a state of the form that a reset makes."""
        tree = self._jax.tree_util
        (first, form), (second, other) = (tree.tree_flatten_with_path(state) for state in (before, after))
        if form != other:
            self._refuse("step", "state", f"the structure that reset() makes, {form}", other)
        for (path, a), (_, b) in zip(first, second, strict=True):
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                where = f"state{tree.keystr(path)}"
                wanted = f"{a.dtype} of shape {a.shape}, as reset() makes it"
                self._refuse("step", where, wanted, f"{b.dtype} of shape {b.shape}")


def _entry(tree: Any, name: str) -> Any:
    """Return a group's entry of a dict by group, or all of another object."""
    return tree.get(name) if isinstance(tree, Mapping) else tree


class JaxRows(NamedTuple):
    """The rows of all agents of one world, after a reset or a step.

    "By group" means: one array (or tree, for Dict and Tuple spaces) whose first axis is the agents, where all agents
    have equal spaces; else a dict of group names to such arrays, as in `VectorEnv.step`.

    Attributes:
        obs: Observations, by group: (A_g, *shape), of the dtype of the space.
        rewards: (A,) floats. None after a reset, and only then.
        terminated, truncated: (A,) bool, who ends in this step; those of agents that ended before mean nothing. None
            after a reset, and only then.
        acting: (A,) bool, who must act next; None: all that are in the episode.
        action_masks: (A_g, choices) bool by group, for the groups whose ``mask_sizes`` are not None; else None.
        infos: Name → array, of the whole env; none after a reset.
        agent_infos: Name → array (A, …), of each agent; none after a reset.
    """

    obs: Any
    rewards: Any = None
    terminated: Any = None
    truncated: Any = None
    acting: Any = None
    action_masks: Any = None
    infos: Mapping[str, Any] = {}
    agent_infos: Mapping[str, Any] = {}


class JaxWorld(ABC):
    """A multi-agent env as pure functions of JAX; ``marlvec.make(MyWorld, num_envs=1024)`` runs many at once.

    Subclasses set the attributes in ``__init__``. `reset` and `step` are traced by ``jax.jit`` and ``jax.vmap``: they
    must have no side effects, and return arrays of the same shapes and dtypes in every call. They do not reset by
    themselves: a step that ends the episode returns the true last observations.

    Attributes:
        name: Name of the world in messages.
        agents: Agent names; their order is the agent axis.
        observation_spaces: One per agent, in that order, without the action mask.
        action_spaces: One per agent. A Discrete action is an int32, from ``space.start``.
        mask_sizes: Length of each agent's action mask, or None; empty means that no agent has one.
        state_space: Space of the global state, or None; with one, `global_state` returns it.
        metadata: Any entries.
    """

    name: str = "jax world"
    agents: tuple[str, ...]
    observation_spaces: tuple[Space[Any], ...]
    action_spaces: tuple[Space[Any], ...]
    mask_sizes: tuple[int | None, ...] = ()
    state_space: Space[Any] | None = None
    metadata: Mapping[str, Any] = {}

    @abstractmethod
    def reset(self, key: Any) -> tuple[Any, JaxRows]:
        """Begin an episode.

        Args:
            key: A key of ``jax.random``, another one in each call.

        Returns:
            The world's state, any pytree of arrays, and the first rows.
        """

    @abstractmethod
    def step(self, key: Any, state: Any, actions: Any) -> tuple[Any, JaxRows]:
        """Take one step.

        Args:
            key: A key of ``jax.random``, another one in each call.
            state: What `reset` or `step` returned last.
            actions: Actions, by group: (A_g, *shape). Those of agents that do not act lie in the space, and mean
                nothing.

        Returns:
            The next state, of the same structure, shapes and dtypes, and the rows.
        """

    def global_state(self, state: Any) -> Any:
        """Return the global state, an array of ``state_space``; called only if there is one."""
        raise ContractError(f"{self.name} declares a state_space and has no global_state(state)")

    def spec(self) -> EnvSpec:
        """Describe this world.

        Returns:
            Its agents, spaces and masks.

        Raises:
            ContractError: It has no agents, names one twice, a space is missing, or a mask does not fit its space.
        """
        agents = tuple(self.agents)
        if not agents:
            raise ContractError(f"{self.name}.agents: expected at least one agent, got none")
        if len(set(agents)) != len(agents):
            raise ContractError(f"{self.name}.agents: expected each agent once, got {agents}")
        sizes = tuple(self.mask_sizes) or (None,) * len(agents)
        spaces = (tuple(self.observation_spaces), tuple(self.action_spaces))
        for what, got in zip(("observation_spaces", "action_spaces", "mask_sizes"), (*spaces, sizes), strict=True):
            if len(got) != len(agents):
                raise ContractError(
                    f"{self.name}.{what}: expected one for each of {len(agents)} agents, got {len(got)}"
                )
        for agent, space, size in zip(agents, spaces[1], sizes, strict=True):
            if size is not None and size != (choices := count_choices(space)):
                wanted = f"{choices}, one entry per choice" if choices is not None else "None, since it has no choices"
                raise ContractError(
                    f"{self.name}.mask_sizes: agent {agent!r}: expected {wanted} of {space}, got {size}"
                )
        return EnvSpec(self.name, agents, *spaces, sizes, state_space=self.state_space, metadata=dict(self.metadata))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {len(self.agents)} agents>"

"""`JaxPool`: N worlds of JAX in one jitted, vmapped call, as a `Pool`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
from gymnasium.spaces import Space
from numpy.typing import NDArray

from marlvec.envs.autoreset import AutoresetMode
from marlvec.errors import ArgumentError, ContractError
from marlvec.serialization.state_fields import check_array
from marlvec.spaces import Leaf
from marlvec.vector.data.infos import OF_AGENTS, Path
from marlvec.vector.pools.jax.form import WorldForm, import_jax
from marlvec.vector.pools.jax.program import Carry, WorldProgram, WorldRows, padded
from marlvec.vector.pools.jax.world import JaxWorld
from marlvec.vector.pools.pool import FinalRows, Leaves, Pool, PoolReply

__all__ = ["JaxEnvView", "JaxPool"]

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

"""`Pool`: the contract of one object of another library that steps many envs; and the shard that drives a pool.

`PoolShard` is the counterpart of `Shard`, with equal rows, bit for bit; `PoolQueue` sends requests in order, with full
batches; `AliveTracker` keeps which agents are in the episode, for pools whose replies do not have that.
"""

from __future__ import annotations

import difflib
import sys
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Space
from numpy.typing import NDArray

from marlvec.env_ids import rows_of
from marlvec.envs.spec import COMMON, AutoresetMode, AutoresetRules, EnvSpec, Info, refuse_masks
from marlvec.errors import ArgumentError, BusyError, ContractError, UnknownEnvError
from marlvec.extras import import_extra
from marlvec.spaces import Leaf
from marlvec.spaces.action_masks import mask_refusal
from marlvec.vector.buffers import Buffers, EnvSelection
from marlvec.vector.infos import OF_AGENTS, InfoColumns, Path, ShardReport
from marlvec.vector.native_shard import BatchedShard
from marlvec.vector.shard import EnvEvent, EnvPhase

BoolArray = NDArray[np.bool_]
Ids = NDArray[np.int64]
Leaves = list[list[NDArray[Any]]]
"""Per group, per leaf of its space: an array whose first axes are envs and the group's agents."""


@dataclass(slots=True)
class FinalRows:
    """Final rows of ended episodes, from a pool that begins the next episodes in the same step."""

    rows: Ids  # (k,) int64, ascending: positions of these envs in the reply
    obs: Leaves  # per group, per leaf (k, A_g, *leaf.shape)
    state: NDArray[Any] | None = None  # (k, *state_space.shape), if the pool returns states
    present: BoolArray | None = None  # (k, A): in the next episodes, whose first rows are in the reply; None: all
    infos: dict[int, Info] = field(default_factory=dict)  # of the final rows, by env


@dataclass(slots=True)
class PoolReply:
    """Rows of ``n`` envs, in order of arrival.

    A pool that sets ``alive`` returns all rows ready to use: zeros for agents that were not in the episode before,
    ``acting`` only for agents that are alive, masks that allow everything for the others, and ``done``.
    """

    env_ids: Ids  # (n,) int64
    obs: Leaves  # per group, per leaf (n, A_g, *leaf.shape); zeros where an agent has no row
    reward: NDArray[Any]  # (n, A)
    terminated: BoolArray  # (n, A)
    truncated: BoolArray  # (n, A)
    # (n, A), agents with a row; None: all. Rows of agents that had already left the episode are ignored.
    present: BoolArray | None = None
    acting: BoolArray | None = None  # (n, A), agents that must act next; None: all present agents
    masks: Sequence[BoolArray | None] | None = None  # per group (n, A_g, choices), or None
    # (n, A), agents in the episode after this step, or in the next one where `finals` has the row; None: derived
    alive: BoolArray | None = None
    done: BoolArray | None = None  # (n,), envs whose episode ended in this step; None: derived
    elapsed: NDArray[Any] | None = None  # (n,), steps since the reset
    infos: dict[int, Info] = field(default_factory=dict)  # further infos, by env
    # further infos, path → (n, …), or (n, A, …) under `OF_AGENTS` of data/infos.py
    columns: dict[Path, NDArray[Any]] = field(default_factory=dict)
    has_columns: BoolArray | None = None  # (n,), envs whose columns are valid; None: all
    finals: FinalRows | None = None  # of episodes that the pool replaced by new ones in this step
    state: NDArray[Any] | None = None  # (n, *state_space.shape)
    # The receiver may keep the arrays in `obs`: rows of all envs in order, zeros where an agent is not in the episode,
    # never written to again by the pool. They may be read-only.
    gives_obs: bool = False

    def select(self, which: BoolArray | Ids) -> PoolReply:
        """Return the rows where ``which`` is True, or at these positions."""
        chosen: dict[str, Any] = {}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, np.ndarray):
                chosen[entry.name] = value[which]
        ids = set(chosen["env_ids"].tolist())
        n = len(self.env_ids)
        return replace(
            self,
            **chosen,
            obs=[[leaf[which] for leaf in leaves] for leaves in self.obs],
            masks=None if self.masks is None else [None if mask is None else mask[which] for mask in self.masks],
            infos={i: info for i, info in self.infos.items() if i in ids},
            columns={path: column[which] for path, column in self.columns.items()},
            finals=None if self.finals is None else _select_finals(self.finals, np.arange(n)[which], ids),
            gives_obs=False,
        )


class Pool(ABC):
    """Many envs of one kind, with batched requests and replies."""

    spec: EnvSpec  # of one env; with a `state_space` the pool can return global states
    num_envs: int  # N, the envs that callers see: 0 to N - 1
    num_spares: int = 0  # hidden envs, N to N + num_spares - 1, which fill batches
    batch_size: int  # number of rows for which `recv` waits, unless `synchronous`
    # The pool's own mode, an `AutoresetMode` or its name. "next_step": the next `send` to an env begins its next
    # episode, whatever the action; "same_step": the pool begins it at once, and reports the old one in
    # `PoolReply.finals`.
    autoreset: str
    steps_all: bool = False  # `send` requires all envs
    synchronous: bool = True  # each request, of any number of envs, gets one reply, before the next request
    fills_idle: bool = False  # `send` itself replaces actions of agents that do not act by harmless ones
    brings_state: bool = False  # replies must have `PoolReply.state`; set before the first call
    promised_limit: int | None = None  # a longer episode raises: the pool ignored its ``max_episode_steps``

    def warm_up(self) -> None:
        """Compile and allocate before the first call; ``brings_state`` is already set."""

    def action_dtype(self, leaf: Leaf) -> np.dtype[Any]:
        """Return the dtype of this leaf's actions in `send`; by default the leaf's dtype."""
        return leaf.dtype

    def check_reset(self, ids: Ids, seeds: Sequence[int | None], options: Sequence[dict[str, Any] | None]) -> None:
        """Raise `ArgumentError` if the pool does not support these arguments of a reset."""

    @abstractmethod
    def reset(self, ids: Ids, seeds: Sequence[int | None], options: Sequence[dict[str, Any] | None]) -> None:
        """Request new episodes of these envs, which may include spares."""

    @abstractmethod
    def send(self, ids: Ids, actions: Leaves, acting: BoolArray) -> None:
        """Request a step of these envs, ascending.

        `actions` are per group, per leaf (n, A_g, *leaf.shape), valid; the pool must not keep the arrays. `acting` (n,
        A) bool are agents whose actions count; all False in envs whose episode is over.
        """

    @abstractmethod
    def recv(self) -> PoolReply:
        """Wait for the next reply."""

    def forget(self) -> bool:
        """Discard all requests after a Ctrl-C at any point; return whether the pool can continue after a reset."""
        # The next call is a reset; no env is stepped before it.
        return False

    def state(self) -> NDArray[Any]:
        """Return all envs' global states, (N, *state_space.shape); called only with a ``state_space``."""
        raise NotImplementedError(f"{self.spec.name}: state()")

    # --- saved states, between two calls

    def state_obstacle(self) -> str | None:
        """Return why states of envs cannot be saved, and what to do; None if they can."""
        return (
            f"{self.spec.name} keeps the states of its envs to itself; backend='async' or 'native' saves them, where "
            f"it has them"
        )

    def get_state(self, ids: Ids) -> dict[str, Any]:
        """Copy all state that the next steps of these envs depend on, name → array (n, …); plain data."""
        raise NotImplementedError(f"{self.spec.name}: get_state()")

    def check_state(self, state: Any, n: int) -> None:
        """Raise `ArgumentError` unless a state from `get_state` of ``n`` envs fits these envs."""
        raise ArgumentError(f"set_state(): {self.state_obstacle()}")

    def set_state(self, ids: Ids, state: Mapping[str, Any], places: Ids) -> None:
        """Restore states from `get_state`: env ``ids[k]`` gets entry ``places[k]``."""
        raise NotImplementedError(f"{self.spec.name}: set_state()")

    @abstractmethod
    def env(self, i: int) -> Any:
        """Return env ``i`` as an object, for control calls."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. May be called again."""


def harmless_action(space: Any) -> NDArray[Any]:
    """Return an action in the space, for agents that need not act."""
    low, high = getattr(space, "low", None), getattr(space, "high", None)
    if low is not None and high is not None:
        return np.clip(np.zeros(space.shape, space.dtype), low, high)
    return np.asarray(np.zeros(space.shape, space.dtype) + getattr(space, "start", 0), space.dtype)


def _select_finals(finals: FinalRows, places: Ids, ids: set[int]) -> FinalRows:
    """Select the final rows at these positions of a reply with envs ``ids``."""
    kept = np.flatnonzero(np.isin(places, finals.rows))  # rows of the new reply
    order = np.searchsorted(finals.rows, places[kept])
    return FinalRows(
        rows=kept,
        obs=[[leaf[order] for leaf in leaves] for leaves in finals.obs],
        state=None if finals.state is None else finals.state[order],
        present=None if finals.present is None else finals.present[order],
        infos={i: info for i, info in finals.infos.items() if i in ids},
    )


class PoolQueue:
    """Sends a pool's requests in order, with full batches.

    A pool that returns `Pool.batch_size` rows at a time never replies to a smaller request. Its hidden spare envs make
    up the difference; ``in_flight`` counts them, too.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._idle_spares = list(range(pool.num_envs, pool.num_envs + pool.num_spares))
        self._receiver: ThreadPoolExecutor | None = None
        self._receiving: Future[PoolReply] | None = None
        self.in_flight = 0

    @property
    def batch_size(self) -> int:
        """Number of envs that must be in flight for a reply."""
        return 1 if self._pool.synchronous else self._pool.batch_size

    @property
    def empty(self) -> bool:
        return not self.in_flight and not self._waiting

    def ask(self, count: int, request: Callable[[], None]) -> None:
        """Send a request of ``count`` envs (`Pool.reset` or `Pool.send`), now or as soon as the pool accepts it."""
        self._waiting.append((count, request))
        self._ask_pool()

    def receive(self, timeout: float | None) -> PoolReply | None:
        """Wait for the next reply, at most ``timeout`` seconds; return it without spares' rows, or None."""
        # BusyError: the pool would never reply, since too few envs are in flight.
        if self._receiving is None:
            self._ask_pool()
            self._add_spares()
            if timeout is None:
                return self._without_spares(self._pool.recv())
            if self._receiver is None:  # pools cannot wait for a limited time, threads can
                self._receiver = ThreadPoolExecutor(1, "marlvec-pool")
            self._receiving = self._receiver.submit(self._pool.recv)
        with suppress(FutureTimeout):
            reply = self._receiving.result(timeout)
            self._receiving = None
            return self._without_spares(reply)
        return None

    def missing_for(self, count: int) -> int:
        """Return the number of envs missing in the last batch of a request for ``count`` envs alone."""
        missing = -count % self.batch_size
        return max(0, missing - self._pool.num_spares)

    def reset(self) -> None:
        """Forget all requests: the pool has lost them."""
        pool = self._pool
        self._waiting.clear()
        self._idle_spares = list(range(pool.num_envs, pool.num_envs + pool.num_spares))
        self.in_flight = 0

    def forget(self) -> bool:
        """Discard all requests; return whether the pool can continue, with a reset."""
        if self._receiving is not None:  # the waiting thread still uses the pool
            with suppress(Exception):
                self._receiving.result()
            self._receiving = None
        self.reset()
        return self._pool.forget()

    def close(self, timeout: float) -> None:
        """Release the waiting thread, if any: the pool must not be closed while it waits."""
        if self._receiving is not None:
            with suppress(Exception):
                self._receiving.result(timeout)
        if self._receiver is not None:
            self._receiver.shutdown(wait=self._receiving is None or self._receiving.done(), cancel_futures=True)

    def _ask_pool(self) -> None:
        while self._waiting and not (self._pool.synchronous and self.in_flight):
            count, request = self._waiting.popleft()
            request()
            self.in_flight += count

    def _add_spares(self) -> None:
        missing = self.batch_size - self.in_flight
        if missing <= 0:
            return
        if missing > len(self._idle_spares):
            raise BusyError(
                f"recv(): {self.in_flight} envs are in flight, and this pool hands out {self._pool.batch_size} rows at "
                f"a time: it would wait for ever. send() to more envs first; nothing is lost"
            )
        spares, self._idle_spares = self._idle_spares[:missing], self._idle_spares[missing:]
        nothing: Sequence[None] = [None] * missing
        self._pool.reset(np.array(spares, np.int64), nothing, nothing)
        self.in_flight += missing

    def _without_spares(self, reply: PoolReply) -> PoolReply:
        pool, ids = self._pool, reply.env_ids
        self.in_flight -= len(ids)
        if self.in_flight < 0:
            raise ContractError(
                f"{pool.spec.name}: the pool answered for {-self.in_flight} envs more than it was asked"
            )
        if pool.num_spares:
            mine = ids < pool.num_envs
            if not mine.all():
                self._idle_spares += ids[~mine].tolist()
                return reply.select(mine)
        return reply


def import_suite(module: str, what: str, extra: str) -> Any:
    """Import a suite that ``what`` needs, without its warnings; ``extra`` of marlvec installs it."""
    streams = sys.stdout, sys.stderr  # JaxMARL's import replaces both
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return import_extra(module, what, f"pip install 'marlvec[{extra}]'")
    finally:
        sys.stdout, sys.stderr = streams


def made_or_built(
    name: str, env: Any, kwargs: Mapping[str, Any], known: Iterable[str], make: Callable[..., Any]
) -> Any:
    """Return ``make(env, **kwargs)`` of an id, one of `known`, or a built env itself; ``name`` is ``"family/…"``.

    `UnknownEnvError`: no such id. `ArgumentError`: arguments beside a built env.
    """
    if isinstance(env, str):
        check_known(name.partition("/")[0], env, known)
        return make(env, **kwargs)
    if kwargs:
        raise ArgumentError(f"{name}: expected no arguments with a built env, got {sorted(kwargs)}; build it with them")
    return env


def check_known(family: str, name: str, known: Iterable[str], listed_by: str = "`marlvec envs`") -> None:
    """Raise `UnknownEnvError`, with similar names, unless a suite has an env of this name."""
    names = list(known)
    if name in names:
        return
    lowered = {one.lower(): one for one in names}
    near = [lowered[one] for one in difflib.get_close_matches(name.lower(), lowered, n=5, cutoff=0.5)]
    near += [one for one in names if name.lower() in one.lower() and one not in near][: 5 - len(near)]
    hint = f"Did you mean {' or '.join(repr(f'{family}/{one}') for one in near)}? " if near else ""
    raise UnknownEnvError(f"unknown env '{family}/{name}'. {hint}{listed_by} lists all")


def array_space(shape: tuple[int, ...], dtype: Any) -> Space[Any]:
    """Return the space of all arrays of this shape and dtype; of 0 and 1 in int8, for bools."""
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return Box(0, 1, shape, np.int8)
    if dtype.kind == "f":
        return Box(-np.inf, np.inf, shape, dtype.type)
    limits = np.iinfo(dtype)
    return Box(limits.min, limits.max, shape, dtype.type)


class AliveTracker:
    """Completes the replies of one pool: each then has who is alive, and rows ready to use."""

    def __init__(self, spec: EnvSpec, num_envs: int) -> None:
        self._name, self._agents = spec.name, spec.agents
        self._members = [list(group.agents) for group in spec.groups]
        self.had_rows = np.zeros((num_envs, len(spec.agents)), np.bool_)

    def complete(self, reply: PoolReply, rows: EnvSelection, before: BoolArray, began: BoolArray | None) -> PoolReply:
        """Return the reply with `PoolReply.alive` and `PoolReply.done`; if it has ``alive``, the reply itself.

        `rows` are those of its envs; `before` (n, A) bool, agents in the episode before this step; `began` (n,) bool,
        envs whose episode begins with this reply, or None.
        """
        if reply.alive is not None:
            if reply.done is None:
                raise ContractError(
                    f"{self._name}: PoolReply.done: expected (n,) bool from a pool that sets alive, got None"
                )
            self._check_finals(reply, reply.done)
            return reply
        present = self._present(reply, rows, before, began)
        terminated, truncated, reward, obs = reply.terminated, reply.truncated, reply.reward, reply.obs
        if present is not None:
            terminated, truncated, reward = terminated & present, truncated & present, np.where(present, reward, 0)
        ended = terminated | truncated
        alive = ~ended if present is None else present & ~ended
        done = reply.done
        if done is None:
            done = ended[:, 0] if ended.shape[1] == 1 else np.asarray(ended.any(axis=1) & ~alive.any(axis=1))
        self._check_finals(reply, done)
        if reply.finals is not None:  # these rows are of the next episode
            places, begun = reply.finals.rows, reply.finals.present
            alive[places] = self.had_rows[reply.env_ids[places]] = True if begun is None else begun
            if present is not None:
                present[places] = alive[places]
        if present is not None and not reply.gives_obs:
            obs = self._without_absent(obs, present)
        acting = alive if reply.acting is None else reply.acting & alive
        masks = reply.masks
        if masks is not None and np.count_nonzero(acting) < acting.size:
            masks = [
                None if mask is None else mask | ~acting[:, members, None]
                for mask, members in zip(masks, self._members, strict=True)
            ]
        return replace(
            reply,
            obs=obs,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            acting=acting,
            masks=masks,
            alive=alive,
            done=done,
        )

    def _present(
        self, reply: PoolReply, rows: EnvSelection, before: BoolArray, began: BoolArray | None
    ) -> BoolArray | None:
        """Return which agents are in the episode, or end in this step, (n, A) bool in new memory; None: all."""
        # An agent with a row that was not alive and had no row before joins. With a row before, it is padding.
        if reply.present is None and len(self._agents) == 1:
            return None  # who has ended is asked for nothing but a new episode
        if began is not None:
            before = np.where(began[:, None], True if reply.present is None else reply.present, before)
        if reply.present is None and np.count_nonzero(before) == before.size:
            if began is not None:
                self.had_rows[rows] = True
            return None
        given = np.ones(before.shape, np.bool_) if reply.present is None else reply.present
        if np.count_nonzero(lost := before & ~given):
            i, a = np.argwhere(lost)[0].tolist()
            who = f"agent {self._agents[a]!r} of env {reply.env_ids[i]}"
            raise ContractError(f"{self._name}: {who} is gone, and was neither terminated nor truncated")
        present = given & (before | ~self.had_rows[rows])
        self.had_rows[rows] = given
        return present

    def _check_finals(self, reply: PoolReply, done: BoolArray) -> None:
        """Check that the final rows are of the envs whose episode is over."""
        if reply.finals is not None and not np.array_equal(reply.finals.rows, np.flatnonzero(done)):
            raise ContractError(
                f"{self._name}: the episodes of envs {reply.env_ids[done].tolist()} are over, and it gives final rows "
                f"of envs {reply.env_ids[reply.finals.rows].tolist()}"
            )

    def _without_absent(self, obs: Leaves, present: BoolArray) -> Leaves:
        """Return observations with zeros for absent agents."""
        return [
            [np.where(present[:, members].reshape(*leaf.shape[:2], *[1] * (leaf.ndim - 2)), leaf, 0) for leaf in leaves]
            for members, leaves in zip(self._members, obs, strict=True)
        ]


class PoolShard(BatchedShard):
    """All envs of a pool, whose requests are in ``queue``."""

    def __init__(self, pool: Pool, autoreset_mode: str) -> None:
        super().__init__(pool.spec, pool.num_envs, autoreset_mode)
        self.queue = PoolQueue(pool)
        self._pool = pool
        self._check_batches(self._autoreset)
        self._next_episode = self._autoreset.next_episode_request(AutoresetMode(pool.autoreset))
        n = pool.num_envs
        self._everyone = np.arange(n)
        self._alive_tracker = AliveTracker(pool.spec, n)
        self._saved["had_rows"] = self._alive_tracker.had_rows
        self._limit, self._elapsed = pool.promised_limit, np.zeros(n, np.int64)
        self._columns, self._final_columns = InfoColumns(n), InfoColumns(n)
        self._groups = pool.spec.groups
        self._members = [list(group.agents) for group in self._groups]
        self._harmless = [[harmless_action(leaf.space) for leaf in group.action_tree.leaves] for group in self._groups]
        self._declares_mask = [group.mask_size is not None for group in self._groups]
        self._masked = any(self._declares_mask)  # a mask has been written

    def attach(self, buffers: Buffers) -> None:
        super().attach(buffers)
        for g, group in enumerate(self._groups):
            for k, leaf in enumerate(group.action_tree.leaves):
                buffers.use_action_dtype(g, k, self._pool.action_dtype(leaf))

    def _check_batches(self, autoreset: AutoresetRules) -> None:
        """Refuse a mode that the pool does not serve, and batches that would never be full."""
        pool = self._pool
        autoreset.check_pool(pool.spec.name, AutoresetMode(pool.autoreset), steps_all=pool.steps_all)
        if 0 < pool.num_spares < pool.batch_size - 1 and not pool.synchronous:
            raise ArgumentError(
                f"{pool.spec.name} hands out {pool.batch_size} rows at a time: expected no spare envs or at least "
                f"{pool.batch_size - 1}, got {pool.num_spares}"
            )
        if missing := self.queue.missing_for(1 if autoreset.begins_at_once else pool.num_envs):
            raise ArgumentError(
                f"autoreset_mode={autoreset.mode.value!r}: {pool.spec.name} hands out {pool.batch_size} rows at a "
                f"time, and {missing} more envs are needed as spares to fill up batches. PoolVectorEnv(pool, "
                f"num_envs=…) leaves envs over, and marlvec.make() provides them; or take 'next_step' and a "
                f"batch_size that divides num_envs={pool.num_envs}"
            )

    # --- asking ---

    def ask_reset(
        self, ids: Ids, seeds: Sequence[int | None], options: Sequence[dict[str, Any] | None], *, alone: bool
    ) -> None:
        """Request new episodes; cancels due autoresets. `alone`: no other request is pending or undelivered."""
        if alone:  # what others have said before was handed out already
            self._columns.forget(slice(None))
            self._final_columns.forget(slice(None))
        if self.queue.empty and any(seed is not None for seed in seeds):
            self.queue.reset()
        self.queue.ask(len(ids), partial(self._pool.reset, ids, seeds, options))
        self._phases.on(ids, EnvEvent.ASK_RESET)
        self._buffers.events[ids] = False
        self._final_columns.forget(ids)

    def ask_step(self, ids: Ids) -> None:
        """Request a step with the actions in the rows, and clear what the rows report of the step before."""
        ids = self._in_order(ids)
        rows = self._rows(ids)
        begun, over = self._split(ids, rows)
        going = ids
        if over is not None and self._next_episode == "reset":
            self._begin(ids[over])
            going = ids[~over]
        if len(going):
            self._send(going)
        self._phases.on(rows, EnvEvent.ASK_STEP)
        # The rows are cleared while the pool is at work.
        if begun is not None:
            self._clear_finals(begun)
        self._buffers.events[rows] = False
        if self._final_columns:
            self._final_columns.forget(rows)
        if over is not None:
            self._buffers.reset_mask[rows] = over

    def _begin(self, ids: Ids) -> None:
        """Request these envs' next episodes."""
        nothing: list[None] = [None] * len(ids)
        self.queue.ask(len(ids), partial(self._pool.reset, ids, nothing, nothing))

    def _send(self, ids: Ids) -> None:
        rows, buffers = self._rows(ids), self._buffers
        acting = buffers.acting[rows]
        actions: Leaves = [[leaf[rows] for leaf in leaves] for leaves in buffers.actions]
        if not self._pool.fills_idle and np.count_nonzero(acting) < acting.size:  # theirs may be anything
            for members, leaves, fillers in zip(self._members, actions, self._harmless, strict=True):
                for k, (action, harmless) in enumerate(zip(leaves, fillers, strict=True)):
                    leaves[k] = np.where(_over(acting[:, members], action), action, harmless)
        self.queue.ask(len(ids), partial(self._pool.send, ids, actions, acting))

    # --- taking in answers ---

    def read(self, reply: PoolReply) -> tuple[Ids, ShardReport]:
        """Write the rows of a reply; return the envs that are ready now, and their report."""
        ids = self._in_order(reply.env_ids)
        if ids is not reply.env_ids and np.count_nonzero(ids != reply.env_ids):
            reply = reply.select(np.argsort(reply.env_ids))
        self._refuse_masks_in_infos(reply)
        report, rows = ShardReport(infos=reply.infos), self._rows(ids)
        began, replaced = self._record_beginnings(reply, ids, rows)
        reply = self._alive_tracker.complete(reply, rows, self._buffers.alive[rows], began)
        done = reply.done
        assert done is not None
        if self._limit is not None:
            self._check_limit(ids, began, done, self._limit)
        if replaced is None:
            self._buffers.reward[rows] = reply.reward
        else:  # these keep the reward of the step that ended their episode
            self._buffers.reward[ids[~replaced]] = reply.reward[~replaced]
        ended = reply.terminated | reply.truncated
        any_ended = np.count_nonzero(ended) > 0
        if reply.state is not None and self._buffers.state is not None:
            self._buffers.state[rows] = reply.state
        if any_ended:
            self._buffers.terminated[rows] |= reply.terminated
            self._buffers.truncated[rows] |= reply.truncated
            self._buffers.done[rows] |= done
        self._write_turns(reply, rows)
        self._write_obs(reply, rows)
        if reply.columns or self._columns:
            self._columns.write(rows, reply.columns)
            if reply.has_columns is not None:
                self._columns.forget(ids[~reply.has_columns])
        ready = ids
        if any_ended:
            self._snapshot(reply, ended)
            if np.count_nonzero(done):
                ready = self._finish(reply, done, report)
        if self._columns or self._final_columns:
            report.columns, report.final_columns = self._columns, self._final_columns
        return ready, report

    def _refuse_masks_in_infos(self, reply: PoolReply) -> None:
        for infos in (reply.infos, {} if reply.finals is None else reply.finals.infos):
            for i, info in infos.items():
                refuse_masks(self.spec, info, f"{self.spec.name}: env {i}: ")
        for path in reply.columns:
            if path[:1] == ("action_mask",):
                refuse_masks(self.spec, {COMMON: {"action_mask": path}}, f"{self.spec.name}: ")
            elif path[:2] == (OF_AGENTS, "action_mask"):
                refuse_masks(
                    self.spec, {agent: {"action_mask": path} for agent in self.spec.agents}, f"{self.spec.name}: "
                )

    def _record_beginnings(
        self, reply: PoolReply, ids: Ids, rows: EnvSelection
    ) -> tuple[BoolArray | None, BoolArray | None]:
        """Change the phases; return whose episodes begin with this row, and whose in the step that ended the last."""
        # Both (n,) bool, or None if no env's does. The rewards of the second stay.
        began: BoolArray | None = None
        replaced: BoolArray | None = None
        if not self._phases.are_all(rows, EnvPhase.STEPPING):
            began = ~self._phases.where(rows, EnvPhase.STEPPING)
            if self._autoreset.begins_at_once:
                replaced = self._phases.where(rows, EnvPhase.REPLACING)
                if not np.count_nonzero(replaced):
                    replaced = None
        try:
            self._phases.on(rows, EnvEvent.REPLY)
        except KeyError as error:
            raise self._broken(f"it answers for envs {ids.tolist()}, not all of which were asked: {error}") from None
        self._check_beginnings(reply, began)
        return began, replaced

    def _check_beginnings(self, reply: PoolReply, began: BoolArray | None) -> None:
        """Check that the pool's beginnings are those that were requested."""
        ids = reply.env_ids
        if reply.elapsed is not None and reply.finals is None:
            at_start = reply.elapsed == 0
            wrong = at_start if began is None else at_start != began
            if np.count_nonzero(wrong):
                i = int(wrong.argmax())
                what = "stepped" if at_start[i] else "reset"
                raise self._broken(
                    f"env {ids[i]} was {what}, and says that {reply.elapsed[i]} steps have passed since its reset"
                )
        if began is None:
            return
        first = began.nonzero()[0]
        if np.count_nonzero(over := reply.terminated[first] | reply.truncated[first]):
            raise self._broken(
                f"in envs {ids[first][over.any(axis=1)].tolist()} the episode is over right after its reset"
            )
        if np.count_nonzero(rewards := reply.reward[first]):
            raise self._broken(f"envs {ids[first][rewards.any(axis=1)].tolist()} give a reward for a reset")
        if reply.present is not None and not reply.present[began].any(axis=1).all():
            empty = ids[began & ~reply.present.any(axis=1)].tolist()
            raise self._broken(f"in envs {empty} no agent is there after a reset")

    def _check_limit(self, ids: Ids, began: BoolArray | None, done: BoolArray, limit: int) -> None:
        """Count the steps of episodes; raise if the pool ignores ``max_episode_steps``, which it received."""
        self._elapsed[ids] += 1
        self._elapsed[ids[done if began is None else done | began]] = 0
        if np.count_nonzero(longer := self._elapsed[ids] >= limit):
            raise self._broken(
                f"max_episode_steps={limit}: expected the pool to truncate every agent after {limit} steps, got "
                f"episodes that continue in envs {ids[longer].tolist()}: the pool ignores this argument; leave it out"
            )

    def _finish(self, reply: PoolReply, done: BoolArray, report: ShardReport) -> Ids:
        """Handle ended episodes, and begin the next ones if the mode requires it. Returns the envs that are ready."""
        over, buffers = reply.env_ids[done], self._buffers
        if reply.state is not None and buffers.final_state is not None:
            finals = reply.finals
            buffers.final_state[over] = reply.state[done] if finals is None or finals.state is None else finals.state
        if not self._autoreset.begins_at_once:
            self._phases.on(over, EnvEvent.END)
            return reply.env_ids
        if reply.finals is not None:
            report.final_infos.update(reply.finals.infos)
            if reply.columns:
                self._final_columns.write(over, {path: column[done] for path, column in reply.columns.items()})
                self._columns.forget(over)
            self._phases.on(over, EnvEvent.FOLLOW)
            return reply.env_ids
        if reply.columns:
            self._final_columns.write(over, {path: column[done] for path, column in reply.columns.items()})
        report.final_infos.update({i: report.infos.pop(i) for i in over.tolist() if i in report.infos})
        self._phases.on(over, EnvEvent.REPLACE)
        if self._next_episode == "step":
            self._send(over)
        else:
            self._begin(over)
        return reply.env_ids[~done]

    # --- rows ---

    def _in_order(self, ids: Ids) -> Ids:
        """Return these envs, ascending; the same array every time if they are all."""
        if len(ids) == len(self._everyone):
            return self._everyone
        return np.sort(ids) if (ids[1:] < ids[:-1]).any() else ids

    def _rows(self, ids: Ids) -> EnvSelection:
        """Return the rows of envs that are in order: a slice, so that nothing is copied, if they are consecutive."""
        return slice(None) if ids is self._everyone else rows_of(ids)

    def _write_obs(self, reply: PoolReply, rows: EnvSelection) -> None:
        buffers = self._buffers
        for g, leaves in enumerate(reply.obs):
            if reply.gives_obs:
                buffers.take_obs(g, leaves)
                continue
            for target, leaf in zip(buffers.own_obs(g), leaves, strict=True):
                target[rows] = leaf

    def _write_turns(self, reply: PoolReply, rows: EnvSelection) -> None:
        """Write who is alive, who acts, and the action masks."""
        buffers = self._buffers
        buffers.alive[rows] = reply.alive
        buffers.acting[rows] = reply.alive if reply.acting is None else reply.acting
        if reply.masks is None:
            if self._masked:
                buffers.clear_masks(rows)
            return
        for g, (given, mask) in enumerate(zip(reply.masks, buffers.action_masks, strict=True)):
            if given is not None:
                if mask is None:
                    raise self._broken(f"action masks: {mask_refusal(self._groups[g].action_space)}")
                mask[rows] = given
                self._masked = True
                if not self._declares_mask[g]:
                    buffers.gave_mask[rows] = True

    def _snapshot(self, reply: PoolReply, ended: BoolArray) -> None:
        """Keep the observations of agents that ended, before the next episode overwrites them."""
        finals = reply.finals
        if finals is not None:
            replaced = ended[finals.rows]
            self._copy_finals(reply.env_ids[finals.rows], replaced, finals.obs)
            if np.count_nonzero(replaced) == np.count_nonzero(ended):
                return
        rows = np.flatnonzero(ended[:, 0] if ended.shape[1] == 1 else ended.any(axis=1))
        if finals is not None:
            rows = rows[~np.isin(rows, finals.rows)]
        if len(rows):
            obs = [[leaf[rows] for leaf in leaves] for leaves in reply.obs]
            self._copy_finals(reply.env_ids[rows], ended[rows], obs)

    def _copy_finals(self, envs: Ids, ended: BoolArray, obs: Leaves) -> None:
        """Write the observations (k, A_g, …) of agents that ended, (k, A) bool, into rows of ``envs``."""
        whole = np.count_nonzero(ended) == ended.size
        for members, targets, leaves in zip(self._members, self._buffers.final_obs, obs, strict=True):
            k, j = (slice(None), slice(None)) if whole else ended[:, members].nonzero()
            for target, leaf in zip(targets, leaves, strict=True):
                if whole:
                    target[envs] = leaf
                else:
                    target[envs[k], j] = leaf[k, j]
        self._mark_finals(envs)

    # --- saved states ---

    _inner = "pool"

    def _get_inner(self, ids: Ids) -> dict[str, Any]:
        return self._pool.get_state(ids)

    def _check_inner(self, inner: Any, n: int) -> None:
        self._pool.check_state(inner, n)

    def _set_inner(self, ids: Ids, inner: Mapping[str, Any], places: Ids) -> None:
        self._pool.set_state(ids, inner, places)
        self._elapsed[ids] = 0
        self._columns.forget(ids)
        self._final_columns.forget(ids)

    def _broken(self, problem: str) -> ContractError:
        return ContractError(f"{self.spec.name}: {problem}")


def _over(flags: BoolArray, leaf: NDArray[Any]) -> BoolArray:
    """Return flags (n, A_g) with axes of length 1 at the end, to match a leaf (n, A_g, …)."""
    return flags.reshape(flags.shape + (1,) * (leaf.ndim - 2))

"""EnvPool's pools as a `Pool`: their form, read from the config, and ``recv()``'s results as `PoolReply`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray

from marlvec.envs.adapters.gymnasium import AGENT
from marlvec.envs.spec import AutoresetMode, EnvSpec
from marlvec.errors import ArgumentError, BusyError, ContractError
from marlvec.spaces import Leaf, SpaceTree
from marlvec.spaces.action_masks import split_action_mask
from marlvec.vector.infos import OF_AGENTS, Path
from marlvec.vector.pools.pool import Leaves, Pool, PoolReply

Ids = NDArray[np.int64]


Seeds = list[int]
_INT32 = 2**31


class EnvPoolAdapter(Pool):
    """Adapts a pool with EnvPool's methods: ``send(action, env_id)``, ``recv()``, ``reset(env_id)``.

    ``recv()`` returns ``(obs, reward, terminated, truncated, info)``, or in the old form ``(obs, reward, done, info)``;
    ``info`` may have ``env_id``, ``elapsed_step``, ``players`` (``env_id`` and ``id`` of each row, and more by row),
    ``current_player``, ``legal_action_mask``. With ``current_player`` a pool takes one action per env, of the player
    whose turn it is; without, it takes one action per player that has a row.

    ``make_pool`` builds a pool from one seed per env, or from random seeds if given None. Without it, the pool cannot
    be rebuilt, and takes no seeds. ``num_envs`` are the envs that callers see; the others are spares.
    """

    def __init__(
        self,
        form: PoolForm,
        *,
        pool: Any = None,
        make_pool: Callable[[Seeds | None], Any] | None = None,
        num_envs: int | None = None,
    ) -> None:
        n = form.num_envs if num_envs is None else num_envs
        if not 1 <= n <= form.num_envs:
            raise ArgumentError(f"num_envs={n}, but {form.name} holds {form.num_envs} envs")
        self.num_envs, self.num_spares = n, form.num_envs - n
        self.batch_size, self.autoreset = form.batch_size, form.autoreset
        # With several players EnvPool waits for batch_size envs even if it has no more envs.
        self.synchronous = form.batch_size >= form.num_envs and form.num_players == 1
        self._pool, self._make_pool = pool, make_pool
        self._fast_path: EnvPoolFastPath | None = None
        self._looks_at_actions = True  # EnvPool fills idle players in its first steps; the fast path begins later
        self._form = form
        agents = form.num_players
        space, mask_size = split_action_mask(
            form.observation_space, form.action_space, f"{form.name}: observation space"
        )
        self.spec = EnvSpec(
            name=form.name,
            agents=(AGENT,) if agents == 1 else tuple(f"player_{a}" for a in range(agents)),
            observation_spaces=(space,) * agents,
            action_spaces=(form.action_space,) * agents,
            mask_sizes=(mask_size or form.mask_size,) * agents,
            metadata=dict(form.metadata),
        )
        self._actions = SpaceTree(form.action_space)
        self._everyone = np.arange(form.num_envs)
        self._turns = False
        self._rows = np.ones((form.num_envs, agents), np.bool_)  # players with a row in an env's last reply
        self._seeds: Seeds | None = None  # default seeds of the next pool; None: random
        self._resetting: Ids | None = None  # request and reply in one call
        self._in_flight = 0
        if self.num_spares and pool is not None and not callable(getattr(pool, "_reset", None)):
            raise ArgumentError(f"{form.name} cannot reset some envs while others are busy, so it can have no spares")
        self._reader = EnvPoolReader(form, self.spec, mask_in_obs=mask_size is not None)
        self._last: Ids = self._everyone

    def made_by(self, make_pool: Callable[[Seeds | None], Any]) -> None:
        """Set the function that rebuilds the pool with other seeds."""
        self._make_pool = make_pool

    def check_reset(self, ids: Ids, seeds: Sequence[int | None], options: Sequence[dict[str, Any] | None]) -> None:
        name = self.spec.name
        if any(options):
            raise ArgumentError(f"reset(options=…): {name} takes no options")
        if self._in_flight and not self.synchronous and not callable(getattr(self._pool, "_reset", None)):
            raise BusyError(
                f"a reset of envs {ids.tolist()}: {name} resets no envs while others are busy; recv() first"
            )
        given = [seed for seed in seeds if seed is not None]
        if not given:
            return
        if self._make_pool is None:
            raise ArgumentError(
                f"reset(seed=…): {name} was built with its seeds, and cannot be rebuilt with others; let "
                f"marlvec.make() build it, from a function that takes num_envs and seed"
            )
        if len(given) < self.num_envs or len(set(ids.tolist())) < self.num_envs:
            raise ArgumentError(f"reset(seed=…): {name} takes seeds only when it is built, so give a seed to every env")
        if large := [seed for seed in given if seed >= _INT32]:
            raise ArgumentError(
                f"reset(seed=…): {name} keeps its seeds in 32 bits; expected less than 2**31, got {large}"
            )

    def reset(self, ids: Ids, seeds: Sequence[int | None], options: Sequence[dict[str, Any] | None]) -> None:
        if self._pool is None or any(seed is not None for seed in seeds):
            self._open_pool(ids, seeds)
        self._last = ids
        self._in_flight += len(ids)
        pool, own = self._pool, getattr(self._pool, "_reset", None)
        if callable(own):
            own(ids.astype(np.int32))
        elif len(ids) == len(self._everyone):
            pool.async_reset()
            self._last = self._everyone  # the order of the rows, whatever the order of the request
        else:
            self._resetting = ids

    def _open_pool(self, ids: Ids, seeds: Sequence[int | None]) -> None:
        assert self._make_pool is not None
        self._drop_pool()
        chosen = self._seeds
        if seeds[0] is not None:
            chosen = [0] * len(self._everyone)
            for i, seed in zip(ids.tolist(), seeds, strict=True):
                chosen[i] = seed or 0
        self._pool = self._make_pool(chosen)
        spaces_of(self._pool, self.spec.name)
        self._in_flight = 0
        self._rows[:] = True

    def send(self, ids: Ids, actions: Leaves, acting: NDArray[np.bool_]) -> None:
        self._last = ids
        self._in_flight += len(ids)
        if len(self.spec.agents) == 1:
            parts = [leaf[:, 0] for leaf in actions[0]]
        elif self._turns:
            parts = [leaf[np.arange(len(ids)), acting.argmax(axis=1)] for leaf in actions[0]]
        else:
            rows = self._rows[ids]
            parts = [leaf[rows] for leaf in actions[0]]
        everyone = len(ids) == len(self._everyone)
        if self._fast_path is not None:
            self._fast_path.send(parts[0], None if everyone else ids)
            return
        # A copy: the pool's threads read it while the buffers change.
        action = self._actions.unflatten([np.array(part, order="C") for part in parts])
        if everyone:
            self._pool.send(action)
        else:
            self._pool.send(action, ids.astype(np.int32))
        if self._looks_at_actions:
            self._looks_at_actions = False  # it has
            if self._actions.is_leaf and EnvPoolFastPath.fits(self._pool):
                self._fast_path = EnvPoolFastPath(self._pool)

    def recv(self) -> PoolReply:
        if self._resetting is not None:
            ids, self._resetting = self._resetting, None
            answer = self._pool.reset(ids.astype(np.int32))
        else:
            answer = self._pool.recv() if self._fast_path is None else self._fast_path.recv()
        reply, rows = self._reader.read(answer, self._last)
        self._in_flight -= len(reply.env_ids)
        if len(self.spec.agents) > 1:
            self._turns = self._reader.turns
            self._rows[reply.env_ids] = True if rows is None else rows
        return reply

    def forget(self) -> bool:
        if self._make_pool is None:
            return False
        self._drop_pool()  # the next reset builds another pool
        self._seeds = (np.random.SeedSequence().generate_state(len(self._everyone)) >> 1).tolist()
        self._in_flight, self._resetting = 0, None
        return True

    def env(self, i: int) -> Any:
        return _PooledEnv(self, i)

    def close(self) -> None:
        self._drop_pool()

    def _drop_pool(self) -> None:
        pool, self._pool, self._fast_path, self._looks_at_actions = self._pool, None, None, True
        close = getattr(pool, "close", None)
        if close is not None:
            close()


class _PooledEnv:
    """One env of a pool, for rendering only."""

    def __init__(self, pool: EnvPoolAdapter, i: int) -> None:
        self._of, self._i = pool, i

    def __repr__(self) -> str:
        return f"<env {self._i} of {self._of.spec.name}>"

    @property
    def render_mode(self) -> str | None:
        mode: str | None = getattr(self._of._pool, "render_mode", None)
        return mode

    def render(self) -> Any:
        pool = self._of._pool
        if not hasattr(pool, "render"):
            raise ArgumentError(f"{self._of.spec.name} has no render()")
        frames = pool.render(env_ids=np.array([self._i], np.int32))
        return None if frames is None else frames[0]


_ASKED = ["env_id", "players.env_id", "action"]
_EXPECTED = {"obs", "reward", "done", "trunc", "elapsed_step"}
_KNOWN = {*_EXPECTED, "discount", "step_type"}
_PLAYERS = "info:players.env_id"  # with one player, the same as env_id


class EnvPoolFastPath:
    """Sends actions to EnvPool's compiled pool and receives replies, without its Python layer, if it `fits`."""

    def __init__(self, pool: Any) -> None:
        self._send, self._recv = pool._send, pool._recv
        self._keys: list[str] = list(pool._state_keys)
        self._infos = [(k, k.removeprefix("info:")) for k in self._keys if k.startswith("info:") and k != _PLAYERS]
        self._everyone = np.arange(pool.config["num_envs"], dtype=np.int32)
        self._dtype: np.dtype[Any] = np.dtype(pool._spec._action_spec[-1][0])

    @staticmethod
    def fits(pool: Any) -> bool:
        """Return whether the pool, its ``send`` and its ``recv`` are EnvPool's own, and its arrays have this form."""
        kind = type(pool)
        for name in ("send", "recv", "_to", "_from"):  # a subclass may override them
            method = getattr(kind, name, None)
            if not str(getattr(method, "__module__", "")).startswith("envpool.python.") or name in vars(pool):
                return False
        if not all(hasattr(pool, name) for name in ("_send", "_recv", "_state_keys", "_action_keys")):
            return False
        keys = {key for key in pool._state_keys if key != _PLAYERS}
        known = keys >= _EXPECTED and all(key in _KNOWN or key.startswith("info:") for key in keys)
        flat = not any("." in key for key in keys)
        return list(pool._action_keys) == _ASKED and known and flat and pool.config.get("max_num_players") == 1

    def send(self, action: NDArray[Any], ids: NDArray[np.int64] | None) -> None:
        """Step some envs, or all; the actions are copied."""
        envs = self._everyone if ids is None else ids.astype(np.int32)
        self._send([envs, envs, action.astype(self._dtype, order="C")])

    def recv(self) -> tuple[Any, ...]:
        """Wait for the next reply; return the same as the pool's ``recv``."""
        reply = dict(zip(self._keys, self._recv(), strict=True))
        info = {name: reply[key] for key, name in self._infos}
        info["elapsed_step"] = reply["elapsed_step"]
        truncated = reply["trunc"]
        return reply["obs"], reply["reward"], reply["done"] & ~truncated, truncated, info


BoolArray = NDArray[np.bool_]


_MASKS = ("legal_action_mask", "action_mask")
_CUT = "TimeLimit.truncated"


@dataclass(frozen=True, kw_only=True)
class PoolForm:
    """Spaces, players and calls of a pool, or of an EnvPool spec before its pool is built."""

    name: str
    num_envs: int  # spares included
    batch_size: int  # rows per reply
    num_players: int  # most players of one env
    observation_space: Any  # one player's
    action_space: Any  # one player's
    mask_size: int | None = None  # of the declared action masks
    max_episode_steps: int | None = None
    autoreset: AutoresetMode = AutoresetMode.NEXT_STEP
    metadata: Mapping[str, Any]


def form_of(pool: Any, *, name: str | None = None) -> PoolForm:
    """Read the form of a pool, or of an EnvPool spec; ``name`` defaults to that of its class.

    Its ``config``, a mapping or a named tuple, has ``num_envs`` and, optionally, ``batch_size``, ``max_num_players``
    and ``max_episode_steps``, or these are attributes.
    """
    name = name or type(pool).__name__
    config = getattr(pool, "config", {})
    config = config if isinstance(config, Mapping) else config._asdict()

    def said(key: str, default: Any) -> Any:
        value = config.get(key, None)
        return getattr(pool, key, default) if value is None else value

    num_envs = said("num_envs", None)
    if num_envs is None:
        raise ContractError(f"{name}: expected a pool that says its num_envs, in config or as an attribute")
    observation_space, action_space = spaces_of(pool, name)
    states = getattr(getattr(pool, "spec", pool), "state_array_spec", {})
    legal = states.get("info:legal_action_mask")
    limit = said("max_episode_steps", None)
    metadata = dict(getattr(pool, "metadata", {}))
    autoreset = AutoresetMode.declared_by(metadata, name) or AutoresetMode.NEXT_STEP
    metadata.pop("autoreset_mode", None)
    return PoolForm(
        name=name,
        num_envs=int(num_envs),
        batch_size=int(said("batch_size", 0)) or int(num_envs),
        num_players=int(said("max_num_players", 1)),
        observation_space=observation_space,
        action_space=action_space,
        mask_size=int(legal.shape[-1]) if legal is not None and len(legal.shape) == 1 else None,
        max_episode_steps=None if limit is None else int(limit),
        autoreset=autoreset,
        metadata=metadata,
    )


def spaces_of(pool: Any, name: str) -> tuple[Any, Any]:
    """Return one env's observation and action space. EnvPool builds them on first access, and casts their bounds."""
    found = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*precision lowered by casting", UserWarning)
        for kind in ("observation_space", "action_space"):
            space = getattr(pool, f"single_{kind}", None)
            found.append(getattr(pool, kind, None) if space is None else space)
            if found[-1] is None:
                raise ContractError(f"{name}: expected a pool with an {kind}")
    observation_space, action_space = found
    return observation_space, action_space


class EnvPoolReader:
    """Reads the replies of one pool; ``turns`` is whether they have whose turn it is.

    `mask_in_obs`: the observation space has an ``action_mask`` that is taken out of it.
    """

    def __init__(self, form: PoolForm, spec: EnvSpec, *, mask_in_obs: bool) -> None:
        self._name = spec.name
        self._num_agents = len(spec.agents)
        self._limit = form.max_episode_steps
        self._tree = SpaceTree(form.observation_space)
        self._leaves: list[tuple[int, Leaf]] = list(enumerate(self._tree.leaves))
        self._mask_leaf: int | None = None
        if mask_in_obs:
            self._mask_leaf = next(k for k, leaf in self._leaves if leaf.path == "action_mask")
            del self._leaves[self._mask_leaf]
        # Beside a Box, an entry of that name is an info like others.
        self._mask_keys = () if isinstance(form.action_space, Box) else _MASKS
        self._position = np.zeros(form.num_envs, np.int64)
        self.turns = False

    def read(self, answer: Any, asked: Ids) -> tuple[PoolReply, BoolArray | None]:
        """Read one reply; return it, and which players have a row, (n, A) bool, None for all."""
        # If `info` does not name the reply's envs, they are those of the last request, `asked`.
        obs, reward, terminated, truncated, info = self._parts(answer)
        ids = np.asarray(info.get("env_id", asked)).astype(np.int64)
        n, num_agents = len(ids), self._num_agents
        players = info.get("players", {})
        player_rows = None
        if num_agents > 1:
            player_rows = _PlayerRows(ids, players, num_agents, self._position, self._name)
        num_rows = n if player_rows is None else player_rows.num_rows
        turn = info.get("current_player")
        self.turns = turn is not None and num_agents > 1
        parts = self._tree.flatten(obs)
        given = None if player_rows is None else player_rows.given
        elapsed = info.get("elapsed_step")
        if reward is None:
            reward = np.zeros(num_rows)
        if terminated is None:
            terminated = truncated = np.zeros(n, np.bool_)
        elif truncated is None:
            done = np.asarray(terminated, np.bool_)
            truncated = done & self._cut_short(info, elapsed, n)
            terminated = done & ~truncated
        reply = PoolReply(
            env_ids=ids,
            obs=[[self._spread(f"obs {leaf.path!r}", parts[k], player_rows, n, leaf) for k, leaf in self._leaves]],
            reward=self._spread("reward", reward, player_rows, n),
            terminated=self._spread("terminated", terminated, player_rows, n),
            truncated=self._spread("truncated", truncated, player_rows, n),
            elapsed=None if elapsed is None else np.asarray(elapsed),
        )
        reply.present = given
        if self.turns:
            reply.acting = np.asarray(turn)[:, None] == np.arange(num_agents)
        mask = next((info[key] for key in self._mask_keys if key in info), None)
        if self._mask_leaf is not None:
            mask = parts[self._mask_leaf]
        if mask is not None:
            mask = np.asarray(mask, np.bool_)
            if mask.ndim != 3 or len(mask) != n:
                mask = self._spread("the mask", mask, player_rows, n)
            reply.masks = [mask]
        reply.columns = dict(self._columns(info, player_rows, n))
        return reply, given

    def _parts(self, answer: Any) -> tuple[Any, Any, Any, Any, Mapping[str, Any]]:
        parts = tuple(answer) if isinstance(answer, (tuple, list)) and not hasattr(answer, "_fields") else ()
        if parts and (parts[-1].__class__ is dict or isinstance(parts[-1], Mapping)):
            match parts:
                case (obs, info):
                    return obs, None, None, None, info
                case (obs, reward, done, info):
                    return obs, reward, done, None, info
                case (obs, reward, terminated, truncated, info):
                    return obs, reward, terminated, truncated, info
        got = f"{len(parts)} values" if parts else type(answer).__name__
        raise ContractError(
            f"{self._name}: recv() should return (obs, reward, terminated, truncated, info), as EnvPool's "
            f"env_type='gymnasium' does, got {got}"
        )

    def _cut_short(self, info: Mapping[str, Any], elapsed: Any, n: int) -> BoolArray:
        """Return (n,) bool: episodes that reached the time limit, for pools with one ``done`` flag."""
        if _CUT in info:
            return np.asarray(info[_CUT], np.bool_)
        if elapsed is not None and self._limit is not None:
            return np.asarray(elapsed) >= self._limit
        return np.zeros(n, np.bool_)

    def _spread(
        self, what: str, value: Any, player_rows: _PlayerRows | None, n: int, leaf: Leaf | None = None
    ) -> NDArray[Any]:
        """Spread entries per row, or per env, over players: (n, A, …)."""
        array = value if value.__class__ is np.ndarray else np.asarray(value)
        num_rows = n if player_rows is None else player_rows.num_rows
        if array.ndim and len(array) == num_rows and (player_rows is None or num_rows != n or leaf or what == "reward"):
            out = array[:, None] if player_rows is None else player_rows.spread(array)
        elif player_rows is not None and array.ndim and len(array) == n:
            out = np.broadcast_to(array[:, None], (n, self._num_agents, *array.shape[1:]))
        else:
            expected = f"{num_rows} rows" if player_rows is None else f"{num_rows} rows of players, or {n} of envs"
            raise ContractError(f"{self._name}: {what}: expected {expected}, got shape {array.shape}")
        if leaf is not None and (
            out.shape[2:] != leaf.shape or not (out.dtype == leaf.dtype or _fits(out.dtype, leaf.dtype))
        ):
            raise ContractError(
                f"{self._name}: {what}: expected {leaf.dtype} of shape {leaf.shape}, got {out.dtype} of {out.shape[2:]}"
            )
        return out

    def _columns(
        self, info: Mapping[str, Any], player_rows: _PlayerRows | None, n: int
    ) -> Iterator[tuple[Path, NDArray[Any]]]:
        """Return the infos that no other field of the reply holds."""
        for key, value in info.items():
            if key in ("env_id", "current_player", _CUT) or (key in self._mask_keys and self._mask_leaf is None):
                continue
            if key != "players":
                yield from self._leaves_of((key,), value, n)
                continue
            for name, item in value.items():
                if name not in ("env_id", "id"):
                    rows = np.asarray(item)
                    yield (OF_AGENTS, name), rows[:, None] if player_rows is None else player_rows.spread(rows)

    def _leaves_of(self, path: Path, value: Any, n: int) -> Iterator[tuple[Path, NDArray[Any]]]:
        if value.__class__ is not np.ndarray and isinstance(value, Mapping):
            for key, inner in value.items():
                yield from self._leaves_of((*path, str(key)), inner, n)
            return
        array = np.asarray(value)
        if not array.ndim or len(array) != n:
            where = ".".join(path)
            raise ContractError(
                f"{self._name}: info {where!r}: expected one entry for each of {n} envs, got {array.shape}"
            )
        yield path, array


class _PlayerRows:
    """Env and player of each of R rows, from ``info["players"]``; without ``id``, players are numbered in row order.

    `given` (n, A) bool are the players that have a row; None: all. `position` is scratch, one entry per env of the
    pool.
    """

    def __init__(
        self, ids: Ids, players: Mapping[str, Any], num_agents: int, position: NDArray[np.int64], name: str
    ) -> None:
        n = len(ids)
        self._shape = (n, num_agents)
        self._where: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
        self.given: BoolArray | None = None
        in_order = np.repeat(ids, num_agents)
        env_id = np.asarray(players.get("env_id", in_order)).astype(np.int64)
        self.num_rows = len(env_id)
        player = players.get("id")
        if np.array_equal(env_id, in_order) and (
            player is None or np.array_equal(player, np.tile(np.arange(num_agents), n))
        ):
            return
        position[ids] = np.arange(n)
        row = position[np.minimum(env_id, len(position) - 1)]
        if not np.array_equal(ids[row], env_id):
            raise ContractError(f"{name}: rows of players in envs {env_id.tolist()}, expected those of {ids.tolist()}")
        player = _count(row) if player is None else np.asarray(player).astype(np.int64)
        if len(player) != len(row) or (len(player) and not 0 <= player.min() <= player.max() < num_agents):
            raise ContractError(f"{name}: expected players 0 to {num_agents - 1}, one per row, got {player.tolist()}")
        self._where = row, player
        self.given = np.zeros(self._shape, np.bool_)
        self.given[self._where] = True
        if np.count_nonzero(self.given) != len(row):
            raise ContractError(f"{name}: a player has two rows: env_id {env_id.tolist()}, id {player.tolist()}")
        if self.given.all():
            self.given = None

    def spread(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Spread rows (R, …) to (n, A, …), with zeros for players without a row."""
        if self._where is None:
            return rows.reshape(*self._shape, *rows.shape[1:])
        out = np.zeros((*self._shape, *rows.shape[1:]), rows.dtype)
        out[self._where] = rows
        return out


def _count(row: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number the rows of each env from 0, in row order."""
    order = np.argsort(row, kind="stable")
    ordered = row[order]
    first = np.searchsorted(ordered, ordered)
    out = np.empty(len(row), np.int64)
    out[order] = np.arange(len(row)) - first
    return out


def _fits(got: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    """Return whether values of one dtype fit another without loss; bools fit a MultiBinary's int8."""
    return got.kind == "b" or np.can_cast(got, wanted, "same_kind")

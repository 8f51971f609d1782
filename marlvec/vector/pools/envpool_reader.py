"""Reads an EnvPool-like pool: its form from its config, and ``recv()``'s results as `PoolReply`.

EnvPool returns players' rows flat, in the order in which envs became ready; the reader adds the agent axis.
Axis letters: n envs, R rows (players of those envs), A agents.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray

from marlvec.envs.autoreset import AutoresetMode
from marlvec.envs.spec import EnvSpec
from marlvec.errors import ContractError
from marlvec.spaces import Leaf, SpaceTree
from marlvec.vector.data.infos import OF_AGENTS, Path
from marlvec.vector.pools.pool import PoolReply

__all__ = ["EnvPoolReader", "PoolForm", "form_of", "spaces_of"]

BoolArray = NDArray[np.bool_]
Ids = NDArray[np.int64]

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

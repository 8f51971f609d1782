"""`EnvPoolAdapter`: an EnvPool pool as a `Pool`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.envs.adapters.gymnasium import AGENT
from marlvec.envs.spec import EnvSpec
from marlvec.errors import ArgumentError, BusyError
from marlvec.spaces import SpaceTree
from marlvec.spaces.action_masks import split_action_mask
from marlvec.vector.pools.envpool_reader import EnvPoolReader, PoolForm, spaces_of
from marlvec.vector.pools.pool import Leaves, Pool, PoolReply

__all__ = ["EnvPoolAdapter", "EnvPoolFastPath"]

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

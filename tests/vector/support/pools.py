"""Pools over single envs: what `PoolVectorEnv` makes of them must be what other backends make of the same envs.

`MirrorPool` holds any envs, by a `SyncVectorEnv` that resets nothing by itself. `WorldPool` has EnvPool's face, and is
driven by the same plain loops as the reference. It is strict where EnvPool is not: it refuses actions in the wrong
number or outside of their space, also where it throws them away, and where EnvPool would wait for ever it raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import tree
from numpy.typing import NDArray

from marlvec import SyncVectorEnv, VectorStep
from marlvec.vector.pools.pool import FinalRows, Leaves, Pool, PoolReply
from tests.vector.support.drivers import Driver, News, TurnDriver, driver_of, spaces_of
from tests.vector.support.reference import COMMON, Call


class MirrorPool(Pool):
    """The pool.

    Args:
        factories: One an env.
        autoreset: What it does by itself at the end of an episode.
        gives: Whether it gives its observations away, read-only.
        tells: Whether it says itself who is alive, and which episodes are over.
        keeps_state: Whether states of envs can be saved.
    """

    steps_all = True

    def __init__(
        self, factories: Any, autoreset: str = "disabled", *, gives: bool = False, tells: bool = False, **options: Any
    ) -> None:
        with SyncVectorEnv(factories[:1]) as probe:
            has_state = probe.spec.state_space is not None
        self.inner = SyncVectorEnv(factories, autoreset_mode="disabled", state=has_state, **options)
        self.states: Any = None  # of all envs
        self.spec = self.inner.spec
        self.num_envs = self.batch_size = self.inner.num_envs
        self.autoreset, self.gives, self.tells = autoreset, gives, tells
        self.over = np.zeros(self.num_envs, bool)
        self.request: Any = None
        self.dtypes: list[Any] = []

    def action_dtype(self, leaf: Any) -> Any:
        return np.dtype(np.int32) if leaf.dtype == np.int64 else leaf.dtype

    def reset(self, ids: Any, seeds: Sequence[int | None], options: Any) -> None:
        self.request = partial(self._reset, ids, list(seeds), list(options))

    def send(self, ids: Any, actions: Leaves, acting: Any) -> None:
        self.dtypes = [leaf.dtype for leaves in actions for leaf in leaves]
        self.request = partial(self._step, [[leaf.copy() for leaf in leaves] for leaves in actions])

    def recv(self) -> PoolReply:
        request, self.request = self.request, None
        return request()

    def forget(self) -> bool:
        self.request = None
        return True

    def env(self, i: int) -> Any:
        return self.inner

    def close(self) -> None:
        self.inner.close()

    def state(self) -> Any:
        return self.states

    def state_obstacle(self) -> str | None:
        return next(iter(self.inner.state_obstacles().values()), None)

    def get_state(self, ids: Any) -> dict[str, Any]:
        saved = self.inner.get_state(ids)
        return {"inner": saved, "over": self.over[ids]}

    def check_state(self, state: Any, n: int) -> None:
        pass

    def set_state(self, ids: Any, state: Any, places: Any) -> None:
        self.inner.set_state(state["inner"], ids, from_ids=np.asarray(state["inner"]["env_ids"])[places])
        self.over[ids] = state["over"][places]

    def _ask(self, ids: Any, seeds: Any = None, options: Any = None) -> VectorStep:
        self.inner.async_reset(seed=seeds, options=options, env_ids=ids)
        self.over[ids] = False
        return self.inner.recv()

    def _reset(self, ids: Any, seeds: Any, options: Any) -> PoolReply:
        return self._reply(self._ask(ids, seeds, options))

    def _step(self, actions: Leaves) -> PoolReply:
        groups = self.spec.groups
        again = np.flatnonzero(self.over)
        going = np.flatnonzero(~self.over)
        trees = [
            group.action_tree.unflatten([leaf[going] for leaf in leaves])
            for group, leaves in zip(groups, actions, strict=True)
        ]
        begun = self._reply(self._ask(again)) if len(again) else None
        if not len(going):
            assert begun is not None
            return begun
        if self.inner.grouped:
            self.inner.send({group.name: tree for group, tree in zip(groups, trees, strict=True)}, going)
        else:
            self.inner.send(trees[0], going)
        step = self.inner.recv()
        reply = self._reply(step)
        done = np.flatnonzero(step.done)
        if self.autoreset == "next_step":
            self.over[reply.env_ids[done]] = True
        if self.autoreset == "same_step" and len(done):
            obs = [[leaf[done].copy() for leaf in leaves] for leaves in reply.obs]
            state = None if reply.state is None else reply.state[done].copy()
            infos = {int(i): reply.infos.pop(int(i)) for i in reply.env_ids[done] if int(i) in reply.infos}
            new = self._reply(self._ask(reply.env_ids[done]))
            reply.finals = FinalRows(done, obs, state, new.present, infos)
            reply.alive = self._put(reply.alive, done, new.alive)
            assert new.env_ids.tolist() == reply.env_ids[done].tolist()
            reply.acting = self._put(reply.acting, done, new.acting)
            reply.state = self._put(reply.state, done, new.state)
            for ours, theirs in zip(reply.obs, new.obs, strict=True):
                for leaf, rows in zip(ours, theirs, strict=True):
                    leaf[done] = rows
            for mask, rows in zip(reply.masks or [], new.masks or [], strict=True):
                self._put(mask, done, rows)
            reply.infos |= new.infos
        return reply if begun is None else _joined(reply, begun)

    def _put(self, array: Any, rows: Any, new: Any) -> Any:
        if array is not None:
            array[rows] = new
        return array

    def _reply(self, step: VectorStep) -> PoolReply:
        whole = len(step) == self.num_envs
        if step.state is not None:
            if self.states is None:
                self.states = np.zeros((self.num_envs, *step.state.shape[1:]), step.state.dtype)
            self.states[step.env_ids] = step.state
        masks = [None if mask is None else mask.copy() for mask in step.action_masks]
        reply = PoolReply(
            env_ids=step.env_ids,
            obs=[[leaf.copy() for leaf in leaves] for leaves in step.obs_leaves],
            reward=step.rewards,
            terminated=step.terminated,
            truncated=step.truncated,
            present=None if self.tells else step.alive | step.terminated | step.truncated,
            alive=step.alive.copy() if self.tells else None,
            done=step.done.copy() if self.tells else None,
            acting=step.acting.copy(),
            masks=None if all(mask is None for mask in masks) else masks,
            infos=dict(step._infos),
            state=step.state.copy() if step.state is not None and self.brings_state else None,
            gives_obs=self.gives and whole and (self.tells or bool(step.alive.all())),
        )
        if reply.gives_obs and self.autoreset != "same_step":
            for leaves in reply.obs:
                for leaf in leaves:
                    leaf.flags.writeable = False
        return reply


def _joined(a: PoolReply, b: PoolReply) -> PoolReply:
    """Rows of both, in order of their envs."""
    order = np.argsort(np.concatenate([a.env_ids, b.env_ids]))

    def join(x: Any, y: Any) -> Any:
        return None if x is None else np.concatenate([x, y])[order]

    return PoolReply(
        env_ids=join(a.env_ids, b.env_ids),
        obs=[[join(x, y) for x, y in zip(p, q, strict=True)] for p, q in zip(a.obs, b.obs, strict=True)],
        reward=join(a.reward, b.reward),
        terminated=join(a.terminated, b.terminated),
        truncated=join(a.truncated, b.truncated),
        present=join(a.present, b.present),
        alive=join(a.alive, b.alive),
        done=join(a.done, b.done),
        acting=join(a.acting, b.acting),
        masks=None if a.masks is None or b.masks is None else [*map(join, a.masks, b.masks)],
        infos=a.infos | b.infos,
        state=join(a.state, b.state),
    )


Factories = Sequence[Callable[[], Any]]


@dataclass
class Life:
    """One env, and what its last answer said."""

    driver: Driver
    seed: int | None = None
    over: bool = False
    elapsed: int = 0
    shown: dict[int, Any] = field(default_factory=dict)
    news: News = field(default_factory=lambda: News({}, set(), set()))

    @property
    def rows(self) -> list[int]:
        """Which players have a row."""
        return sorted(self.news.alive | set(self.news.ended))

    @property
    def nothing(self) -> Any:
        """The row of a player who waits for its first turn."""
        return tree.map_structure(np.zeros_like, next(iter(self.shown.values())))

    def begin(self) -> None:
        self.news = self.driver.reset(self.seed, None)
        self.seed, self.over, self.elapsed, self.shown = None, False, 0, dict(self.news.obs)

    def step(self, actions: dict[int, Any]) -> None:
        self.news = self.driver.step({a: action for a, action in actions.items() if a in self.news.acting})
        self.shown.update(self.news.obs)
        self.elapsed += 1
        self.over = not self.news.alive


class WorldPool:
    """The pool.

    Args:
        lives: Its envs.
        batch_size: Rows it hands out at a time; None: all envs'.
        seeds: Of each env's first reset.
        shuffle: Seed of the order in which envs become ready; None: as they were asked.
        style: ``"flags"``; ``"done"``: one flag, and ``TimeLimit.truncated`` in the infos; ``"elapsed"``: one flag, and
            a limit in the config.
        declare_mask: Whether it says beforehand that there are masks.
        extra: More infos: env index and steps since the reset → one dict, the same keys always.
        private: Whether it has EnvPool's ``_reset``, which asks and does not wait.
    """

    metadata = {"render_modes": ["rgb_array"]}
    render_mode = "rgb_array"

    def __init__(
        self,
        lives: list[Life],
        *,
        batch_size: int | None = None,
        seeds: Sequence[int] | None = None,
        shuffle: int | None = None,
        style: str = "flags",
        declare_mask: bool = False,
        extra: Callable[[int, int], dict[str, Any]] | None = None,
        private: bool = True,
    ) -> None:
        self.lives, self.style, self.extra = lives, style, extra
        for life, seed in zip(lives, [None] * len(lives) if seeds is None else seeds, strict=True):
            life.seed = seed
        spaces = spaces_of(lives[0].driver)
        self.observation_space, self.action_space, mask_size = spaces[0]
        self.players = len(spaces)
        self.turns = isinstance(lives[0].driver, TurnDriver)
        self.batch_size = batch_size or len(lives)
        self.config: dict[str, Any] = {"num_envs": len(lives), "batch_size": self.batch_size}
        self.config["max_num_players"] = self.players
        if style == "elapsed":
            self.config["max_episode_steps"] = lives[0].driver.env.world.script.length
        if declare_mask:
            self.spec = SimpleNamespace(state_array_spec={"info:legal_action_mask": np.zeros(mask_size or 0)})
        self.masked = mask_size is not None
        self.queue: list[tuple[int, Any]] = []
        self.rng = None if shuffle is None else np.random.default_rng(shuffle)
        self.closed = False
        self.resets = 0
        if private:
            self._reset = self._ask_resets

    @property
    def counts(self) -> bool:
        return self.batch_size < len(self.lives) or self.players > 1

    def reset(self, env_id: NDArray[np.int32] | None = None) -> Any:
        self._ask_resets(np.arange(len(self.lives), dtype=np.int32) if env_id is None else env_id)
        answer = self.recv()
        return answer[0], answer[-1]

    def async_reset(self) -> None:
        self._ask_resets(np.arange(len(self.lives), dtype=np.int32))

    def _ask_resets(self, env_id: NDArray[np.int32]) -> None:
        assert env_id.dtype == np.int32
        self._ask([(i, None) for i in env_id.tolist()])

    def send(self, action: Any, env_id: NDArray[np.int32] | None = None) -> None:
        ids = list(range(len(self.lives))) if env_id is None else env_id.tolist()
        many = self.players > 1 and not self.turns
        rows = [(i, a) for i in ids for a in (self.lives[i].rows if many else [0])]
        actions: dict[int, dict[int, Any]] = {i: {} for i in ids}
        for k, (i, a) in enumerate(rows):
            own = tree.map_structure(lambda leaf, k=k: leaf[k], action)
            assert self.action_space.contains(own), (i, a, own)
            for player in range(self.players) if self.turns else [a]:
                actions[i][player] = own
        assert {len(leaf) for leaf in tree.flatten(action)} <= {len(rows)}
        self._ask(list(actions.items()))

    def _ask(self, requests: list[tuple[int, Any]]) -> None:
        assert not self.closed
        busy = {i for i, _ in self.queue}
        assert not busy & {i for i, _ in requests}, "an env was asked twice"
        assert self.counts or not self.queue, "EnvPool mixes up the rows of two calls"
        self.queue += requests

    def recv(self) -> Any:
        assert not self.closed
        count = self.batch_size if self.counts else len(self.queue)
        assert 0 < count <= len(self.queue), f"EnvPool waits for ever: {len(self.queue)} asked, {count} a batch"
        if self.rng is not None and (self.counts or self.players > 1):
            self.rng.shuffle(self.queue)
        chosen, self.queue = self.queue[:count], self.queue[count:]
        for i, actions in chosen:
            life = self.lives[i]
            if actions is None or life.over:
                self.resets += 1
                life.begin()
            else:
                life.step(actions)
        return self._answer([i for i, _ in chosen])

    def step(self, action: Any, env_id: NDArray[np.int32] | None = None) -> Any:
        self.send(action, env_id)
        return self.recv()

    def render(self, env_ids: Any = None) -> Any:
        return np.stack([np.full((2, 2, 3), i, np.uint8) for i in env_ids])

    def close(self) -> None:
        self.closed = True

    def _answer(self, ids: list[int]) -> Any:
        lives = [self.lives[i] for i in ids]
        rows = [(life, i, a) for life, i in zip(lives, ids, strict=True) for a in life.rows]
        seen = [life.shown.get(a, life.nothing) for life, _, a in rows]
        obs = tree.map_structure(lambda *leaves: np.stack(leaves), *seen)
        reward = np.array([life.news.rewards.get(a, 0.0) for life, _, a in rows])
        ended = np.array([life.news.ended.get(a, (False, False)) for life, _, a in rows], bool)
        elapsed = np.array([life.elapsed for life in lives], np.int32)
        info: dict[str, Any] = {"env_id": np.array(ids, np.int32), "elapsed_step": elapsed}
        info["players"] = {"env_id": np.array([i for _, i, _ in rows], np.int32)}
        if self.players > 1:
            info["players"]["id"] = np.array([a for _, _, a in rows], np.int32)
        if self.turns:
            info["current_player"] = np.array([min(life.news.acting, default=0) for life in lives])
        if self.masked:
            owners = [(life, min(life.news.acting, default=0)) for life in lives]
            if self.players > 1 and not self.turns:
                owners = [(life, a) for life, _, a in rows]
            found = [life.news.masks.get(a) for life, a in owners]
            blank = np.ones(self.action_space.n, bool)
            info["legal_action_mask"] = np.stack([blank if mask is None else mask.astype(bool) for mask in found])
        if self.extra is not None:
            told = [self.extra(i, life.elapsed) for life, i in zip(lives, ids, strict=True)]
            info.update(tree.map_structure(lambda *leaves: np.stack(leaves), *told))
        terminated, truncated = ended[:, 0], ended[:, 1]
        if self.style == "flags":
            return obs, reward, terminated, truncated, info
        if self.style == "done":
            info["TimeLimit.truncated"] = truncated
        return obs, reward, terminated | truncated, info


class PoolShop:
    """Makes pools over the same envs again and again, as ``reset(seed=…)`` asks for."""

    def __init__(self, factories: Factories, num_spares: int = 0, **options: Any) -> None:
        spares = [factories[k % len(factories)] for k in range(num_spares)]
        self.lives = [Life(driver_of(factory())) for factory in (*factories, *spares)]
        self.options = options
        self.made: list[WorldPool] = []
        self.seeds: list[list[int] | None] = []

    def __call__(self, num_envs: int, seed: list[int] | None = None) -> WorldPool:
        assert num_envs <= len(self.lives)
        seeds = None if seed is None else [*seed, *[0] * (len(self.lives) - len(seed))]
        for life in self.lives:
            life.over = False
        self.made.append(WorldPool(self.lives, seeds=seeds, **self.options))
        self.seeds.append(seed)
        return self.made[-1]


def tell_elapsed(calls: list[Call], mode: str) -> list[Call]:
    """Let the reference's envs say how many steps have passed since their reset, as pools do."""
    elapsed: NDArray[np.int64] | None = None
    for call in calls:
        frame = call.expected
        n = len(frame.env_ids)
        asked = list(range(n)) if call.env_ids is None else call.env_ids
        if elapsed is None:
            elapsed = np.zeros(n, np.int64)
        frame.infos, frame.final_infos = [{} for _ in range(n)], [{} for _ in range(n)]
        for i in asked:
            again = call.kind == "reset" or bool(frame.reset_mask[i])
            elapsed[i] = 0 if again else elapsed[i] + 1
            if mode == "same_step" and call.kind == "step" and frame.done[i]:
                frame.final_infos[i] = {COMMON: {"elapsed_step": int(elapsed[i])}}
                elapsed[i] = 0
            frame.infos[i] = {COMMON: {"elapsed_step": int(elapsed[i])}}
    return calls

"""`MirrorPool`: a `Pool` over any envs, by a `SyncVectorEnv` that resets nothing by itself.

What `PoolVectorEnv` makes of it must be what other backends make of the same envs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from marlvec import SyncVectorEnv, VectorStep
from marlvec.vector.pools.pool import FinalRows, Leaves, Pool, PoolReply


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

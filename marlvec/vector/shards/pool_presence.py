"""`Presence`: which agents are in the episode, for pools whose replies do not have that."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from marlvec.envs.spec import EnvSpec
from marlvec.errors import ContractError
from marlvec.vector.data.buffers import Selection
from marlvec.vector.pools.pool import Leaves, PoolReply

__all__ = ["Presence"]

BoolArray = NDArray[np.bool_]


class Presence:
    """Completes the replies of one pool: each then has who is alive, and rows ready to use."""

    def __init__(self, spec: EnvSpec, num_envs: int) -> None:
        self._name, self._agents = spec.name, spec.agents
        self._members = [list(group.agents) for group in spec.groups]
        self.had_rows = np.zeros((num_envs, len(spec.agents)), np.bool_)

    def complete(self, reply: PoolReply, rows: Selection, before: BoolArray, began: BoolArray | None) -> PoolReply:
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
        self, reply: PoolReply, rows: Selection, before: BoolArray, began: BoolArray | None
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

"""`PoolShard`: the counterpart of `Shard` for the envs of a pool; its rows are equal, bit for bit.

One thing differs: a pool may show all players every move of a turn-based game, where PettingZoo's AEC shows it to the
player who acts next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.env_ids import rows_of
from marlvec.envs.autoreset import AutoresetMode, AutoresetRules
from marlvec.envs.spec import COMMON, refuse_masks
from marlvec.errors import ArgumentError, ContractError
from marlvec.spaces.action_masks import mask_refusal
from marlvec.vector.data.buffers import Buffers, Selection
from marlvec.vector.data.infos import OF_AGENTS, InfoColumns
from marlvec.vector.data.report import Report
from marlvec.vector.pools.pool import Leaves, Pool, PoolReply, harmless_action
from marlvec.vector.pools.pool_queue import PoolQueue
from marlvec.vector.shards.batched_shard import BatchedShard
from marlvec.vector.shards.phase import EnvEvent, EnvPhase
from marlvec.vector.shards.pool_presence import Presence

__all__ = ["PoolShard"]

Ids = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


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
        self._presence = Presence(pool.spec, n)
        self._saved["had_rows"] = self._presence.had_rows
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

    def read(self, reply: PoolReply) -> tuple[Ids, Report]:
        """Write the rows of a reply; return the envs that are ready now, and their report."""
        ids = self._in_order(reply.env_ids)
        if ids is not reply.env_ids and np.count_nonzero(ids != reply.env_ids):
            reply = reply.select(np.argsort(reply.env_ids))
        self._refuse_masks_in_infos(reply)
        report, rows = Report(infos=reply.infos), self._rows(ids)
        began, replaced = self._note_beginnings(reply, ids, rows)
        reply = self._presence.complete(reply, rows, self._buffers.alive[rows], began)
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

    def _note_beginnings(
        self, reply: PoolReply, ids: Ids, rows: Selection
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

    def _finish(self, reply: PoolReply, done: BoolArray, report: Report) -> Ids:
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

    def _rows(self, ids: Ids) -> Selection:
        """Return the rows of envs that are in order: a slice, so that nothing is copied, if they are consecutive."""
        return slice(None) if ids is self._everyone else rows_of(ids)

    def _write_obs(self, reply: PoolReply, rows: Selection) -> None:
        buffers = self._buffers
        for g, leaves in enumerate(reply.obs):
            if reply.gives_obs:
                buffers.take_obs(g, leaves)
                continue
            for target, leaf in zip(buffers.own_obs(g), leaves, strict=True):
                target[rows] = leaf

    def _write_turns(self, reply: PoolReply, rows: Selection) -> None:
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
        self._note_finals(envs)

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

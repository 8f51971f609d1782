"""Defects of pools: what becomes of rows that a pool has replaced by the next episode's in the same step."""

from __future__ import annotations

from typing import Any

import numpy as np

from marlvec.vector.shards.pool_shard import PoolShard
from tests.defects.registry import Patch, after, found_by

CONTRACT = "tests/vector/pools/test_pool_contract.py"


@found_by(CONTRACT)
def pool_final_obs_of_the_next_episode(patch: Patch) -> None:
    """Final observations of a pool that resets by itself are the next episode's first."""
    snapshot = PoolShard._snapshot

    def confuse(shard: PoolShard, reply: Any, ended: Any) -> None:
        finals, reply.finals = reply.finals, None
        snapshot(shard, reply, ended)
        reply.finals = finals

    patch.setattr(PoolShard, "_snapshot", confuse)


@found_by(f"{CONTRACT}::test_global_states_come_with_every_row")
def pool_final_state_of_the_next_episode(patch: Patch) -> None:
    """The state in which an episode of such a pool ended is the next one's first."""

    def confuse(_: Any, shard: PoolShard, reply: Any, done: Any, report: Any) -> None:
        buffers = shard._buffers
        if reply.state is not None and buffers.final_state is not None:
            buffers.final_state[reply.env_ids[done]] = reply.state[done]

    after(patch, PoolShard, "_finish", confuse)


@found_by(CONTRACT)
def pool_agents_of_the_next_episode_are_all(patch: Patch) -> None:
    """Who is in the episode that such a pool has begun is not looked at: all are."""
    note = PoolShard._note_ends

    def confuse(shard: PoolShard, reply: Any, *args: Any) -> Any:
        if reply.finals is not None:
            reply.finals.present = None
        return note(shard, reply, *args)

    patch.setattr(PoolShard, "_note_ends", confuse)


@found_by(CONTRACT)
def pool_finals_of_those_that_died_before_are_overwritten(patch: Patch) -> None:
    """At an episode's end all agents' final observations are written, also of those that ended before."""
    copy = PoolShard._copy_finals

    def confuse(shard: PoolShard, envs: Any, ended: Any, obs: Any) -> None:
        copy(shard, envs, np.ones_like(ended), obs)

    patch.setattr(PoolShard, "_copy_finals", confuse)


@found_by(f"{CONTRACT}::test_a_saved_state_goes_on_bit_by_bit")
def pool_phases_not_restored(patch: Patch) -> None:
    """A restored pool goes on in the phases that it was in itself."""
    restore = PoolShard.set_state

    def confuse(shard: PoolShard, ids: Any, state: Any, places: Any) -> None:
        kept = shard._phases.values.copy()
        restore(shard, ids, state, places)
        shard._phases.values[:] = kept

    patch.setattr(PoolShard, "set_state", confuse)

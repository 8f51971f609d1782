"""Defects of pools: who is alive, whose episode is over, masks, arrays that a pool hands over, and what becomes of rows
that it has replaced by the next episode's in the same step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from marlvec.vector.buffers import Buffers
from marlvec.vector.pools import pool as pool_shard
from marlvec.vector.pools.envpool import EnvPoolAdapter
from marlvec.vector.pools.pool import AliveTracker, PoolShard
from tests.defects.registry import Patch, after, found_by

CONTRACT = "tests/vector/test_pools.py"
POOL = "tests/vector/test_pools.py"


def completed(patch: Patch, change: Any) -> None:
    """Let ``change(given, completed)`` make another reply of what a pool gave and what became of it."""
    complete = AliveTracker.complete

    def confuse(presence: AliveTracker, reply: Any, *args: Any) -> Any:
        return change(reply, complete(presence, reply, *args))

    patch.setattr(AliveTracker, "complete", confuse)


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
    complete = AliveTracker.complete

    def confuse(presence: AliveTracker, reply: Any, *args: Any) -> Any:
        if reply.finals is not None:
            reply.finals.present = None
        return complete(presence, reply, *args)

    patch.setattr(AliveTracker, "complete", confuse)


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


@found_by(CONTRACT)
def pool_agents_said_to_be_alive_are_those_that_did_not_end(patch: Patch) -> None:
    """What a pool says of who is alive is not looked at: all are, but for those that end in this step."""

    def change(given: Any, reply: Any) -> Any:
        return reply if given.alive is None else replace(reply, alive=~(reply.terminated | reply.truncated))

    completed(patch, change)


@found_by(CONTRACT)
def pool_first_end_ends_the_episode(patch: Patch) -> None:
    """An episode is over as soon as one of its agents ends."""

    def change(_: Any, reply: Any) -> Any:
        over = (reply.terminated | reply.truncated).any(axis=1)
        return reply if reply.finals is not None else replace(reply, done=over)

    completed(patch, change)


@found_by(CONTRACT)
def pool_all_that_are_alive_act(patch: Patch) -> None:
    """Whom a pool lets wait is not looked at."""
    completed(patch, lambda _, reply: replace(reply, acting=reply.alive))


@found_by(POOL)
def pool_masks_of_those_that_wait_are_shown(patch: Patch) -> None:
    """Agents that do not act keep the masks that the pool gave, instead of ones that allow everything."""
    completed(patch, lambda given, reply: replace(reply, masks=given.masks))


@found_by(f"{CONTRACT}::test_rows_that_only_keep_their_place_are_ignored")
def pool_padding_is_in_the_episode(patch: Patch) -> None:
    """A row that only keeps its place makes its agent join again."""

    def confuse(_: Any, presence: AliveTracker, *args: Any) -> None:
        presence.had_rows[:] = False

    after(patch, AliveTracker, "complete", confuse)


@found_by(CONTRACT)
def pool_who_ends_alone_has_no_final_obs(patch: Patch) -> None:
    """Where the pool has begun next episodes, agents of other envs that ended alone get no final observations."""
    snapshot = PoolShard._snapshot

    def confuse(shard: PoolShard, reply: Any, ended: Any) -> None:
        if reply.finals is not None:
            ended = ended & reply.done[:, None]
        snapshot(shard, reply, ended)

    patch.setattr(PoolShard, "_snapshot", confuse)


@found_by(CONTRACT)
def pool_rows_written_over_given_ones_are_lost(patch: Patch) -> None:
    """After arrays that the pool gave, rows of some envs go into a copy that is never read."""

    def confuse(buffers: Buffers, g: int) -> Any:
        return [leaf if leaf.flags.writeable else leaf.copy() for leaf in buffers.obs[g]]

    patch.setattr(Buffers, "own_obs", confuse)


@found_by(CONTRACT)
def pool_given_arrays_are_not_taken_again(patch: Patch) -> None:
    """Of the arrays that a pool gives only the first are taken; all later steps show these."""
    take = Buffers.take_obs

    def confuse(buffers: Buffers, g: int, leaves: Any) -> None:
        if buffers.obs[g][0].flags.writeable:
            take(buffers, g, leaves)

    patch.setattr(Buffers, "take_obs", confuse)


@found_by("tests/properties/test_orders.py")
def pool_resets_of_all_in_the_order_of_the_request(patch: Patch) -> None:
    """Rows of a reset of all envs are taken for those of the order in which it was asked."""

    def as_asked(_: Any, pool: EnvPoolAdapter, ids: Any, *__: Any) -> None:
        pool._last = ids

    after(patch, EnvPoolAdapter, "reset", as_asked)


@found_by(f"{POOL}::test_a_mask_of_players_in_infos_is_refused")
def pool_masks_in_infos_forbid_nothing(patch: Patch) -> None:
    """Masks in infos of a pool, which no policy gets, are infos like others."""
    patch.setattr(pool_shard, "refuse_masks", lambda *_: None)

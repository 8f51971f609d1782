"""Defects of native envs."""

from __future__ import annotations

from typing import Any

from marlvec.vector.shards.native_shard import NativeShard
from tests.defects.registry import Patch, found_by

MPE, BOARDS = "tests/native/test_mpe.py", "tests/native/test_boards_vector.py"
STATES = "tests/native/test_states.py"


@found_by(MPE, BOARDS)
def native_final_obs_of_the_next_episode(patch: Patch) -> None:
    """The final observation of a native env is the next episode's first."""
    begin, copy_finals = NativeShard._begin, NativeShard._copy_finals

    def begin_first(shard: NativeShard, ids: Any, report: Any) -> None:
        begin(shard, ids, report)
        copy_finals(shard, ids)

    patch.setattr(NativeShard, "_begin", begin_first)


@found_by(MPE, "tests/native/test_runner.py")
def native_limit_one_step_late(patch: Patch) -> None:
    """The limit of an episode's steps comes one step late."""
    cut = NativeShard._cut_short
    patch.setattr(NativeShard, "_cut_short", lambda shard, ids, limit: cut(shard, ids, limit + 1))


@found_by(STATES)
def native_state_of_the_first_env(patch: Patch) -> None:
    """All envs get the state of the first one that was saved."""
    set_state = NativeShard.set_state

    def first(shard: NativeShard, ids: Any, state: Any, places: Any) -> None:
        set_state(shard, ids, state, [places[0]] * len(places))

    patch.setattr(NativeShard, "set_state", first)

"""Defects of native envs."""

from __future__ import annotations

import importlib
from typing import Any

from marlvec.native.grids import overcooked, pursuit, warehouse
from marlvec.native.grids.foraging import Foraging
from marlvec.vector.native_shard import NativeShard
from marlvec.vector.thread_team import Share, ThreadTeam
from tests.defects.registry import Patch, found_by

MPE, BOARDS = "tests/native/test_mpe.py", "tests/native/test_boards_vector.py"
STATES = "tests/native/test_states.py"
THREADS = "tests/native/test_thread_team.py"
CHECKS = importlib.import_module("marlvec.testing.check_native_env")  # by name: the package has the function
CHECK = "tests/testing/test_check_native_env.py"


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


@found_by("tests/native/test_grids.py")
def native_env_draws_each_frame_in_a_new_window(patch: Patch) -> None:
    """A compiled env does not hand its reference's window on, so that each frame opens one."""
    patch.setattr(Foraging, "viewer_names", ())


@found_by(THREADS)
def native_share_run_by_two_threads(patch: Patch) -> None:
    """The caller runs shares that a helper has begun once more."""
    patch.setattr(Share, "claim", lambda share, who: True)


@found_by(THREADS)
def native_call_returns_before_its_shares_end(patch: Patch) -> None:
    """A call does not wait for the shares that helpers have begun."""
    patch.setattr(ThreadTeam, "_wait", lambda team: None)


@found_by("tests/native/test_grids.py", "tests/native/test_foraging.py")
def foraging_forgets_where_players_stood(patch: Patch) -> None:
    """In each episode of foraging all cells are free, also those where players stood at the end of the last one."""
    reset = Foraging.reset

    def forgetful(env: Foraging, ids: Any) -> None:
        env.begun[ids] = False
        reset(env, ids)

    patch.setattr(Foraging, "reset", forgetful)


@found_by("tests/native/test_warehouse.py::test_crowds_go_as_networkx_lets_them")
def warehouse_goes_by_other_hashes(patch: Patch) -> None:
    """Robots in a crowd go first by the order of places, not by that of the set they are in."""
    hashes = warehouse._hashes
    patch.setattr(warehouse, "_hashes", lambda height, width: hashes(height, width)[::-1].copy())


@found_by("tests/native/test_pursuit.py::test_episodes_end_when_all_evaders_are_caught")
def pursuit_surrounds_from_all_sides_alone(patch: Patch) -> None:
    """Four pursuers are needed around an evader, also where the edge of the map stands on two sides."""
    make_board = pursuit.make_board

    def without_edges(x_size: int, y_size: int, sight: int) -> Any:
        board = make_board(x_size, y_size, sight)
        board.need[:] = 4
        return board

    patch.setattr(pursuit, "make_board", without_edges)


@found_by("tests/native/test_overcooked_rules.py")
def overcooked_soups_are_done_at_once(patch: Patch) -> None:
    """No soup needs time to cook."""
    read_recipes = overcooked.read_recipes

    def at_once(layout: Any) -> Any:
        recipes = read_recipes(layout)
        recipes.times[:] = 0
        return recipes

    patch.setattr(overcooked, "read_recipes", at_once)


@found_by(CHECK)
def native_check_looks_at_no_rewards(patch: Patch) -> None:
    """Rewards are not compared by check_native_env()."""
    pairs = CHECKS._pairs
    patch.setattr(CHECKS, "_pairs", lambda a, b, path: iter(()) if path == "rewards" else pairs(a, b, path))


@found_by(CHECK)
def native_check_never_resumes(patch: Patch) -> None:
    """No env of check_native_env() goes on from a saved state."""
    patch.setattr(CHECKS.Pair, "resume", lambda both: None)

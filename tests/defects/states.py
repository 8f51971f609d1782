"""Defects of saved states: each lets one thing go wrong when a collector goes on from one."""

from __future__ import annotations

from dataclasses import fields
from itertools import count
from typing import Any

import numpy as np

from marlvec.collect.columns import ColumnSpecs
from marlvec.collect.episodes import EpisodeTracker
from marlvec.collect.rollout import RolloutLoop
from marlvec.collect.state import ComingPolicies, StatefulCollector, StateLoader
from marlvec.envs import attributes
from marlvec.envs.attributes import AttributeWriter
from marlvec.selfplay.mapping import SelfPlayMapping
from marlvec.serialization import records
from marlvec.vector.native_shard import NativeShard
from marlvec.vector.recovery import Recovery
from tests.defects.registry import Patch, after, found_by

EXACT = "tests/collect/state/test_exact_resume.py"
RESTARTED = "tests/collect/state/test_restarted_envs.py"
LEAGUE = "tests/selfplay/test_resume.py"


@found_by(f"{EXACT}::test_resume_is_exact_in_native_envs")
def saved_native_rng_stays(patch: Patch) -> None:
    """Native envs go on with the random streams that they have, not with those of the state."""
    get_state = NativeShard.get_state

    def with_other_streams(shard: NativeShard, ids: Any) -> dict[str, Any]:
        state = get_state(shard, ids)
        for name, array in state["arrays"].items():
            if "rng" in name:
                array += np.ones(1, array.dtype)
        return state

    patch.setattr(NativeShard, "get_state", with_other_streams)


@found_by("tests/collect/state/test_background.py::test_the_next_batches_come_next")
def saved_batches_of_the_background_dropped(patch: Patch) -> None:
    """Batches that were made in the background and not taken are not in the state."""
    get_state = StatefulCollector._get_state
    patch.setattr(StatefulCollector, "_get_state", lambda collector, waiting: get_state(collector, ()))


@found_by(f"{RESTARTED}::test_their_episodes_are_lost_and_counted")
def saved_rows_of_restarted_envs_uncounted(patch: Patch) -> None:
    """What was in the episodes of envs that are restarted is dropped, and not counted as lost."""
    drop = RolloutLoop._drop

    def uncounted(loop: RolloutLoop, env_ids: Any) -> None:
        lost = loop._counters.agent_steps_lost
        drop(loop, env_ids)
        loop._counters.agent_steps_lost = lost

    patch.setattr(RolloutLoop, "_drop", uncounted)


@found_by("tests/collect/state/test_set_state.py::test_an_array_of_another_dtype_or_shape_is_named_and_changes_nothing")
def saved_columns_of_any_dtype(patch: Patch) -> None:
    """Columns of saved rows are taken over without a look at their dtypes and shapes."""
    patch.setattr(ColumnSpecs, "check", lambda *_: None)


@found_by(f"{RESTARTED}::test_masked_envs_stay_out")
def saved_masks_forgotten(patch: Patch) -> None:
    """Envs that were masked are said not to be."""

    def forget(state: dict[str, Any], *_: Any) -> None:
        state["masked"] = np.zeros_like(state["masked"])

    after(patch, Recovery, "get_state", forget)


@found_by(f"{EXACT}::test_batches_are_those_of_the_run_that_went_on")
def saved_episode_numbers_from_the_start(patch: Patch) -> None:
    """Episodes are counted from the beginning again, and have the random streams of the first ones."""

    def from_the_start(state: dict[str, Any], *_: Any) -> None:
        state["number_N"] = np.zeros_like(state["number_N"])

    after(patch, EpisodeTracker, "get_state", from_the_start)


@found_by(f"{LEAGUE}::test_a_state_that_is_refused_leaves_the_opponents_alone")
def saved_opponents_stay_where_a_state_is_refused(patch: Patch) -> None:
    """Opponents that came with a state stay in the collector although the state is refused."""
    patch.setattr(ComingPolicies, "take_back", lambda coming: None)


@found_by(f"{LEAGUE}::test_what_loads_after_the_mapping_and_fails_takes_it_back")
def saved_half_of_it_loaded(patch: Patch) -> None:
    """Where one part cannot be loaded, those before it stay loaded."""
    patch.setattr(StateLoader, "undo", lambda loader: None)


@found_by(f"{LEAGUE}::test_a_league_goes_on_in_a_new_collector")
def saved_retiring_opponents_chosen_again(patch: Patch) -> None:
    """Opponents that only play on to the end of their episodes can be chosen again."""

    def chosen_again(_: None, mapping: SelfPlayMapping, *__: Any) -> None:
        mapping._retiring.clear()

    after(patch, SelfPlayMapping, "set_state", chosen_again)


COPIED = "tests/vector/api/test_saved_states.py"


@found_by(f"{COPIED}::test_an_object_is_taken_from_a_later_place_where_its_first_is_empty")
def saved_objects_are_of_their_first_place_alone(patch: Patch) -> None:
    """An object that cannot be copied is refused where its first place is empty, although a later one has it."""
    patch.setattr(AttributeWriter, "_find_places", lambda *_: None)


@found_by(f"{COPIED}::test_objects_that_cannot_be_copied_may_be_keys_and_members")
def saved_keys_in_another_order(patch: Patch) -> None:
    """Keys that cannot be copied are taken in the order in which the env has them now."""
    labelled, given = attributes._Keys.labelled, count()

    def any_of_them(keys: Any, label: str) -> list[Any]:
        found = [key for key in attributes._flat(keys._of) if not isinstance(key, str)]
        return found[(k := next(given) % len(found)) : k + 1] if found else labelled(keys, label)

    patch.setattr(attributes._Keys, "labelled", any_of_them)


@found_by("tests/serialization/test_records.py")
def saved_integers_unchecked(patch: Patch) -> None:
    """Where a state should have an integer, anything is taken."""
    unchecked = ("an integer", lambda data: data, lambda data, _: True)
    patch.setattr(records, "_SCALARS", {**records._SCALARS, int: unchecked})


@found_by("tests/serialization/test_golden.py")
def saved_records_turned_round(patch: Patch) -> None:
    """The values of a record are written and read in another order than in files of earlier versions."""
    patch.setattr(records, "fields", lambda record: fields(record)[::-1])

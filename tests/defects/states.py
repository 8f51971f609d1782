"""Defects of saved states, checkpoints and recordings."""

from __future__ import annotations

from dataclasses import fields
from itertools import count, groupby
from typing import Any

import numpy as np

from marlvec.collect.batch import SampleBatch
from marlvec.collect.columns import ColumnSpecs
from marlvec.collect.episodes import EpisodeTracker
from marlvec.collect.rollout import RolloutLoop
from marlvec.collect.state import ComingPolicies, StatefulCollector, StateLoader
from marlvec.envs import attributes
from marlvec.envs.attributes import AttributeWriter
from marlvec.policies import checkpoint
from marlvec.recording import dataset, minari, vault
from marlvec.recording import replay_buffers as d3rlpy
from marlvec.recording import rows as block_store
from marlvec.recording.recorder import PartWriter, QueuedBatch, RepeatedRows
from marlvec.recording.rows import _Window
from marlvec.selfplay.mapping import SelfPlayMapping
from marlvec.serialization import records
from marlvec.vector.native_shard import NativeShard
from marlvec.vector.recovery import Recovery
from tests.defects.registry import Patch, after, found_by

# --- Defects of saved states: each lets one thing go wrong when a collector goes on from one


EXACT = "tests/collect/test_state.py"
RESTARTED = "tests/collect/test_state.py"
LEAGUE = "tests/selfplay/test_opponents.py"


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


@found_by("tests/collect/test_background.py::test_the_next_batches_come_next")
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


@found_by("tests/collect/test_state.py::test_an_array_of_another_dtype_or_shape_is_named_and_changes_nothing")
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


COPIED = "tests/vector/test_saved_states.py"


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


# --- Defects of checkpoints


SAVE = "tests/checkpoints/test_checkpoint.py"


@found_by(SAVE)
def checkpoint_learner_not_restored(patch: Patch) -> None:
    """The learner's part of a checkpoint is saved as it was at first."""
    states: dict[int, Any] = {}
    state_of = checkpoint._without_tensors

    def at_first(value: Any, place: list[Any], tensors: list[list[Any]]) -> Any:
        if place == ["learner"]:
            value = states.setdefault(0, value)
        return state_of(value, place, tensors)

    patch.setattr(checkpoint, "_without_tensors", at_first)


@found_by(SAVE)
def checkpoint_best_is_the_last(patch: Patch) -> None:
    """The best checkpoint is replaced by every new one."""
    patch.setattr(checkpoint, "_score_of", lambda best: -float("inf"))


@found_by(f"{SAVE}::test_a_training_of_another_env_is_replaced_only_with_overwrite")
def checkpoint_of_another_env_replaced(patch: Patch) -> None:
    """The folder of a training of another env is taken for one's own."""
    patch.setattr(checkpoint, "_is_of_another_env", lambda *_, **__: False)


@found_by(SAVE)
def checkpoint_older_ones_in_another_order(patch: Patch) -> None:
    """Of the checkpoints before the last the oldest is found first."""
    kept = checkpoint._kept

    patch.setattr(checkpoint, "_kept", lambda last: kept(last)[::-1])


# --- Defects of recordings


RECORDER, DATASET = "tests/recording/test_recorder.py", "tests/recording/test_dataset.py"
VAULT, D3RLPY = "tests/recording/test_vault.py", "tests/recording/test_views.py"


@found_by(RECORDER)
def recorded_rows_twice(patch: Patch) -> None:
    """Rows of a batch that was not delivered are recorded again when they come again."""
    patch.setattr(RepeatedRows, "drop_from", lambda self, queued: (queued.tables, queued.batch.env_steps))


@found_by(RECORDER)
def recorded_batches_dropped_at_a_full_queue(patch: Patch) -> None:
    """Where the queue is full, a batch is dropped in silence."""
    put = PartWriter.put

    def dropping(self: PartWriter, batch: QueuedBatch) -> None:
        if len(self._queue) < self._queue_size:
            put(self, batch)

    patch.setattr(PartWriter, "put", dropping)


@found_by(RECORDER)
def recorded_bytes_lost_on_a_full_disk(patch: Patch) -> None:
    """What the disk refuses is taken for written."""

    def careless(self: PartWriter, call: Any) -> Any:
        try:
            return call()
        except OSError:
            return 1

    patch.setattr(PartWriter, "_persist", careless)


@found_by(RECORDER)
def recorded_parts_kept_behind_a_checkpoint(patch: Patch) -> None:
    """Going back to a checkpoint leaves the parts that were written since."""
    patch.setattr(PartWriter, "cut", lambda self, size: None)


@found_by(DATASET)
def recorded_files_not_checked(patch: Patch) -> None:
    """A file that was changed is read as it is."""
    patch.setattr(block_store, "_check_sum", lambda *_: None)


@found_by(DATASET)
def minibatches_drop_what_is_left_of_a_window(patch: Patch) -> None:
    """Rows that make no minibatch at the end of a window come in none."""
    patch.setattr(_Window, "drop", lambda self, stop: setattr(self, "rows", 0))


@found_by(DATASET)
def minibatches_whose_columns_have_other_orders(patch: Patch) -> None:
    """Each second column is left in its order where the others are mixed."""
    mix = _Window.mix

    def partly(self: _Window, order_B: Any) -> None:
        kept = {name: array.copy() for name, array in list(self._arrays.items())[1::2]}
        mix(self, order_B)
        for name, array in kept.items():
            self._arrays[name][...] = array

    patch.setattr(_Window, "mix", partly)


@found_by(DATASET)
def recorded_episodes_without_their_last_rows(patch: Patch) -> None:
    """Of each episode, the rows of the last part are left out."""
    ranges = dataset.RecordedDataset._ranges

    def shorter(self: dataset.RecordedDataset) -> Any:
        for session, spans in ranges(self):
            yield session, {name: (start, max(start, stop - 5)) for name, (start, stop) in spans.items()}

    patch.setattr(dataset.RecordedDataset, "_ranges", shorter)


@found_by(DATASET)
def joint_rows_of_the_wrong_agents(patch: Patch) -> None:
    """On the axis of agents the first two are exchanged."""
    joint = dataset.joint_rows

    def exchanged(batch: Any, agents: Any, names: Any, first: int) -> Any:
        order = np.array(agents)
        order[:2] = order[:2][::-1]
        return joint(batch, order.tolist(), names, first)

    patch.setattr(dataset, "joint_rows", exchanged)


@found_by(VAULT)
def vaults_whose_agents_end_too_early(patch: Patch) -> None:
    """An agent's flags are written at its last decision alone, so that a Vault's episode has no end."""
    experience = vault._experience

    def once(episode: Any, optional: Any) -> Any:
        found = experience(episode, optional)
        for leaf in (("terminals",), ("truncations",)):
            found[leaf] = found[leaf] & found["infos", "acting"]
        return found

    patch.setattr(vault, "_experience", once)


@found_by(VAULT)
def vaults_read_over_the_ends_of_episodes(patch: Patch) -> None:
    """Episodes of a Vault are cut where a piece that is read ends."""
    patch.setattr(vault._Moments, "before", lambda self, stop: self)


@found_by(D3RLPY)
def mdp_datasets_without_gaps(patch: Patch) -> None:
    """Where rows are missing, an episode of d3rlpy's goes on."""

    def careless(rows: Any) -> Any:
        rows = rows.take(np.lexsort([rows["t"], rows["agent_index"], rows["eps_id"]]))
        keys = np.stack([rows["eps_id"], rows["agent_index"]])
        last_B = np.append((keys[:, 1:] != keys[:, :-1]).any(axis=0), True)
        return rows.replace(timeouts=last_B & ~rows["terminated"])

    patch.setattr(d3rlpy, "_with_timeouts", careless)


@found_by("tests/recording/test_views.py::test_an_agent_that_came_back_has_an_episode_a_life")
def minari_joins_the_lives_of_an_agent(patch: Patch) -> None:
    """An agent that ended and came back has one episode of Minari's, and loses a final observation."""
    episodes = minari._agent_episodes

    def joined(group: Any, agent: int) -> Any:
        for _, own in groupby(episodes(group, agent), key=lambda rows: int(rows["eps_id"][0])):
            yield SampleBatch.concat(list(own))

    patch.setattr(minari, "_agent_episodes", joined)


@found_by(f"{DATASET}::test_columns_that_begin_late_are_filled_and_marked_in_every_view")
def recorded_columns_filled_without_a_mark(patch: Patch) -> None:
    """Rows of parts that lack a column look as if they had it."""
    patch.setattr(block_store.BlockStore, "_late_columns", lambda _: [])


@found_by("tests/serialization/test_records.py")
def saved_integers_unchecked(patch: Patch) -> None:
    """Where a state should have an integer, anything is taken."""
    unchecked = ("an integer", lambda data: data, lambda data, _: True)
    patch.setattr(records, "_SCALARS", {**records._SCALARS, int: unchecked})


@found_by("tests/serialization/test_records.py")
def saved_records_turned_round(patch: Patch) -> None:
    """The values of a record are written and read in another order than in files of earlier versions."""
    patch.setattr(records, "fields", lambda record: fields(record)[::-1])

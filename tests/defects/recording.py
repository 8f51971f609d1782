"""Defects of recordings."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np

from marlvec.collect.batch import SampleBatch
from marlvec.recording import dataset, minari, vault
from marlvec.recording import replay_buffers as d3rlpy
from marlvec.recording import rows as block_store
from marlvec.recording.recorder import PartWriter, QueuedBatch, RepeatedRows
from marlvec.recording.rows import _Window
from tests.defects.registry import Patch, found_by

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

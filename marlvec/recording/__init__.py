"""Recordings: collected batches streamed to disk, and read back as rows."""

from marlvec.recording.block_store import Column
from marlvec.recording.dataset import EpisodeTable, RecordedDataset
from marlvec.recording.formats.d3rlpy import to_mdp_dataset
from marlvec.recording.formats.minari import from_minari, to_minari
from marlvec.recording.formats.torchrl import to_replay_buffer
from marlvec.recording.formats.vault import from_vault, to_vault
from marlvec.recording.recorded_rows import RecordedRows

__all__ = [
    "RecordedDataset",
    "RecordedRows",
    "Column",
    "EpisodeTable",
    "to_minari",
    "from_minari",
    "to_vault",
    "from_vault",
    "to_replay_buffer",
    "to_mdp_dataset",
]

"""Recordings: collected batches streamed to disk, and read back as rows."""

from marlvec.recording.dataset import EpisodeTable, RecordedDataset
from marlvec.recording.minari import from_minari, to_minari
from marlvec.recording.replay_buffers import to_mdp_dataset, to_replay_buffer
from marlvec.recording.rows import Column, RecordedRows
from marlvec.recording.vault import from_vault, to_vault

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

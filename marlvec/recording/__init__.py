"""Recordings: what is collected, as a stream on disk, and back as rows."""

from marlvec.recording.dataset import EpisodeTable, RecordedDataset
from marlvec.recording.recorded_rows import Column, RecordedRows

__all__ = ["RecordedDataset", "RecordedRows", "Column", "EpisodeTable"]

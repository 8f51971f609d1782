"""`JSONLinesLogger`: one line of JSON per finished episode."""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from marlvec.collect.callbacks.append_file import AppendFile, digest_before
from marlvec.collect.callbacks.callback import ClosingCallback
from marlvec.collect.callbacks.episode_step import RunningEpisode
from marlvec.collect.metrics.episode_table import EpisodeRecord
from marlvec.errors import ArgumentError
from marlvec.serialization.saved import ProcessBound

__all__ = ["JSONLinesLogger"]


class JSONLinesLogger(ProcessBound, ClosingCallback):
    """Writes a line of JSON for each finished episode; read them with ``pandas.read_json(path, lines=True)``.

    A line is an object with ``eps_id``, ``env_id``, ``number``, ``length``, ``return`` (the team's, the sum over all
    agents), ``duration``, the lists ``returns``, ``decisions``, ``present`` and ``policies`` in agent order, and
    ``custom``: numbers of callbacks that precede the logger. NaN and infinities are null. Values given to
    `Metrics.add_value` belong to no episode and are not written. Lines are on disk at the end of each batch; after a
    full disk or Ctrl-C, at the end of the next one. Close it, or use it in a ``with`` block.

    If training resumes from a checkpoint, lines that were written after the checkpoint are cut off: their episodes are
    collected again.

    Args:
        path: The file; lines are appended to its content.

    Raises:
        OSError: The file is not writable.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = Path(path)
        self._file = AppendFile(self._path)

    def on_episode_end(self, episode: RunningEpisode, record: EpisodeRecord) -> None:
        self._check_process("on_episode_end()")
        line = {
            "eps_id": record.eps_id,
            "env_id": record.env_id,
            "number": record.number,
            "length": record.length,
            "return": record.episode_return,
            "duration": record.duration,
            "returns": record.returns_A.tolist(),
            "decisions": record.lengths_A.tolist(),
            "present": record.present_A.tolist(),
            "policies": record.policies,
            "custom": {name: float(value) for name, value in record.custom.items()},
        }
        self._file.add(json.dumps(_plain(line), allow_nan=False).encode() + b"\n")

    def on_sample_end(self, *_: object) -> None:
        self._check_process("on_sample_end()")
        self._file.flush()

    def state_dict(self) -> dict[str, Any]:
        """Return the file's size and a digest of its end, as plain data."""
        size = self._size()
        return {"bytes": size, "end": digest_before(self._path, size)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Cut off lines that were written after `state_dict` was called. A different file stays unchanged.

        Raises:
            ArgumentError: Not such a state.
        """
        if state.keys() != {"bytes", "end"}:
            raise ArgumentError(f"expected the state of a JSONLinesLogger, got {list(state)}")
        size = int(state["bytes"])
        if self._size() > size and digest_before(self._path, size) == state["end"]:
            self._file.truncate(size)

    def _size(self) -> int:
        """Return the file's size in bytes, after writing all lines; 0 for a pipe."""
        self._check_process("state_dict()")
        self._file.flush()
        return self._file.size or 0

    def close(self) -> None:
        """Close the file. May be called twice."""
        self._file.close()


def _plain(value: object) -> object:
    """Replace NaN and infinities, which JSON lacks."""
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value

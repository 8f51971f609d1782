"""`JSONLinesLogger`: one line of JSON per finished episode."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Self

from marlvec.collect.callbacks.callback import Callback
from marlvec.collect.callbacks.episode_step import RunningEpisode
from marlvec.collect.metrics.episode_table import EpisodeRecord

__all__ = ["JSONLinesLogger"]


class JSONLinesLogger(Callback):
    """Writes a line of JSON for each episode that ends: ``pandas.read_json(path, lines=True)`` reads them.

    A line is an object with ``eps_id``, ``env_id``, ``number``, ``length``, ``return`` (the team's, the sum over all
    agents), ``duration``, the lists ``returns``, ``decisions``, ``present`` and ``policies`` in the order of the
    agents, and ``custom``. Callbacks before it in the list have put their numbers into ``custom`` by then; NaN and
    infinities are null. All numbers are that episode's own, nothing is a mean over several; what
    `Metrics.add_value` is given belongs to no episode and is not here. Lines are on disk at the end of each batch.
    Close it, or use it in a ``with`` block.

    Args:
        path: The file. What it holds already stays.

    Raises:
        OSError: It cannot be written to.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115  (close() closes it)

    def on_episode_end(self, episode: RunningEpisode, record: EpisodeRecord) -> None:
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
        self._file.write(json.dumps(_plain(line), allow_nan=False) + "\n")

    def on_sample_end(self, *_: object) -> None:
        self._file.flush()

    def close(self) -> None:
        """Close the file. May be called twice."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _plain(value: object) -> object:
    """What JSON can say: it has no NaN and no infinities."""
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value

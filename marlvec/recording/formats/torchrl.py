"""Fills TorchRL's replay buffers from recordings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from marlvec.collect.batch import SampleBatch
from marlvec.errors import ArgumentError
from marlvec.extras import import_extra
from marlvec.recording.recorded_rows import RecordedRows, executed_column

__all__ = ["to_replay_buffer"]

_ROWS = 1 << 16
_INSTALL = 'pip install "marlvec[torchrl]"'
_NEXT = {"rewards": "reward", "terminated": "terminated", "truncated": "truncated", "next_obs": "observation"}


def to_replay_buffer(
    rows: RecordedRows, batch_size: int, *, columns: Sequence[str] = (), storage: Any = None, **options: Any
) -> Any:
    """Make a TorchRL replay buffer of one policy's rows, with the names that TorchRL's losses read.

    ``observation`` (n, …); ``action`` (n, …), which is ``actions_executed`` if recorded, else ``actions``; under
    ``next``, ``observation`` (n, …), ``reward`` (n, 1) float32, and ``terminated``, ``truncated`` and ``done`` (n, 1).
    Rows are copied some ten thousand at a time.

        with marlvec.load_dataset("runs/seek") as data:
            buffer = to_replay_buffer(data["main"], batch_size=256)
        loss = dqn_loss(buffer.sample())

    Args:
        rows: A policy's rows.
        batch_size: Rows of a sample.
        columns: Names of further columns, which keep their names.
        storage: TorchRL's storage of the rows; None: memory-mapped files, ``LazyMemmapStorage(len(rows))``.
        options: Arguments of ``TensorDictReplayBuffer``: ``sampler``, ``prefetch``, ``transform`` and so on.

    Returns:
        A ``torchrl.data.TensorDictReplayBuffer`` that holds all rows.

    Raises:
        MissingExtraError: torchrl is not installed.
        ArgumentError: The recording has no rows of the policy; or executed actions are marked as missing in some.
        KeyError: A column does not exist.
    """
    data = import_extra("torchrl.data", "to_replay_buffer()", _INSTALL)
    if not len(rows):
        raise ArgumentError("to_replay_buffer(): expected at least one row")
    buffer = data.TensorDictReplayBuffer(
        storage=data.LazyMemmapStorage(len(rows)) if storage is None else storage, batch_size=batch_size, **options
    )
    now = {"obs": "observation", executed_column(rows, "to_replay_buffer()"): "action"}
    needed = [*now, *_NEXT, *columns]
    for batch in rows.batches(_ROWS, needed):
        buffer.extend(_tensordict(batch, now, columns))
    return buffer


def _tensordict(batch: SampleBatch, now: Mapping[str, str], columns: Sequence[str]) -> Any:
    """Convert rows to a tensordict with TorchRL's names."""
    found = batch.to_tensordict()
    names = {name: found[name] for name in columns}
    names |= {theirs: found[ours] for ours, theirs in now.items()}
    after = {theirs: found[ours] for ours, theirs in _NEXT.items()}
    for name in ("reward", "terminated", "truncated"):
        after[name] = after[name].unsqueeze(-1)
    after["reward"] = after["reward"].float()
    after["done"] = after["terminated"] | after["truncated"]
    return type(found)({**names, "next": type(found)(after, batch_size=found.batch_size)}, batch_size=found.batch_size)

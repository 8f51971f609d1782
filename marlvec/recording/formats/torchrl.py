"""Fills TorchRL's replay buffers from recordings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.batch import SampleBatch
from marlvec.errors import ArgumentError
from marlvec.extras import import_extra
from marlvec.recording.recorded_rows import RecordedRows, executed_column
from marlvec.trees import Tree, map_tree, tree_leaves

__all__ = ["to_replay_buffer"]

_ROWS = 1 << 16
_INSTALL_TORCHRL = 'pip install "marlvec[torchrl]"'
_NEXT = {"rewards": "reward", "terminated": "terminated", "truncated": "truncated", "next_obs": "observation"}
_TRAJECTORY = ("unroll_id", "eps_id", "agent_index", "t")
_WIDER = {np.dtype(np.uint16): np.int32, np.dtype(np.uint32): np.int64, np.dtype(np.uint64): np.int64}


def to_replay_buffer(
    rows: RecordedRows, batch_size: int, *, columns: Sequence[str] = (), storage: Any = None, **options: Any
) -> Any:
    """Make a TorchRL replay buffer of one policy's rows, with the names that TorchRL's losses read.

    ``observation`` (n, …); ``action`` (n, …), which is ``actions_executed`` if recorded, else ``actions``; under
    ``next``, ``observation`` (n, …), ``reward`` (n, 1) float32, and ``terminated``, ``truncated`` and ``done`` (n, 1).
    Rows are copied some ten thousand at a time. PyTorch cannot index uint16, uint32 and uint64: these become int32,
    int64 and int64.

    ``("collector", "traj_ids")`` (n,) numbers the trajectories: consecutive decisions of one agent, until its end or
    the end of a recorded batch. TorchRL's ``SliceSampler(slice_len=…)`` finds it by itself. Do not give it
    ``end_key=("next", "done")``: a batch ends without ``done``, and its slices would mix agents.

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
        ArgumentError: The recording has no rows of the policy; executed actions are marked as missing in some; a number
            of dtype uint64 is 2**63 or more; or rows of a column have no entries, as of shape (0,), which memory-mapped
            files cannot hold.
        KeyError: A column does not exist.
    """
    data = import_extra("torchrl.data", "to_replay_buffer()", _INSTALL_TORCHRL)
    torch = import_extra("torch", "to_replay_buffer()", _INSTALL_TORCHRL)
    if not len(rows):
        raise ArgumentError("to_replay_buffer(): expected at least one row")
    buffer = data.TensorDictReplayBuffer(
        storage=data.LazyMemmapStorage(len(rows)) if storage is None else storage, batch_size=batch_size, **options
    )
    keys = [name for name in _TRAJECTORY if name in rows]
    now = {"obs": "observation", executed_column(rows, "to_replay_buffer()"): "action"}
    needed = [*now, *_NEXT, *columns, *keys]
    last, number = None, -1
    for start, batch in zip(range(0, len(rows), _ROWS), rows.batches(_ROWS, needed), strict=True):
        fitting = batch.replace(**{name: _fitting(name, batch[name], storage is None) for name in needed})
        found = _tensordict(fitting, now, columns)
        if len(keys) == len(_TRAJECTORY):
            # One column a row; t minus the row's number is the same along a trajectory.
            row_keys = np.stack([batch[name] for name in keys])
            row_keys[-1] -= np.arange(start, start + len(batch))
            before = np.full((len(keys), 1), -1) if last is None else last
            begins = (np.diff(row_keys, axis=1, prepend=before) != 0).any(axis=0)
            begins[0] |= last is None
            traj_ids = number + np.cumsum(begins)
            last, number = row_keys[:, -1:], int(traj_ids[-1])
            found["collector", "traj_ids"] = torch.from_numpy(traj_ids)
        buffer.extend(found)
    return buffer


def _fitting(name: str, column: Tree, is_memmap: bool) -> Tree:
    """Return a column in dtypes that PyTorch can index."""
    for path, leaf in tree_leaves(column):
        where = f"to_replay_buffer(): column {name!r}{f' at {path}' if path else ''}"
        if is_memmap and 0 in leaf.shape[1:]:
            raise ArgumentError(
                f"{where}: rows of shape {leaf.shape[1:]} have no entries, which memory-mapped files cannot hold: give "
                f"storage=LazyTensorStorage(len(rows))"
            )
        if leaf.dtype == np.uint64 and leaf.max(initial=0) > np.iinfo(np.int64).max:
            raise ArgumentError(f"{where}: expected numbers below 2**63, as PyTorch indexes int64, got {leaf.max()}")

    def widened(leaf: NDArray[Any]) -> NDArray[Any]:
        return leaf.astype(_WIDER[leaf.dtype]) if leaf.dtype in _WIDER else leaf

    return map_tree(widened, column)


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

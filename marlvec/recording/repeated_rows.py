"""`RepeatedRows`: finds rows that a collector gives a second time; `QueuedBatch`: a batch that waits to be written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.batch import MultiAgentBatch
from marlvec.collect.batch.arrow_columns import Arrays, TableForm
from marlvec.collect.rollout_state import STREAM_BITS

__all__ = ["QueuedBatch", "RepeatedRows", "Table"]

_KEYS = ("eps_id", "agent_index", "t")


class Table(NamedTuple):
    """One policy's rows: their form, arrays by the table's column, and number."""

    form: TableForm
    arrays: Arrays
    rows: int


@dataclass(frozen=True, slots=True)
class QueuedBatch:
    """A batch that waits to be written."""

    batch: MultiAgentBatch  # as the collector made it
    tables: Mapping[str, Table]  # what is written, by policy id
    source: object  # metrics of the collector that made it; None for a batch that was written by hand


class RepeatedRows:
    """One collector's batches, without rows that came before.

    A batch that a callback refused, or before whose return Ctrl-C came, is not delivered: its rows come again, in the
    next batch or over several, and the fragments of the next batch have the numbers of those of the one before.
    """

    def __init__(self) -> None:
        self._last: MultiAgentBatch | None = None
        self._undelivered: set[tuple[str, int, int, int]] = set()
        self._env_steps = 0  # of batches that were not delivered, and did not come again yet

    def drop_from(self, queued: QueuedBatch) -> tuple[Mapping[str, Table], int]:
        """Return the batch's tables without repeated rows, and its env steps without theirs."""
        batch, last, self._last = queued.batch, self._last, queued.batch
        if last is not None:
            before, now = _fragments(last), _fragments(batch)
            if now is None:
                return queued.tables, batch.env_steps
            if before is not None and any(now[stream][0] <= before[stream][1] for stream in now.keys() & before.keys()):
                self._undelivered |= {key for policy_id in last for key in _keys(policy_id, last)}
                self._env_steps += last.env_steps
        if not self._undelivered:
            return queued.tables, batch.env_steps
        tables, hits = {}, 0
        for policy_id, table in queued.tables.items():
            keys = _keys(policy_id, batch)
            new_B = np.array([key not in self._undelivered for key in keys], np.bool_)
            hits += len(new_B) - int(new_B.sum())
            self._undelivered.difference_update(keys)
            tables[policy_id] = _chosen(table, new_B)
        repeated = min(self._env_steps, batch.env_steps) if hits else 0
        self._env_steps -= repeated
        if not hits:  # what was not delivered was lost: the collector was reset
            self._undelivered, self._env_steps = set(), 0
        return tables, batch.env_steps - repeated


def _chosen(table: Table, chosen_B: NDArray[np.bool_]) -> Table:
    if chosen_B.all():
        return table
    return Table(table.form, {name: array[chosen_B] for name, array in table.arrays.items()}, int(chosen_B.sum()))


def _fragments(batch: MultiAgentBatch) -> dict[int, tuple[int, int]] | None:
    """First and last ``unroll_id``, by the collector's stream; None where a row is not a decision each."""
    if not all(name in rows and np.ndim(rows[name]) == 1 for rows in batch.values() for name in (*_KEYS, "unroll_id")):
        return None
    found: dict[int, tuple[int, int]] = {}
    for rows in batch.values():
        ids_B = rows["unroll_id"]
        streams = range(int(ids_B.min()) >> STREAM_BITS, (int(ids_B.max()) >> STREAM_BITS) + 1) if len(ids_B) else ()
        for stream in streams:
            own_B = ids_B if len(streams) == 1 else ids_B[ids_B >> STREAM_BITS == stream]
            if len(own_B):
                first, last = found.get(stream, (own_B[0], own_B[0]))
                found[stream] = min(int(first), int(own_B.min())), max(int(last), int(own_B.max()))
    return found


def _keys(policy_id: str, batch: MultiAgentBatch) -> list[tuple[str, int, int, int]]:
    rows = batch[policy_id]
    columns = (rows[name].tolist() for name in _KEYS)
    return [(policy_id, *key) for key in zip(*columns, strict=True)]

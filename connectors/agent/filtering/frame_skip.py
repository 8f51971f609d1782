"""`FrameSkip`: the policy decides every k-th step; its action is repeated in between."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.connectors._support.agent_table import AgentTable, Tables
from marlvec.connectors.agent.filtering.filter_rows import RowFilter
from marlvec.connectors.connector import EnvIds
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError

__all__ = ["FrameSkip"]


class FrameSkip(RowFilter):
    """Asks the policy at every k-th row of an agent; in between its last action is sent again.

    An episode's first row stays, then each k-th one after it; last rows always. Rewards add up to the next row that
    stays, as in `FilterRows`. Put `MaxObs` before it, and it sees the rows in between as well.

    Args:
        k: Of how many rows one stays, at least 1.

    Raises:
        ArgumentError: ``k`` is below 1.
    """

    def __init__(self, k: int) -> None:
        if k < 1:
            raise ArgumentError(f"k must be at least 1, got {k}")
        super().__init__("repeat")
        self.k = k
        self._count = AgentTable((), np.int64)

    def keep_rows(self, rows: Rows) -> NDArray[Any]:
        count = self._count.get(rows.env_id, rows.agent_index)
        if "first" in rows:
            count = np.where(rows.first, 0, count)
        self._count.set(rows.env_id, rows.agent_index, count + 1)
        keep: NDArray[Any] = count % self.k == 0
        return keep

    def reset(self, env_ids: EnvIds | None = None) -> None:
        super().reset(env_ids)
        self._count.reset(env_ids)

    @property
    def _tables(self) -> Tables:
        return {**super()._tables, "count": self._count}

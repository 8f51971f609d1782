"""`UnreadSteps`: decisions of policies whose rows are not read; they are counted, and nothing else is kept."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.storage.transition_buffer import Slots
from marlvec.serialization.saved import Saved, SavedField

__all__ = ["UnreadSteps"]

IntArray = NDArray[np.int64]

_START = 256
_LANE, _TICK, _EPS_ID = range(3)


class UnreadSteps(Saved):
    """Which lanes decided something, and when its outcome came; one for all policies whose rows are not read.

    Ctrl-C may come at any line, see `SlotBuffer`.

    Args:
        num_lanes: N × A.
        num_agents: A.

    Attributes:
        slot_L: (L,) 0 where a lane waits for an action or for its outcome, else -1; for reading.
    """

    saved_as = "steps that are not read"
    saved_fields: ClassVar = {"steps": SavedField("_steps", (3, None)), "slot_L": SavedField("slot_L")}

    def __init__(self, num_lanes: int, num_agents: int) -> None:
        self.slot_L = np.full(num_lanes, -1, np.int64)
        self._num_agents = num_agents
        self._size = 0
        self._table = np.empty((3, _START), np.int64)  # of steps whose outcome is known: lane, tick, eps_id

    def __len__(self) -> int:
        return self._size + int(np.count_nonzero(self.slot_L >= 0))

    def append(self, lanes: IntArray, tick: IntArray, eps_id: IntArray, *, final: bool) -> int:
        """Lanes have got their next rows, which close what was decided before.

        Args:
            lanes: (n,) which, none twice.
            tick: (n,) the rounds in which those came.
            eps_id: (n,) their episodes.
            final: Whether they are last rows.

        Returns:
            How many steps were closed.
        """
        acted = self.slot_L[lanes] >= 0
        closed = int(np.count_nonzero(acted))
        start, stop = self._size, self._size + closed
        if stop > self._table.shape[1]:
            table = np.empty((3, 2 * stop), np.int64)
            table[:, :start] = self._table[:, :start]
            self._table = table
        if closed:
            everyone = closed == len(lanes)
            for k, column in enumerate((lanes, tick, eps_id)):
                self._table[k, start:stop] = column if everyone else column[acted]
        self.slot_L[lanes] = -1 if final else 0
        self._size = stop
        return closed

    # --- saved

    @property
    def _steps(self) -> IntArray:
        return self._table[:, : self._size]

    def derive(self, values: dict[str, Any]) -> dict[str, Any]:
        """Make the table of the steps."""
        table = values["_steps"]
        return {"_table": table, "_size": table.shape[1], "slot_L": values["slot_L"]}

    # --- looking: slots are numbers of closed steps, in the order in which they were closed

    def closed(self, eps_ids: IntArray | None = None) -> IntArray:
        """Slots of all steps whose outcome is known, or of those of some episodes; ascending."""
        if eps_ids is None:
            return np.arange(self._size)
        return self.of_episodes(eps_ids)

    def of_episodes(self, eps_ids: IntArray) -> IntArray:
        """Slots of steps of some episodes whose outcome is known; ascending."""
        return np.flatnonzero(np.isin(self._table[_EPS_ID, : self._size], eps_ids))

    def without(self, slots: Slots, eps_ids: Collection[int]) -> Slots:
        """Those of some slots that are of none of these episodes."""
        if not len(slots) or not eps_ids:
            return slots
        own = np.asarray(slots)
        return own[~np.isin(self._table[_EPS_ID, own], list(eps_ids))]

    def closing_order(self, slots: IntArray) -> tuple[IntArray, IntArray]:
        """Tick at which each step was closed, and its lane."""
        return self._table[_TICK, slots], self._table[_LANE, slots]

    # --- out

    def forget(self, slots: Slots) -> None:
        """Drop steps that were counted in a batch, or lost."""
        if len(slots) == self._size:
            self._size = 0
        else:
            self._keep(np.delete(np.arange(self._size), slots))

    def forget_open(self, env_ids: IntArray) -> None:
        """Nothing comes of what agents of these envs wait for."""
        self.slot_L.reshape(-1, self._num_agents)[env_ids] = -1

    def keep_ended(self, ended_N: IntArray) -> None:
        """Drop all but the steps of episodes whose ids are below that of their env; no lane waits any more."""
        self.slot_L[:] = -1
        lane, _, eps_id = self._table[:, : self._size]
        self._keep(np.flatnonzero(eps_id < ended_N[lane // self._num_agents]))

    def _keep(self, slots: IntArray) -> None:
        table = np.empty_like(self._table)
        table[:, : len(slots)] = self._table[:, slots]
        vars(self).update(_table=table, _size=len(slots))

    def clear(self) -> None:
        """Drop everything."""
        self._size = 0
        self.slot_L[:] = -1

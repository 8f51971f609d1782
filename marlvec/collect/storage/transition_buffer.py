"""`TransitionBuffer`: what buffers of both kinds can do."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.storage.columns import ColumnForms, Leaves
from marlvec.connectors import Rows
from marlvec.env_ids import Where
from marlvec.trees import Tree

__all__ = ["Slots", "TransitionBuffer"]

IntArray = NDArray[np.int64]

Slots: TypeAlias = IntArray | range
"""Some of a buffer's transitions, by number, ascending."""


class TransitionBuffer(Protocol):
    """What one policy saw and did; see `SlotBuffer` and `DenseBuffer`.

    Attributes:
        forms: The columns' forms.
        slot_L: (L,) not negative where a lane's row waits for an action or for its outcome; for reading.
    """

    forms: ColumnForms
    slot_L: IntArray

    def __len__(self) -> int:
        """How many rows are stored."""

    def append(
        self,
        rows: Rows,
        lanes: IntArray,
        places: Where,
        tick: IntArray | int,
        env_t: IntArray,
        missing: NDArray[np.bool_] | None = None,
    ) -> int:
        """Store rows, and close the transitions that led to them; returns how many."""

    def answer(self, places: Where, parts: list[Leaves]) -> None:
        """Write down what was decided about these lanes' last rows."""

    def closed(self) -> Slots:
        """The transitions whose outcome is known."""

    def without(self, slots: Any, eps_ids: Collection[int]) -> Slots:
        """Those of some transitions that are of none of these episodes."""

    def read(self, slots: Any, unroll_id: int) -> tuple[dict[str, Tree], int]:
        """Columns of transitions, ordered by env, agent and time; and the number after their last fragment's."""

"""The part of an env's row that holds Python objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.spaces import Leaf, check_member, check_size, snapshot

__all__ = ["ObjectCells"]

AnyArray = NDArray[Any]


class ObjectCells:
    """Makes what an env hands out fit to be kept: members of their spaces, copies, and bounded in size altogether.

    Args:
        rows: Per agent, per leaf, its part of the row. Cells of object leaves have no axes.
    """

    __slots__ = ("_rows", "_sizes")

    def __init__(self, rows: Sequence[Sequence[AnyArray]]) -> None:
        self._rows = rows
        self._sizes: dict[tuple[int, int], int] = {}  # (agent, leaf) → bytes of the value there

    def fit(self, agent: int, k: int, leaf: Leaf, value: Any) -> AnyArray:
        """Copy a value for the cell of agent number ``agent``'s leaf ``k``, which is not written yet.

        Returns:
            An array without axes that holds the copy.

        Raises:
            ContractError: It is no member of its space, cannot be pickled or makes the env's objects too large.
        """
        check_member(leaf, value)
        copy, size = snapshot(leaf, value)
        # Cells are cleared by others too, so what is there now is asked of them.
        check_size(leaf, size, sum(n for at, n in self._sizes.items() if at != (agent, k) and self._is_full(*at)))
        self._sizes[agent, k] = size
        cell = np.empty((), np.object_)
        cell.fill(copy)  # an assignment would take sequences apart
        return cell

    def _is_full(self, agent: int, k: int) -> bool:
        return self._rows[agent][k][()] is not None

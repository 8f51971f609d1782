"""Numbers in the place of NaN."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from gymnasium.spaces import Box, Space
from numpy.typing import NDArray

from marlvec.connectors.action.float_boxes import FloatBoxes
from marlvec.connectors.action.row_name import row_name
from marlvec.connectors.connector import ActionConnector
from marlvec.connectors.row_random import RowRandom
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, ContractError

__all__ = ["ReplaceNaN"]


class ReplaceNaN(ActionConnector):
    """Replaces every NaN in the actions of every Box of floats, element by element; other leaves pass unchanged.

    A ``"random"`` number is drawn as the Box's own ``sample`` does: evenly between two bounds, from an exponential
    distribution of scale 1 away from the only bound, from the standard normal one without bounds.

    Args:
        fill: What to put there: ``"zeros"``, or the bound next to 0 where 0 is outside the Box; ``"random"`` numbers
            from it; or nothing: ``"raise"``.
        seed: Of the random ones.

    Raises:
        ArgumentError: ``fill`` is none of the three.
        ContractError: In a call: there is a NaN and ``fill`` is ``"raise"``; names env and agent.
    """

    def __init__(self, fill: Literal["zeros", "random", "raise"] = "zeros", *, seed: int = 0) -> None:
        if fill not in ("zeros", "random", "raise"):
            raise ArgumentError(f'fill must be "zeros", "random" or "raise", got {fill!r}')
        self.fill = fill
        self.seed = seed
        self._uniform = RowRandom(seed, "ReplaceNaN")
        self._normal = RowRandom(seed, "ReplaceNaN, normal")
        self._boxes: FloatBoxes | None = None

    def __call__(self, rows: Rows) -> Rows:
        if self._boxes is None:
            raise self._not_set_up()
        leaves = self._boxes.tree.flatten(rows.actions_for_env)
        found = False
        for i, leaf, box, part in self._boxes.parts:
            value = np.asarray(leaves[i])
            missing = np.isnan(value)
            if not missing.any():
                continue
            found = True
            if self.fill == "raise":
                row = int(np.argwhere(missing)[0, 0])
                raise ContractError(f"the policy gave NaN for {leaf} of {row_name(rows, row)}")
            size = self._boxes.size
            fill = self._draw(rows, box, size, part) if self.fill == "random" else np.clip(0, box.low, box.high)
            leaves[i] = np.where(missing, np.asarray(fill, box.low.dtype), value)
        return rows.replace(actions_for_env=self._boxes.tree.unflatten(leaves)) if found else rows

    def setup(self, space: Space[Any]) -> None:
        self._boxes = FloatBoxes(space)

    def _draw(self, rows: Rows, box: Box, size: int, part: slice) -> NDArray[Any]:
        """(n, *shape) members of the Box, by its part of each row's numbers."""
        shape = (len(rows), *box.shape)
        u = self._uniform.uniform(rows, size)[:, part].reshape(shape)
        normal = self._normal.normal(rows, size)[:, part].reshape(shape)
        below, above = np.where(box.bounded_below, box.low, 0.0), np.where(box.bounded_above, box.high, 0.0)
        drawn = np.select(
            [box.bounded_below & box.bounded_above, box.bounded_below, box.bounded_above],
            [below * (1 - u) + above * u, below - np.log1p(-u), above + np.log1p(-u)],
            normal,
        )
        members: NDArray[Any] = np.clip(drawn.astype(box.low.dtype), box.low, box.high)
        return members

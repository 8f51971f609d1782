"""`Standardize`: columns of a batch with mean 0 and standard deviation 1."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.connectors.connector import LearnerConnector
from marlvec.connectors.learner.fragments import numbers, one_array, unknown_outcome
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, ContractError

__all__ = ["Standardize"]


class Standardize(LearnerConnector):
    """Subtracts a column's mean over the batch and divides by its standard deviation.

    Entries that are padding, phantom rows or masked otherwise do not count, and come out as 0. Works on rows and on
    sequences (B, T). The column keeps its dtype if that is a float one, and comes out as float32 else.

    Args:
        column: Its name.
        mask: Name of a bool column that is False where an entry does not count, if there is one; None to count all
            others. Padding and rows that are ``phantom`` never count, nor do those of agents that were truncated
            without a final observation.
        epsilon: Added to the standard deviation.

    Raises:
        ArgumentError: ``epsilon`` is below 0.
        ContractError: When called: the column is missing, does not fit its mask, or has a NaN or infinite entry that
            counts.
    """

    across_agents = True

    def __init__(self, column: str = "advantages", mask: str | None = "loss_mask", epsilon: float = 1e-8) -> None:
        if not epsilon >= 0:
            raise ArgumentError(f"epsilon must not be below 0, got {epsilon}")
        self.column = column
        self.mask = mask
        self.epsilon = epsilon

    def __call__(self, rows: Rows) -> Rows:
        values = one_array(rows, self.column)
        counts = self._counts(rows, values)
        wide = values[counts].astype(np.float64)
        if not np.isfinite(wide).all():
            raise ContractError(f"column {self.column!r} has {np.count_nonzero(~np.isfinite(wide))} NaN or inf entries")
        out = np.zeros(values.shape, values.dtype if values.dtype.kind == "f" else np.float32)
        if wide.size:
            wide -= wide.mean()
            wide -= wide.mean()  # the first mean was rounded: of equal values that error would be all there is
            spread = wide.std() + self.epsilon
            out[counts] = wide / spread if spread > 0 else 0.0
        return rows.replace(**{self.column: out})

    def _counts(self, rows: Rows, values: NDArray[Any]) -> NDArray[np.bool_]:
        """Which entries count, in the shape of the values' first axes."""
        counts = np.ones(len(rows), np.bool_)
        if "seq_lens" in rows and values.ndim > 1:
            counts = np.arange(values.shape[1]) < numbers(rows, "seq_lens")[:, None]
        names = ("phantom",) if self.mask is None else (self.mask, "phantom")
        masks = {name: one_array(rows, name).astype(np.bool_) for name in names if name in rows}
        if "phantom" in masks:
            masks["phantom"] = ~masks["phantom"]
        if "next_obs_missing" in rows:
            masks["next_obs_missing"] = ~unknown_outcome(rows)
        for name, mask in masks.items():
            if mask.shape != values.shape[: mask.ndim]:
                raise ContractError(f"column {self.column!r} has shape {values.shape}, its mask {name!r} {mask.shape}")
            axes = max(mask.ndim, counts.ndim)
            mask, counts = (part.reshape(*part.shape, *[1] * (axes - part.ndim)) for part in (mask, counts))
            counts = mask & counts
        return counts

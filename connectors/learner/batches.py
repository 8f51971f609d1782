"""Whole batches: columns standardized, rows shared out among modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.connectors.connector import LearnerConnector
from marlvec.connectors.learner.fragments import column, numbers, one_array, unknown_outcome
from marlvec.connectors.parameters import NonNegativeFloat
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, ContractError

__all__ = ["regroup", "Standardize"]

ModuleMapping = Mapping[str, str] | Callable[[str, int], str]
"""Policy id to module id, or a function of policy id and agent_index that gives a module id."""


def regroup(batch: Mapping[str, Rows], mapping: ModuleMapping) -> dict[str, Rows]:
    """Share out the rows of a finished batch among learners' modules.

    For learners that are cut otherwise than the policies that acted: a critic that several policies share, or an agent
    with a module of its own under a policy of all. Every row goes to exactly one module. A module's rows are in the
    order of the batch: policy after policy, and each policy's in their old order, so that fragments stay whole.

    Args:
        batch: Policy id to its rows.
        mapping: Policy id to module id; or a function, called once for each policy id and ``agent_index`` there is.

    Returns:
        Module id to its rows, in order of first appearance; modules without a row have no key.

    Raises:
        KeyError: The mapping has no module for a policy that has rows.
        ArgumentError: A module would get rows with different columns or shapes.
        ContractError: The mapping is a function and the rows have no ``agent_index``.
    """
    parts: dict[str, list[Rows]] = {}
    sources: dict[str, list[str]] = {}
    for policy_id, rows in batch.items():
        for module_id, share in _shares(policy_id, rows, mapping).items():
            parts.setdefault(module_id, []).append(share)
            sources.setdefault(module_id, []).append(policy_id)
    joined = {}
    for module_id, shares in parts.items():
        try:
            joined[module_id] = Rows.concat(shares)
        except ArgumentError as error:
            error.add_note(f"module {module_id!r} gets rows of the policies {sources[module_id]}")
            raise
    return joined


def _shares(policy_id: str, rows: Rows, mapping: ModuleMapping) -> dict[str, Rows]:
    """One policy's rows by module."""
    if not len(rows):
        return {}
    if isinstance(mapping, Mapping):
        if policy_id not in mapping:
            raise KeyError(f"no module for policy {policy_id!r}; the mapping has {list(mapping)}")
        return {mapping[policy_id]: rows}
    agents, agent_n = np.unique(column(rows, "agent_index"), return_inverse=True)
    modules = [mapping(policy_id, int(agent)) for agent in agents]
    names = list(dict.fromkeys(modules))
    if len(names) == 1:
        return {names[0]: rows}
    module_n = np.array([names.index(module) for module in modules])[agent_n]
    order = [names[k] for k in dict.fromkeys(module_n.tolist())]
    return {name: rows.take(module_n == names.index(name)) for name in order}


@dataclass(eq=False, repr=False)
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

    column: str = "advantages"
    mask: str | None = "loss_mask"
    epsilon: NonNegativeFloat = 1e-8

    across_agents = True

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

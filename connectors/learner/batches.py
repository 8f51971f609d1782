"""Whole batches: columns standardized, rows shared out among modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.connectors.connector import LearnerConnector, NonNegativeFloat
from marlvec.connectors.learner.fragments import column, given_actions, numbers, one_array, unknown_outcome
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, ContractError

ModuleMapping = Mapping[str, str] | Callable[[str, int], str]
"""Policy id to module id, or a function of policy id and agent_index that gives a module id."""


def regroup(batch: Mapping[str, Rows], mapping: ModuleMapping) -> dict[str, Rows]:
    """Distribute the rows of a finished batch to learners' modules.

    For learners whose modules differ from the acting policies: a critic shared by several policies, or an agent with
    its own module under a shared policy. Every row goes to exactly one module. A module's rows keep the batch's order,
    policy after policy, so that fragments stay whole.

    Args:
        batch: Policy id to its rows.
        mapping: Policy id to module id; or a function, called once for each present policy id and ``agent_index``.

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

    Padding, phantom rows and masked entries do not count, and become 0. Works on rows and on sequences (B, T). A float
    column keeps its dtype, others become float32.

    Args:
        column: Name of the column.
        mask: Name of an optional bool column that is False where an entry does not count; None: no such column.
            Padding, ``phantom`` rows, rows of agents truncated without a final observation, and NaN in rows whose
            action the policy did not choose (``off_policy``) never count.
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
            wide -= wide.mean()  # corrects the rounding of the first mean, which matters for equal values
            spread = wide.std() + self.epsilon
            out[counts] = wide / spread if spread > 0 else 0.0
        return rows.replace(**{self.column: out})

    def _counts(self, rows: Rows, values: NDArray[Any]) -> NDArray[np.bool_]:
        """Return the entries that count, in the shape of the values' first axes."""
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
        given = given_actions(rows)
        if given.any() and given.shape == values.shape[: given.ndim] and values.dtype.kind == "f":
            given, counts = (part.reshape(*part.shape, *[1] * (values.ndim - part.ndim)) for part in (given, counts))
            counts = counts & ~(given & np.isnan(values))
        return counts

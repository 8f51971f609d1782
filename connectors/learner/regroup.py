"""`regroup`: shares out a batch's rows among the learner's modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from marlvec.connectors.learner.fragments import column
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError

__all__ = ["regroup"]

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

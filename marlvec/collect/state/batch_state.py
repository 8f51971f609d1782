"""Converts batches that were made but not taken to plain data, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from marlvec.collect.batch import MultiAgentBatch, SampleBatch
from marlvec.collect.columns.plain import plain_rows, rows_from
from marlvec.collect.columns.specs import ColumnSpecs
from marlvec.serialization.state_fields import State, check_fields, number_field

__all__ = ["batch_from", "get_batch_state"]


def get_batch_state(batch: MultiAgentBatch) -> State:
    """Return a batch as plain data."""
    return {
        "policies": {name: plain_rows(batch[name], f"a batch of {name!r}") for name in batch},
        "known": list(batch.known),
        "env_steps": batch.env_steps,
        "agent_steps": batch.agent_steps,
    }


def batch_from(state: Any, specs: Mapping[str, ColumnSpecs]) -> MultiAgentBatch:
    """Rebuild a batch from a result of `get_batch_state`, in new arrays.

    ``specs``: allowed columns by policy id; for other policies only the collector's columns are checked.
    """
    where = "a batch that waits"
    check_fields(state, ("policies", "known", "env_steps", "agent_steps"), where)
    policies = {name: rows_from(rows, f"{where}: {name}") for name, rows in state["policies"].items()}
    for name, rows in policies.items():
        specs.get(name, ColumnSpecs({}, any_shape=True)).check(dict(rows.items()), f"{where}: {name}")
    return MultiAgentBatch(
        {name: SampleBatch(rows) for name, rows in policies.items()},
        env_steps=number_field(state, "env_steps", where),
        known=tuple(map(str, state["known"])),
        agent_steps=number_field(state, "agent_steps", where),
    )

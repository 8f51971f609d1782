"""Batches that are made and were not taken, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from marlvec.collect.batch import MultiAgentBatch, SampleBatch
from marlvec.collect.columns.plain import plain_rows, rows_from
from marlvec.collect.columns.specs import ColumnSpecs
from marlvec.serialization.state_fields import State, check_fields, number_field

__all__ = ["batch_from", "get_batch_state"]


def get_batch_state(batch: MultiAgentBatch) -> State:
    """Return a batch as plain data.

    Raises:
        SerialisationError: A column holds objects along more axes than one.
    """
    return {
        "policies": {name: plain_rows(batch[name], f"a batch of {name!r}") for name in batch},
        "known": list(batch.known),
        "env_steps": batch.env_steps,
        "agent_steps": batch.agent_steps,
    }


def batch_from(state: Any, specs: Mapping[str, ColumnSpecs]) -> MultiAgentBatch:
    """The batch that `get_batch_state` was given, in new arrays.

    Args:
        state: What it gave.
        specs: What columns are checked against, by policy id; of other policies nothing is known but the columns that
            the collector makes.

    Raises:
        ArgumentError: There is none in this.
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

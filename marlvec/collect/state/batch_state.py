"""Batches that are made and were not taken, as plain data."""

from __future__ import annotations

from typing import Any

from marlvec.collect.batch import MultiAgentBatch, SampleBatch
from marlvec.collect.storage.plain_columns import plain_rows, rows_from
from marlvec.serialization.state_fields import State, check_fields, number_field

__all__ = ["batch_from", "get_batch_state"]


def get_batch_state(batch: MultiAgentBatch) -> State:
    """All that is in a batch.

    Raises:
        SerialisationError: A column holds objects along more axes than one.
    """
    return {
        "policies": {name: plain_rows(batch[name], f"a batch of {name!r}") for name in batch},
        "known": list(batch.known),
        "env_steps": batch.env_steps,
        "agent_steps": batch.agent_steps,
    }


def batch_from(state: Any) -> MultiAgentBatch:
    """The batch that `get_batch_state` was given, in new arrays.

    Raises:
        ArgumentError: There is none in this.
    """
    where = "a batch that waits"
    check_fields(state, ("policies", "known", "env_steps", "agent_steps"), where)
    return MultiAgentBatch(
        {name: SampleBatch(rows_from(rows, where)) for name, rows in state["policies"].items()},
        env_steps=number_field(state, "env_steps", where),
        known=tuple(map(str, state["known"])),
        agent_steps=number_field(state, "agent_steps", where),
    )

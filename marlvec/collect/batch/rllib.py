"""Batches as RLlib's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from marlvec.errors import ArgumentError
from marlvec.extras import import_extra
from marlvec.trees import Tree

__all__ = ["RLLIB_NAMES", "as_multi_agent", "as_sample_batch"]

RLLIB_NAMES = {
    "next_obs": "new_obs",
    "terminated": "terminateds",
    "truncated": "truncateds",
    "logp": "action_logp",
    "values": "vf_preds",
}
"""Columns that RLlib calls otherwise; the others keep their names."""


def as_sample_batch(columns: Mapping[str, Tree]) -> Any:
    """``ray.rllib.policy.sample_batch.SampleBatch`` of these columns, which are not copied.

    Raises:
        MissingExtraError: ray is not installed.
        ArgumentError: The columns are sequences, or one already has the name that another gets.
    """
    theirs = _module()
    if "seq_lens" in columns:
        raise ArgumentError("to_rllib() takes rows, and these are sequences (B, T, …): call unpad() first")
    if taken := [RLLIB_NAMES[name] for name in columns if RLLIB_NAMES.get(name) in columns]:
        raise ArgumentError(f"to_rllib() needs the names {taken}, which are columns already: drop() them first")
    return theirs.SampleBatch({RLLIB_NAMES.get(name, name): column for name, column in columns.items()})


def as_multi_agent(batches: Mapping[str, Mapping[str, Tree]], env_steps: int) -> Any:
    """``ray.rllib.policy.sample_batch.MultiAgentBatch`` of these policies' columns.

    Raises:
        MissingExtraError: ray is not installed.
        ArgumentError: As of `as_sample_batch`.
    """
    theirs = _module()
    return theirs.MultiAgentBatch({name: as_sample_batch(columns) for name, columns in batches.items()}, env_steps)


def _module() -> Any:
    return import_extra("ray.rllib.policy.sample_batch", "to_rllib()", 'pip install "ray[rllib]"')

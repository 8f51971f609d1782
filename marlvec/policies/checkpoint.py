"""`save_policy` and `load_policy`: a policy's learned state in a file, as data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from marlvec.connectors import ActionPipeline, AgentPipeline
from marlvec.errors import CheckpointError, MarlvecError
from marlvec.policies.policy import Policy, PolicyState
from marlvec.serialization.archive import FilePath, read_archive, write_archive
from marlvec.serialization.values import decode, encode

__all__ = ["PolicyCheckpoint", "load_policy", "save_policy"]


@dataclass(frozen=True, slots=True)
class PolicyCheckpoint:
    """Contents of a policy's file: its version, a state from its ``state_dict``, and states of its connectors."""

    version: int
    state: PolicyState
    agent_connectors: Mapping[str, Any] | None  # with its memory of running episodes; None: not saved
    action_connectors: Mapping[str, Any] | None


def save_policy(
    path: FilePath,
    policy: Policy,
    agent_connectors: AgentPipeline | None = None,
    action_connectors: ActionPipeline | None = None,
) -> None:
    """Save a policy's learned state, e.g. for ``marlvec serve``.

    Args:
        path: The file, by convention ``.npz``. An old file is replaced atomically.
        policy: The policy.
        agent_connectors: Its agent connectors, e.g. ``collector.agent_connectors["main"]``.
        action_connectors: Its action connectors.

    Raises:
        SerialisationError: A value in its state cannot be stored in a file.
    """
    chains = {"agent_connectors": agent_connectors, "action_connectors": action_connectors}
    write_archive(
        path,
        {
            "version": encode(int(policy.version), "its version"),
            "state": encode(dict(policy.state_dict()), "the policy's state"),
            **{name: encode(dict(c.state_dict()), name) for name, c in chains.items() if c is not None},
        },
    )


def load_policy(path: FilePath) -> PolicyCheckpoint:
    """Read a file of `save_policy`; executes nothing from it. Raises `CheckpointError` if it is missing or damaged."""
    found = read_archive(path)
    try:
        data = {name: decode(value) for name, value in found.items()}
        return PolicyCheckpoint(
            data["version"], data["state"], data.get("agent_connectors"), data.get("action_connectors")
        )
    except (KeyError, MarlvecError) as error:
        raise CheckpointError(path, f"holds no policy: {error!r:.300}") from error

"""`save_policy` and `load_policy`: a policy's learned state in a file, as data alone."""

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
    """What a file holds of a policy.

    Attributes:
        version: The policy's version.
        state: What its ``state_dict`` gave.
        agent_connectors, action_connectors: What its connectors' gave, with what they remember of running episodes;
            None where none were saved.
    """

    version: int
    state: PolicyState
    agent_connectors: Mapping[str, Any] | None
    action_connectors: Mapping[str, Any] | None


def save_policy(
    path: FilePath,
    policy: Policy,
    agent_connectors: AgentPipeline | None = None,
    action_connectors: ActionPipeline | None = None,
) -> None:
    """Save what a policy has learned, e.g. for ``marlvec serve``.

    Args:
        path: The file, by convention ``.npz``. What was there is replaced at once or not at all.
        policy: The policy.
        agent_connectors: What stands before it, e.g. ``collector.agent_connectors["main"]``.
        action_connectors: What stands behind it.

    Raises:
        SerialisationError: There is something in its state that a file cannot hold.
        OSError: The file cannot be written.
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
    """Read what `save_policy` wrote; nothing in it is executed.

    Raises:
        CheckpointError: There is no such file, it is damaged, or holds something else.
    """
    found = read_archive(path)
    try:
        data = {name: decode(value) for name, value in found.items()}
        return PolicyCheckpoint(
            data["version"], data["state"], data.get("agent_connectors"), data.get("action_connectors")
        )
    except (KeyError, MarlvecError) as error:
        raise CheckpointError(path, f"holds no policy: {error!r:.300}") from error

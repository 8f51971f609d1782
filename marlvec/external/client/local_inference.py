"""`LocalInference`: the settings with which a client runs policies itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from marlvec.collect.acting.policy_set import Connectors
from marlvec.policies import PolicyLike

__all__ = ["LocalInference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalInference:
    """Settings to run policies in the client's process: it waits for no answer, and sends its actions to the server.

    Weights come from `Server.publish`, in numbered versions. Build the policies here as in the server's process: they
    load the server's ``state_dict``; connectors load the server's learned state at each new episode. Received data
    names no class or function. In the server's batches these rows are ``off_policy``, with the actions that the env
    received; other policy outputs (``logp``, …) stay here. Action connectors must keep the action space: the collector
    cannot compute the policy's output from the env's action, and refuses it.

    Attributes:
        policies: Policy id to policy, as in the server's collector; or one policy, which becomes ``"main"``. A policy
            may also be an object with a method ``act(rows)``, or a function of rows.
        policy_mapping: A policy id, or agent name to policy id; None: the only policy.
        agent_connectors: As for a `Collector`.
        action_connectors: As for a `Collector`.
        explore: Whether the policies explore.
        update_seconds: Seconds between checks for newer weights.
        seed: Seed of the policies; None: from the operating system.
    """

    policies: Mapping[str, PolicyLike] | PolicyLike
    policy_mapping: str | Mapping[str, str] | None = None
    agent_connectors: Connectors = None
    action_connectors: Connectors = None
    explore: bool = True
    update_seconds: float = 10.0
    seed: int | None = None

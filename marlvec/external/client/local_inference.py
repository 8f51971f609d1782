"""`LocalInference`: the settings with which a client runs policies itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from marlvec.collect.acting.policy_set import Connectors
from marlvec.policies import PolicyLike

__all__ = ["LocalInference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalInference:
    """Policies in the client's own process: no answer is waited for, and the actions are sent to the server.

    Weights come from `Server.publish`, in numbered versions: the policies here must be built as those there are, and
    take over their ``state_dict``; connectors take over what those there have learned, with each new episode. Nothing
    that comes names a class or a function. In the server's batches these rows are ``off_policy``, with what the env was
    given; what else a policy says (``logp``, …) stays here. Action connectors must keep the action space: the collector
    there cannot compute from the env's action what the policy had said, and refuses it.

    Attributes:
        policies: Policy id to policy, as the server's collector has them; or one policy, which is ``"main"``. An
            object with a method ``act(rows)``, or a function of rows, will do for a policy.
        policy_mapping: A policy id, or agent name to policy id; None: the only policy there is.
        agent_connectors: As a `Collector`'s.
        action_connectors: Likewise.
        explore: Whether the policies explore.
        update_seconds: How often to ask for newer weights.
        seed: Seeds the policies; None: from the operating system.
    """

    policies: Mapping[str, PolicyLike] | PolicyLike
    policy_mapping: str | Mapping[str, str] | None = None
    agent_connectors: Connectors = None
    action_connectors: Connectors = None
    explore: bool = True
    update_seconds: float = 10.0
    seed: int | None = None

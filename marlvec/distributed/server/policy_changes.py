"""Changes to all running collectors: their policies, the mapping, and the trained policies.

Each change is pickled once on the head, and applied to every collector between two requests, also after a restart.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any, TypeAlias

import cloudpickle

from marlvec.collect import Collector
from marlvec.collect.acting.policy_set import PoliciesToTrain
from marlvec.collect.episodes import PolicyMapping
from marlvec.errors import ArgumentError, SerialisationError, StateError

__all__ = [
    "AddPolicy",
    "Added",
    "MapPolicies",
    "PolicyChange",
    "RemovePolicy",
    "TrainPolicies",
    "check_learner_chain",
    "pickled",
]


@dataclass(frozen=True, slots=True)
class Added:
    """The first collector's new policy, from which all others build an equal policy."""

    weights: Any  # None without weights
    chains: bytes | None  # its agent, action and learner connectors, pickled, if copied from another policy


@dataclass(frozen=True, slots=True)
class AddPolicy:
    """Add a policy, as `marlvec.Collector.add_policy` does.

    `content` are the policy and its agent, action and learner connectors, pickled together, so that connectors that
    refer to the policy refer to the added object.
    """

    policy_id: str
    content: bytes
    like: str | None
    frozen: bool
    mapping: bytes | None = None  # pickled, of episodes that begin from then on; None: keep the current one

    def apply(self, collector: Collector, added: Added | None) -> Added:
        """Add the policy to a collector. `added` is the first collector's result; None for the first collector."""
        policy, *own = pickle.loads(self.content)
        like = self.like
        if added is not None and added.chains is not None:
            own, like = pickle.loads(added.chains), None
        names = ("agent_connectors", "action_connectors", "learner_connectors")
        collector.add_policy(
            self.policy_id, policy, like=like, frozen=self.frozen, **dict(zip(names, own, strict=True))
        )
        try:
            check_learner_chain(collector, self.policy_id)
            _change_mapping(collector, self.mapping)
        except (ArgumentError, StateError):
            collector.remove_policy(self.policy_id)
            raise
        policy = collector.policies[self.policy_id]
        if added is None:
            return Added(policy.get_weights(), self._copied(collector) if like is not None else None)
        if added.weights:
            policy.set_weights(added.weights)
        return added

    def _copied(self, collector: Collector) -> bytes:
        """Pickle the new policy's connectors; their statistics are now shared by all, not one collector's own."""
        sides = collector.agent_connectors, collector.action_connectors, collector.learner_connectors
        chains = [side[self.policy_id] for side in sides]
        for chain in chains[:2]:
            if chain.bound:
                chain.take_merged(chain.merge_states([chain.hand_over()]))
        return bytes(cloudpickle.dumps(chains))


@dataclass(frozen=True, slots=True)
class RemovePolicy:
    """Remove a policy, once it plays in no running episode of a collector."""

    policy_id: str
    mapping: bytes | None = None  # pickled, without the policy; None: the current mapping does not name it

    def apply(self, collector: Collector) -> bool:
        """Set the mapping; remove the policy if no running episode uses it.

        Return whether it was removed; if not, call `retry` between other calls. `StateError`: a fixed mapping names it.
        """
        _change_mapping(collector, self.mapping)
        return self.retry(collector)

    def retry(self, collector: Collector) -> bool:
        """Remove the policy if no running episode uses it; return whether it was removed."""
        try:
            collector.remove_policy(self.policy_id)
        except StateError:
            if not callable(collector.policy_mapping):
                raise
            return False
        return True


@dataclass(frozen=True, slots=True)
class MapPolicies:
    """Set the policy mapping, pickled, of episodes that begin."""

    mapping: bytes

    def apply(self, collector: Collector) -> None:
        """Set the mapping; `StateError` if the collector's mapping is fixed."""
        _change_mapping(collector, self.mapping)


@dataclass(frozen=True, slots=True)
class TrainPolicies:
    """Set the trained policies, a pickled value for `marlvec.Collector.policies_to_train`."""

    given: bytes

    def apply(self, collector: Collector) -> None:
        """Set them."""
        given: PoliciesToTrain = pickle.loads(self.given)
        collector.policies_to_train = given


PolicyChange: TypeAlias = AddPolicy | RemovePolicy | MapPolicies | TrainPolicies


def _change_mapping(collector: Collector, mapping: bytes | None) -> None:
    if mapping is not None:
        function: PolicyMapping = pickle.loads(mapping)
        collector.policy_mapping = function


def check_learner_chain(collector: Collector, policy_id: str) -> None:
    """Raise for learner connectors that need the whole batch: a collector sees only its part."""
    if across := [piece.name for piece in collector.learner_connectors[policy_id] if piece.across_agents]:
        raise ArgumentError(
            f"learner connectors {across} of policy {policy_id!r} look across a batch, and each collector sees its own "
            f"part of it alone: give them to Collectors(learner_connectors=...)"
        )


def pickled(value: Any, name: str, hint: str = "") -> bytes:
    """Pickle a caller's value, functions and classes by value; `SerialisationError` names it."""
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise SerialisationError(f"{name} cannot be pickled ({error}){hint}") from error

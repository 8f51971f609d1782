"""What changes in all collectors alike while they run: their policies, who plays, and what is trained.

Each is pickled once on the head, and applied to every collector between two requests; also to one that is restarted.
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
    """What one collector has made of a new policy, for all others to make the same of it.

    Attributes:
        weights: Its weights; None where it has none.
        chains: Its agent, action and learner connectors, pickled, where they are copies of another policy's.
    """

    weights: Any
    chains: bytes | None


@dataclass(frozen=True, slots=True)
class AddPolicy:
    """Add a policy, as `marlvec.Collector.add_policy` does.

    Attributes:
        policy_id, like, frozen: As there.
        content: The policy and its agent, action and learner connectors, pickled together: what the connectors know
            of the policy is then the very policy that is added.
        mapping: A function that says who plays in episodes that begin from then on, pickled; None: the one there is.
    """

    policy_id: str
    content: bytes
    like: str | None
    frozen: bool
    mapping: bytes | None = None

    def apply(self, collector: Collector, added: Added | None) -> Added:
        """Add it to a collector.

        Args:
            collector: Which.
            added: What the first collector made of it; None for that one.

        Raises:
            Exception: As `marlvec.Collector.add_policy`.
        """
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
        """The new policy's connectors, pickled. What they have learnt is known to all from here on, not to one."""
        sides = collector.agent_connectors, collector.action_connectors, collector.learner_connectors
        chains = [side[self.policy_id] for side in sides]
        for chain in chains[:2]:
            if chain.bound:
                chain.take_merged(chain.merge_states([chain.hand_over()]))
        return bytes(cloudpickle.dumps(chains))


@dataclass(frozen=True, slots=True)
class RemovePolicy:
    """Remove a policy, once it plays in no running episode of a collector.

    Attributes:
        policy_id: Which.
        mapping: A function that does not name it, pickled; None: the one there is does not.
    """

    policy_id: str
    mapping: bytes | None = None

    def apply(self, collector: Collector) -> bool:
        """Change who plays, and remove it if that can be done now.

        Returns:
            Whether it is removed; else call `retry` between other calls.

        Raises:
            StateError: It plays by a fixed mapping.
            ArgumentError: The mapping is no function of an agent's name and an episode.
        """
        _change_mapping(collector, self.mapping)
        return self.retry(collector)

    def retry(self, collector: Collector) -> bool:
        """Remove it if that can be done now."""
        try:
            collector.remove_policy(self.policy_id)
        except StateError:
            if not callable(collector.policy_mapping):
                raise
            return False
        return True


@dataclass(frozen=True, slots=True)
class MapPolicies:
    """Have another function say which policy plays which agent in episodes that begin.

    Attributes:
        mapping: ``(agent name, episode) -> policy id``, pickled.
    """

    mapping: bytes

    def apply(self, collector: Collector) -> None:
        """Use it from now on.

        Raises:
            ArgumentError: It is no function of an agent's name and an episode.
            StateError: The collector's mapping is fixed.
        """
        _change_mapping(collector, self.mapping)


@dataclass(frozen=True, slots=True)
class TrainPolicies:
    """Train these policies.

    Attributes:
        given: As `marlvec.Collector.policies_to_train`, pickled.
    """

    given: bytes

    def apply(self, collector: Collector) -> None:
        """Train them from now on.

        Raises:
            ArgumentError: They are no collection of policies, and no function.
        """
        given: PoliciesToTrain = pickle.loads(self.given)
        collector.policies_to_train = given


PolicyChange: TypeAlias = AddPolicy | RemovePolicy | MapPolicies | TrainPolicies


def _change_mapping(collector: Collector, mapping: bytes | None) -> None:
    if mapping is not None:
        function: PolicyMapping = pickle.loads(mapping)
        collector.policy_mapping = function


def check_learner_chain(collector: Collector, policy_id: str) -> None:
    """Refuse learner connectors that need a whole batch: a collector sees its own part of it alone.

    Raises:
        ArgumentError: There are some; names them.
    """
    if across := [piece.name for piece in collector.learner_connectors[policy_id] if piece.across_agents]:
        raise ArgumentError(
            f"learner connectors {across} of policy {policy_id!r} look across a batch, and each collector sees its own "
            f"part of it alone: give them to Collectors(learner_connectors=...)"
        )


def pickled(value: Any, name: str, hint: str = "") -> bytes:
    """A value of the caller's, pickled with what it is defined by.

    Raises:
        SerialisationError: It cannot be; names it.
    """
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise SerialisationError(f"{name} cannot be pickled ({error}){hint}") from error

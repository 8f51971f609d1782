"""`PolicyCopy` and `SharedPolicy`: policies for a second collector, copied, or shared without side effects."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
from gymnasium.spaces import Space

from marlvec.connectors import Pipeline, Rows
from marlvec.errors import ArgumentError
from marlvec.policies.policy import Policy, PolicyOutput
from marlvec.policies.policy_map import PolicyMap

__all__ = ["SharedPolicy", "PolicyCopy", "copies_of", "eval_copies"]


class SharedPolicy(Policy):
    """A policy, the ``host``, that another collector also uses: it is set up only if it never was."""

    def __init__(self, name: str, host: Policy) -> None:
        self._name, self.host, self.version = name, host, host.version

    def setup(self, observation_space: Space[Any], action_space: Space[Any], *, seed: int) -> None:
        """Set the policy up or, if that was done, check its spaces."""
        if self.host.observation_space is None or self.host.action_space is None:
            self.host.setup(observation_space, action_space, seed=seed)
        for what, own, here in (
            ("observation", self.host.observation_space, observation_space),
            ("action", self.host.action_space, action_space),
        ):
            if own is not None and own != here:
                raise ArgumentError(
                    f"policy {self._name!r}: expected the {what} space {own} of its setup(), got {here}: give it the "
                    f"same connectors"
                )
        super().setup(observation_space, action_space, seed=seed)

    def reseed(self, seed: int) -> None:
        self.host.reseed(seed)

    def act(self, rows: Rows, *, explore: bool = True) -> PolicyOutput:
        return self.host.act(rows, explore=explore)

    def __repr__(self) -> str:
        return repr(self.host)


P = TypeVar("P", bound=Pipeline[Any])


class PolicyCopy(Policy):
    """A copy of one of the policies: the same weights, with its own random generator and memory."""

    def __init__(self, policies: Mapping[str, Policy], policy_id: str) -> None:
        self._policies, self._policy_id = policies, policy_id
        self._policy: Policy | None = None
        self._setup: tuple[Space[Any], Space[Any], int] | None = None

    def copy(self) -> Policy:
        """Copy the policy at the first call; return the copy."""
        if self._policy is None:
            policy = self._policies[self._policy_id]
            try:
                self._policy = copy.deepcopy(policy)
            except Exception as error:
                error.add_note(f"while policy {self._policy_id!r} was copied, so that evaluate() does not change it")
                raise
            self.version = self._policy.version
            self._set_up()
        return self._policy

    def setup(self, observation_space: Space[Any], action_space: Space[Any], *, seed: int) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        self._setup = observation_space, action_space, seed
        self._set_up()

    def _set_up(self) -> None:
        if self._policy is not None and self._setup is not None:
            observation_space, action_space, seed = self._setup
            if self._policy.observation_space is None:
                self._policy.setup(observation_space, action_space, seed=seed)
            else:  # setup() could reset its weights
                self._policy.reseed(seed)

    def reseed(self, seed: int) -> None:
        if self._policy is not None:
            self._policy.reseed(seed)

    def act(self, rows: Rows, *, explore: bool = True) -> PolicyOutput:
        return self.copy().act(rows, explore=explore)


def copies_of(policies: Mapping[str, Policy]) -> dict[str, Policy]:
    """Return copies of all policies. Policies of a `PolicyMap` are copied at their first call, others now."""
    copies = {policy_id: PolicyCopy(policies, policy_id) for policy_id in policies}
    if not isinstance(policies, PolicyMap):
        for policy_copy in copies.values():
            policy_copy.copy()
    return dict(copies)


def eval_copies(pipelines: Mapping[str, P], num_envs: int) -> dict[str, P]:
    """Return copies of connectors in eval mode, with their learned state, and without memory of the envs' episodes."""
    copies = {policy_id: copy.deepcopy(pipeline) for policy_id, pipeline in pipelines.items()}
    for pipeline in copies.values():
        pipeline.reset(np.arange(num_envs))
        pipeline.eval()
    return copies

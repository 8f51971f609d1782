"""`RandomPolicy`: random actions, within action masks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.spaces import Discrete, Space
from numpy.typing import NDArray

from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, StateError
from marlvec.policies.policy import Policy, PolicyOutput, PolicyState
from marlvec.sampling import SpaceSampler
from marlvec.spaces import SpaceTree
from marlvec.trees import Tree

__all__ = ["RandomPolicy"]


class RandomPolicy(Policy):
    """Acts uniformly at random; with an action mask, uniformly over the allowed actions.

    `marlvec.sampling.SpaceSampler` describes how each kind of space is sampled, and the meaning of masks.

    Args:
        seed: Seed of its random generator; None: from the collector's seed.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed
        self._rng = np.random.default_rng(seed)
        self._sampler: SpaceSampler | None = None

    def setup(self, observation_space: Space[Any], action_space: Space[Any], *, seed: int) -> None:
        self._sampler = SpaceSampler(SpaceTree(action_space))
        super().setup(observation_space, action_space, seed=seed)

    def reseed(self, seed: int) -> None:
        if self.seed is None:
            self._rng = np.random.default_rng(seed)

    def act(self, rows: Rows, *, explore: bool = True) -> PolicyOutput:
        """Draw one action per row.

        Raises:
            StateError: `setup` was not called.
            ContractError: A mask allows no action, or does not fit the action space; names the env and the agent.
        """
        if self._sampler is None:
            raise StateError("this RandomPolicy has no action space yet: call setup() first, or use a Collector")

        def where(i: int) -> str:
            return f"env {int(rows['env_id'][i])}, agent {int(rows['agent_index'][i])}"

        drawn: Tree = self._sampler.sample(self._rng, len(rows), rows.get("action_mask"), where)
        return drawn

    def probabilities(self, rows: Rows) -> NDArray[np.float64]:
        """Return the probability of each action, for n rows: (n, k) float64; masked actions have 0.

        Returns:
            Rows that sum to 1.

        Raises:
            StateError: `setup` was not called.
            ArgumentError: The action space is not Discrete.
        """
        space = self.action_space
        if space is None:
            raise StateError("this RandomPolicy has no action space yet: call setup() first, or use a Collector")
        if not isinstance(space, Discrete):
            raise ArgumentError(f"probabilities(): expected a Discrete action space, got {space}")
        allowed = np.asarray(rows.get("action_mask", np.ones((len(rows), int(space.n)))), np.float64)
        shares: NDArray[np.float64] = allowed / allowed.sum(axis=1, keepdims=True)
        return shares

    def state_dict(self) -> PolicyState:
        return {"rng": self._rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        rng = np.random.default_rng()
        try:
            rng.bit_generator.state = state["rng"]
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(f"expected the state of a RandomPolicy, got {dict(state)!r}") from error
        self._rng = rng

    def __repr__(self) -> str:
        return "RandomPolicy()" if self.seed is None else f"RandomPolicy(seed={self.seed})"

"""Policies: rows in, actions out.

A policy answers all ready rows of all envs in one call. It sees spaces and observations as they are behind the agent
connectors, and gives actions as they are before the action connectors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium.spaces import Space

from marlvec.connectors.rows import Rows
from marlvec.connectors.trees import Tree
from marlvec.errors import ArgumentError, StateError
from marlvec.sampling import SpaceSampler
from marlvec.spaces import SpaceTree

__all__ = ["FunctionPolicy", "Policy", "PolicyOutput", "RandomPolicy"]

PolicyOutput = Tree | tuple[Tree, Mapping[str, Tree]]
"""Actions (n, …), a tree in the shape of the action space; or those and a dict of further columns (n, …)."""


class Policy(ABC):
    """Chooses actions for rows.

    Attributes:
        version: Number of the weights in use; every row collected carries the one it was decided with.
        observation_space: One observation as the policy sees it; None until `setup`.
        action_space: One action as the policy gives it; None until `setup`.
    """

    version: int = 0
    observation_space: Space[Any] | None = None
    action_space: Space[Any] | None = None

    def setup(self, observation_space: Space[Any], action_space: Space[Any], *, seed: int) -> None:
        """Learn the spaces. Called once by the collector, before the first `act`.

        Args:
            observation_space: One row's observation, behind the agent connectors.
            action_space: One row's action, before the action connectors.
            seed: From the collector's seed, another one for each policy; passed on to `reseed`.
        """
        self.observation_space = observation_space
        self.action_space = action_space
        self.reseed(seed)

    def reseed(self, seed: int) -> None:
        """Begin a new random stream. Called by `setup`, and by ``collector.reset(seed=…)``; does nothing here."""

    @abstractmethod
    def act(self, rows: Rows, *, explore: bool = True) -> PolicyOutput:
        """Choose one action per row.

        Args:
            rows: n rows: ``obs``, ids, ``t``, ``first``, ``reward`` (paid since the agent's previous row),
                ``action_mask`` (n, k) bool where the env gives one, and what the connectors added.
            explore: Whether to explore, or to act as well as it can.

        Returns:
            Actions (n, …), or ``(actions, columns)`` with further columns (n, …), e.g. ``logp``. The columns must stay
            the same from call to call; they are found in the batch under their names.
        """


class FunctionPolicy(Policy):
    """A policy made of a function.

    Args:
        function: Takes rows, returns what `Policy.act` returns.
    """

    def __init__(self, function: Callable[[Rows], PolicyOutput]) -> None:
        if not callable(function):
            raise ArgumentError(f"FunctionPolicy wants a function of rows, got {type(function).__name__}")
        self.function = function

    def act(self, rows: Rows, *, explore: bool = True) -> PolicyOutput:
        return self.function(rows)

    def __repr__(self) -> str:
        return f"FunctionPolicy({getattr(self.function, '__name__', repr(self.function))})"


class RandomPolicy(Policy):
    """Acts uniformly at random; with an action mask, uniformly over what is allowed.

    How each kind of space is drawn from, and what a mask means there, is told in `marlvec.sampling.SpaceSampler`.

    Args:
        seed: Seed of its random stream, whatever the collector's; None: the collector's seed decides.
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
            ContractError: A mask allows nothing, or does not fit the action space; names the env and the agent.
        """
        if self._sampler is None:
            raise StateError("this RandomPolicy does not know its action space: call setup() first, or use a Collector")

        def where(i: int) -> str:
            return f"env {int(rows['env_id'][i])}, agent {int(rows['agent_index'][i])}"

        drawn: Tree = self._sampler.sample(self._rng, len(rows), rows.columns.get("action_mask"), where)
        return drawn

    def __repr__(self) -> str:
        return "RandomPolicy()" if self.seed is None else f"RandomPolicy(seed={self.seed})"

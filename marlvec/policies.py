"""Policies: rows in, actions out.

A policy answers all ready rows of all envs in one call. It sees spaces and observations as they are behind the agent
connectors, and gives actions as they are before the action connectors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space
from numpy.typing import NDArray

from marlvec.connectors.rows import Rows
from marlvec.connectors.trees import Tree
from marlvec.errors import ArgumentError, ContractError, StateError
from marlvec.spaces import Leaf, SpaceTree

__all__ = ["FunctionPolicy", "Policy", "PolicyOutput", "RandomPolicy"]

AnyArray = NDArray[Any]
BoolArray = NDArray[np.bool_]

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
    """Acts uniformly at random, in any action space; with an action mask, uniformly over what is allowed.

    Each element of a Box is drawn as gymnasium's ``Box.sample`` does: uniformly where it has both bounds, from
    an exponential distribution of scale 1 away from its only bound, from the standard normal one without bounds; all
    rounded down for integers. A mask belongs to a Discrete or MultiDiscrete space; for the latter it is the masks of
    its dimensions, one after the other.

    Args:
        seed: Seed of its random stream, whatever the collector's; None: the collector's seed decides.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed
        self._rng = np.random.default_rng(seed)
        self._tree: SpaceTree | None = None
        self._samplers: list[Callable[[int, BoolArray | None, Rows], AnyArray]] = []

    def setup(self, observation_space: Space[Any], action_space: Space[Any], *, seed: int) -> None:
        self._tree = SpaceTree(action_space)
        self._samplers = [self._sampler(leaf) for leaf in self._tree.leaves]
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
        tree = self._tree
        if tree is None:
            raise StateError("this RandomPolicy does not know its action space: call setup() first, or use a Collector")
        mask = rows.columns.get("action_mask") if tree.is_leaf else None
        return tree.unflatten([sample(len(rows), mask, rows) for sample in self._samplers])

    def __repr__(self) -> str:
        return "RandomPolicy()" if self.seed is None else f"RandomPolicy(seed={self.seed})"

    def _sampler(self, leaf: Leaf) -> Callable[[int, BoolArray | None, Rows], AnyArray]:
        space = leaf.space
        if isinstance(space, Discrete):
            return lambda n, mask, rows: self._discrete(int(space.n), int(space.start), leaf.dtype, n, mask, rows)
        if isinstance(space, MultiDiscrete):
            return lambda n, mask, rows: self._multi_discrete(space, n, mask, rows)
        if isinstance(space, MultiBinary):
            return lambda n, mask, rows: self._rng.integers(2, size=(n, *leaf.shape), dtype=np.int8)
        assert isinstance(space, Box)  # SpaceTree lets no other leaf through
        return _BoxSampler(space, self)

    def _discrete(
        self, size: int, start: int, dtype: np.dtype[Any], n: int, mask: BoolArray | None, rows: Rows
    ) -> AnyArray:
        if mask is None:
            drawn: AnyArray = self._rng.integers(size, size=n)
        else:
            drawn = self._choose(mask, size, rows)
        return (drawn + start).astype(dtype, copy=False)

    def _multi_discrete(self, space: MultiDiscrete, n: int, mask: BoolArray | None, rows: Rows) -> AnyArray:
        sizes = np.asarray(space.nvec)
        if mask is None:
            drawn: AnyArray = self._rng.integers(sizes, size=(n, *sizes.shape))
        else:
            bounds = np.concatenate([[0], np.cumsum(sizes.ravel())])
            if mask.shape[1] != bounds[-1]:
                raise _wrong_mask(mask, int(bounds[-1]))
            dims = [mask[:, low:high] for low, high in pairwise(bounds)]
            drawn = np.stack([self._choose(m, m.shape[1], rows) for m in dims], axis=1).reshape(n, *sizes.shape)
        return (drawn + space.start).astype(space.dtype, copy=False)

    def _choose(self, mask: BoolArray, size: int, rows: Rows) -> AnyArray:
        """Position of one allowed entry per row: (n,) int64."""
        if mask.shape[1] != size:
            raise _wrong_mask(mask, size)
        count = mask.sum(axis=1)
        if not count.all():
            i = int(np.flatnonzero(count == 0)[0])
            raise ContractError(
                f"the action mask of env {int(rows['env_id'][i])}, agent {int(rows['agent_index'][i])} allows nothing; "
                f"an agent that must act needs one action at least"
            )
        # The k-th allowed entry is the first whose running count exceeds k.
        k = self._rng.integers(count)
        chosen: AnyArray = np.argmax(np.cumsum(mask, axis=1) > k[:, None], axis=1)
        return chosen


class _BoxSampler:
    """Draws from a Box, element by element as its bounds ask."""

    def __init__(self, space: Box, policy: RandomPolicy) -> None:
        self._policy = policy
        self._dtype: np.dtype[Any] = np.dtype(space.dtype)
        self._shape = space.shape
        self._low: AnyArray = space.low
        self._high: AnyArray = space.high
        below, above = space.bounded_below, space.bounded_above
        if self._dtype.kind == "b":
            below = above = np.ones(space.shape, np.bool_)
        self._both, self._below, self._above = below & above, below & ~above, ~below & above
        self._all_bounded = bool(self._both.all())

    def __call__(self, n: int, mask: BoolArray | None, rows: Rows) -> AnyArray:
        rng, shape = self._policy._rng, (n, *self._shape)
        if self._all_bounded and self._dtype.kind != "f":
            return rng.integers(self._low, self._high, size=shape, dtype=self._dtype, endpoint=True)
        if self._all_bounded:
            return self._uniform(rng.random(shape), self._low, self._high)
        # One draw of each kind for every element keeps the stream independent of where the bounds are.
        out = np.asarray(rng.standard_normal(shape))
        exponential, uniform = rng.standard_exponential(shape), rng.random(shape)
        below, above, both = self._below, self._above, self._both
        out[:, below] = self._low[below] + exponential[:, below]
        out[:, above] = self._high[above] - exponential[:, above]
        if self._dtype.kind != "f":
            out[:, both] = np.floor(self._low[both] + uniform[:, both] * (self._high[both] - self._low[both] + 1.0))
            # A bound near the end of the dtype's range must not wrap around.
            info: Any = np.iinfo(self._dtype)
            return np.clip(np.floor(out), float(info.min), float(info.max)).astype(self._dtype)
        drawn = out.astype(self._dtype)
        drawn[:, both] = self._uniform(uniform[:, both], self._low[both], self._high[both])
        return drawn

    def _uniform(self, u: NDArray[np.float64], low: AnyArray, high: AnyArray) -> AnyArray:
        # In this form the largest floats as bounds do not overflow; the clip undoes a last rounding.
        drawn = u * high.astype(np.float64) + (1.0 - u) * low.astype(np.float64)
        clipped: AnyArray = np.clip(drawn.astype(self._dtype), low, high)
        return clipped


def _wrong_mask(mask: BoolArray, size: int) -> ContractError:
    return ContractError(f"an action mask has {mask.shape[1]} entries, the policy's action space has {size} choices")

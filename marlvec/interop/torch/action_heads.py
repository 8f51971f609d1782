"""Distributions over action spaces from a torch module's outputs, sampled with an explicit generator."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from numpy.typing import NDArray
from torch import Tensor

from marlvec.errors import ContractError, UnsupportedSpaceError
from marlvec.spaces import Leaf, SpaceTree
from marlvec.spaces.action_masks import OTHER_WIDTH, choice_sizes
from marlvec.trees import Tree

__all__ = ["Distribution", "Head", "MakeDistribution"]


class Distribution(Protocol):
    """A distribution over actions, for n rows."""

    def sample(self, generator: torch.Generator) -> Tree:
        """Draw n actions with this generator only: tensors (n, …) in the shape of the action space."""

    def mode(self) -> Tree:
        """Return the most likely actions: tensors (n, …) in the shape of the action space."""

    def logp(self, actions: Tree) -> Tensor:
        """Return log-probabilities of actions: (n,)."""

    def entropy(self) -> Tensor:
        """Return entropies: (n,)."""


MakeDistribution = Callable[[Any, Tensor | None], Distribution]
"""Function of a module's action outputs, (n, k), and the action mask (n, m) bool or None, to a distribution."""


class Categorical:
    """Categorical distributions over k choices, numbered from ``start``; logits (n, k), -inf for masked choices."""

    def __init__(self, logits: Tensor, start: int = 0) -> None:
        self._logp = torch.log_softmax(logits, dim=-1)
        self._start = start

    def sample(self, generator: torch.Generator) -> Tensor:
        # The Gumbel-max trick. The noise is finite, so that masked choices never win.
        u = torch.rand(self._logp.shape, generator=generator, device=self._logp.device, dtype=self._logp.dtype)
        noise = -torch.log(-torch.log(u.clamp_min(torch.finfo(u.dtype).tiny)))
        return (self._logp + noise).argmax(dim=-1) + self._start

    def mode(self) -> Tensor:
        return self._logp.argmax(dim=-1) + self._start

    def logp(self, actions: Tensor) -> Tensor:
        return self._logp.gather(-1, (actions.long() - self._start)[..., None])[..., 0]

    def entropy(self) -> Tensor:
        p = self._logp.exp()
        # Without the -inf of masked choices: 0 * inf would be NaN, also in gradients of unselected branches.
        return -(p * self._logp.masked_fill(p == 0, 0.0)).sum(dim=-1)


class Gaussian:
    """Independent normal distributions of k numbers; inputs (n, 2 k): means, then log standard deviations."""

    def __init__(self, inputs: Tensor, shape: tuple[int, ...]) -> None:
        self._mean, self._log_std = inputs.chunk(2, dim=-1)
        self._shape = shape

    def sample(self, generator: torch.Generator) -> Tensor:
        mean = self._mean
        noise = torch.randn(mean.shape, generator=generator, device=mean.device, dtype=mean.dtype)
        return (mean + noise * self._log_std.exp()).reshape(-1, *self._shape)

    def mode(self) -> Tensor:
        return self._mean.reshape(-1, *self._shape)

    def logp(self, actions: Tensor) -> Tensor:
        z = (actions.reshape(self._mean.shape) - self._mean) / self._log_std.exp()
        return -(0.5 * z**2 + self._log_std + 0.5 * math.log(2 * math.pi)).sum(dim=-1)

    def entropy(self) -> Tensor:
        return (self._log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(dim=-1)


class Product:
    """Independent distributions over the parts of one action."""

    def __init__(
        self, parts: list[Any], split: Callable[[Any], list[Tensor]], join: Callable[[list[Tensor]], Any]
    ) -> None:
        self._parts, self._split, self._join = parts, split, join

    def sample(self, generator: torch.Generator) -> Any:
        return self._join([part.sample(generator) for part in self._parts])

    def mode(self) -> Any:
        return self._join([part.mode() for part in self._parts])

    def logp(self, actions: Any) -> Tensor:
        pairs = zip(self._parts, self._split(actions), strict=True)
        return torch.stack([part.logp(action) for part, action in pairs]).sum(dim=0)

    def entropy(self) -> Tensor:
        return torch.stack([part.entropy() for part in self._parts]).sum(dim=0)


class Head:
    """Default distributions of an action space.

    A row needs ``size`` numbers, leaf by leaf: ``n`` logits for a Discrete; the logits of all dimensions, one after the
    other, for a MultiDiscrete, and two each for a MultiBinary; means, then log standard deviations for a Box of floats.
    Masks apply to a Discrete or MultiDiscrete as a whole, in the same order.
    """

    def __init__(self, tree: SpaceTree) -> None:
        self._tree = tree
        self._sizes = [_size(leaf) for leaf in tree.leaves]
        self.size = sum(self._sizes)
        self._masked = isinstance(tree.space, (Discrete, MultiDiscrete))

    def __call__(self, inputs: Any, mask: Tensor | None) -> Distribution:
        """Return the distributions of n rows, from (n, size) numbers and a mask (n, size)."""
        if not isinstance(inputs, Tensor) or inputs.ndim != 2 or inputs.shape[1] != self.size:
            got = tuple(inputs.shape) if isinstance(inputs, Tensor) else type(inputs).__name__
            raise ContractError(
                f"module output: expected {self.size} numbers a row for {self._tree.space}, a tensor of shape "
                f"(n, {self.size}), got {got}"
            )
        if mask is not None and self._masked:
            if mask.shape != inputs.shape:
                raise ContractError(
                    f"action mask: expected {self.size} entries, one per choice, got {mask.shape[-1]}: {OTHER_WIDTH}"
                )
            inputs = inputs.masked_fill(~mask, -math.inf)
        pieces = inputs.split(self._sizes, dim=-1)
        parts = [_distribution(leaf, piece) for leaf, piece in zip(self._tree.leaves, pieces, strict=True)]
        if len(parts) == 1 and self._tree.is_leaf:
            only: Distribution = parts[0]
            return only
        return Product(parts, self._tree.flatten, self._tree.unflatten)

    def without_choice(self, mask: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return positions (k,) of rows for which a mask (n, size) allows no choice in some dimension."""
        if not self._masked or mask.shape[1] != self.size:  # `__call__` raises
            return np.zeros(0, np.int64)
        space: Any = self._tree.space
        starts = np.cumsum([0, *choice_sizes(space)[:-1]])
        return np.flatnonzero(~np.logical_or.reduceat(mask, starts, axis=1).all(axis=1))


def _size(leaf: Leaf) -> int:
    space: Any = leaf.space
    if isinstance(space, (Discrete, MultiDiscrete)):
        return int(choice_sizes(space).sum())
    if isinstance(space, MultiBinary) or (isinstance(space, Box) and leaf.dtype.kind == "f"):
        return 2 * math.prod(leaf.shape)
    raise UnsupportedSpaceError(
        f"no default distribution over {leaf} of the action space, {space}: pass TorchPolicy a distribution, or "
        f"discretize it with connectors"
    )


def _distribution(leaf: Leaf, inputs: Tensor) -> Any:
    space: Any = leaf.space
    if isinstance(space, Discrete):
        return Categorical(inputs, int(space.start))
    if isinstance(space, Box):
        return Gaussian(inputs, leaf.shape)
    binary = isinstance(space, MultiBinary)
    sizes = [2] * math.prod(leaf.shape) if binary else choice_sizes(space).tolist()
    starts = [0] * len(sizes) if binary else [int(k) for k in np.ravel(space.start)]
    parts = [Categorical(p, start) for p, start in zip(inputs.split(sizes, dim=-1), starts, strict=True)]

    def split(actions: Tensor) -> list[Tensor]:
        return list(actions.reshape(len(actions), len(sizes)).unbind(dim=1))

    def join(columns: list[Tensor]) -> Tensor:
        return torch.stack(columns, dim=1).reshape(-1, *leaf.shape)

    return Product(parts, split, join)

"""Random members of spaces, many rows at a time, from a random stream and with action masks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space
from numpy.typing import NDArray

from marlvec.errors import ContractError, UnsupportedSpaceError
from marlvec.spaces import Leaf, SpaceTree
from marlvec.spaces.action_masks import OTHER_WIDTH, choice_sizes, pick_allowed

AnyArray = NDArray[Any]
BoolArray = NDArray[np.bool_]
Generator = np.random.Generator
Where = Callable[[int], str]
_Draw = Callable[[Generator, int], AnyArray]


class SpaceSampler:
    """Draws members of one space, uniformly; with a mask, uniformly over the allowed ones.

    Each element of a Box is drawn as in Gymnasium's ``Box.sample``: uniformly with both bounds, from an exponential
    distribution of scale 1 with one bound, from the standard normal without bounds; rounded down for integers. Leaves
    without a fixed-size array form, and users' spaces with their own ``sample``, are drawn by it, from copies.
    """

    def __init__(self, tree: SpaceTree) -> None:
        self._tree = tree
        self._draws = [_draw_of(leaf) for leaf in tree.leaves]
        space = tree.space
        self._choices = choice_sizes(space) if isinstance(space, (Discrete, MultiDiscrete)) else None

    def sample(self, rng: Generator, n: int, mask: BoolArray | None = None, where: Where = "row {}".format) -> Any:
        """Draw n members: an array (n, …), or a tree of these; ``where(i)`` names row i in messages.

        `mask` (n, k) bool allows choices: k = ``n`` of a Discrete, the sum of ``nvec`` of a MultiDiscrete; else
        ignored. `UnsupportedSpaceError`: a user's space has no ``sample``, or one that raises.
        """
        if mask is not None and self._choices is not None:
            return self._choose_allowed(rng, mask, self._choices, where)
        return self._tree.unflatten([draw(rng, n) for draw in self._draws])

    def _choose_allowed(self, rng: Generator, mask: BoolArray, sizes: AnyArray, where: Where) -> AnyArray:
        leaf = self._tree.leaves[0]
        bounds = np.concatenate([[0], np.cumsum(sizes)])
        if mask.shape[1] != bounds[-1]:
            raise ContractError(
                f"an action mask has {mask.shape[1]} entries, the action space has {bounds[-1]} choices: {OTHER_WIDTH}"
            )
        dims = [pick_allowed(mask[:, low:high], rng.integers, where) for low, high in pairwise(bounds.tolist())]
        drawn = dims[0] if not leaf.shape else np.stack(dims, axis=1).reshape(len(mask), *leaf.shape)
        space: Any = leaf.space
        chosen: AnyArray = (drawn + space.start).astype(leaf.dtype, copy=False)
        return chosen


def _draw_of(leaf: Leaf) -> _Draw:
    space: Any = leaf.space
    dtype, start = leaf.dtype, getattr(space, "start", 0)
    if _draws_like(space, Discrete):
        return _DiscreteDraw(int(start), int(space.n), dtype)
    if _draws_like(space, MultiDiscrete):
        sizes = np.asarray(space.nvec)
        return lambda rng, n: (rng.integers(sizes, size=(n, *sizes.shape)) + start).astype(dtype, copy=False)
    if _draws_like(space, MultiBinary):
        return lambda rng, n: rng.integers(2, size=(n, *leaf.shape), dtype=np.int8)
    if _draws_like(space, Box):
        return _BoxDraw(space)
    return _OwnDraw(leaf)


def _draws_like(space: Space[Any], kind: type[Space[Any]]) -> bool:
    """Return whether a space is of this kind, and not a user's subclass with its own ``sample``."""
    return isinstance(space, kind) and type(space).sample is kind.sample


class _DiscreteDraw:
    _FEW = 2**31  # up to this n, uniform floats give equal probabilities within a share of 2**-22

    def __init__(self, start: int, n: int, dtype: np.dtype[Any]) -> None:
        self._start, self._n, self._dtype = start, n, dtype

    def __call__(self, rng: Generator, n: int) -> AnyArray:
        if self._n > self._FEW:
            return rng.integers(self._start, self._start + self._n, size=n).astype(self._dtype, copy=False)
        # A third of the time of integers(); random() is at most 1 - 2**-53, so the result is less than n.
        drawn: AnyArray = (rng.random((n,)) * self._n).astype(self._dtype)
        return drawn + self._dtype.type(self._start) if self._start else drawn


class _OwnDraw:
    def __init__(self, leaf: Leaf) -> None:
        self._leaf = leaf
        self._space = copy.deepcopy(leaf.space)
        self._shape, self._dtype = leaf.shape, leaf.dtype

    def __call__(self, rng: Generator, n: int) -> AnyArray:
        out = np.empty((n, *self._shape), self._dtype)
        try:
            self._space.seed(int(rng.integers(2**31)))
            for i in range(n):
                out[i] = self._space.sample()
        except Exception as error:
            raise UnsupportedSpaceError(
                f"{self._leaf}: expected a space that can be drawn from, got {type(self._space).__name__}, whose "
                f"sample() raised {type(error).__name__}: {error}. Give that class a sample(), or choose by other means"
            ) from error
        return out


class _BoxDraw:
    def __init__(self, space: Box) -> None:
        self._dtype: np.dtype[Any] = np.dtype(space.dtype)
        self._shape = space.shape
        self._low: AnyArray = space.low
        self._high: AnyArray = space.high
        below, above = space.bounded_below, space.bounded_above
        if self._dtype.kind == "b":
            below = above = np.ones(space.shape, np.bool_)
        self._both, self._below, self._above = below & above, below & ~above, ~below & above
        self._all_bounded = bool(self._both.all())

    def __call__(self, rng: Generator, n: int) -> AnyArray:
        shape = (n, *self._shape)
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
        # This form does not overflow with the largest floats as bounds; the clip corrects rounding.
        drawn = u * high.astype(np.float64) + (1.0 - u) * low.astype(np.float64)
        clipped: AnyArray = np.clip(drawn.astype(self._dtype), low, high)
        return clipped

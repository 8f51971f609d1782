"""Base of connectors that treat each leaf of an observation by itself: paths of leaves, vectors, one-hots."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Space, Tuple
from numpy.typing import NDArray

from marlvec.connectors.connector import AgentConnector, from_setup
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, ContractError, UnsupportedSpaceError
from marlvec.spaces import Leaf, SpaceTree
from marlvec.spaces.action_masks import choice_sizes
from marlvec.spaces.tree import map_space

__all__ = [
    "check_keys",
    "is_below",
    "LeafPlan",
    "LeafwiseObs",
    "append_to_obs",
    "appended_space",
    "OneHot",
    "space_summary",
]


def space_summary(space: Space[Any]) -> str:
    """Describe a space in one short line: ``Box (18,) float32 [-10, 10]``."""
    if isinstance(space, Box):
        low, high = (space.low.min(), space.high.max()) if space.low.size else (0, 0)
        return f"Box {space.shape} {space.dtype} [{low:g}, {high:g}]"
    if isinstance(space, Dict):
        return "{" + ", ".join(f"{key}: {space_summary(sub)}" for key, sub in space.spaces.items()) + "}"
    if isinstance(space, Tuple):
        return "(" + ", ".join(space_summary(sub) for sub in space.spaces) + ")"
    return str(space)


def is_below(path: str, key: str) -> bool:
    return path == key or path.startswith(f"{key}/")


def check_keys(keys: Sequence[str], tree: SpaceTree) -> None:
    """Raise ArgumentError if a key matches no leaf."""
    for key in keys:
        if not any(is_below(leaf.path, key) for leaf in tree.leaves):
            raise ArgumentError(f"no key {key!r} in the space; its leaves are {[leaf.path for leaf in tree.leaves]}")


class LeafPlan(NamedTuple):
    """Transform of one leaf: its space on the other side; a function of (n, …) values, which it does not write to."""

    space: Space[Any]
    apply: Callable[..., NDArray[Any]]


@dataclass(eq=False, repr=False)
class LeafwiseObs(AgentConnector):
    """Transforms the matching leaves of an observation one by one; other leaves pass unchanged.

    Subclasses define the transform of a leaf in `_plan`.

    Args:
        keys: Paths of the leaves, e.g. ``"camera/left"``; a path includes all leaves below it. None: every matching
            leaf.

    Raises:
        ArgumentError: In `bind`: a path does not exist.
        UnsupportedSpaceError: In `bind`: no leaf is of its kind, at all or below one of ``keys``.
    """

    keys: Sequence[str] | None = field(default=None, kw_only=True)

    _kind = "leaves"
    """What leaves it works on, for messages."""
    _advice = "take it out of this pipeline"
    """What to do where there are none."""
    _tree = from_setup(SpaceTree)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.keys = None if self.keys is None else tuple(self.keys)

    def __call__(self, rows: Rows) -> Rows:
        tree = self._tree
        leaves = tree.flatten(rows.obs)
        for i, apply in self._work:
            leaves[i] = apply(np.asarray(leaves[i]))
        return rows.replace(obs=tree.unflatten(leaves))

    def setup(self, space: Space[Any]) -> None:
        tree = SpaceTree(space)
        self._work = [(i, plan.apply) for i, plan in enumerate(self._plans(tree)) if plan is not None]
        self._tree = tree

    def output_space(self, space: Space[Any]) -> Space[Any]:
        plans = iter(self._plans(SpaceTree(space)))  # map_space meets the leaves in the same order

        def planned(leaf: Space[Any]) -> Space[Any]:
            plan = next(plans)
            return leaf if plan is None else plan.space

        return map_space(planned, space)

    @abstractmethod
    def _plan(self, leaf: Leaf) -> LeafPlan | None:
        """Return the transform of a leaf; None if the leaf does not match. Changes nothing."""

    def _plans(self, tree: SpaceTree) -> list[LeafPlan | None]:
        if self.keys is None:
            plans = [self._plan(leaf) for leaf in tree.leaves]
            if not any(plans):
                raise self._none_found(f"in {space_summary(tree.space)}")
            return plans
        check_keys(self.keys, tree)
        plans = [self._plan(at) if any(is_below(at.path, key) for key in self.keys) else None for at in tree.leaves]
        for key in self.keys:
            if not any(plan for leaf, plan in zip(tree.leaves, plans, strict=True) if is_below(leaf.path, key)):
                raise self._none_found(f"at {key!r} of {space_summary(tree.space)}")
        return plans

    def _none_found(self, where: str) -> UnsupportedSpaceError:
        return UnsupportedSpaceError(f"{self!r} works on {self._kind}, and there is none {where}; {self._advice}")


def append_to_obs(rows: Rows, extra_nk: NDArray[Any], dtype: np.dtype[Any]) -> Rows:
    """Append (n, k) numbers to (n, d) observations, in the dtype of `appended_space`."""
    obs = rows.obs
    size = obs.shape[1]
    out = np.empty((len(rows), size + extra_nk.shape[1]), dtype)
    out[:, :size] = obs
    with np.errstate(over="ignore"):  # a number too large for float32 becomes infinite
        out[:, size:] = extra_nk
    return rows.replace(obs=out)


def appended_space(space: Space[Any], extra: Box, times: int, who: str) -> Box:
    """Return the space of a vector with ``times`` vectors of ``extra`` appended, in the common dtype."""
    if not isinstance(space, Box) or len(space.shape) != 1:
        raise UnsupportedSpaceError(f"{who} needs a vector to append to: put FlattenObs before it; got {space}")
    dtype = np.result_type(space.low.dtype, extra.low.dtype)
    low = np.concatenate([space.low, np.tile(extra.low, times)]).astype(dtype)
    high = np.concatenate([space.high, np.tile(extra.high, times)]).astype(dtype)
    return Box(low, high, dtype=dtype.type)


class OneHot:
    """Turns the entries of a Discrete or MultiDiscrete leaf, raveled, into one-hots, concatenated."""

    def __init__(self, leaf: Leaf) -> None:
        count, first = _categories(leaf)
        self.leaf = leaf
        self._low, self._high = first, first + count - 1
        # Column j of the one-hot is entry owner[j] of the leaf compared with level[j].
        self._owner = np.repeat(np.arange(len(count)), count)
        self._level = np.concatenate([np.arange(c) + f for c, f in zip(count, first, strict=True)])
        self.width = len(self._level)

    def __call__(self, value_n: Any) -> NDArray[np.bool_]:
        """Turn (n, *leaf.shape) into (n, width); ContractError names value and row."""
        values = np.asarray(value_n).reshape(len(value_n), len(self._low))
        wrong = (values < self._low) | (values > self._high)
        if wrong.any():
            row, entry = np.argwhere(wrong)[0]
            raise ContractError(f"{self.leaf} is {values[row, entry]} in row {row}, outside of {self.leaf.space}")
        hot: NDArray[np.bool_] = values[:, self._owner] == self._level
        return hot


def _categories(leaf: Leaf) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Number of categories and the first one, for each entry, raveled."""
    assert isinstance(leaf.space, (Discrete, MultiDiscrete))
    return choice_sizes(leaf.space), np.asarray(leaf.space.start, np.int64).ravel()

"""Bases of connectors that work leaf by leaf: observations by key, and spaces that a function declares."""

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
from marlvec.trees import Tree, map_tree


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
    """Return whether a leaf's path is the key, or lies below it."""
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


SpaceRule = Space[Any] | Callable[[Space[Any]], Space[Any]] | None
"""The space on a function's other side: a space, or a function of the space on this side; None: both are equal."""


def check_function(function: Any, rule: Any, who: str, argument: str = "output_space") -> None:
    """Check the arguments of a connector around a function: ``rule``, called ``argument``, is a `SpaceRule`."""
    if not callable(function):
        raise ArgumentError(f"{who} takes a function, got {type(function).__name__}")
    if rule is not None and not isinstance(rule, Space) and not callable(rule):
        raise ArgumentError(
            f"{argument} must be a space, a function from space to space, or None; got {type(rule).__name__}"
        )


def space_after(rule: SpaceRule, space: Space[Any], who: str, argument: str = "output_space") -> Space[Any]:
    """Compute the space on the other side of a function by a rule."""
    if rule is None or isinstance(rule, Space):
        return space if rule is None else rule
    after = rule(space)
    if not isinstance(after, Space):
        raise ArgumentError(f"the {argument} of {who} must return a space, got {type(after).__name__}")
    return after


def read_only(tree: Tree) -> Tree:
    """Return read-only views."""

    def view(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            leaf = leaf.view()
            leaf.flags.writeable = False
        return leaf

    return map_tree(view, tree)


class DeclaredSpace:
    """Checks structure, shapes and dtypes of a function's values against a space; bounds are not checked.

    Floats are cast to the space's float size, ints to its int size; a float never becomes an int.
    """

    def __init__(self, space: Space[Any], who: str) -> None:
        self._tree = SpaceTree(space)
        self._who = who

    def batch(self, value: Tree, n: int) -> Tree:
        """Check and cast the values of n rows, to writable arrays; ContractError names the leaf."""
        pairs = zip(self._flatten(value, ""), self._tree.leaves, strict=True)
        return self._tree.unflatten([self._fit(leaf_value, leaf, (n,), "") for leaf_value, leaf in pairs])

    def stack(self, values: Sequence[Any]) -> Tree:
        """Check, cast and stack values that were made row by row; ContractError names row and leaf."""
        leaves = self._tree.zeros(len(values))
        for row, value in enumerate(values):
            for k, leaf_value in enumerate(self._flatten(value, f" for row {row}")):
                leaves[k][row] = self._fit(leaf_value, self._tree.leaves[k], (), f" for row {row}")
        return self._tree.unflatten(leaves)

    def _flatten(self, value: Tree, where: str) -> list[Any]:
        try:
            return self._tree.flatten(value)
        except ContractError as error:
            raise ContractError(f"the function of {self._who} returned{where}: {error}; {self._advice}") from None

    def _fit(self, value: Any, leaf: Leaf, lead: tuple[int, ...], where: str) -> Any:
        if leaf.is_object:
            if not lead or (hasattr(value, "__len__") and len(value) == lead[0]):
                return value
            raise self._misfit(leaf, f"objects of shape {lead}", type(value).__name__, where)
        shape = (*lead, *leaf.shape)
        try:
            array: NDArray[Any] = np.asarray(value)
        except ValueError:  # a ragged list
            raise self._misfit(leaf, f"{leaf.dtype} of shape {shape}", "what is no regular array", where) from None
        if array.shape != shape or not np.can_cast(array.dtype, leaf.dtype, "same_kind"):
            got = f"{array.dtype} of shape {array.shape}"
            raise self._misfit(leaf, f"{leaf.dtype} of shape {shape}", got, where)
        array = array.astype(leaf.dtype, copy=False)
        return array if array.flags.writeable or not lead else array.copy()

    def _misfit(self, leaf: Leaf, expected: str, got: str, where: str) -> ContractError:
        return ContractError(
            f"the function of {self._who} returned{where} {got} for {leaf}, expected {expected}; {self._advice}"
        )

    @property
    def _advice(self) -> str:
        return "where it changes the space, say so with output_space=…"


class ObsFunction(AgentConnector):
    """A connector around a user's function of observations; subclasses define how it is called."""

    _declared = from_setup(DeclaredSpace)

    def __init__(self, function: Callable[..., Tree], output_space: SpaceRule = None) -> None:
        check_function(function, output_space, type(self).__name__)
        self.function = function
        self._rule = output_space

    def setup(self, space: Space[Any]) -> None:
        self._declared = DeclaredSpace(self.output_space(space), self.name)

    def output_space(self, space: Space[Any]) -> Space[Any]:
        return space_after(self._rule, space, self.name)

    def params(self) -> dict[str, Any]:
        return {"function": self.function, "output_space": self._rule}

"""Converts the policy's actions: to numpy, by a function, or to another space."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete, Space
from numpy.typing import NDArray

from marlvec.connectors.action.valid_actions import Choices
from marlvec.connectors.connector import ActionConnector, PositiveInt, from_setup
from marlvec.connectors.leafwise import LeafPlan, SpaceRule, check_function, read_only, space_after
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, UnsupportedSpaceError
from marlvec.spaces import SpaceTree
from marlvec.spaces.tree import map_space
from marlvec.trees import Tree, _typed, map_tree, to_array


class ToNumpy(ActionConnector):
    """Converts every column that is not numpy to arrays, leaf by leaf.

    Accepts torch tensors on any device, also with gradients, objects with ``__array__``, and lists. Numbers do not
    change. A list in ``actions_for_env`` gets the dtype of the action space. No tensor library is imported.
    """

    _tree = from_setup(SpaceTree)

    def __call__(self, rows: Rows) -> Rows:
        tree = self._tree
        done: dict[str, Any] = {}
        for name, column in rows.items():
            if type(column) is np.ndarray:
                continue
            if name == "actions_for_env":
                pairs = zip(tree.flatten(column), tree.leaves, strict=True)
                done[name] = tree.unflatten([_typed(to_array(value), value, leaf.dtype) for value, leaf in pairs])
            else:
                done[name] = map_tree(to_array, column)
        return rows.replace(**done) if done else rows

    @property
    def only_converts(self) -> bool:
        return True

    def setup(self, space: Space[Any]) -> None:
        self._tree = SpaceTree(space)


class ReadOnlyActions(ActionConnector):
    """Makes ``actions_for_env`` read-only views; the policy's own arrays stay as writeable as they were."""

    def __call__(self, rows: Rows) -> Rows:
        actions = rows["actions_for_env"]
        if type(actions) is np.ndarray:
            actions = actions.view()
            actions.flags.writeable = False
            return rows.replace(actions_for_env=actions)
        return rows.replace(actions_for_env=read_only(actions))

    @property
    def only_converts(self) -> bool:
        return True


class MapActions(ActionConnector):
    """Replaces ``actions_for_env`` by ``function(actions)``, for all rows at once.

    For a function that needs other columns, too, use `action_connector`.

    Args:
        function: Takes a tree of (n, …) arrays in the shape of the policy's space, and returns one in the shape of the
            env's. It must not write into its argument.
        policy_space: Space of one action before the function: a space, or a function of the space after it; None if
            both are equal.

    Raises:
        ArgumentError: ``function`` is not a function, or ``policy_space`` neither space nor function; or, in a call,
            the function returned another number of rows.
    """

    is_choice = False

    def __init__(self, function: Callable[[Tree], Tree], policy_space: SpaceRule = None) -> None:
        check_function(function, policy_space, "MapActions", "policy_space")
        self.function = function
        self._rule = policy_space

    def __call__(self, rows: Rows) -> Rows:
        return rows.replace(actions_for_env=self.function(rows.actions_for_env))

    def policy_space(self, space: Space[Any]) -> Space[Any]:
        return space_after(self._rule, space, self.name, "policy_space")

    def params(self) -> dict[str, Any]:
        return {"function": self.function, "policy_space": self._rule}


class LeafwiseActions(ActionConnector):
    """Converts the matching leaves of an action one by one; other leaves pass unchanged."""

    _without = ""
    """Why it refuses ``{space}``, which has no such leaf; empty where that passes."""
    _tree = from_setup(SpaceTree)

    def __call__(self, rows: Rows) -> Rows:
        tree = self._tree
        leaves = tree.flatten(rows.actions_for_env)
        for i, apply in self._work:
            leaves[i] = apply(leaves[i], rows)
        return rows.replace(actions_for_env=tree.unflatten(leaves))

    def setup(self, space: Space[Any]) -> None:
        self._tree = SpaceTree(space)
        self._work = [(i, plan.apply) for i, plan in enumerate(self._plans(space)) if plan is not None]

    def policy_space(self, space: Space[Any]) -> Space[Any]:
        plans = self._plans(space)
        if self._without and not any(plans):
            raise UnsupportedSpaceError(self._without.format(space=space))
        rest = iter(plans)  # map_space meets the leaves in the same order
        return map_space(lambda leaf: leaf if (plan := next(rest)) is None else plan.space, space)

    def _plans(self, space: Space[Any]) -> list[LeafPlan | None]:
        return [self._plan(leaf.space) for leaf in SpaceTree(space).leaves]

    @abstractmethod
    def _plan(self, space: Space[Any]) -> LeafPlan | None:
        """Return the conversion of a leaf to its space on the policy's side, of actions and their rows, or None."""


class UnsquashActions(LeafwiseActions):
    """Stretches actions in [-1, 1] to the bounds of every bounded float Box; other leaves pass unchanged.

    Exact at the ends: -1 becomes low and 1 becomes high. Actions beyond -1 and 1 end up beyond the bounds, for
    `ClipActions` to clip. The policy acts in ``Box(-1, 1)`` of the leaf's shape and dtype.
    """

    @property
    def is_identity(self) -> bool:
        return "_tree" in vars(self) and not self._work

    def undo(self, actions: Tree) -> Tree:
        leaves = self._tree.flatten(actions)
        for i, stretch in self._work:
            assert isinstance(stretch, _Stretch)  # see `_plan`
            leaves[i] = stretch.undo(leaves[i])
        return self._tree.unflatten(leaves)

    def _plan(self, space: Space[Any]) -> LeafPlan | None:
        if not isinstance(space, Box) or space.low.dtype.kind != "f" or not space.is_bounded("both"):
            return None
        return LeafPlan(Box(-1, 1, space.shape, space.low.dtype.type), _Stretch(space))


class _Stretch:
    """Maps [-1, 1] linearly to a Box's bounds, computed from the nearer end so that both ends are exact."""

    def __init__(self, space: Box) -> None:
        self.low, self.high = space.low, space.high
        self.half = self.high / 2 - self.low / 2  # halved first: high - low may overflow
        self.dtype = space.low.dtype

    def __call__(self, action_n: Any, rows: Rows) -> NDArray[Any]:
        action = np.asarray(action_n)
        upper = action > 0
        with np.errstate(over="ignore"):  # an action far beyond may become infinite; ClipActions brings it back
            step = (1 - np.abs(action)) * self.half
            out: NDArray[Any] = np.where(upper, self.high, self.low) + np.where(upper, -step, step)
            return out.astype(self.dtype, copy=False)

    def undo(self, action_n: Any) -> NDArray[Any]:
        """Map the Box's bounds to [-1, 1], exact at both ends; an element with equal bounds becomes 0."""
        action = np.asarray(action_n)
        middle = self.high / 2 + self.low / 2
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            out = np.where(action > middle, 1 - (self.high - action) / self.half, (action - self.low) / self.half - 1)
        back: NDArray[Any] = np.where(self.half == 0, 0, out).astype(self.dtype)
        return back


@dataclass(eq=False, repr=False)
class PadActions(LeafwiseActions):
    """Lets the policy act in a Discrete of ``n`` choices if the env has fewer, so that one policy fits many envs.

    Actions that the env lacks become ``invalid``. Each Discrete is widened and keeps its start; other leaves pass
    unchanged. Masks keep the env's length: policies treat missing entries as forbidden.

    Args:
        n: Choices of the policy, at least the env's.
        invalid: The env's action that replaces an action that the env lacks; None for the first.

    Raises:
        ArgumentError: ``n`` is not a positive int; or, in `bind`, ``invalid`` is not an action of the space.
        UnsupportedSpaceError: In `bind`: the space has no Discrete, or one with more than ``n`` choices.
        ContractError: In a call: an action is not in the policy's space.
    """

    n: PositiveInt
    invalid: int | None = field(default=None, kw_only=True)

    _without = (
        "PadActions widens Discretes, and there is none in {space}; put DiscretizeActions(joint=True) behind it for "
        "Boxes, or pad the env itself: make(..., pad=True)"
    )

    def undo(self, actions: Tree) -> Tree:
        return actions  # the env's choices are the first of the policy's

    def _plan(self, space: Space[Any]) -> LeafPlan | None:
        if not isinstance(space, Discrete):
            return None
        widened = self._widened(space)
        return LeafPlan(widened, partial(self._cut, space, Choices(widened)))

    def _cut(self, space: Discrete, choices: Choices, actions_n: Any, rows: Rows) -> NDArray[Any]:
        chosen = choices.read(actions_n, rows)
        instead = 0 if self.invalid is None else self.invalid - int(space.start)
        return choices.write(np.where(chosen < int(space.n), chosen, instead))

    def _widened(self, space: Discrete) -> Discrete:
        n, start = int(space.n), int(space.start)
        if n > self.n:
            raise UnsupportedSpaceError(f"{self!r} has fewer choices than the env's {space}; give it {n} at least")
        if self.invalid is not None and not start <= self.invalid < start + n:
            raise ArgumentError(f"invalid={self.invalid} must be an action of {space}: {start} to {start + n - 1}")
        return Discrete(self.n, start=start, dtype=np.dtype(space.dtype).type)


@dataclass(eq=False, repr=False)
class DiscretizeActions(LeafwiseActions):
    """Lets the policy choose among evenly spaced values of each element of a bounded Box, bounds included.

    The policy acts in a MultiDiscrete of the Box's shape, or in a Discrete if the Box has shape (). With ``joint`` it
    acts in one Discrete over the grid of all elements, in which the last element changes fastest: 3 bins for 2 elements
    are 9 choices; 0 is (low, low), 1 is (low, middle). Other leaves pass unchanged.

    Args:
        bins: Number of values of each element, at least 2; or a number for each element, in every Box.
        joint: Whether the policy makes one choice for the whole Box.

    Raises:
        ArgumentError: ``bins`` has no number, or one below 2.
        UnsupportedSpaceError: In `bind`: it has no Box; one has no bounds, or not as many elements as
            ``bins``, or ints and fewer values than bins, or more joint choices than an int64 can count.
        ContractError: In a call: an action is not in the policy's space.
    """

    bins: int | Sequence[int]
    joint: bool = field(default=False, kw_only=True)

    _without = "DiscretizeActions needs a Box, got {space}; leave it out"

    def __post_init__(self) -> None:
        numbers = np.asarray(self.bins)
        if numbers.dtype.kind not in "iu" or numbers.ndim > 1 or not numbers.size or numbers.min() < 2:
            raise ArgumentError(f"bins must be ints from 2 on, got {self.bins!r}")
        self.bins = int(numbers) if not numbers.ndim else tuple(int(n) for n in numbers)

    def _plan(self, space: Space[Any]) -> LeafPlan | None:
        if not isinstance(space, Box):
            return None
        grid = _Grid(space, self.bins, joint=self.joint)
        return LeafPlan(grid.space, grid.values)


class _Grid:
    """The values of the choices in one Box of d elements."""

    def __init__(self, box: Box, bins: int | Sequence[int], *, joint: bool) -> None:
        self._box = box
        self._sizes = _sizes(box, bins)
        self._joint = joint
        self.space = self._choices()
        self._read = Choices(self.space)
        self._levels = self._table()

    def values(self, action_n: Any, rows: Rows) -> NDArray[Any]:
        """Convert (n, …) actions of the policy to (n, *shape) values of the Box."""
        chosen = self._read.read(action_n, rows)
        if self._joint:
            chosen = np.stack(np.unravel_index(chosen[:, 0], self._sizes), axis=1)
        found: NDArray[Any] = self._levels[np.arange(len(self._sizes)), chosen]
        return found.reshape(len(found), *self._box.shape)

    def _choices(self) -> Discrete | MultiDiscrete:
        if self._joint:
            count = math.prod(self._sizes)
            if count > np.iinfo(np.int64).max:
                raise UnsupportedSpaceError(
                    f"{count:.3g} joint choices for {self._box} are too many; use fewer bins, or joint=False"
                )
            return Discrete(count)
        if not self._box.shape:
            return Discrete(self._sizes[0])
        return MultiDiscrete(np.array(self._sizes, np.int64).reshape(self._box.shape))

    def _table(self) -> NDArray[Any]:
        """Return (d, most bins): each element's values in order, in the Box's dtype, padded with its last value."""
        low, high = self._box.low.ravel(), self._box.high.ravel()
        table = np.repeat(high[:, None], max(self._sizes), axis=1)
        table[:, 0] = low
        for row, size, start, end in zip(table, self._sizes, low, high, strict=True):
            share = np.arange(1, size - 1) / (size - 1)
            # Not from high - low, which may overflow; sorted, because bounds this close round to either side.
            between = np.sort(float(start) * (1 - share) + float(end) * share)
            row[1 : size - 1] = np.clip(between if row.dtype.kind == "f" else np.rint(between), start, end)
        return table


def _sizes(box: Box, bins: int | Sequence[int]) -> tuple[int, ...]:
    d = math.prod(box.shape)
    if not box.is_bounded("both"):
        raise UnsupportedSpaceError(
            f"DiscretizeActions needs bounds, got {box}; give the env a bounded action space, or put a MapActions with "
            f"a bounded policy_space behind it"
        )
    sizes = (bins,) * d if isinstance(bins, int) else tuple(bins)
    if len(sizes) != d:
        raise UnsupportedSpaceError(f"bins has {len(sizes)} numbers for the {d} elements of {box}")
    if box.low.dtype.kind != "f":
        for size, low, high in zip(sizes, box.low.ravel().tolist(), box.high.ravel().tolist(), strict=True):
            if size > high - low + 1:
                raise UnsupportedSpaceError(
                    f"{size} bins are more than the {high - low + 1} ints from {low} to {high} in {box}; use fewer"
                )
    return sizes

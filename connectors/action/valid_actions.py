"""Makes actions valid for the env: within bounds, allowed by the mask, not NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete, Space
from numpy.typing import NDArray

from marlvec.connectors.connector import ActionConnector, from_setup
from marlvec.connectors.rows import RowRandom, Rows
from marlvec.errors import ContractError, UnsupportedSpaceError
from marlvec.spaces import Leaf, SpaceTree
from marlvec.spaces.action_masks import choice_sizes, pick_allowed
from marlvec.trees import Tree, to_array, tree_leaves

EXECUTED = "actions_executed"
EXECUTED_MISSING = "actions_executed_missing"
"""Rows whose executed action cannot be expressed in the policy's space."""


def is_given(rows: Rows) -> NDArray[np.bool_]:
    """Return the rows whose action the policy did not choose (``off_policy``): exploration leaves these unchanged."""
    return np.asarray(rows["off_policy"], np.bool_) if "off_policy" in rows else np.zeros(len(rows), np.bool_)


class ExecutedActions:
    """Writes a connector's output actions, and the column ``actions_executed``, in the policy's space and its dtypes.

    Behind a connector that converts actions, changed actions are converted back (`ActionConnector.undo`). Where that is
    impossible (`DiscretizeActions`, `MapActions`) ``actions_executed_missing`` marks the changed rows.
    """

    def __init__(
        self, space: Space[Any], policy_space: Space[Any] | None, undone_by: tuple[ActionConnector, ...] | None = ()
    ) -> None:
        self.tree = SpaceTree(space if policy_space is None else policy_space)
        self._undone_by, self._is_policys = undone_by, policy_space == space
        self.is_known = policy_space is not None  # False without a pipeline
        self.is_plain = self._is_policys and undone_by == ()  # the output is the column

    def send(self, rows: Rows, actions: Tree, *, chooses: bool = False) -> Rows:
        """Return rows with ``actions_for_env`` replaced, and the column updated, if there is one in the same space.

        ``chooses``: always add the column, because the actions do not follow from the policy's alone.
        """
        follows = self._is_policys and EXECUTED in rows and self._undone_by is not None
        if self.is_known and (chooses or follows):
            return rows.replace(actions_for_env=actions, **self.columns(rows, actions))
        return rows if actions is rows.actions_for_env else rows.replace(actions_for_env=actions)

    def before(self, rows: Rows) -> Tree:
        """Return what the agents of these rows do, as far as known before this connector."""
        return self._cast(rows[EXECUTED] if EXECUTED in rows else rows["actions"])

    def columns(self, rows: Rows, actions: Tree) -> dict[str, Tree]:
        """Return the column for rows before the connector, and actions behind it; unchanged rows keep their values.

        If changes cannot be converted back, changed rows keep theirs, too, and are marked in a second column.
        """
        if self.is_plain:
            return {EXECUTED: self._cast(actions)}
        same_n = np.ones(len(rows), np.bool_)
        for (_, old), (_, new) in zip(tree_leaves(rows.actions_for_env), tree_leaves(actions), strict=True):
            same = np.asarray(to_array(old) == to_array(new))
            same_n &= same.all(axis=tuple(range(1, same.ndim)))
        if self._undone_by is None:
            return {EXECUTED: self.before(rows), EXECUTED_MISSING: ~same_n | rows.get(EXECUTED_MISSING, False)}
        back = actions
        for piece in self._undone_by:
            back = piece.undo(back)
        pairs = zip(self.tree.flatten(self.before(rows)), self.tree.flatten(back), strict=True)
        picked = [np.where(same_n.reshape(-1, *[1] * (np.ndim(a) - 1)), a, b) for a, b in pairs]
        return {EXECUTED: self._cast(self.tree.unflatten(picked))}

    def _cast(self, actions: Tree) -> Tree:
        """Return actions in the dtypes of the space, so that the column's dtypes never depend on the draws."""
        leaves = self.tree.flatten(actions)
        for i, leaf in enumerate(self.tree.leaves):
            if not leaf.is_object:
                array = to_array(leaves[i])
                fits = np.can_cast(array.dtype, leaf.dtype, "same_kind")
                leaves[i] = array.astype(leaf.dtype, copy=False) if fits else array
        return self.tree.unflatten(leaves)


class FloatBoxes:
    """All float Boxes of an action space, whose elements are D numbers in a row."""

    def __init__(self, space: Space[Any]) -> None:
        self.tree = SpaceTree(space)
        # for each Box: its position and leaf in the tree, the Box, and its slice of the D elements
        self.parts: list[tuple[int, Leaf, Box, slice]] = []
        self.size = 0
        for i, leaf in enumerate(self.tree.leaves):
            if isinstance(leaf.space, Box) and leaf.dtype.kind == "f":
                end = self.size + math.prod(leaf.shape)
                self.parts.append((i, leaf, leaf.space, slice(self.size, end)))
                self.size = end

    def need(self, what: str) -> None:
        """Raise UnsupportedSpaceError if there is no float Box, which ``what`` needs."""
        if not self.parts:
            raise UnsupportedSpaceError(
                f"{what} needs a Box of floats, got {self.tree.space}; for choices there is EpsilonGreedy"
            )

    def add(self, actions: Tree, noise_nD: NDArray[np.float64], *, clip: bool) -> Tree:
        """Add noise to (n, …) actions, in the Boxes' dtypes; with ``clip``, clip them to the bounds."""
        leaves = self.tree.flatten(actions)
        for i, leaf, box, part in self.parts:
            noise = noise_nD[:, part].reshape(-1, *leaf.shape)
            noisy = (np.asarray(leaves[i]) + noise).astype(leaf.dtype)
            leaves[i] = np.clip(noisy, box.low, box.high) if clip else noisy
        return self.tree.unflatten(leaves)


class ClipActions(ActionConnector):
    """Clips the actions of every Box with a bound, and casts them to its dtype; other leaves pass unchanged.

    A NaN has no nearest bound and raises ContractError. Float actions for a Box of ints keep their dtype: they are not
    rounded here.
    """

    _tree = from_setup(SpaceTree)

    def __call__(self, rows: Rows) -> Rows:
        tree = self._tree
        leaves = tree.flatten(rows.actions_for_env)
        for i, leaf, low, high in self._boxes:
            clipped = np.minimum(np.maximum(leaves[i], low), high)
            if np.isnan(clipped).any():
                row = int(np.argwhere(np.isnan(clipped))[0, 0])
                raise ContractError(f"the policy gave NaN for {leaf} in row {row}")
            if np.can_cast(clipped.dtype, leaf.dtype, "same_kind"):
                clipped = clipped.astype(leaf.dtype, copy=False)
            leaves[i] = clipped
        return self._executed.send(rows, tree.unflatten(leaves))

    @property
    def is_identity(self) -> bool:
        return "_tree" in vars(self) and not self._boxes

    def setup(self, space: Space[Any]) -> None:
        self._tree = SpaceTree(space)
        self._executed = ExecutedActions(space, self.action_space, self.undone_by)
        self._boxes: list[tuple[int, Leaf, Any, Any]] = []
        for i, leaf in enumerate(self._tree.leaves):
            if isinstance(leaf.space, Box) and (leaf.space.bounded_below.any() or leaf.space.bounded_above.any()):
                self._boxes.append((i, leaf, leaf.space.low, leaf.space.high))


def row_name(rows: Rows, i: int) -> str:
    """Name a row: ``env 3, agent 1`` if rows have ids, else ``row 7``."""
    if "env_id" not in rows or "agent_index" not in rows:
        return f"row {i}"
    return f"env {int(rows.env_id[i])}, agent {int(rows.agent_index[i])}"


AnyArray = NDArray[Any]
BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]


class Choices:
    """The D dimensions of a Discrete (D = 1) or MultiDiscrete, with their choices counted from 0.

    A mask is (n, k) bool, the choices of all dimensions one after the other, as in `marlvec.sampling.SpaceSampler`.
    """

    def __init__(self, space: Discrete | MultiDiscrete) -> None:
        self._space = space
        self._shape = tuple(int(n) for n in space.shape or ())
        self._dtype = np.dtype(space.dtype)
        self._start = np.asarray(space.start, np.int64)
        self.sizes: IntArray = choice_sizes(space)
        self._bounds = np.concatenate([[0], np.cumsum(self.sizes)])

    @classmethod
    def of(cls, space: Space[Any]) -> Choices | None:
        return cls(space) if isinstance(space, (Discrete, MultiDiscrete)) else None

    def read(self, action_n: Any, rows: Rows) -> IntArray:
        """Convert (n, …) actions to (n, D) choices; ContractError names the row of an illegal action."""
        action = np.asarray(action_n)
        if action.dtype.kind not in "iu" or action.shape[1:] != self._shape:
            raise ContractError(
                f"expected actions of {self._space}, ints of shape {(len(rows), *self._shape)}, got {action.dtype} of "
                f"shape {action.shape}"
            )
        chosen: IntArray = (action.astype(np.int64) - self._start).reshape(len(action), len(self.sizes))
        outside = (chosen < 0) | (chosen >= self.sizes)
        if outside.any():
            i = int(np.flatnonzero(outside.any(axis=1))[0])
            raise ContractError(f"expected an action of {self._space}, got {action[i]} for {row_name(rows, i)}")
        return chosen

    def write(self, chosen_nD: IntArray) -> AnyArray:
        """Convert (n, D) choices to (n, …) actions of the space's dtype."""
        actions: AnyArray = (chosen_nD.reshape(len(chosen_nD), *self._shape) + self._start).astype(self._dtype)
        return actions

    def check(self, mask: Any) -> BoolArray:
        """Return the mask as (n, k) bools, or raise ContractError."""
        checked: BoolArray = np.asarray(mask, np.bool_)
        if checked.ndim != 2 or checked.shape[1] != self._bounds[-1]:
            raise ContractError(
                f"expected action masks of {self._bounds[-1]} entries, one for each choice of {self._space}, got "
                f"{checked.shape[1:]}; masks are the env's, so put this connector where actions are those of the env"
            )
        return checked

    def allowed(self, mask: BoolArray, chosen_nD: IntArray) -> BoolArray:
        """Return whether the mask allows each of (n, D) choices."""
        found: BoolArray = np.take_along_axis(mask, chosen_nD + self._bounds[:-1], axis=1)
        return found

    def pick(self, uniform_nD: NDArray[np.float64], mask: BoolArray | None, name: Callable[[int], str]) -> IntArray:
        """Choose by numbers in [0, 1), uniformly among all choices, or among the allowed; 0 is the first.

        ContractError, if the mask allows nothing in a dimension, names row i by ``name(i)``.
        """
        if mask is None:
            return _scaled(uniform_nD, self.sizes)
        out = np.empty(uniform_nD.shape, np.int64)
        for d, (low, high) in enumerate(pairwise(self._bounds.tolist())):
            out[:, d] = pick_allowed(mask[:, low:high], partial(_scaled, uniform_nD[:, d]), name)
        return out


def _scaled(uniform: NDArray[np.float64], sizes: IntArray) -> IntArray:
    return (uniform * sizes).astype(np.int64)


@dataclass(eq=False, repr=False)
class MaskInvalid(ActionConnector):
    """Replaces actions in ``actions_for_env`` that ``action_mask`` forbids; ``actions`` stay unchanged.

    Works on a Discrete, and on each dimension of a MultiDiscrete, whose masks are concatenated. Other spaces, and rows
    without the column, pass unchanged. Put it after all connectors that change actions, as the mask is the env's.

    Args:
        fallback: Replacement: the ``"first"`` allowed action, or a ``"random"`` allowed action; ``"raise"``: raise
            instead.
        seed: Seed of the random replacements.

    Raises:
        ArgumentError: ``fallback`` has another value.
        ContractError: In a call: a mask does not fit the space or allows nothing, an action is outside the space, or
            forbidden with ``fallback="raise"``; names env and agent.
    """

    fallback: Literal["first", "random", "raise"] = "first"
    seed: int = field(default=0, kw_only=True)

    _executed = from_setup(ExecutedActions)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._random = RowRandom(self.seed, "MaskInvalid")
        self._choices: Choices | None = None

    def __call__(self, rows: Rows) -> Rows:
        executed, choices = self._executed, self._choices
        if choices is None or "action_mask" not in rows:
            return rows
        mask = choices.check(rows.action_mask)
        chosen = choices.read(rows.actions_for_env, rows)
        allowed = choices.allowed(mask, chosen)
        if allowed.all():
            chooses = self.fallback != "raise"
            return executed.send(rows, choices.write(chosen), chooses=chooses)  # in the space's dtype, as below
        if self.fallback == "raise":
            i = int(np.flatnonzero(~allowed.all(axis=1))[0])
            raise ContractError(
                f"the action {rows.actions_for_env[i]} of {row_name(rows, i)} is forbidden by its action mask; let the "
                f"policy mind the mask, or choose another fallback"
            )
        if self.fallback == "random":
            uniform = self._random.uniform(rows, len(choices.sizes))
        else:
            uniform = np.zeros(chosen.shape)
        instead = choices.pick(uniform, mask, lambda i: row_name(rows, i))
        return executed.send(rows, choices.write(np.where(allowed, chosen, instead)), chooses=True)

    def setup(self, space: Space[Any]) -> None:
        self._executed = ExecutedActions(space, self.action_space, self.undone_by)
        self._choices = Choices.of(space)


class BoxActions(ActionConnector):
    """A connector that works on the float Boxes of an action, and passes other leaves unchanged."""

    _boxes = from_setup(FloatBoxes)
    _executed = from_setup(ExecutedActions)

    def setup(self, space: Space[Any]) -> None:
        self._boxes = FloatBoxes(space)
        self._executed = ExecutedActions(space, self.action_space, self.undone_by)


@dataclass(eq=False, repr=False)
class ReplaceNaN(BoxActions):
    """Replaces every NaN in the actions of every Box of floats, element by element; other leaves pass unchanged.

    A ``"random"`` number is drawn as the Box's own ``sample`` does: evenly between two bounds, from an exponential
    distribution of scale 1 away from the only bound, from the standard normal one without bounds.

    Args:
        fill: Replacement: ``"zeros"`` (or the bound nearest 0, if 0 is outside the Box), or ``"random"`` numbers from
            the Box; ``"raise"``: raise instead.
        seed: Seed of the random replacements.

    Raises:
        ArgumentError: ``fill`` has another value.
        ContractError: In a call: there is a NaN and ``fill`` is ``"raise"``; names env and agent.
    """

    fill: Literal["zeros", "random", "raise"] = "zeros"
    seed: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._uniform = RowRandom(self.seed, "ReplaceNaN")
        self._normal = RowRandom(self.seed, "ReplaceNaN, normal")

    def __call__(self, rows: Rows) -> Rows:
        leaves = self._boxes.tree.flatten(rows.actions_for_env)
        for i, leaf, box, part in self._boxes.parts:
            value = np.asarray(leaves[i])
            missing = np.isnan(value)
            if not missing.any():
                continue
            if self.fill == "raise":
                row = int(np.argwhere(missing)[0, 0])
                raise ContractError(f"the policy gave NaN for {leaf} of {row_name(rows, row)}")
            size = self._boxes.size
            fill = self._draw(rows, box, size, part) if self.fill == "random" else np.clip(0, box.low, box.high)
            leaves[i] = np.where(missing, np.asarray(fill, box.low.dtype), value)
        return self._executed.send(rows, self._boxes.tree.unflatten(leaves), chooses=self.fill != "raise")

    def _draw(self, rows: Rows, box: Box, size: int, part: slice) -> NDArray[Any]:
        """Return (n, *shape) members of the Box, from its share of each row's random numbers."""
        shape = (len(rows), *box.shape)
        u = self._uniform.uniform(rows, size)[:, part].reshape(shape)
        normal = self._normal.normal(rows, size)[:, part].reshape(shape)
        below, above = np.where(box.bounded_below, box.low, 0.0), np.where(box.bounded_above, box.high, 0.0)
        drawn = np.select(
            [box.bounded_below & box.bounded_above, box.bounded_below, box.bounded_above],
            [below * (1 - u) + above * u, below - np.log1p(-u), above + np.log1p(-u)],
            normal,
        )
        members: NDArray[Any] = np.clip(drawn.astype(box.low.dtype), box.low, box.high)
        return members

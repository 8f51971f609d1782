"""`History`: the last k rows of each agent, for connectors that stack or delay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space
from numpy.typing import NDArray

from marlvec.connectors._support.agent_table import AgentTable, Tables
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, ContractError, UnsupportedSpaceError
from marlvec.spaces import Leaf, SpaceTree
from marlvec.trees import Tree, map_tree, to_array, zip_trees

__all__ = [
    "including_blank",
    "stacked_space",
    "History",
    "TreeForm",
    "action_tree",
    "blank_action",
    "blank_obs",
    "cast_row_leaf",
    "check_column_is_new",
    "fixed_size_tree",
]


AnyArray = NDArray[Any]


def including_blank(leaf: Space[Any]) -> Space[Any]:
    """A leaf's space with its blank: zeros in a Box; all others hold theirs, zeros or their start, already."""
    if isinstance(leaf, Box):
        low, high = np.minimum(leaf.low, 0), np.maximum(leaf.high, 0)
        return Box(low, high, leaf.shape, leaf.low.dtype.type)
    return leaf


def stacked_space(leaf: Space[Any], stack: Callable[[Any], AnyArray]) -> Space[Any]:
    """Space of several values of a leaf's space in one array.

    Args:
        leaf: A Box, Discrete, MultiDiscrete or MultiBinary.
        stack: Makes such an array of one value, all of them equal.
    """
    if isinstance(leaf, Box):
        return Box(stack(leaf.low), stack(leaf.high), dtype=leaf.low.dtype.type)
    if isinstance(leaf, (Discrete, MultiDiscrete)):
        choices = leaf.n if isinstance(leaf, Discrete) else leaf.nvec
        return MultiDiscrete(stack(choices), dtype=np.dtype(leaf.dtype).type, start=stack(leaf.start))
    assert isinstance(leaf, MultiBinary)
    return MultiBinary(stack(np.zeros(leaf.shape)).shape)


class History:
    """The last k values of every (env, agent) in its running episode, leaf by leaf.

    A ring: a new value is written over the oldest one, and nothing else moves. An episode that begins only sets its
    count to 0, and what its agent saw before that is not shown again.

    Args:
        k: How many values are kept.
        blanks: One array per leaf: a value of one row. It gives the leaf's shape and dtype, and stands for the values
            from before the episode.
        repeat: Whether the episode's first value stands for those instead.
    """

    def __init__(self, k: int, blanks: Sequence[AnyArray], *, repeat: bool = False) -> None:
        self.k = k
        self.blanks = tuple(blanks)
        self.repeat = repeat
        self.count = AgentTable((), np.int64)
        # Agent a's ring takes the slots a*k to a*k + k-1 of the table's second axis.
        self.rings = [AgentTable(blank.shape, blank.dtype) for blank in self.blanks]

    def begin(self, rows: Rows) -> None:
        """Forget what the agents of rows with ``first`` had; rows without that column begin nothing."""
        if "first" in rows and rows.first.any():
            self.count.set(rows.env_id[rows.first], rows.agent_index[rows.first], 0)

    def push(self, rows: Rows, leaves: Sequence[Any], what: str) -> None:
        """Add one value per row; where one does not fit, nothing has changed.

        Args:
            rows: Whose they are.
            leaves: A (n, *shape) array or tensor per leaf.
            what: Names the values in messages.

        Raises:
            ContractError: A leaf has another shape, or a dtype that the history's cannot hold.
        """
        arrays = [_fit(leaf, blank, len(rows), what) for leaf, blank in zip(leaves, self.blanks, strict=True)]
        env_id, agent_index = rows.env_id, rows.agent_index
        count = self.count.get(env_id, agent_index)
        slot = self._slot(agent_index, count)
        for ring, array in zip(self.rings, arrays, strict=True):
            ring.set(env_id, slot, array)
        self.count.set(env_id, agent_index, count + 1)

    def look(self, rows: Rows, shifts: NDArray[np.int64]) -> list[AnyArray]:
        """Copy values out.

        Args:
            rows: Whose.
            shifts: (m,) which, counted from the last one pushed: 0 for that one, -1 for the one before it; above -k.

        Returns:
            An array (n, m, *shape) per leaf.
        """
        env_id, agent_index = rows.env_id[:, None], rows.agent_index[:, None]
        number = self.count.get(rows.env_id, rows.agent_index)[:, None] + (shifts - 1)
        missing = number < 0
        some = bool(missing.any())
        if some and self.repeat:
            number = np.maximum(number, 0)
        slot = self._slot(agent_index, number)
        values = [ring.get(env_id, slot) for ring in self.rings]
        if some and not self.repeat:
            for value, blank in zip(values, self.blanks, strict=True):
                value[missing] = blank
        return values

    @property
    def tables(self) -> Tables:
        """All it keeps, for `Remembers`."""
        return {"count": self.count, "rings": self.rings}

    def same_form(self, other: History | None) -> bool:
        """Whether both keep as many values of the same shapes and dtypes."""
        return (
            other is not None
            and self.k == other.k
            and [(b.shape, b.dtype) for b in self.blanks] == [(b.shape, b.dtype) for b in other.blanks]
        )

    def _slot(self, agent_index: AnyArray, number: AnyArray) -> AnyArray:
        # From the ring's back to its front, so that the first value makes room in the table for all of them.
        slot: AnyArray = agent_index * self.k + (self.k - 1 - number % self.k)
        return slot


class TreeForm:
    """The structure of a column that no space describes, taken from one row's value; used like a `SpaceTree`.

    Args:
        row: One row's value: an array, or a dict or tuple of those.

    Attributes:
        blanks: Its leaves, as arrays.
    """

    def __init__(self, row: Tree) -> None:
        self._row = map_tree(to_array, row)
        self.blanks: list[AnyArray] = self.flatten(self._row)

    def flatten(self, tree: Tree) -> list[Any]:
        """List the leaves of a tree of the same structure.

        Raises:
            ContractError: The structure is another one; says where.
        """
        leaves: list[Any] = []
        try:
            zip_trees(lambda pair: leaves.append(pair[1]), [self._row, tree])
        except ArgumentError as error:
            raise ContractError(str(error)) from None
        return leaves

    def unflatten(self, leaves: Sequence[Any]) -> Tree:
        """Build the tree whose leaves these are."""
        rest = iter(leaves)
        return map_tree(lambda _: next(rest), self._row)


def action_tree(space: Space[Any] | None, owner: str) -> SpaceTree:
    """Walk the policy's action space.

    Raises:
        ArgumentError: It is not known.
    """
    if space is None:
        raise ArgumentError(
            f"{owner} does not know the action space: give it to the pipeline, bind(space, agents, action_space)"
        )
    return SpaceTree(space)


def blank_action(leaf: Leaf) -> AnyArray:
    """An action of this leaf's space that stands for none: the start of a Discrete, of a Box the member nearest 0.

    A space that holds neither that nor zeros gives a member of its own, the same one each time.
    """
    blank = blank_obs(leaf)
    if isinstance(leaf.space, Box):
        blank = np.asarray(np.clip(blank, leaf.space.low, leaf.space.high), leaf.dtype)
    if leaf.is_object or not leaf.space.contains(blank):
        blank[()] = _member(leaf.space)
    return blank


def blank_obs(leaf: Leaf) -> AnyArray:
    """Zeros, or the start of a Discrete or MultiDiscrete."""
    start = getattr(leaf.space, "start", None)
    return leaf.blank() if start is None else np.array(start, leaf.dtype)


def cast_row_leaf(value: Any, blank: AnyArray, what: str) -> AnyArray:
    """Bring one leaf of a row's value, as a user wrote it, into the shape and dtype of ``blank``.

    Raises:
        ArgumentError: It does not fit; names ``what``.
    """
    given = to_array(value) if blank.dtype != object else np.asarray(value)
    try:
        with np.errstate(invalid="ignore"):  # NaN for an int, which is refused below
            full = np.broadcast_to(given, blank.shape).astype(blank.dtype)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{what}: a value of shape {given.shape} does not fit shape {blank.shape}") from error
    # Floats round; a number that an integer cannot hold is a mistake.
    if blank.dtype.kind not in "fO" and not np.array_equal(full, np.broadcast_to(given, blank.shape)):
        raise ArgumentError(f"{what}: {value!r} does not fit dtype {blank.dtype}")
    return full


def fixed_size_tree(
    space: Space[Any], owner: str, advice: str = "put FlattenObs(drop=[…]) before it, or encode the leaf"
) -> SpaceTree:
    """Walk a space whose values are all to be kept in arrays.

    Raises:
        UnsupportedSpaceError: A leaf has no fixed size; says what to do.
    """
    tree = SpaceTree(space)
    for leaf in tree.leaves:
        if leaf.is_object:
            raise UnsupportedSpaceError(
                f"{owner} cannot keep {leaf} of {type(leaf.space).__name__}, which has no fixed size; {advice}"
            )
    return tree


def check_column_is_new(rows: Rows, column: str, owner: str) -> None:
    """Refuse to write over a column.

    Raises:
        ContractError: The rows have it already.
    """
    if column in rows:
        raise ContractError(f"{owner} adds column {column!r}, but the rows have one of that name already")


def _member(space: Space[Any]) -> Any:
    own = deepcopy(space)  # the caller's space is never drawn from
    own.seed(0)
    return own.sample()


def _fit(leaf: Any, blank: AnyArray, n: int, what: str) -> AnyArray:
    """Check and cast one leaf of n values to the blank's dtype."""
    array = to_array(leaf)
    if array.shape != (n, *blank.shape) or not np.can_cast(array.dtype, blank.dtype, "same_kind"):
        raise ContractError(
            f"expected {what} as {blank.dtype} of shape {(n, *blank.shape)}, got {array.dtype} of shape {array.shape}"
        )
    return array.astype(blank.dtype, copy=False)

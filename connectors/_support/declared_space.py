"""Checks what a user's function returns against the space that was declared for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Space
from numpy.typing import NDArray

from marlvec.connectors.connector import AgentConnector, from_setup
from marlvec.errors import ArgumentError, ContractError
from marlvec.spaces import Leaf, SpaceTree
from marlvec.trees import Tree, map_tree

__all__ = ["DeclaredSpace", "ObsFunction", "SpaceRule", "check_function", "read_only", "space_after"]

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

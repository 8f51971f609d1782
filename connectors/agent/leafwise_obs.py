"""What works on each leaf of an observation by itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Space
from numpy.typing import NDArray

from marlvec.connectors.agent.leaf_paths import check_keys, is_below
from marlvec.connectors.connector import AgentConnector
from marlvec.connectors.leaf_spaces import map_space, space_summary
from marlvec.connectors.rows import Rows
from marlvec.errors import UnsupportedSpaceError
from marlvec.spaces import Leaf, SpaceTree

__all__ = ["LeafPlan", "LeafwiseObs"]


class LeafPlan(NamedTuple):
    """What becomes of one leaf.

    Attributes:
        space: The leaf's space afterwards.
        apply: Takes (n, *shape) values and returns (n, *space.shape) of them; writes to nothing it was given.
    """

    space: Space[Any]
    apply: Callable[[NDArray[Any]], NDArray[Any]]


class LeafwiseObs(AgentConnector):
    """Transforms the leaves of an observation that are of its kind, each by itself; the others pass unchanged.

    A subclass says in `_plan` what it does with a leaf; everything else is here.

    Args:
        keys: Paths of the leaves to work on, e.g. ``"camera/left"``; a path stands for all below it. None for every
            leaf of its kind.

    Raises:
        ArgumentError: Where a space is first seen: a path is not in it.
        UnsupportedSpaceError: Where a space is first seen: no leaf is of its kind, at all or below one of ``keys``.
    """

    _kind: str
    """What leaves it works on, for messages."""
    _advice: str = "take it out of this pipeline"
    """What to do where there are none."""

    def __init__(self, keys: Sequence[str] | None = None) -> None:
        self.keys = None if keys is None else tuple(keys)
        self._tree: SpaceTree | None = None
        self._work: list[tuple[int, Callable[[NDArray[Any]], NDArray[Any]]]] = []

    def __call__(self, rows: Rows) -> Rows:
        if self._tree is None:
            raise self._not_set_up()
        leaves = self._tree.flatten(rows.obs)
        for i, apply in self._work:
            leaves[i] = apply(np.asarray(leaves[i]))
        return rows.replace(obs=self._tree.unflatten(leaves))

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
        """Say what becomes of a leaf; None where it is of another kind. Changes nothing.

        Raises:
            UnsupportedSpaceError: It is of the right kind, and cannot be worked on all the same.
        """

    def _plans(self, tree: SpaceTree) -> list[LeafPlan | None]:
        """One for each leaf of the tree."""
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

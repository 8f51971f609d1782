"""From rows of the action buffers to actions as an env expects them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gymnasium.spaces import Discrete
from numpy.typing import NDArray

from marlvec.spaces import SpaceTree
from marlvec.spaces.padding import Crop, cut

__all__ = ["ActionReader"]

AnyArray = NDArray[Any]


class ActionReader:
    """Reads the actions of some agents of one env.

    Args:
        tree: Structure of one agent's action.
        rows: Per leaf: those agents' rows, (agents, *leaf.shape).
        agent_num: How many agents these are.
        crops: Per agent and leaf, what part of its row is the agent's own; None: all of it.
    """

    __slots__ = ("_agent_num", "_crops", "_is_bare", "_rows", "_tree")

    def __init__(
        self,
        tree: SpaceTree,
        rows: Sequence[AnyArray],
        agent_num: int,
        crops: Sequence[Sequence[Crop]] | None = None,
    ) -> None:
        self._tree = tree
        self._rows = tuple(rows)
        self._agent_num = agent_num
        self._crops = crops
        self._is_bare = [leaf.is_object or isinstance(leaf.space, Discrete) for leaf in tree.leaves]

    @property
    def quick(self) -> Callable[[], list[Any]] | None:
        """What does the same as `read` in one call into C, where there is such a thing."""
        return self._rows[0].tolist if self._tree.is_leaf and self._is_bare[0] else None

    def cropped(self, crops: Sequence[Sequence[Crop]]) -> ActionReader:
        """The same for agents whose actions are only a part of their rows."""
        return ActionReader(self._tree, self._rows, self._agent_num, crops)

    def read(self) -> list[Any]:
        """One action per agent: Discrete ones are Python ints, arrays are private copies, objects are as they were."""
        if self._tree.is_leaf:
            return self._read_leaf(0)
        if not self._rows:  # an empty Dict or Tuple
            return [self._tree.unflatten(()) for _ in range(self._agent_num)]
        leaves = [self._read_leaf(k) for k in range(len(self._rows))]
        return [self._tree.unflatten(parts) for parts in zip(*leaves, strict=True)]

    def _read_leaf(self, k: int) -> list[Any]:
        if self._is_bare[k]:
            values: list[Any] = self._rows[k].tolist()
            return values
        # A list over a copy: the env may keep its action, and it must not change under its hands in the next step.
        copy = self._rows[k].copy()
        if self._crops is not None:
            return [cut(copy[j, ...], crops[k]) for j, crops in enumerate(self._crops)]
        return list(copy) if copy.ndim > 1 else [copy[j, ...] for j in range(len(copy))]  # 0-d arrays, not scalars

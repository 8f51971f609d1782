"""More actions than the env has."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Discrete, Space

from marlvec.connectors.action.choices import Choices
from marlvec.connectors.connector import ActionConnector
from marlvec.connectors.leaf_spaces import map_space
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, UnsupportedSpaceError
from marlvec.spaces import SpaceTree

__all__ = ["PadActions"]


class PadActions(ActionConnector):
    """Lets the policy act in a Discrete of ``n`` choices where the env has fewer, so that one policy fits many envs.

    What the env does not have becomes ``invalid``. Each Discrete of the action is widened, with the start it has; other
    leaves pass unchanged. Masks stay as long as the env's actions: a policy that minds them knows that the rest is not
    allowed.

    Args:
        n: Choices of the policy, at least the env's.
        invalid: The env's action that is sent instead of one beyond; None for the first.

    Raises:
        ArgumentError: ``n`` is no int from 1 on; or, where a space is first seen, ``invalid`` is no action of it.
        UnsupportedSpaceError: Where a space is first seen: it has no Discrete, or one of more than ``n`` choices.
        ContractError: In a call: an action is not of the policy's space.
    """

    def __init__(self, n: int, *, invalid: int | None = None) -> None:
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1:
            raise ArgumentError(f"n must be an int from 1 on, got {n!r}")
        self.n = int(n)
        self.invalid = invalid
        self._tree: SpaceTree | None = None
        self._work: list[tuple[int, Discrete, Choices]] = []

    def __call__(self, rows: Rows) -> Rows:
        if self._tree is None:
            raise self._not_set_up()
        leaves = self._tree.flatten(rows.actions_for_env)
        for i, space, choices in self._work:
            chosen = choices.read(leaves[i], rows)
            instead = 0 if self.invalid is None else self.invalid - int(space.start)
            leaves[i] = choices.write(np.where(chosen < int(space.n), chosen, instead))
        return rows.replace(actions_for_env=self._tree.unflatten(leaves))

    def setup(self, space: Space[Any]) -> None:
        self._tree = SpaceTree(space)
        self._work = []
        for i, leaf in enumerate(self._tree.leaves):
            if isinstance(leaf.space, Discrete):
                self._work.append((i, leaf.space, Choices(self._widened(leaf.space))))

    def policy_space(self, space: Space[Any]) -> Space[Any]:
        if not any(isinstance(leaf.space, Discrete) for leaf in SpaceTree(space).leaves):
            raise UnsupportedSpaceError(
                f"PadActions widens Discretes, and there is none in {space}; put DiscretizeActions(joint=True) behind "
                f"it for Boxes, or pad the env itself: make(..., pad=True)"
            )
        return map_space(lambda leaf: self._widened(leaf) if isinstance(leaf, Discrete) else leaf, space)

    def _widened(self, space: Discrete) -> Discrete:
        n, start = int(space.n), int(space.start)
        if n > self.n:
            raise UnsupportedSpaceError(f"{self!r} has fewer choices than the env's {space}; give it {n} at least")
        if self.invalid is not None and not start <= self.invalid < start + n:
            raise ArgumentError(f"invalid={self.invalid} must be an action of {space}: {start} to {start + n - 1}")
        return Discrete(self.n, start=start, dtype=np.dtype(space.dtype).type)

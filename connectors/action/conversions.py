"""Conversions of actions: to numpy, read-only, mapped by a function, and padded ones cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.spaces import Discrete, Space

from marlvec.connectors.action.valid_actions import Choices
from marlvec.connectors.connector import ActionConnector
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, UnsupportedSpaceError
from marlvec.spaces import SpaceTree
from marlvec.spaces.tree import map_space
from marlvec.trees import Tree, _typed, map_tree, to_array

__all__ = ["ToNumpy", "ReadOnlyActions", "MapActions", "PadActions"]


class ToNumpy(ActionConnector):
    """Turns every column that is not numpy yet into arrays, leaf by leaf.

    Takes torch tensors on any device, also those that need a gradient, all that has ``__array__``, and lists. The
    numbers stay as they are. A list has no dtype of its own: in ``actions_for_env`` it takes that of the action space.
    No library of tensors is imported.
    """

    def __init__(self) -> None:
        self._tree: SpaceTree | None = None

    def __call__(self, rows: Rows) -> Rows:
        if self._tree is None:
            raise self._not_set_up()
        done: dict[str, Any] = {}
        for name, column in rows.items():
            if type(column) is np.ndarray:
                continue
            if name == "actions_for_env":
                pairs = zip(self._tree.flatten(column), self._tree.leaves, strict=True)
                done[name] = self._tree.unflatten([_typed(to_array(value), value, leaf.dtype) for value, leaf in pairs])
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
        return rows.replace(actions_for_env=map_tree(_read_only, actions))

    @property
    def only_converts(self) -> bool:
        return True


def _read_only(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        array = array.view()
        array.flags.writeable = False
    return array


class MapActions(ActionConnector):
    """Puts ``function(actions)`` in the place of ``actions_for_env``, for all rows at once.

    One that needs more of the rows than the actions is an `action_connector`.

    Args:
        function: Takes a tree of (n, …) arrays in the shape of the policy's space, and returns one in the shape of the
            env's. It must not write into what it is given.
        policy_space: Space of one action before the function: a space; or a function that gives it for the space after
            it; None where the two are equal.

    Raises:
        ArgumentError: ``function`` is no function, or ``policy_space`` neither space nor function; or, in a call, the
            function returned another number of rows.
    """

    def __init__(
        self,
        function: Callable[[Tree], Tree],
        policy_space: Space[Any] | Callable[[Space[Any]], Space[Any]] | None = None,
    ) -> None:
        if not callable(function):
            raise ArgumentError(f"MapActions wants a function of actions, got {type(function).__name__}")
        if policy_space is not None and not isinstance(policy_space, Space) and not callable(policy_space):
            raise ArgumentError(f"policy_space must be a space or a function of one, got {policy_space!r}")
        self.function = function
        self._given_space = policy_space

    def __call__(self, rows: Rows) -> Rows:
        return rows.replace(actions_for_env=self.function(rows.actions_for_env))

    def policy_space(self, space: Space[Any]) -> Space[Any]:
        if self._given_space is None or isinstance(self._given_space, Space):
            return space if self._given_space is None else self._given_space
        return self._given_space(space)

    def params(self) -> dict[str, Any]:
        return {"function": self.function, "policy_space": self._given_space}


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

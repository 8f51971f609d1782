"""A function of the user's on actions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gymnasium.spaces import Space

from marlvec.connectors.connector import ActionConnector
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError
from marlvec.trees import Tree

__all__ = ["MapActions"]


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

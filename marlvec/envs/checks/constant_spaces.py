"""Spaces that must be the same objects whenever they are asked for, and never change."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from gymnasium.spaces import Space

from marlvec.envs.checks.place import Place
from marlvec.spaces import describe_difference

__all__ = ["ConstantSpaces"]


class ConstantSpaces:
    """All spaces of one env as it first gave them.

    Args:
        env: The env's name.
        read: Asks the env for all its spaces: the call, e.g. ``"observation_space('agent_0')"``, to its answer.

    Raises:
        ContractError: An answer is no space, or another one when it is asked again.
    """

    def __init__(self, env: str, read: Callable[[], dict[str, Any]]) -> None:
        self._env, self._read = env, read
        self._first: dict[str, Space[Any]] = read()
        for call, space in self._first.items():
            if not isinstance(space, Space):
                Place(env, call).broken("the space", "a gymnasium space", type(space).__name__)
        self._copies = deepcopy(self._first)
        self.check(None)

    def check(self, episode: int | None) -> None:
        """Ask again.

        Args:
            episode: The number of the running episode, or None before the first.

        Raises:
            ContractError: A space is another object, or has changed.
        """
        now = self._read()
        for call, space in self._first.items():
            place = Place(self._env, call, episode)
            if call not in now:
                place.broken("the space", "the same as before", "none")
            if now[call] is not space:
                place.broken("the space", "the same object on each call", f"another one, {now[call]}")
            if changed := describe_difference(self._copies[call], space):
                place.broken("the space", "no change while the env lives", f"a change {changed}")

"""What every policy is."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from gymnasium.spaces import Space

from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError
from marlvec.trees import Tree

__all__ = ["Policy", "PolicyOutput", "PolicyState", "takes_explore"]

PolicyOutput = Tree | tuple[Tree, Mapping[str, Tree]]
"""Actions (n, …), a tree in the shape of the action space; or those and a dict of further columns (n, …)."""

PolicyState = dict[str, Any]
"""What a policy has learned and remembers: numbers, texts, arrays, and dicts, lists and tuples of those."""


def takes_explore(act: Callable[..., Any]) -> bool:
    """Whether an ``act`` may be told to explore; one that just takes rows need not be."""
    try:
        parameters = inspect.signature(act).parameters.values()
    except (ValueError, TypeError):  # of a function written in C
        return False
    return any(p.kind is p.VAR_KEYWORD or (p.name == "explore" and p.kind is not p.POSITIONAL_ONLY) for p in parameters)


class Policy(ABC):
    """Chooses actions for rows.

    A subclass may leave out ``explore`` where it makes no difference: ``def act(self, rows)``.

    Attributes:
        version: Number of the weights in use; every row collected carries the one it was decided with.
        observation_space: One observation as the policy sees it; None until `setup`.
        action_space: One action as the policy gives it; None until `setup`.
    """

    version: int = 0
    observation_space: Space[Any] | None = None
    action_space: Space[Any] | None = None

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        act = cls.__dict__.get("act")
        if inspect.isfunction(act) and not takes_explore(act):
            cls.act = _for_rows_alone(act)  # type: ignore[method-assign]  # which all callers may tell to explore

    def setup(self, observation_space: Space[Any], action_space: Space[Any], *, seed: int) -> None:
        """Learn the spaces. Called once by the collector, before the first `act`.

        Args:
            observation_space: One row's observation, behind the agent connectors.
            action_space: One row's action, before the action connectors.
            seed: From the collector's seed, another one for each policy; passed on to `reseed`.
        """
        self.observation_space = observation_space
        self.action_space = action_space
        self.reseed(seed)

    def reseed(self, seed: int) -> None:
        """Begin a new random stream. Called by `setup`, and by ``collector.reset(seed=…)``; does nothing here."""

    @abstractmethod
    def act(self, rows: Rows, *, explore: bool = True) -> PolicyOutput:
        """Choose one action per row.

        Args:
            rows: n rows: ``obs``, ids, ``t``, ``first``, ``reward`` (paid since the agent's previous row),
                ``action_mask`` (n, k) bool where the env gives one, and what the connectors added.
            explore: Whether to explore, or to act as well as it can.

        Returns:
            Actions (n, …), or ``(actions, columns)`` with further columns (n, …), e.g. ``logp``. The columns must stay
            the same from call to call; they are found in the batch under their names.
        """

    def state_dict(self) -> PolicyState:
        """Copy out all that distinguishes it from one that was just built and set up: weights, random streams, memory.

        Returns:
            A copy that later calls do not change; here ``{}``: there is nothing. `version` is not in it.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; from then on it answers as that policy did.

        Args:
            state: As `state_dict` gave it, of a policy built with equal arguments and set up with equal spaces.

        Raises:
            ArgumentError: It does not fit; nothing was loaded.
        """
        if state:
            raise ArgumentError(
                f"a {type(self).__name__} keeps no state and got {list(state)}: override state_dict() and "
                f"load_state_dict() together"
            )


def _for_rows_alone(act: Callable[..., PolicyOutput]) -> Callable[..., PolicyOutput]:
    @functools.wraps(act)
    def whatever(self: Policy, rows: Rows, *, explore: bool = True) -> PolicyOutput:
        return act(self, rows)

    return whatever

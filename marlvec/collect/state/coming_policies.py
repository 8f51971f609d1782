"""`ComingPolicies`: policies that a mapping adds by itself, as opponents are, come and go with a state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, runtime_checkable

__all__ = ["AddsPolicies", "ComingPolicies", "name_of_mapping"]


@runtime_checkable
class AddsPolicies(Protocol):
    """A mapping that adds policies to its collector by itself, and has a state that says which."""

    def add_policies(self, state: Any, collector: Any) -> Callable[[], None]:
        """Have a collector know the policies of a state; returns what takes that back."""

    def unknown_policies(self, state: Any, collector: Any) -> Collection[str]:
        """Ids of policies that it has added to a collector, and that a state does not know."""


def name_of_mapping(mapping: Any) -> str:
    """Under which name the state of a mapping is saved."""
    return f"policy_mapping, {type(mapping).__name__}"


class ComingPolicies:
    """Adds the policies of a state to a collector before the rest of it is looked at, and takes that back.

    Args:
        collector: The collector.
        mapping: Its mapping; any but one that adds policies by itself brings none.

    Attributes:
        leaving: Ids of policies that the state does not know, and that are to leave with what runs here.
    """

    def __init__(self, collector: Any, mapping: Any) -> None:
        self._collector, self._mapping = collector, mapping
        self._undo: Callable[[], None] | None = None
        self.leaving: frozenset[str] = frozenset()

    def add(self, state: Mapping[str, Any]) -> None:
        """Add what the collector has not.

        Raises:
            ArgumentError: The mapping's own state is none, or of another one; nothing has changed.
            StateError: Another policy of such an id plays in a running episode; nothing has changed.
        """
        mapping, name = self._mapping, name_of_mapping(self._mapping)
        own = [saved for who, saved in state["others"] if who == name]
        if own and isinstance(mapping, AddsPolicies):
            self._undo = mapping.add_policies(own[0], self._collector)
            self.leaving = frozenset(mapping.unknown_policies(own[0], self._collector))

    def take_back(self) -> None:
        """Have the collector know the policies that it knew before."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

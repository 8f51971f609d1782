"""`ComingPolicies`: adds and removes policies, such as opponents, when a state is loaded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, runtime_checkable

__all__ = ["AddsPolicies", "ComingPolicies", "name_of_mapping"]


@runtime_checkable
class AddsPolicies(Protocol):
    """A mapping that adds policies to its collector, and lists them in its state."""

    def add_policies(self, state: Any, collector: Any) -> Callable[[], None]:
        """Add the policies of a state to a collector; return a function that removes them."""

    def unknown_policies(self, state: Any, collector: Any) -> Collection[str]:
        """Return ids of policies that it has added to a collector and that are not in a state."""


def name_of_mapping(mapping: Any) -> str:
    """Return the name under which a mapping's state is saved."""
    return f"policy_mapping, {type(mapping).__name__}"


class ComingPolicies:
    """Adds the policies of a state to a collector before the rest of the state is validated; can undo that.

    Policies are added only if the collector's mapping is an `AddsPolicies`.
    """

    def __init__(self, collector: Any, mapping: Any) -> None:
        self._collector, self._mapping = collector, mapping
        self._undo: Callable[[], None] | None = None
        # ids of policies that are not in the state; removed with the running episodes
        self.leaving: frozenset[str] = frozenset()

    def add(self, state: Mapping[str, Any]) -> None:
        """Add the policies that the collector lacks; if this raises, nothing has changed.

        `StateError`: another policy with one of these ids plays in a running episode.
        """
        mapping, name = self._mapping, name_of_mapping(self._mapping)
        own = [saved for who, saved in state["others"] if who == name]
        if own and isinstance(mapping, AddsPolicies):
            self._undo = mapping.add_policies(own[0], self._collector)
            self.leaving = frozenset(mapping.unknown_policies(own[0], self._collector))

    def take_back(self) -> None:
        """Restore the collector's previous policies."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

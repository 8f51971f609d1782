"""Which policies learn."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeAlias

from marlvec.errors import ArgumentError

__all__ = ["PoliciesToTrain", "Trained"]

PoliciesToTrain: TypeAlias = Collection[str] | Callable[[str], bool] | None
"""Ids of the policies that get batches, or a function ``(policy id) -> bool``; None for all."""


class Trained:
    """Says of each policy whether it gets batches.

    Args:
        given: What the user gave.
        known: Ids of the policies there are.

    Raises:
        ArgumentError: It is neither, or names an unknown policy.

    Attributes:
        given: As given.
    """

    def __init__(self, given: PoliciesToTrain, known: Collection[str]) -> None:
        if given is not None and not callable(given):
            if isinstance(given, str) or not isinstance(given, Collection):
                raise ArgumentError(
                    f"policies_to_train must be a list of policy ids, or a function (policy id) -> bool, got {given!r}"
                )
            if unknown := [name for name in given if name not in known]:
                raise ArgumentError(
                    f"policies_to_train names unknown policies {unknown}; the policies are {list(known)}"
                )
            given = tuple(given)
        self.given = given

    def __call__(self, policy_id: str) -> bool:
        """Whether this policy gets batches.

        Raises:
            Exception: What the function raises, with a note that nothing is lost.
        """
        if self.given is None:
            return True
        if not callable(self.given):
            return policy_id in self.given
        try:
            return bool(self.given(policy_id))
        except Exception as error:
            error.add_note(f"in policies_to_train({policy_id!r}); no row is lost: call collect() again")
            raise

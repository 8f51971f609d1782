"""Functions of rows as policies."""

from __future__ import annotations

from collections.abc import Callable

from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError
from marlvec.policies.policy import Policy, PolicyOutput

__all__ = ["FunctionPolicy"]


class FunctionPolicy(Policy):
    """A policy made of a function.

    Args:
        function: Takes rows, returns what `Policy.act` returns.
    """

    def __init__(self, function: Callable[[Rows], PolicyOutput]) -> None:
        if not callable(function):
            raise ArgumentError(f"FunctionPolicy wants a function of rows, got {type(function).__name__}")
        self.function = function

    def act(self, rows: Rows, *, explore: bool = True) -> PolicyOutput:
        return self.function(rows)

    def __repr__(self) -> str:
        return f"FunctionPolicy({getattr(self.function, '__name__', repr(self.function))})"

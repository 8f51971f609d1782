"""`MapObs`: a user's function of a batch of observations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gymnasium.spaces import Space

from marlvec.connectors.agent._support.declared_space import (
    DeclaredSpace,
    SpaceRule,
    check_function,
    read_only,
    space_after,
)
from marlvec.connectors.connector import AgentConnector
from marlvec.connectors.rows import Rows
from marlvec.trees import Tree

__all__ = ["MapObs"]


class MapObs(AgentConnector):
    """Puts ``function(obs)`` in the place of the observations, all rows in one call.

    The arrays it gets are read-only. For one that looks at a row's agent or other columns, use `agent_connector`; for
    one that knows a single row only, `PerAgent`.

    Args:
        function: Takes observations, an array (n, …) or a tree of these, and returns such for the same n rows.
        output_space: Space of one observation after the function, or a function that makes it of the space before;
            None where the two are equal.

    Raises:
        ArgumentError: ``function`` cannot be called, or ``output_space`` is none of these.
        ContractError: In a call: what the function returned has another structure, shape or dtype than was declared.
    """

    def __init__(self, function: Callable[[Tree], Tree], output_space: SpaceRule = None) -> None:
        check_function(function, output_space, "MapObs")
        self.function = function
        self._rule = output_space
        self._declared: DeclaredSpace | None = None

    def __call__(self, rows: Rows) -> Rows:
        if self._declared is None:
            raise self._not_set_up()
        return rows.replace(obs=self._declared.batch(self.function(read_only(rows.obs)), len(rows)))

    def setup(self, space: Space[Any]) -> None:
        self._declared = DeclaredSpace(self.output_space(space), self.name)

    def output_space(self, space: Space[Any]) -> Space[Any]:
        return space_after(self._rule, space, self.name)

    def params(self) -> dict[str, Any]:
        return {"function": self.function, "output_space": self._rule}

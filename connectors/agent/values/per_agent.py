"""`PerAgent`: a user's function of one agent's observation at a time."""

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
from marlvec.errors import ContractError
from marlvec.spaces import SpaceTree
from marlvec.trees import Tree, map_tree

__all__ = ["PerAgent"]


class PerAgent(AgentConnector):
    """Puts ``function(obs, agent)`` in the place of each observation, one row a call.

    The easiest to write and the slowest to run: a call of a Python function for every row. `MapObs` takes all rows at
    once. The arrays it gets are read-only.

    Args:
        function: Takes one observation, as the space of one has it, and the agent's name, or its ``agent_index`` where
            the pipeline was bound without names. Returns one observation.
        output_space: Space of one observation after the function, or a function that makes it of the space before;
            None where the two are equal.

    Raises:
        ArgumentError: ``function`` cannot be called, or ``output_space`` is none of these.
        ContractError: In a call: what the function returned has another structure, shape or dtype than was declared;
            names the row.
    """

    def __init__(self, function: Callable[[Tree, str | int], Tree], output_space: SpaceRule = None) -> None:
        check_function(function, output_space, "PerAgent")
        self.function = function
        self._rule = output_space
        self._tree: SpaceTree | None = None
        self._declared: DeclaredSpace | None = None

    def __call__(self, rows: Rows) -> Rows:
        if self._tree is None or self._declared is None:
            raise self._not_set_up()
        obs = read_only(self._tree.unflatten(self._tree.flatten(rows.obs)))  # keys in the space's order
        agents = [self._agent(index) for index in rows.agent_index.tolist()]
        values = [self.function(_row(obs, i), agent) for i, agent in enumerate(agents)]
        return rows.replace(obs=self._declared.stack(values))

    def setup(self, space: Space[Any]) -> None:
        self._tree = SpaceTree(space)
        self._declared = DeclaredSpace(self.output_space(space), self.name)

    def output_space(self, space: Space[Any]) -> Space[Any]:
        return space_after(self._rule, space, self.name)

    def params(self) -> dict[str, Any]:
        return {"function": self.function, "output_space": self._rule}

    def _agent(self, index: int) -> str | int:
        if not self.agents:
            return index
        if not 0 <= index < len(self.agents):
            raise ContractError(f"agent_index {index} in rows of {len(self.agents)} agents")
        return self.agents[index]


def _row(obs: Tree, i: int) -> Tree:
    return map_tree(lambda leaf: leaf[i], obs)

"""`AgentPipeline`: the chain of connectors from the envs' rows to a policy's input."""

from __future__ import annotations

from typing import Any

from gymnasium.spaces import Space

from marlvec.connectors.connector import AgentConnector
from marlvec.connectors.pipeline import Pipeline

__all__ = ["AgentPipeline"]


class AgentPipeline(Pipeline[AgentConnector], AgentConnector):
    """A chain of agent connectors: from the envs' rows to the policy's rows.

    Bound to the space of one observation: ``pipeline.bind(envs.agent_observation_space(0), envs.agents)``.

    Args:
        pieces: Agent connectors, first to last.
    """

    _side = AgentConnector
    _section = "agent_connectors"

    @property
    def is_identity(self) -> bool:
        return type(self).__call__ is Pipeline.__call__ and not (self._program or self._compile()).stages

    @property
    def input_space(self) -> Space[Any]:
        """Space of one observation before the first piece."""
        return self._bound_space()

    @property
    def output_space_(self) -> Space[Any]:
        """Space of one observation after the last piece."""
        return self._spaces(self._bound_space())[-1]

    def output_space(self, space: Space[Any]) -> Space[Any]:
        return self._spaces(space)[-1]

    def _past(self, piece: AgentConnector, space: Space[Any]) -> Space[Any]:
        return piece.output_space(space)

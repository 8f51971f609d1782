"""`AgentIndicator`: the agent's index, one-hot, appended to its observation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from gymnasium.spaces import Box, Space
from numpy.typing import NDArray

from marlvec.connectors.connector import AgentConnector
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, ContractError, UnsupportedSpaceError

__all__ = ["AgentIndicator"]


class AgentIndicator(AgentConnector):
    """Appends a one-hot of the agent, or of its type, to an observation vector: ``(d,)`` becomes ``(d + width,)``.

    Without arguments the agents are those the pipeline was bound with, so that ``AgentIndicator()`` is enough.

    Args:
        agents: How many agents there are, or their names, in the order of ``agent_index``; None to take the
            pipeline's.
        mode: ``"one_hot"`` for one column per agent, ``"type"`` for one per type, in order of first appearance.
        types: Each agent's type, by position or by name; None to take the name without its number, so that
            ``adversary_0`` and ``adversary_1`` are both ``adversary``.

    Raises:
        ArgumentError: ``mode`` is neither, or ``types`` is given without it; or, where a space is first seen, the
            agents or their types are not known.
    """

    def __init__(
        self,
        agents: int | Sequence[str] | None = None,
        *,
        mode: Literal["one_hot", "type"] = "one_hot",
        types: Sequence[str] | Mapping[str, str] | None = None,
    ) -> None:
        if mode not in ("one_hot", "type"):
            raise ArgumentError(f'mode must be "one_hot" or "type", got {mode!r}')
        if types is not None and mode != "type":
            raise ArgumentError('types are only used with mode="type"')
        self.given = agents if agents is None or isinstance(agents, int) else tuple(agents)
        self.mode = mode
        self.types = types
        self._codes: NDArray[Any] | None = None

    def __call__(self, rows: Rows) -> Rows:
        if self._codes is None:
            raise self._not_set_up()
        obs = rows.obs
        count, width = self._codes.shape
        size = obs.shape[1]
        out = np.empty((len(rows), size + width), obs.dtype)
        out[:, :size] = obs
        try:
            out[:, size:] = self._codes[rows.agent_index]
        except IndexError:
            raise ContractError(f"agent_index {int(rows.agent_index.max())} in rows of {count} agents") from None
        return rows.replace(obs=out)

    def setup(self, space: Space[Any]) -> None:
        self._codes = self._table().astype(space.dtype)

    def output_space(self, space: Space[Any]) -> Space[Any]:
        if not isinstance(space, Box) or len(space.shape) != 1:
            raise UnsupportedSpaceError(f"AgentIndicator needs a vector: put FlattenObs before it; got {space}")
        width = self._table().shape[1]
        low = np.concatenate([space.low, np.zeros(width, space.dtype)])
        high = np.concatenate([space.high, np.ones(width, space.dtype)])
        return Box(low, high, dtype=space.low.dtype.type)

    def params(self) -> dict[str, Any]:
        return {**super().params(), "agents": self.given}

    def _table(self) -> NDArray[np.bool_]:
        """(A, width): the columns to append for each agent."""
        names = self.agents if self.given is None else self.given
        count = names if isinstance(names, int) else len(names)
        if count < 1:
            raise ArgumentError("the agents are not known: call bind(space, agents), or give AgentIndicator(agents)")
        if self.mode == "one_hot":
            return np.eye(count, dtype=np.bool_)
        types = self._types(names)
        kinds = list(dict.fromkeys(types))
        return np.array([[kind == other for other in kinds] for kind in types])

    def _types(self, names: int | tuple[str, ...]) -> list[str]:
        if isinstance(self.types, Mapping) or self.types is None:
            if isinstance(names, int):
                raise ArgumentError("types by name need agents by name: AgentIndicator([name, ...], ...)")
            if self.types is None:
                return [re.sub(r"_?\d+$", "", name) for name in names]
            if missing := [name for name in names if name not in self.types]:
                raise ArgumentError(f"no type is given for the agents {missing}")
            return [self.types[name] for name in names]
        count = names if isinstance(names, int) else len(names)
        if len(self.types) != count:
            raise ArgumentError(f"{len(self.types)} types are given for {count} agents")
        return list(self.types)

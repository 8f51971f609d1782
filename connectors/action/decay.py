"""`Decay`: a number that goes linearly from one value to another as an agent decides, for exploration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.connectors._support.agent_table import AgentTable
from marlvec.connectors.connector import State
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError

__all__ = ["Decay"]


class Decay:
    """The part of the way gone, 0 to 1, by each (env, agent): linear in the decisions that it has counted.

    Each counts for itself, over all its episodes. A count of all rows would make what an agent does depend on who
    decided before it in the same batch. Counts are what a connector has learnt: no end of an episode touches them.

    Args:
        final: Value at the end; None where there is no decay.
        decay_steps: Decisions of one agent in one env until then; None likewise.

    Raises:
        ArgumentError: Only one of them is given, or ``decay_steps`` is below 1.
    """

    def __init__(self, final: float | None, decay_steps: int | None) -> None:
        if (final is None) != (decay_steps is None):
            raise ArgumentError(f"give final and decay_steps, or neither; got final={final}, decay_steps={decay_steps}")
        if decay_steps is not None and decay_steps < 1:
            raise ArgumentError(f"decay_steps must be at least 1, got {decay_steps}")
        self._final = final
        self._steps = decay_steps
        self._count = AgentTable((), np.int64)

    def count(self, rows: Rows) -> None:
        """Count one decision of each row's agent."""
        if self._steps is not None:
            self._count.set(rows.env_id, rows.agent_index, self._count.get(rows.env_id, rows.agent_index) + 1)

    def __call__(self, start: Any, rows: Rows) -> Any:
        """Give the value now: ``start`` as it is without decay; else (n, 1), or (n, D) for a start of D numbers."""
        if self._steps is None:
            return start
        done = np.minimum(self._count.get(rows.env_id, rows.agent_index) / self._steps, 1)
        value: NDArray[np.float64] = start + (self._final - start) * done[:, None]
        return value

    def state_dict(self) -> State:
        """Every agent's count; ``{}`` without decay."""
        return {} if self._steps is None else {"count": self._count.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over every agent's count.

        Raises:
            ArgumentError: There are counts and no decay, or decay and no counts.
        """
        if state.keys() != self.state_dict().keys():
            raise ArgumentError(f"expected the state keys {list(self.state_dict())}, got {list(state)}")
        if state:
            self._count.load_state_dict(state["count"])

    def take_merged(self, state: Mapping[str, Any]) -> None:
        """Take over counts of agents that have gone further elsewhere; of the others their own stay.

        Raises:
            ArgumentError: As `merge_states`.
        """
        if state:
            self.load_state_dict(self.merge_states([self.state_dict(), state]))

    def merge_states(self, states: Sequence[Mapping[str, Any]]) -> State:
        """Join states: each agent has gone as far as the copy that has gone furthest. Of none, give this one's.

        Sums would run ahead: what was joined and loaded once would be counted again by the next join.

        Raises:
            ArgumentError: A state is of no decay.
        """
        if self._steps is None or not states:
            return self.state_dict()
        merged = AgentTable((), np.int64)
        for state in states:
            if state.keys() != {"count"}:
                raise ArgumentError(f"expected the state key 'count', got {list(state)}")
            count = np.asarray(state["count"]["values"])
            env_id, agent_index = (index.ravel() for index in np.indices(count.shape))
            merged.set(env_id, agent_index, np.maximum(merged.get(env_id, agent_index), count.ravel()))
        return {"count": merged.state_dict()}

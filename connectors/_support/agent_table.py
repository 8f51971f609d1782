"""`AgentTable`: a connector's state as one array with a row per (env, agent)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from marlvec.connectors.connector import EnvIds, State
from marlvec.errors import ArgumentError
from marlvec.serialization.state_fields import array_field

__all__ = ["AgentTable"]


class AgentTable:
    """One slot per (env, agent), in an array that grows as envs and agents show up.

    Rows of any subset of envs, in any order, read and write their own slots only. No (env, agent) pair may appear
    twice in one call: of two writes to one slot the last would win.

    Args:
        shape: Shape of one slot.
        dtype: Its dtype.
        fill: What a slot holds before it is first written, and after `reset`; broadcast to ``shape``.

    Attributes:
        values: (N, A, *shape); N and A are as large as any env_id and agent_index seen needed.
    """

    def __init__(self, shape: tuple[int, ...] = (), dtype: DTypeLike = np.float64, fill: Any = 0) -> None:
        self.fill = np.broadcast_to(np.asarray(fill, dtype), shape)
        self.values: NDArray[Any] = np.zeros((0, 0, *shape), dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one slot."""
        return self.values.shape[2:]

    def __repr__(self) -> str:
        n, a = self.values.shape[:2]
        return f"AgentTable({self.shape}, {self.values.dtype}; {n} envs, {a} agents)"

    def get(self, env_id: NDArray[Any], agent_index: NDArray[Any]) -> NDArray[Any]:
        """Copy the slots of these rows: ``(n, *shape)``.

        Args:
            env_id: (n,) ints.
            agent_index: (n,) ints.

        Returns:
            ``(n, *shape)``, of the table's dtype.
        """
        try:
            slots: NDArray[Any] = self.values[env_id, agent_index]
        except IndexError:
            self._grow(env_id, agent_index)
            slots = self.values[env_id, agent_index]
        return slots

    def set(self, env_id: NDArray[Any], agent_index: NDArray[Any], values: Any) -> None:
        """Write into the slots of these rows.

        Args:
            env_id: (n,) ints.
            agent_index: (n,) ints.
            values: Broadcast to ``(n, *shape)``.
        """
        try:
            self.values[env_id, agent_index] = values
        except IndexError:
            self._grow(env_id, agent_index)
            self.values[env_id, agent_index] = values

    def reset(self, env_ids: EnvIds | None = None) -> None:
        """Refill the slots of every agent of these envs, or of all; envs never seen need no refill."""
        if env_ids is None:
            self.values[:] = self.fill
            return
        where = np.asarray(env_ids, np.int64)
        self.values[where[where < len(self.values)]] = self.fill

    def state_dict(self) -> State:
        """Exact copy of every slot."""
        return {"values": self.values.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over every slot.

        Raises:
            ArgumentError: Slots of another shape or dtype.
        """
        self.values = array_field(state, "values", self.values.dtype, (None, None, *self.shape), "slots of agents")

    def _grow(self, env_id: NDArray[Any], agent_index: NDArray[Any]) -> None:
        if env_id.size and (env_id.min() < 0 or agent_index.min() < 0):
            raise ArgumentError("env_id and agent_index must not be negative")
        n, a = self.values.shape[:2]
        grown = np.empty((_room(n, env_id), _room(a, agent_index), *self.shape), self.values.dtype)
        grown[:] = self.fill
        grown[:n, :a] = self.values
        self.values = grown


def _room(have: int, index: NDArray[Any]) -> int:
    return max(have, int(index.max()) + 1) if index.size else have

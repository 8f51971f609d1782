"""`AgentTable`: an array with a slot per (env, agent); `Remembers`: connectors with such tables as state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from marlvec.connectors.connector import Connector, EnvIds, State
from marlvec.errors import ArgumentError
from marlvec.serialization.state_fields import array_field, check_fields

__all__ = ["AgentTable", "Remembers", "Tables", "load_tables", "save_tables"]


class AgentTable:
    """One slot per (env, agent), in an array that grows as envs and agents show up.

    Rows of any subset of envs, in any order, read and write their own slots only. No (env, agent) pair may appear
    twice in one call: of two writes to one slot the last would win.

    Args:
        shape: Shape of one slot.
        dtype: Its dtype.
        fill: Value of a slot before its first write, and after `reset`; broadcast to ``shape``.

    Attributes:
        values: (N, A, *shape); N and A grow with the env ids and agent indices seen.
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
        """Copy the slots of the rows ``env_id``, ``agent_index``, (n,) each: ``(n, *shape)``, of the table's dtype."""
        try:
            slots: NDArray[Any] = self.values[env_id, agent_index]
        except IndexError:
            self._grow(env_id, agent_index)
            slots = self.values[env_id, agent_index]
        return slots

    def set(self, env_id: NDArray[Any], agent_index: NDArray[Any], values: Any) -> None:
        """Write ``values``, broadcast to ``(n, *shape)``, to the slots of the rows ``env_id``, ``agent_index``."""
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
        self.values = self.checked(state, "slots of agents")

    def checked(self, state: Mapping[str, Any], where: str) -> NDArray[Any]:
        """Return a copy of a state's slots, (N, A, *shape); ArgumentError names ``where`` if shape or dtype differ."""
        check_fields(state, ["values"], where)
        return array_field(state, "values", self.values.dtype, (None, None, *self.shape), where)

    def _grow(self, env_id: NDArray[Any], agent_index: NDArray[Any]) -> None:
        if env_id.size and (env_id.min() < 0 or agent_index.min() < 0):
            raise ArgumentError("env_id and agent_index must not be negative")
        n, a = self.values.shape[:2]
        grown = np.empty((_room(n, env_id), _room(a, agent_index), *self.shape), self.values.dtype)
        grown[:] = self.fill
        grown[:n, :a] = self.values
        self.values = grown


Tables = Mapping[str, AgentTable | Sequence[AgentTable]]


def save_tables(tables: Tables) -> State:
    """Return exact copies of tables, and of lists of them, by name."""
    return {
        name: table.state_dict() if isinstance(table, AgentTable) else [one.state_dict() for one in table]
        for name, table in tables.items()
    }


def load_tables(state: Mapping[str, Any], tables: Tables, owner: str) -> None:
    """Load a state from `save_tables`, completely or not at all."""
    check_fields(state, tables, owner)
    found = []
    for name, table in tables.items():
        own, saved = ([table], [state[name]]) if isinstance(table, AgentTable) else (table, state[name])
        if len(saved) != len(own):
            raise ArgumentError(f"{owner}: {name}: expected {len(own)} leaves, got {len(saved)}")
        found += [(one, one.checked(part, f"{owner}: {name}")) for one, part in zip(own, saved, strict=True)]
    for one, values in found:
        one.values = values


class Remembers(Connector):
    """A connector that stores data of each agent's running episode in tables.

    `reset` refills single tables. A list holds a table per leaf; a single table beside it marks the valid slots.
    """

    # by names in the state; {} until `setup` creates them, if the constructor does not
    _tables: Tables = MappingProxyType({})

    def reset(self, env_ids: EnvIds | None = None) -> None:
        for table in self._tables.values():
            if isinstance(table, AgentTable):
                table.reset(env_ids)

    def state_dict(self) -> State:
        return save_tables(self._tables)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not self._tables:
            raise self._not_set_up()
        load_tables(state, self._tables, self.name)


def _room(have: int, index: NDArray[Any]) -> int:
    return max(have, int(index.max()) + 1) if index.size else have

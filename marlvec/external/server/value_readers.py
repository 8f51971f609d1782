"""Readers and writers of every agent's values, for a session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from marlvec.envs.spec import EnvSpec
from marlvec.errors import RefusedError
from marlvec.external.protocol.spaces import write_space
from marlvec.external.protocol.values import ValueReader, read_array, read_mask

__all__ = ["ValueReaders"]


class ValueReaders:
    """Values of all agents, by their declared spaces. Holds nothing that changes.

    Args:
        spec: What one env looks like.
        logs: Whether clients may say what was done.

    Raises:
        UnsupportedSpaceError: A space does not go over a socket.

    Attributes:
        agents: Names, in order.
        groups: Their spaces as plain data, for the welcome.
    """

    def __init__(self, spec: EnvSpec, *, logs: bool = True) -> None:
        self._logs = logs
        self.agents = spec.agents
        self.groups: list[dict[str, Any]] = []
        self._obs: dict[str, ValueReader] = {}
        self._actions: dict[str, ValueReader] = {}
        for group in spec.groups:
            obs, action = ValueReader(group.observation_space), ValueReader(group.action_space)
            names = [spec.agents[a] for a in group.agents]
            self._obs |= dict.fromkeys(names, obs)
            self._actions |= dict.fromkeys(names, action)
            self.groups.append(
                {
                    "agents": names,
                    "observation": write_space(group.observation_space),
                    "action": write_space(group.action_space),
                    "mask": group.mask_size,
                }
            )

    def obs(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Observations of some agents.

        Raises:
            RefusedError: An agent is unknown.
            ContractError: One is not of its space's structure.
            ProtocolError: There is an array that is none.
        """
        return self._read(self._obs, data, "observation")

    def actions(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Actions of some agents; raises as `obs`, and where clients may not say what was done."""
        if not self._logs:
            raise RefusedError("this server decides itself, and takes no logged actions", "value")
        return self._read(self._actions, data, "action")

    def masks(self, data: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Action masks of some agents; raises as `obs`."""
        if data is None:
            return None
        return {name: read_mask(mask, f"action mask of agent {name!r}") for name, mask in data.items()}

    def outcome(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Rewards and infos of a message, as an `Episode` takes them."""
        infos = fields.get("infos")
        if infos is not None:
            infos = {
                name: {key: read_array(value, key) if isinstance(value, list) else value for key, value in info.items()}
                for name, info in infos.items()
            }
        return {"rewards": fields.get("rewards"), "infos": infos}

    def write_actions(self, actions: Mapping[str, Any]) -> dict[str, Any]:
        """Actions of some agents, as they go over the wire."""
        return {name: self._actions[name].write(action) for name, action in actions.items()}

    def _read(self, readers: Mapping[str, ValueReader], data: Mapping[str, Any], what: str) -> dict[str, Any]:
        found = {}
        for name, value in data.items():
            reader = readers.get(name)
            if reader is None:
                raise RefusedError(f"there is no agent {name!r}; there are {list(self.agents)}"[:500], "value")
            found[name] = reader.read(value, f"{what} of agent {name!r}")
        return found

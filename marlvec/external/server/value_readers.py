"""`ValueReaders`: reads and writes the values of all agents, for sessions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from marlvec.envs.spec import EnvSpec
from marlvec.errors import RefusedError
from marlvec.external.protocol.spaces import write_space
from marlvec.external.protocol.values import ValueReader, read_array, read_mask

__all__ = ["ValueReaders"]


class ValueReaders:
    """Values of all agents, by their declared spaces; immutable. `groups`: spaces as plain data, for the welcome.

    Reading raises `RefusedError`: an agent is unknown; `ContractError`: not its space's; `ProtocolError`: malformed.
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
        """Unpack observations of some agents."""
        return self._read(self._obs, data, "observation")

    def actions(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Unpack actions of some agents; `RefusedError` if clients may not send their own actions."""
        if not self._logs:
            raise RefusedError("this server accepts no logged actions (logs=False)", "value")
        return self._read(self._actions, data, "action")

    def masks(self, data: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Unpack action masks of some agents."""
        if data is None:
            return None
        return {name: read_mask(mask, f"action mask of agent {name!r}") for name, mask in data.items()}

    def outcome(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Unpack a message's rewards and infos into arguments of an `ExternalEpisode`."""
        infos = fields.get("infos")
        if infos is not None:
            infos = {
                name: {key: read_array(value, key) if isinstance(value, list) else value for key, value in info.items()}
                for name, info in infos.items()
            }
        return {"rewards": fields.get("rewards"), "infos": infos}

    def write_actions(self, actions: Mapping[str, Any]) -> dict[str, Any]:
        """Pack actions of some agents."""
        return {name: self._actions[name].write(action) for name, action in actions.items()}

    def _read(self, readers: Mapping[str, ValueReader], data: Mapping[str, Any], what: str) -> dict[str, Any]:
        found = {}
        for name, value in data.items():
            reader = readers.get(name)
            if reader is None:
                raise RefusedError(f"no agent {name!r} exists; the agents are {list(self.agents)}"[:500], "value")
            found[name] = reader.read(value, f"{what} of agent {name!r}")
        return found

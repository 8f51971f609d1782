"""`EnvForm`: agents and spaces as the server declared them; packs and unpacks their values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from marlvec.errors import ArgumentError, ContractError, ProtocolError
from marlvec.external.exchange.value_checker import split_mask
from marlvec.external.protocol.handshake import Welcome
from marlvec.external.protocol.spaces import read_space
from marlvec.external.protocol.values import DTYPES, ValueReader, short, write_array
from marlvec.spaces.action_masks import why_no_mask

__all__ = ["EnvForm"]

_COMMON = ("common", "__common__")  # keys of infos that belong to no single agent


class EnvForm:
    """Agents and spaces of a server, by agent name, and conversion of their values. `masks`: agents that need one."""

    def __init__(self, welcome: Welcome) -> None:
        self.agents = welcome.agents
        self.obs: dict[str, ValueReader] = {}
        self.actions: dict[str, ValueReader] = {}
        self.masks: set[str] = set()
        for group in welcome.groups:
            if not isinstance(group, dict) or group.keys() != {"agents", "observation", "action", "mask"}:
                raise ProtocolError("WELCOME: groups: expected dicts of agents, observation, action and mask")
            names, mask_size = group["agents"], group["mask"]
            if type(names) is not list or not all(type(name) is str for name in names):
                raise ProtocolError(f"WELCOME: groups: agents: expected a list of names, got {short(names)}")
            if mask_size is not None and (type(mask_size) is not int or mask_size < 1):
                raise ProtocolError(f"WELCOME: groups: mask: expected a length from 1, or None, got {short(mask_size)}")
            obs, action = ValueReader(read_space(group["observation"])), ValueReader(read_space(group["action"]))
            self.obs |= dict.fromkeys(names, obs)
            self.actions |= dict.fromkeys(names, action)
            if mask_size is not None:
                self.masks.update(names)
        if self.obs.keys() != set(self.agents):
            raise ProtocolError("WELCOME: groups: expected every agent in one group, and no others")

    def check(self, table: Any, what: str) -> Mapping[str, Any]:
        """Require a dict keyed by known agents."""
        if not isinstance(table, Mapping):
            raise ArgumentError(f"{what}: expected a dict of agent name to value, got {type(table).__name__}")
        if unknown := [name for name in table if name not in self.obs]:
            raise ArgumentError(f"{what}: unknown agents {unknown}; there are {list(self.agents)}")
        return table

    def split(self, obs: Any, masks: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Separate observations from action masks, also if an env puts the mask into the observation.

        `ContractError`: a mask for an action space that cannot have one.
        """
        bare = dict(self.check(obs, "observations"))
        found = {} if masks is None else dict(self.check(masks, "masks"))
        for name in self.masks & bare.keys():
            bare[name], mask = split_mask(bare[name])
            if mask is not None:
                found.setdefault(name, mask)
        for name in found:
            if reason := why_no_mask(self.actions[name].space):
                raise ContractError(f"action mask of agent {name!r}: {reason}")
        return bare, found

    def write_obs(self, obs: Mapping[str, Any]) -> dict[str, Any]:
        """Pack observations; `ContractError` names an agent whose structure, shapes or dtypes are not its space's."""
        return {name: _write(self.obs[name], value, "observation", name) for name, value in obs.items()}

    def write_actions(self, actions: Mapping[str, Any]) -> dict[str, Any]:
        """Pack actions; raises as `write_obs`."""
        return {name: _write(self.actions[name], value, "action", name) for name, value in actions.items()}

    def read_actions(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Unpack received actions; `ProtocolError` if they do not match the action spaces."""
        try:
            return {name: self.actions[name].read(value, f"action of {name!r}") for name, value in data.items()}
        except (KeyError, ContractError) as error:
            raise ProtocolError(f"the server sent invalid actions: {error}") from None

    def write_infos(self, infos: Any) -> dict[str, dict[str, Any]]:
        """Pack infos; `ContractError` if the protocol has no type for a value."""
        self.check({n: None for n in infos if n not in _COMMON} if isinstance(infos, Mapping) else infos, "infos")
        out: dict[str, dict[str, Any]] = {}
        for name, info in infos.items():
            if not isinstance(info, Mapping):
                raise ArgumentError(f"infos of {name!r}: expected a dict, got {type(info).__name__}")
            if info:
                out[name] = {
                    _key(key, name): _write_info(value, f"info {key!r} of {name!r}") for key, value in info.items()
                }
        return out


def _key(key: Any, name: str) -> str:
    if not isinstance(key, str):
        raise ContractError(f"infos of {name!r}: expected keys that are texts, got {key!r}")
    return key


def _write(writer: ValueReader, value: Any, what: str, name: str) -> Any:
    try:
        return writer.write(value)
    except ContractError as error:
        raise ContractError(f"{what} of agent {name!r}: {error}") from None


def _write_info(value: Any, where: str) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.generic) and value.dtype.name in DTYPES:
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.name in DTYPES:
        return write_array(value)
    raise ContractError(
        f"{where}: expected None, a bool, a number, a text or a numeric array, got {type(value).__name__}, which does "
        f"not go over a socket"
    )

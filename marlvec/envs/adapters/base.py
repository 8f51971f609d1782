"""`Adapter`: base of all adapters: names, spaces without masks, metadata, reset arguments, state, close."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, ClassVar

import numpy as np
from gymnasium.spaces import Box, Space

from marlvec.arguments import signature_of
from marlvec.envs.adapters.return_values import (
    AgentId,
    as_flag,
    as_reward,
    contract_error,
    infos_by_agent,
    mapping,
    missing_hint,
    refuse_unknown,
)
from marlvec.envs.adapters.self_reset import resets_itself, take_finals
from marlvec.envs.env import MultiAgentEnv
from marlvec.envs.slot import Slot
from marlvec.envs.spec import COMMON, Info
from marlvec.envs.user_env import UserEnvState, one_each
from marlvec.errors import ArgumentError, ContractError
from marlvec.spaces import SpaceTree, describe_difference
from marlvec.spaces.action_masks import split_action_mask

__all__ = ["ENDED", "LIVE", "MISSING", "NOT_JOINED", "Adapter", "DictAdapter", "keywords_of"]

NOT_JOINED, LIVE, ENDED = range(3)
"""Status of an agent in its episode."""
MISSING: Any = object()
"""Placeholder for an observation that the env did not return."""

_RESERVED = (COMMON, "__all__")


class Adapter(MultiAgentEnv):
    """A user's env as a `MultiAgentEnv`; ``env`` is the env as it was passed in, ``ids`` its own names of its agents.

    `agents` has the names as strings. Observation spaces are given with action masks, and declared without.
    """

    _declaration: ClassVar[str] = "{}_spaces = {{agent: space, …}}"  # how a user's env declares its spaces
    is_lenient = False  # rewards and flags may be arrays of one element, and flags 0 or 1
    copies_attributes = False  # copies of the env's attributes are its state, if it has no ``get_state()``
    _flag_names: ClassVar[tuple[str, str]] = ("termination", "truncation")

    def __init__(
        self,
        env: Any,
        ids: Iterable[AgentId],
        observation_spaces: Sequence[Any],
        action_spaces: Sequence[Any],
    ) -> None:
        self.env = env
        self.metadata = _plain_metadata(getattr(env, "metadata", None))
        self.name = _name_of(env, self.metadata)
        self.ids: tuple[AgentId, ...] = tuple(ids)
        self.agents = tuple(str(agent) for agent in self.ids)
        self._info_keys: tuple[str, ...] = self.agents  # keys of the agents' own infos in an `Info`
        self._index: dict[AgentId, int] = {agent: a for a, agent in enumerate(self.ids)}
        for name in self.agents:
            if name in _RESERVED:
                raise ContractError(f"{self.name}: {name!r} is a reserved word and cannot be an agent's name")
        self._declared = [
            (kind, agent, space)
            for kind, found in (("observation", observation_spaces), ("action", action_spaces))
            for agent, space in zip(self.ids, found, strict=True)
        ]
        for kind, agent, space in self._declared:
            if not isinstance(space, Space):
                got = type(space).__name__
                raise ContractError(
                    f"{self.name}: {kind} space of agent {agent!r}: expected a gymnasium space, got {got}"
                    + (missing_hint(self._declaration.format(kind)) if space is None else "")
                )
        pairs = [
            split_action_mask(observation, action, f"{self.name}: observation space of agent {agent!r}")
            for agent, observation, action in zip(self.ids, observation_spaces, action_spaces, strict=True)
        ]
        self.observation_spaces = tuple(space for space, _ in pairs)
        self.action_spaces = tuple(action_spaces)
        self.mask_sizes = tuple(size for _, size in pairs)
        # Dict(observation=X, action_mask=M) is unwrapped to X; from any other Dict only the mask is removed.
        self._bare = [
            size is not None and set(space.spaces) == {"observation", "action_mask"}
            for space, (_, size) in zip(observation_spaces, pairs, strict=True)
        ]
        self.state_space = _state_space(env)
        self.resets_itself = resets_itself(env, self.name)
        self._reset_takes = keywords_of(env.reset)
        self._status = [NOT_JOINED] * len(self.ids)

    @property
    def unwrapped(self) -> Any:
        return self.env

    def close(self) -> None:
        close = getattr(self.env, "close", None)
        if close is not None:
            close()

    def write_state(self, slot: Slot) -> None:
        slot.write_state(self.env.state())

    def state_obstacle(self) -> str | None:
        return self._user_state().obstacle()

    def get_state(self) -> dict[str, Any]:
        return {"agents": self._agents_now(), "user": self._user_state().get()}

    def set_state(self, state: dict[str, Any]) -> None:
        if not isinstance(state, dict) or state.keys() != {"agents", "user"}:
            raise ArgumentError(f"{self.name}: expected the state of an env with the same marlvec wrappers")
        self._user_state().set(state["user"])
        self._recall_agents(state["agents"])

    def _user_state(self) -> UserEnvState:
        return UserEnvState(self.env, self.name, copies_attributes=self.copies_attributes)

    def _agents_now(self) -> dict[str, Any]:
        """Return the adapter's state of its agents, as plain data."""
        return {"status": list(self._status)}

    def _recall_agents(self, now: dict[str, Any]) -> None:
        """Restore the result of `_agents_now`; the user's env was restored before."""
        self._status = one_each(now["status"], len(self.ids), f"{self.name}: status")

    def _call_reset(self, seed: int | None, options: dict[str, Any] | None) -> Any:
        """Call the env's ``reset`` with the arguments that it accepts; raise if a given one would be dropped."""
        kwargs: dict[str, Any] = {}
        takes = self._reset_takes
        if takes is None or "seed" in takes:
            kwargs["seed"] = seed
        elif seed is not None:
            reseed = getattr(self.env, "seed", None)
            if not callable(reseed):
                contract_error(
                    self.name, "reset()", "it takes no seed and has no seed() method; expected reset(seed=...)"
                )
            reseed(seed)
        if takes is None or "options" in takes:
            # A copy for each env: an env that changes its options must not change another env's, or the caller's.
            kwargs["options"] = None if options is None else deepcopy(options)
        elif options is not None:
            contract_error(self.name, "reset()", f"expected no options, since it takes none, got {options!r}")
        result = self.env.reset(**kwargs)
        self._check_spaces()
        return result

    @abstractmethod
    def space_of(self, kind: str, agent: AgentId) -> Any:
        """Return one agent's ``"observation"`` or ``"action"`` space from the env, including its mask."""

    def _check_spaces(self) -> None:
        """Raise if the env's spaces have changed since the buffers and policies were made."""
        for kind, agent, space in self._declared:
            try:
                now = self.space_of(kind, agent)
            except Exception:  # an env may have spaces of present agents only
                continue
            if now is not space and isinstance(now, Space) and (differs := describe_difference(space, now)):
                contract_error(
                    self.name,
                    "reset()",
                    f"{kind} space of agent {agent!r}: expected the one that the env was built with, got another "
                    f"{differs}. Declare one space that has room for all",
                )

    def _reward(self, value: Any, agent: AgentId, vector_hint: str = "") -> float:
        return (
            value if type(value) is float else as_reward(value, self.name, agent, vector_hint, lenient=self.is_lenient)
        )

    def _flag(self, value: Any, agent: AgentId, what: str, several_hint: str = "") -> bool:
        if value is True or value is False:
            return value is True
        return as_flag(value, self.name, agent, what, several_hint, lenient=self.is_lenient)

    def _flags_in(self, agent: AgentId, ends: Mapping[Any, Any], cuts: Mapping[Any, Any]) -> tuple[bool, bool]:
        """Return an agent's two flags; False if a dict has none for it."""
        return (
            agent in ends and self._flag(ends[agent], agent, self._flag_names[0]),
            agent in cuts and self._flag(cuts[agent], agent, self._flag_names[1]),
        )

    def _infos_by_agent(self, infos: Mapping[Any, Any]) -> Info | None:
        return infos_by_agent(infos, self._index, self.agents, self.name)

    def _listed(self, agents: Any, call: str) -> frozenset[AgentId]:
        refuse_unknown(agents, self._index, self.name, call, "env.agents")
        return frozenset(agents)

    def _observe(self, slot: Slot, a: int, value: Any, acting: bool) -> None:
        """Write agent number ``a``'s observation, and its mask if it has one; if not acting, the mask allows all."""
        if self.mask_sizes[a] is None:
            slot.write_obs(a, value)
            return
        slot.write_obs(a, self._without_mask(a, value))
        if acting:
            slot.write_mask(a, value["action_mask"])
        else:
            slot.clear_mask(a)

    def _join(self, slot: Slot, a: int, obs: Any) -> None:
        """Write agent number ``a``'s first observation; it is alive and acting now."""
        self._observe(slot, a, obs, True)
        slot.alive[a] = slot.acting[a] = True
        self._status[a] = LIVE

    def _record(self, slot: Slot, a: int, obs: Any, reward: float, ended: bool, cut: bool, acts: bool = True) -> bool:
        """Write a step's results for agent number ``a``; return whether it acts next.

        With ``obs`` `MISSING` it keeps its previous observation.
        """
        here = not (ended or cut)
        acts = acts and here
        if obs is MISSING:
            slot.final_missing[a] = not here
            slot.clear_mask(a)
        else:
            self._observe(slot, a, obs, acts)
        slot.reward[a] = reward
        slot.terminated[a] = ended
        slot.truncated[a] = cut
        slot.alive[a] = here
        slot.acting[a] = acts
        self._status[a] = LIVE if here else ENDED
        return acts

    def _without_mask(self, a: int, value: Any) -> Any:
        if self.mask_sizes[a] is None:
            return value
        if not isinstance(value, Mapping) or "action_mask" not in value:
            got = f"keys {sorted(map(str, value))}" if isinstance(value, Mapping) else type(value).__name__
            contract_error(
                self.name, "observation", f"of agent {self.ids[a]!r}: expected a dict with an 'action_mask', got {got}"
            )
        if self._bare[a]:
            if len(value) != 2 or "observation" not in value:
                got = f"{sorted(map(str, value))}"
                contract_error(
                    self.name,
                    "observation",
                    f"of agent {self.ids[a]!r}: expected keys ['action_mask', 'observation'], got {got}",
                )
            return value["observation"]
        return {key: part for key, part in value.items() if key != "action_mask"}

    def _take_masks(self, slot: Slot, new_infos: Info | None) -> Info | None:
        """Move action masks of acting agents, whose spaces declare none, from the infos into the slot.

        Must be called after ``acting`` is written. Modifies and returns the infos. `ContractError`: an agent's action
        space cannot have a mask.
        """
        if new_infos is None and not slot.gave_mask[0]:
            return None
        rest = {} if new_infos is None else new_infos
        for a, info in self._pop_masks(slot, rest):
            if info and slot.acting[a]:
                slot.write_mask(a, info["action_mask"])
            else:
                slot.clear_mask(a)
        return rest or None

    def _pop_masks(self, slot: Slot, new_infos: Info) -> Iterator[tuple[int, Info]]:
        """Remove masks of agents whose spaces declare none; yield each such agent's index and a dict of its mask.

        Beside a Box, an entry of that name is an info like others; so is None beside any space that has no masks.
        """
        for a, who in enumerate(self._info_keys):
            if self.mask_sizes[a] is not None:
                continue
            info = new_infos.get(who, {})
            has_mask = slot.action_mask[a] is not None
            if has_mask or (info.get("action_mask") is not None and not isinstance(self.action_spaces[a], Box)):
                yield a, {"action_mask": info.pop("action_mask")} if "action_mask" in info else {}
                if not info:
                    new_infos.pop(who, None)

    def _end_and_begin(self, slot: Slot, new_infos: Info | None) -> Info | None:
        """Finish the ended episode of an env that has itself begun the next one; then write the new agents.

        Must be called after the flags are written. Modifies the infos of the step; returns those of the reset.
        """
        flags = zip(slot.terminated, slot.truncated, strict=True)
        places = {self._info_keys[a]: a for a, flag in enumerate(flags) if any(flag)}
        finals = take_finals(new_infos, {who: self.ids[a] for who, a in places.items()}, self.name)
        for who, a in places.items():
            slot.write_final(a, self._without_mask(a, finals.observations[who]))
        for a in range(len(self.ids)):
            slot.zero_obs(a)
            slot.clear_mask(a)
            # Final observations were in the infos; else take_finals has raised.
            slot.alive[a] = slot.acting[a] = slot.final_missing[a] = False
        slot.done = slot.begun = True
        last = finals.ended or {}
        for _ in self._pop_masks(slot, last):
            pass  # masks after the end are not needed
        slot.final_info = last or None
        return finals.begun


class DictAdapter(Adapter):
    """An `Adapter` for envs whose ``reset`` and ``step`` return dicts by agent."""

    def reset(self, slot: Slot, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Info | None:
        """Begin an episode with the agents that the env observes. An old env returns the observations alone."""
        result = self._call_reset(seed, options)
        obs, infos = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        obs = mapping(obs, self.name, "reset()", "observations")
        infos = mapping(infos, self.name, "reset()", "infos")
        self._begin(slot, obs, "reset()")
        return self._take_masks(slot, self._infos_by_agent(infos))

    @abstractmethod
    def _begin(self, slot: Slot, obs: Mapping[Any, Any], call: str) -> None:
        pass


def keywords_of(function: Callable[..., Any]) -> frozenset[str] | None:
    """Return the keywords that a callable accepts; None if it accepts any, or has no readable signature."""
    try:
        parameters = signature_of(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


def _state_space(env: Any) -> Space[Any] | None:
    """Return the env's ``state_space`` if its values are fixed-size arrays and the env has ``state()``; else None."""
    space = getattr(env, "state_space", None)
    if not isinstance(space, Space) or not callable(getattr(env, "state", None)):
        return None
    tree = SpaceTree(space)
    return space if tree.is_leaf and not tree.leaves[0].is_object else None


def _name_of(env: Any, metadata: Mapping[str, Any]) -> str:
    name = metadata.get("name")
    if isinstance(name, str) and name:
        return name
    spec_id = getattr(getattr(env, "spec", None), "id", None)
    if isinstance(spec_id, str) and spec_id:
        return spec_id
    inner = getattr(env, "unwrapped", env)
    return type(env if inner is None else inner).__name__


def _plain_metadata(metadata: Any) -> dict[str, Any]:
    """Return the plain data in an env's metadata; the rest (enums, classes, functions) may not be picklable."""
    if not isinstance(metadata, Mapping):
        return {}
    kept = ((str(key), _plain(value)) for key, value in metadata.items())
    return {key: value for key, value in kept if value is not _DROPPED}


_DROPPED = object()


def _plain(value: Any) -> Any:
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, Mapping):
        return _plain_metadata(value)
    if isinstance(value, (list, tuple)):
        parts = [_plain(part) for part in value]
        if any(part is _DROPPED for part in parts):
            return _DROPPED
        return tuple(parts) if isinstance(value, tuple) else parts
    return _DROPPED

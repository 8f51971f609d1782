"""`RLlibAdapter`: RLlib-style dict envs as `MultiAgentEnv`. Does not import ray: only the form of the dicts matters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gymnasium.spaces import Dict, Space

from marlvec.envs.adapters.base import ENDED, LIVE, MISSING, NOT_JOINED, DictAdapter
from marlvec.envs.adapters.return_values import (
    AgentId,
    agent_ids,
    contract_error,
    five_dicts,
    missing_hint,
    refuse_unknown,
)
from marlvec.envs.slot import Slot
from marlvec.envs.spec import Info

__all__ = ["ALL", "RLlibAdapter"]

ALL = "__all__"
"""Key of an RLlib-style env's flags for the whole episode."""


class RLlibAdapter(DictAdapter):
    """An RLlib-style env: the agents in the observations act next.

    An agent joins with its first observation and ends with its own flag or with ``"__all__"``. Live agents that are not
    in the observations wait: they are alive, do not act, keep their observation, and may get rewards. An agent that
    ends without an observation keeps its previous one, and is marked (`Slot.final_missing`). The episode is over when
    ``"__all__"`` is True in terminateds or truncateds, or when every possible agent has ended.

    Agents come from ``possible_agents``, else from the keys of ``observation_spaces``, else from ``get_agent_ids()``,
    ``_agent_ids`` or ``agents``; spaces from ``observation_spaces`` and ``action_spaces``,
    ``get_observation_space(agent)`` and ``get_action_space(agent)``, or one space shared by all. Old envs are
    supported, too: ``step`` may return 4 dicts with one of dones, and ``reset`` observations alone.
    """

    _flag_names = ("terminateds", "truncateds")

    def __init__(self, env: Any) -> None:
        agents = _agents(env)
        super().__init__(
            env,
            agents,
            [_space(env, "observation", agent) for agent in agents],
            [_space(env, "action", agent) for agent in agents],
        )
        self._has_flags = {**self._index, ALL: -1}
        self._acting: tuple[int, ...] = ()

    def _begin(self, slot: Slot, obs: Mapping[Any, Any], call: str) -> None:
        refuse_unknown(obs, self._index, self.name, call, "observations")
        if not obs:
            contract_error(self.name, call, "no observations: expected at least one agent in an episode")
        self._status = [NOT_JOINED] * len(self.ids)
        for a, agent in enumerate(self.ids):
            if agent in obs:
                self._join(slot, a, obs[agent])
        self._acting = tuple(a for a, status in enumerate(self._status) if status == LIVE)

    def step(self, slot: Slot) -> Info | None:
        actions = slot.read_actions()
        result = self.env.step({self.ids[a]: actions[a] for a in self._acting})
        name = self.name
        obs, rewards, terminateds, truncateds, infos = five_dicts(result, name, self._flag_names)
        if ALL not in terminateds:
            _no_all(name, "dones" if len(result) == 4 else "terminateds")
        over = (
            self._flag(terminateds[ALL], ALL, "terminateds"),
            self._flag(truncateds.get(ALL, False), ALL, "truncateds"),
        )
        refuse_unknown(obs, self._index, name, "step()", "observations")
        refuse_unknown(rewards, self._index, name, "step()", "rewards")
        refuse_unknown(terminateds, self._has_flags, name, "step()", "terminateds")
        refuse_unknown(truncateds, self._has_flags, name, "step()", "truncateds")
        new_infos = self._infos_by_agent(infos)
        # If an env resets itself, its observations at an end belong to the next episode.
        last = self.resets_itself and (any(over) or self._all_flagged(terminateds, truncateds))
        seen: Mapping[Any, Any] = {} if last else obs
        self._acting = tuple(
            a for a in range(len(self.ids)) if self._read_agent(slot, a, seen, rewards, terminateds, truncateds, over)
        )
        if last:
            new_infos = self._end_and_begin(slot, new_infos)
            self._begin(slot, obs, "step()")
        else:
            slot.done = any(over) or all(status == ENDED for status in self._status)
        return self._take_masks(slot, new_infos)

    def cut_short(self, slot: Slot) -> None:
        """End the episode here; waiting agents have no final observation."""
        for a, alive in enumerate(slot.alive):
            if alive and not slot.acting[a]:
                slot.final_missing[a] = True
        super().cut_short(slot)

    def _agents_now(self) -> dict[str, Any]:
        return {**super()._agents_now(), "acting": list(self._acting)}

    def _recall_agents(self, now: dict[str, Any]) -> None:
        super()._recall_agents(now)
        self._acting = tuple(now["acting"])

    def space_of(self, kind: str, agent: AgentId) -> Any:
        return _space(self.env, kind, agent)

    def _all_flagged(self, terminateds: Mapping[Any, Any], truncateds: Mapping[Any, Any]) -> bool:
        return all(
            status == ENDED or any(self._flags_in(agent, terminateds, truncateds))
            for agent, status in zip(self.ids, self._status, strict=True)
        )

    def _read_agent(
        self,
        slot: Slot,
        a: int,
        obs: Mapping[Any, Any],
        rewards: Mapping[Any, Any],
        terminateds: Mapping[Any, Any],
        truncateds: Mapping[Any, Any],
        over: tuple[bool, bool],
    ) -> bool:
        """Write the results of a step for one agent; return whether it acts next."""
        agent, name = self.ids[a], self.name
        ended, cut = self._flags_in(agent, terminateds, truncateds)
        reward = self._reward(rewards[agent], agent) if agent in rewards else 0.0
        if self._status[a] == ENDED:
            # Such envs often repeat flags of ended agents, which is harmless; data for them is an error.
            if agent in obs or reward != 0.0:
                contract_error(name, "step()", f"agent {agent!r} has ended and cannot come back, yet it got data")
            return False
        if self._status[a] == NOT_JOINED and agent not in obs:
            if ended or cut or reward != 0.0:
                contract_error(name, "step()", f"agent {agent!r} got a reward or flag before its first observation")
            return False
        if not (ended or cut):
            # "__all__" ends all agents without a flag of their own.
            ended, cut = over
        return self._record(slot, a, obs.get(agent, MISSING), reward, ended, cut, agent in obs)


def _no_all(env: str, what: str) -> None:
    contract_error(
        env,
        "step()",
        f"{what} have no {ALL!r}: expected this key, which is True when the episode of an RLlib-style env is over. "
        f"If this is a PettingZoo Parallel env, derive it from pettingzoo.ParallelEnv, or wrap it in ParallelAdapter "
        f"yourself",
    )


def _look_up(env: Any, attribute: str) -> Any:
    """Read an attribute of an env, or of the env inside: Gymnasium's wrappers do not forward attributes."""
    found = getattr(env, attribute, None)
    return getattr(getattr(env, "unwrapped", None), attribute, None) if found is None else found


def _agents(env: Any) -> list[AgentId]:
    """Return the agents of an RLlib-style env, in a fixed order."""
    label = type(env).__name__
    for attribute in ("possible_agents", "observation_spaces", "get_agent_ids", "_agent_ids", "agents"):
        found = _look_up(env, attribute)
        if callable(found) and attribute == "get_agent_ids":
            found = found()
        if isinstance(found, Dict):
            found = found.spaces
        if isinstance(found, Iterable) and not isinstance(found, (str, Space)) and (listed := list(found)):
            agents = agent_ids(listed, label, attribute)
            # A set has no order, and every worker must use the same one.
            return sorted(agents, key=str) if isinstance(found, (set, frozenset)) else agents
    hint = missing_hint("observation_spaces = {agent: space, …}")
    problem = f"missing: expected all agents there, or as the keys of observation_spaces{hint}"
    contract_error(label, "possible_agents", problem)


def _space(env: Any, kind: str, agent: AgentId) -> Any:
    """Return one agent's space, from the first of the known attributes that has it."""
    spaces = _look_up(env, f"{kind}_spaces")
    spaces = spaces.spaces if isinstance(spaces, Dict) else spaces
    if isinstance(spaces, Mapping) and agent in spaces:
        return spaces[agent]
    function = _look_up(env, f"get_{kind}_space")
    if callable(function):
        return function(agent)
    shared = _look_up(env, f"{kind}_space")
    if callable(shared) and not isinstance(shared, Space):
        return shared(agent)
    # RLlib's older form: one Dict space of all agents' spaces, keyed by agent.
    if isinstance(shared, Dict) and agent in shared.spaces and isinstance(agent, str):
        return shared.spaces[agent]
    return shared

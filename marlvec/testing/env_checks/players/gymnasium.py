"""Checks Gymnasium envs, of one agent or of several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Tuple
from numpy.typing import NDArray

from marlvec.envs.adapters.base import Adapter
from marlvec.envs.adapters.gymnasium import AGENT, joint_keys
from marlvec.envs.adapters.joint import MASKS, JointAdapter
from marlvec.envs.adapters.return_values import AgentId, only_element
from marlvec.spaces.action_masks import count_choices
from marlvec.spaces.equality import short
from marlvec.testing.env_checks.findings import Findings
from marlvec.testing.env_checks.players.base import RawPlayer
from marlvec.testing.env_checks.values import check_keys, check_table

__all__ = ["SinglePlayer", "JointPlayer"]


class SinglePlayer(RawPlayer):
    """Plays a Gymnasium env as the single agent ``"agent_0"``."""

    def __init__(self, adapter: Adapter, max_steps: int, findings: Findings) -> None:
        super().__init__(adapter, max_steps, findings)
        self._seen: Any = None
        self._info: Any = {}
        self._joint = len(joint_keys(self.env.observation_space, self.env.action_space) or ())
        self._form = "tuple" if isinstance(self.env.observation_space, Tuple) else "dict"

    def space_call(self, kind: str, agent: AgentId) -> str:
        return f"{kind}_space"

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> None:
        result = self.ask_reset(seed, options)
        pair = isinstance(result, tuple) and len(result) == 2
        if not pair:
            self.note_old_reset(type(result).__name__)
        self._seen, self._info = result if pair else (result, {})
        with self.place.logging():
            check_table(self._info, self.place, "info", "infos")
        self.observe(AGENT, self._seen)

    def step(self, rng: np.random.Generator) -> None:
        action = self.draw(AGENT, self.allowed(AGENT, self._seen, self._info), rng)
        result = self.check_step(self.ask(self.env.step, action, given="the action"))
        obs, reward, ended, *cut, self._info = result
        with self.place.logging():
            check_table(self._info, self.place, "info", "infos")
        self._seen = obs
        self.observe(AGENT, obs)
        if self._joint and isinstance(reward, (list, tuple, np.ndarray)) and len(reward) == self._joint:
            change = (
                "if each part of the spaces is one agent's, set self.n_agents to their number, or write make(…, "
                f"agents={self._form!r}), and here marlvec.envs.adapt(env, agents={self._form!r})"
            )
            self.place.fault("form", "the reward", "one number, as of an env of one agent", short(reward), change)
        self.note_reward(AGENT, reward)
        self.over = self.ends(AGENT, ended, cut[0] if cut else False)
        if self.over and self.resets_itself:
            self.check_final(AGENT, self._info, {})


class JointPlayer(RawPlayer):
    """Plays a Gymnasium env with one entry per agent in its spaces: all agents act, ended ones as the adapter says."""

    def __init__(self, adapter: JointAdapter, max_steps: int, findings: Findings) -> None:
        self._adapter = adapter
        super().__init__(adapter, max_steps, findings)
        self._seen: Mapping[AgentId, Any] = {}
        self._infos: Mapping[AgentId, Any] = {}

    def space_call(self, kind: str, agent: AgentId) -> str:
        return f"{kind}_space[{self._adapter.keys[self._adapter.ids.index(agent)]!r}]"

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> None:
        result = self.ask_reset(seed, options)
        obs, info = self._adapter.split_reset(result)
        if obs is result:
            self.note_old_reset(type(result).__name__)
        self.live = set(self.agents)
        self._take_infos({} if info is None else info)
        self._check_obs(obs)

    def step(self, rng: np.random.Generator) -> None:
        actions = [
            self.draw(agent, self._allowed(agent), rng) if agent in self.live else self._adapter.idle_action(a)
            for a, agent in enumerate(self.agents)
        ]
        joint = self._adapter.join(actions)
        result = self.check_step(self.ask(self.env.step, joint, given="the action"))
        obs, rewards, ended, *cut, info = result
        self._take_infos(info)
        self._take_rewards(rewards)
        over = self._take_flags(ended, cut[0] if cut else False)
        if over == self.live and self.resets_itself:
            self._check_finals(info)
            self.over = True
            self._check_obs(obs)
            return
        self._check_obs(obs)
        self.gone |= over
        self.live -= over
        self.over = not self.live

    def _check_obs(self, obs: Any) -> None:
        """Check the observations of agents in the episode, or that have just ended."""
        entries = self._entries(obs, "observations")
        if entries is None:
            got, change = type(obs).__name__, "return a tuple with an observation for each agent"
            self.place.fault("results", "observations", self._one_each(), got, change)
        self._seen = entries
        for agent in self.agents:
            if agent in self.live:
                self.observe(agent, entries[agent])

    def _take_rewards(self, rewards: Any) -> None:
        entries = self._entries(rewards, "rewards")
        for agent in self.agents:
            value = rewards if entries is None else entries.get(agent)
            if agent in self.live:
                self.note_reward(agent, value)
            elif entries is not None and value is not None and np.any(value):
                change = "give 0 as the reward of an agent that has ended"
                self.place.report("life", f"reward of agent {agent!r}", "0, for it has ended", str(value), change)

    def _take_flags(self, terminated: Any, truncated: Any) -> set[AgentId]:
        """Check the flags; return the agents that ended in this step."""
        tables = [
            (value, self._entries(value, what))
            for value, what in ((terminated, "terminated"), (truncated, "truncated"))
        ]
        found = set()
        for agent in self.agents:
            if agent in self.live:
                flags = [value if entries is None else entries[agent] for value, entries in tables]
                if self.ends(agent, *flags):
                    found.add(agent)
        return found

    def _take_infos(self, info: Any) -> None:
        """Check the infos: one dict for all, in which masks may be a list, or one per agent."""
        by_agent: Mapping[AgentId, Any] = {}
        if isinstance(info, (list, tuple)) or (isinstance(info, Mapping) and self._adapter.is_dict):
            entries = info if isinstance(info, Mapping) else self._entries(info, "infos")
            by_agent = self.check_infos(entries)
        else:
            with self.place.logging():
                by_agent = self._masks_in(check_table(info, self.place, "info", "infos"))
        self._infos = by_agent

    def _masks_in(self, info: Mapping[Any, Any]) -> dict[AgentId, Any]:
        """Return infos of the agents with the masks that the common info has for each."""
        spaces = self.action_spaces.values()
        takes_masks = not all(self._masked.values()) and not all(isinstance(space, Box) for space in spaces)
        has_choices = any(count_choices(space) is not None for space in spaces)
        for key in MASKS if takes_masks else ():
            value = info.get(key)
            if key not in info or (value is None and not has_choices):
                continue
            if not isinstance(value, (list, tuple, np.ndarray)) or len(value) != len(self.agents):
                got = f"{type(value).__name__} {short(value)}"
                change = f"put a list with one mask for each agent under {key!r}"
                self.place.fault("masks", f"{key!r} of the info", self._one_each(), got, change, kind="values")
            pairs = zip(self.agents, value, strict=True)
            return {agent: {"action_mask": self._cut(agent, mask)} for agent, mask in pairs}
        return {}

    def _cut(self, agent: AgentId, mask: Any) -> Any:
        """Return a mask without entries beyond the agent's choices, if those are all zero."""
        size = count_choices(self.action_spaces[agent])
        if size is None or np.ndim(mask) != 1 or np.any(np.asarray(mask[size:]) != 0):
            return mask
        return mask[:size]

    def _allowed(self, agent: AgentId) -> NDArray[np.bool_] | None:
        return self.allowed(agent, self._seen[agent], self._infos.get(agent))

    def _check_finals(self, info: Any) -> None:
        """Check the last observations of an episode whose env has reset itself."""
        common = info if isinstance(info, Mapping) else {}
        shared = {
            key: dict(zip(self.agents, value, strict=True))
            for key, value in common.items()
            if isinstance(value, (list, tuple, np.ndarray)) and len(value) == len(self.agents)
        }
        for agent in self.agents:
            if agent in self.live:
                self.check_final(agent, self._infos.get(agent), {**common, **shared})

    def _entries(self, value: Any, what: str) -> Mapping[AgentId, Any] | None:
        """Return one entry per agent, or None if one value is for all. A dict may omit ended agents."""
        if isinstance(value, Mapping):
            known = set(self.agents)
            check_keys(set(value) - (known - self.live), self.live, self.place, what)
            return value
        if not isinstance(value, (list, tuple)) and not (isinstance(value, np.ndarray) and value.ndim):
            return None
        if self.lenient and len(value) == 1 < len(self.agents) and only_element(value) is not None:
            return None
        if len(value) != len(self.agents):
            change = f"return one for each agent as {what}"
            if what == "rewards":
                change = (
                    "return one number for the team, or one for each agent; if it is one for each objective, make it "
                    "one: mo_gymnasium.wrappers.LinearReward(env, weight=…)"
                )
            self.place.fault("results", what, self._one_each(), str(len(value)), change, kind=what)
        return dict(zip(self.agents, value, strict=True))

    def _one_each(self) -> str:
        return f"one for each agent, {len(self.agents)} in all"

"""Checks envs whose ``reset`` and ``step`` return dicts by agent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from marlvec.envs.adapters.return_values import AgentId
from marlvec.testing.env_checks.players.base import RawPlayer
from marlvec.testing.env_checks.values import check_table

__all__ = ["ByAgentPlayer"]


class ByAgentPlayer(RawPlayer):
    """Plays an env that takes actions by agent, and returns dicts by agent; keeps the last observations and infos."""

    tables: ClassVar[tuple[str, str, str, str]]  # the env's names of observations, rewards and both flags
    seen: Mapping[Any, Any] = {}
    infos: Mapping[Any, Any] = {}

    def take_reset(self, seed: int | None, options: dict[str, Any] | None) -> None:
        """Reset the env and check that it returns dicts."""
        obs, infos = self.split_reset(self.ask_reset(seed, options))
        self.seen, self.infos = check_table(obs, self.place, "observations"), self.check_infos(infos)

    def take_step(self, acting: Iterable[AgentId], rng: np.random.Generator) -> dict[str, Mapping[Any, Any]]:
        """Step the env with random actions of these agents; return its dicts by name, without the infos."""
        masks = {agent: self.allowed(agent, self.seen.get(agent), self.infos.get(agent)) for agent in acting}
        actions = {agent: self.draw(agent, mask, rng) for agent, mask in masks.items()}
        result = self.check_step(self.ask(self.env.step, actions, given="actions"))
        if len(result) == 4:
            obs, rewards, dones, infos = result
            result = obs, rewards, dones, dict.fromkeys(check_table(dones, self.place, "dones"), False), infos
        *parts, infos = result
        tables = {what: check_table(part, self.place, what) for what, part in zip(self.tables, parts, strict=True)}
        self.infos, self.seen = self.check_infos(infos), tables["observations"]
        return tables

    def observe_seen(self) -> None:
        """Check and note all observations of the last call."""
        for agent in self.agents:
            if agent in self.seen:
                self.observe(agent, self.seen[agent])

    def take(self, agent: AgentId, tables: Mapping[str, Mapping[Any, Any]]) -> bool:
        """Check the results of a step for one agent; return whether it has ended."""
        obs, rewards, *flags = (tables[what] for what in self.tables)
        if agent in obs:
            self.observe(agent, obs[agent])
        if agent in rewards:
            self.note_reward(agent, rewards[agent])
        return self.ends(agent, *(table.get(agent, False) for table in flags))

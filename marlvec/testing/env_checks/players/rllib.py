"""Checks RLlib-style dict envs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from marlvec.envs.adapters.base import Adapter
from marlvec.envs.adapters.return_values import AgentId
from marlvec.envs.adapters.rllib import ALL
from marlvec.testing.env_checks.findings import Findings
from marlvec.testing.env_checks.players.by_agent import ByAgentPlayer
from marlvec.testing.env_checks.values import check_agents

__all__ = ["KeyedPlayer"]


class KeyedPlayer(ByAgentPlayer):
    """Plays an RLlib-style env: each agent in the observations acts next."""

    tables = ("observations", "rewards", "terminateds", "truncateds")

    def __init__(self, adapter: Adapter, max_steps: int, findings: Findings) -> None:
        super().__init__(adapter, max_steps, findings)
        self._acting: list[AgentId] = []

    def space_call(self, kind: str, agent: AgentId) -> str:
        return f"{kind}_space of agent {agent!r}"

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self.take_reset(seed, options)
        self._acting = check_agents(list(self.seen), self.agents, self.place, "observations")
        if not self.seen:
            self.place.fault("agents", "observations", "at least one agent's", "none", "observe who is to act first")
        self.live = set(self.seen)
        self.observe_seen()

    def step(self, rng: np.random.Generator) -> None:
        tables = self.take_step(self._acting, rng)
        over = self._all_flags(tables)
        for what, table in tables.items():
            known = [*self.agents, ALL] if what in self.tables[2:] else self.agents
            with self.place.logging():
                check_agents(list(table), known, self.place, what)
        if self.resets_itself and (over or self._all_end(tables)):
            self._take_all(tables, {})
            for agent in [agent for agent in self.agents if agent in self.live]:
                self.check_final(agent, self.infos.get(agent), self.infos)
            self.observe_seen()
            self.over = True
            return
        born = (set(self.seen) & set(self.agents)) - self.live - self.gone
        ended = self._take_all(tables, self.seen)
        self.gone |= ended
        self.live = (self.live | born) - ended
        self._acting = [agent for agent in self.seen if agent in self.live]
        self.over = over or len(self.gone) == len(self.agents)

    def _all_end(self, tables: Mapping[str, Mapping[Any, Any]]) -> bool:
        """Return whether every possible agent has ended by its own flags."""
        flags = [tables[what] for what in self.tables[2:]]
        return all(agent in self.gone or any(table.get(agent, False) for table in flags) for agent in self.agents)

    def _take_all(self, tables: Mapping[str, Mapping[Any, Any]], seen: Mapping[Any, Any]) -> set[AgentId]:
        """Check the results of a step with these observations; return the agents that ended by their own flags."""
        ended = set()
        for agent in self.agents:
            flags = [tables[what].get(agent, False) for what in self.tables[2:]]
            if agent in self.gone:
                # These envs often keep flags set, which is allowed; sending data is not.
                if agent in seen or tables["rewards"].get(agent, 0) != 0:
                    got = "an observation or a reward"
                    self.place.report("life", f"agent {agent!r}", "no data, for it has ended", got)
                continue
            if agent not in self.live | set(seen):
                if agent in tables["rewards"] or any(flags):
                    change = "give an agent's first observation before, or with, its first reward"
                    expected = "nothing before its first observation"
                    self.place.report("life", f"agent {agent!r}", expected, "a reward or flag", change)
                continue
            if self.take(agent, {**tables, "observations": seen}):
                ended.add(agent)
        return ended

    def _all_flags(self, tables: Mapping[str, Mapping[Any, Any]]) -> bool:
        if ALL not in tables["terminateds"]:
            change = f"set terminateds[{ALL!r}] in every step"
            got = f"{sorted(map(str, tables['terminateds']))}"
            self.place.report("keys", "terminateds", f"a flag of {ALL!r}", got, change)
            self.log.doubtful = True  # the end of the episode is unknown
        flags = [self.read_flag(tables[what].get(ALL, False), ALL, what[:-1]) for what in self.tables[2:]]
        self.note(f"flags of {ALL!r}", flags)
        return any(flags)

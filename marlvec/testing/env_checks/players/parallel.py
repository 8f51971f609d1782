"""Checks PettingZoo Parallel envs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from marlvec.envs.adapters.return_values import AgentId
from marlvec.testing.env_checks.players.by_agent import ByAgentPlayer
from marlvec.testing.env_checks.values import check_agents, check_keys

__all__ = ["ParallelPlayer"]


class ParallelPlayer(ByAgentPlayer):
    """Plays a PettingZoo Parallel env: each agent in ``env.agents`` acts in every step."""

    tables = ("observations", "rewards", "terminations", "truncations")

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self.take_reset(seed, options)
        self.live = set(self._listed())
        if not self.live:
            change = "set self.agents = self.possible_agents[:] in reset()"
            self.place.fault("agents", "env.agents", "at least one agent", "none", change)
        with self.place.logging():
            check_keys(self.seen, self.live, self.place, "observations")
        self.observe_seen()

    def step(self, rng: np.random.Generator) -> None:
        tables = self.take_step([agent for agent in self.agents if agent in self.live], rng)
        now = self._listed()
        for what, table in tables.items():
            with self.place.logging():
                check_agents(list(table), self.agents, self.place, what)
        if self.resets_itself and self._all_end(tables):
            return
        known = set(self.agents)
        silent = self.live - set(now) if self.lenient else set()  # they may have data or not
        born = ((set(now) | set(self.seen)) & known) - self.live - self.gone
        for what, table in tables.items():
            for agent in self.gone:
                if agent in table:
                    self.place.report("life", what, f"nothing of agent {agent!r}, which has ended", "data")
            # New agents have been observed; a reward at once is optional.
            expected = self.live | born if table is self.seen else self.live | (born & set(table))
            with self.place.logging():
                check_keys((set(table) & known) - self.gone - silent, expected - silent, self.place, what)
        ended = {agent for agent in sorted(self.live | born, key=str) if self.take(agent, tables)} | silent
        with self.place.logging():
            self._check_listed(now, born, ended)
        self.gone |= ended
        self.live = (self.live | born) - ended
        self.over = not self.live

    def _all_end(self, tables: Mapping[str, Mapping[Any, Any]]) -> bool:
        """Return whether this step ended the episode of an env that resets itself; if so, check it."""
        others = [tables[what] for what in self.tables[1:]]
        if any(agent not in table for agent in self.live for table in others):
            return False  # the caller reports what is missing
        live = [agent for agent in self.agents if agent in self.live]
        ends = [self.ends(agent, others[1][agent], others[2][agent]) for agent in live]
        if not all(ends):
            return False
        for agent in live:
            self.note_reward(agent, others[0][agent])
            self.check_final(agent, self.infos.get(agent), self.infos)
        self.observe_seen()
        self.over = True
        return True

    def _check_listed(self, now: list[AgentId], born: set[AgentId], ended: set[AgentId]) -> None:
        for agent in now:
            if agent in self.gone:
                self.place.fault("life", "env.agents", f"no agent {agent!r}, which has ended", "it again")
            if agent in ended:
                expected = f"agent {agent!r}, which has ended, to leave it"
                change = (
                    "leave those that have ended out of env.agents: self.agents = [agent for agent in self.agents if "
                    "not (terminations[agent] or truncations[agent])]"
                )
                self.place.fault("life", "env.agents", expected, "it still there", change)
        for agent in sorted((self.live | born) - ended - set(now), key=str):
            self.place.fault("life", "env.agents", f"agent {agent!r}, whose flags are False", "it has left")

    def _listed(self) -> list[AgentId]:
        agents = check_agents(getattr(self.env, "agents", None), self.agents, self.place, "env.agents")
        self.note("env.agents", agents)
        return agents

"""Checks envs whose ``reset`` and ``step`` return dicts by agent: PettingZoo Parallel and RLlib-style envs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from marlvec.envs.adapters.base import Adapter
from marlvec.envs.adapters.return_values import AgentId
from marlvec.envs.adapters.rllib import ALL
from marlvec.testing.env_checks.findings import Findings
from marlvec.testing.env_checks.players.base import RawPlayer
from marlvec.testing.env_checks.values import check_agents, check_keys, check_table

__all__ = ["ByAgentPlayer", "ParallelPlayer", "KeyedPlayer"]


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

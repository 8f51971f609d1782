"""Checking PettingZoo AEC envs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from marlvec.envs.adapters.return_values import AgentId
from marlvec.testing.env_checks.constant_spaces import ZooSpaces
from marlvec.testing.env_checks.player import Player
from marlvec.testing.env_checks.report import short
from marlvec.testing.env_checks.values import check_agents, check_reward, check_table

__all__ = ["TurnPlayer"]


class TurnPlayer(Player):
    """Plays a turn-based env as a loop over ``agent_iter()`` and ``last()`` does; a step of the dead counts, too.

    Args:
        env: The env.
        name: What to call it.
        max_steps: Within how many steps an episode must end.
    """

    def __init__(self, env: Any, name: str, max_steps: int) -> None:
        agents = list(env.possible_agents)
        super().__init__(env, name, agents, ZooSpaces(env, agents), max_steps)
        self._flagged: set[AgentId] = set()
        self._selected: set[AgentId] = set()  # in this game: only they need be able to observe

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> None:
        """Begin a game."""
        self.ask_reset(seed, options)
        self.live, self._flagged, self._selected = set(), set(), set()
        self.live = set(self._look())
        if not self.live:
            self.place.broken("env.agents", "at least one agent", "none")
        for agent in self._flagged:
            self.place.broken(f"flags of agent {agent!r}", "False before the first move", "True")

    def step(self, rng: np.random.Generator) -> None:
        """Let the selected agent move, or take its dead step."""
        env, agent = self.env, self.env.agent_selection
        if agent in self._flagged:
            before = dict(env.rewards)
            self.ask(env.step, None)
            if agent in env.agents:
                self.place.broken("env.agents", f"the dead agent {agent!r} to leave it in step(None)", "it still there")
            self._check_cleared(before, agent)
        else:
            obs, *_, info = self.ask(env.last)
            action = self.draw(agent, self.allowed(agent, obs, info), rng)
            self.ask(env.step, action, given=f"action of agent {agent!r}")
        now = self._look()
        for left in sorted(self.live - set(now), key=str):
            if left not in self._flagged:
                self.place.broken("env.agents", f"agent {left!r}, whose flags are False", "it has left")
            self.gone.add(left)
        self.live = set(now)
        self.over = not now

    def _look(self) -> list[AgentId]:
        """Check all that the env shows between two moves."""
        env, place = self.env, self.place
        now = check_agents(env.agents, self.agents, place, "env.agents")
        self.note("env.agents", now)
        for agent in now:
            if agent in self.gone:
                place.broken("env.agents", f"no agent {agent!r}, which has ended", "it again")
        tables = {what: self._table(what, now) for what in ("rewards", "terminations", "truncations")}
        infos = self.check_infos(env.infos)
        self._selected.update(agent for agent in now if agent == env.agent_selection)
        for agent in sorted(tables["rewards"], key=str):
            self.pay(agent, tables["rewards"][agent])
            if agent in self.gone and tables["rewards"][agent] != 0:
                place.broken(f"reward of agent {agent!r}", "none, for it has ended", str(tables["rewards"][agent]))
        for agent in now:
            ended = self.ends(agent, tables["terminations"][agent], tables["truncations"][agent])
            if agent in self._flagged and not ended:
                place.broken(f"flags of agent {agent!r}", "True until it leaves", "False again")
            if ended:
                self._flagged.add(agent)
            if agent not in infos:
                place.broken("infos", f"one of agent {agent!r}", "none")
            if agent in self._selected:
                self.observe(agent, self.ask(env.observe, agent))
        if now:
            self._check_turn(now)
        return now

    def _check_cleared(self, before: Mapping[Any, Any], dead: AgentId) -> None:
        """Refuse rewards that a dead step left standing: what was paid once would be paid again."""
        for agent, value in check_table(self.env.rewards, self.place, "rewards").items():
            check_reward(value, self.place, agent)
            if value != 0 and agent in before and before[agent] == value:
                self.place.broken(
                    f"reward of agent {agent!r}",
                    f"0 after step(None) of the dead agent {dead!r}",
                    f"{short(value)} again, which would be paid twice. Clear env.rewards in step(None), "
                    f"as AECEnv._was_dead_step() does",
                )

    def _check_turn(self, now: list[AgentId]) -> None:
        env, selected = self.env, self.env.agent_selection
        if selected not in now:
            self.place.broken("agent_selection", f"one of env.agents {now}", repr(selected))
        self.note("agent_selection", selected)
        told = self.ask(env.last)
        if not isinstance(told, tuple) or len(told) != 5:
            self.place.broken("last()", "a tuple of 5", type(told).__name__)
        flags = self.ends(selected, told[2], told[3])
        if flags is not (selected in self._flagged):
            self.place.broken(
                f"last() of agent {selected!r}", "the flags in env.terminations and env.truncations", "others"
            )

    def _table(self, what: str, now: list[AgentId]) -> Mapping[Any, Any]:
        table = check_table(getattr(self.env, what), self.place, what)
        check_agents(list(table), self.agents, self.place, what)
        for agent in now:
            if agent not in table:
                self.place.broken(what, f"one of agent {agent!r}", "none")
        return table

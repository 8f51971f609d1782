"""Scripted PettingZoo AEC envs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pettingzoo import AECEnv

from marlvec.testing.scripted.script import ScriptLike
from marlvec.testing.scripted.scripted_state import ScriptedState, ZooShell

__all__ = ["TurnEnv"]


class TurnEnv(ZooShell, AECEnv):  # type: ignore[misc]  # pettingzoo has no type information
    """A turn-based PettingZoo env driven by a script. Each move rewards every agent in the game, waiting ones too.

    Step ``t`` of the script is the ``t``-th move of the game, whichever agent makes it.

    Args:
        script: The episodes; None draws one per episode from the env's random stream.
        agent_num: Number of agents.
        order: Places on the agent axis in turn order, repeated; None for 0, 1, 2, …. Agents not in the game are
            skipped.
        dead_first: Whether an agent that ends takes its dead step at once, or at its turn.
        state: Whether the env has a global state.
        options: See `ScriptedState`.

    Raises:
        ValueError: In ``step``: the action is not allowed.
    """

    def __init__(
        self,
        script: ScriptLike | None = None,
        *,
        agent_num: int = 2,
        order: Sequence[int] | None = None,
        dead_first: bool = True,
        state: bool = False,
        env_index: int = 0,
        render_mode: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.world = ScriptedState(agent_num, script, env_index=env_index, **options)
        self.metadata = {"name": "turns", "render_modes": [], "is_parallelizable": False}
        self.possible_agents = [f"player_{a}" for a in range(agent_num)]
        self.render_mode = render_mode
        if state:
            self.state_space = self.world.state_space
        self._order = list(range(agent_num)) if order is None else list(order)
        if set(self._order) != set(range(agent_num)):
            raise ValueError(f"order must name every one of {agent_num} agents, got {self._order}")
        self._turn = 0
        self._dead_first = dead_first

    def observe(self, agent: str) -> Any:
        return self.world.observe_masked(self._place(agent), acting=agent == self.agent_selection)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        self.world.reset(seed)
        self.agents: list[str] = []
        self.rewards: dict[str, float] = {}
        self._cumulative_rewards: dict[str, float] = {}
        self.terminations: dict[str, bool] = {}
        self.truncations: dict[str, bool] = {}
        self.infos: dict[str, dict[str, Any]] = {}
        self._skip_agent_selection = None
        self._add_agents()
        self._set_infos()
        self._turn = -1
        self._pass_on()

    def step(self, action: Any) -> None:
        """Let the selected agent move, or take its dead step."""
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            if self.agents and self.agent_selection not in self.agents:
                self._pass_on()
            return
        world, script = self.world, self.world.script
        self._cumulative_rewards[agent] = 0.0
        world.act({self._place(agent): action})
        self._add_agents()
        ended, cut = script.terminated(world.t), script.truncated(world.t)
        for other in self.agents:
            a = self._place(other)
            self.rewards[other] = world.reward(a, action)
            self.terminations[other] = self.terminations[other] or ended[a]
            self.truncations[other] = self.truncations[other] or cut[a]
        self._set_infos()
        self._accumulate_rewards()
        self._pass_on()
        if self._dead_first:
            self._deads_step_first()

    def _add_agents(self) -> None:
        for a, agent in enumerate(self.possible_agents):
            if self.world.script.births[a] == self.world.t:
                self.agents.append(agent)
                self.rewards[agent] = self._cumulative_rewards[agent] = 0.0
                self.terminations[agent] = self.truncations[agent] = False

    def _set_infos(self) -> None:
        self.infos = {agent: self.world.info(self._place(agent)) for agent in self.agents}

    def _pass_on(self) -> None:
        """Give the turn to the next agent in order, dead ones included: they have a step to take."""
        for _ in self._order:
            self._turn = (self._turn + 1) % len(self._order)
            agent = self.possible_agents[self._order[self._turn]]
            if agent in self.agents:
                self.agent_selection = agent
                return

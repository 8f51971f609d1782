"""Scripted envs of the other APIs: PettingZoo AEC, Gymnasium, and RLlib-style dicts (without RLlib)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
from pettingzoo import AECEnv

from marlvec.testing.scripted.script import End, Script, ScriptLike
from marlvec.testing.scripted.scripted_state import AgentStep, ScriptedState, Shell, ZooShell, old_flags

__all__ = ["TurnEnv", "SingleEnv", "KeyedEnv"]


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


class SingleEnv(gymnasium.Env[Any, Any]):
    """A Gymnasium env whose data name their origin.

    Args:
        length: Steps of an episode, or a list of lengths, repeated.
        end: How episodes end.
        info_every: Steps between infos; 0 gives none.
        old_api: Whether ``reset`` returns the observation alone and ``step`` four values, as before 2022.
        options: See `ScriptedState`.

    Raises:
        ValueError: In ``step``: the action is not allowed.
    """

    def __init__(
        self,
        length: int | list[int] = 5,
        *,
        end: End = "terminated",
        info_every: int = 0,
        old_api: bool = False,
        env_index: int = 0,
        **options: Any,
    ) -> None:
        lengths = [length] if isinstance(length, int) else length
        self.world = ScriptedState(1, [Script.together(1, n, end) for n in lengths], env_index=env_index, **options)
        self.metadata = {"name": "single", "render_modes": []}
        self.observation_space = self.world.observation_space
        self.action_space = self.world.action_space
        self.closed = False
        self._info_every, self._old_api = info_every, old_api

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.world.reset(seed)
        obs = self.world.observe_masked(0)
        return obs if self._old_api else (obs, self._info())

    def step(self, action: Any) -> Any:
        world = self.world
        world.act({0: action})
        (ended,), (cut,) = world.script.terminated(world.t), world.script.truncated(world.t)
        obs, reward, info = world.observe_masked(0), world.reward(0, action), self._info()
        if not self._old_api:
            return obs, reward, ended, cut, info
        dones, infos = old_flags({0: ended}, {0: cut}, {0: info})
        return obs, reward, dones[0], infos[0]

    def close(self) -> None:
        """Record that the env was closed."""
        self.closed = True

    def _info(self) -> dict[str, Any]:
        return {"t": self.world.t} if self._info_every and self.world.t % self._info_every == 0 else {}


class KeyedEnv(Shell):
    """An RLlib-style dict env driven by a script: observed agents act, the others wait.

    Args:
        script: The episodes; None draws one per episode from the env's random stream.
        agent_num: Number of agents.
        waits: Function of (t, a): whether live agent ``a`` is left out of the observations of step ``t``; it still gets
            its reward. None: no agent waits.
        int_ids: Whether agents are named 0, 1, 2, … instead of by strings.
        last_obs: Whether agents get a last observation when they end.
        old_api: Whether ``reset`` returns observations alone and ``step`` four dicts.
        options: See `ScriptedState`.

    Raises:
        ValueError: In ``step``: the actions are not those of the agents observed last, or one is not allowed.
    """

    _common_key = "__common__"

    def __init__(
        self,
        script: ScriptLike | None = None,
        *,
        agent_num: int = 3,
        waits: Callable[[int, int], bool] | None = None,
        int_ids: bool = False,
        last_obs: bool = True,
        old_api: bool = False,
        env_index: int = 0,
        **options: Any,
    ) -> None:
        self.world = ScriptedState(agent_num, script, env_index=env_index, **options)
        self.possible_agents: list[Any] = [a if int_ids else f"agent_{a}" for a in range(agent_num)]
        self.observation_spaces = dict.fromkeys(self.possible_agents, self.world.observation_space)
        self.action_spaces = dict.fromkeys(self.possible_agents, self.world.action_space)
        self._waits, self._last_obs, self._old_api = waits, last_obs, old_api
        self._acting: list[Any] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin the next episode; all agents present at the reset are observed."""
        obs = self._begin(seed)
        self._acting = list(obs)
        return obs if self._old_api else (obs, self._infos(list(obs)))

    def step(self, actions: dict[Any, Any]) -> Any:
        """Take one step."""
        here = self._advance(actions, self._acting)
        obs = {agent: self.world.observe_masked(step.place) for agent, step in here.items() if self._is_observed(step)}
        self._acting = [agent for agent in obs if here[agent].alive]
        rewards = {agent: step.reward for agent, step in here.items()}
        over = not any(step.alive for step in here.values())
        terminateds = {agent: step.terminated for agent, step in here.items()} | {"__all__": over}
        truncateds = {agent: step.truncated for agent, step in here.items()} | {"__all__": False}
        infos = self._infos(list(obs))
        if self._old_api:
            return obs, rewards, *old_flags(terminateds, truncateds, infos)
        return obs, rewards, terminateds, truncateds, infos

    def _is_observed(self, step: AgentStep) -> bool:
        if step.joins:
            return True
        if not step.alive:
            return self._last_obs
        return self._waits is None or not self._waits(self.world.t, step.place)

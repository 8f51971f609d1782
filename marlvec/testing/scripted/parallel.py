"""Scripted PettingZoo Parallel envs, and a constant one."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete, Space
from pettingzoo import ParallelEnv

from marlvec.testing.scripted.script import End, Script, ScriptLike
from marlvec.testing.scripted.scripted_state import ScriptedState, ZooShell, old_flags

__all__ = ["CounterEnv", "ScriptedParallelEnv", "NoOpEnv"]


class ScriptedParallelEnv(ZooShell, ParallelEnv):  # type: ignore[misc]  # pettingzoo has no type information
    """A PettingZoo Parallel env driven by a script, whose data name their origin.

    Read observations with `decode`, `checksum` and `draw`, rewards with `decode_reward`.

    Args:
        script: The episodes; None draws one per episode from the env's random stream.
        agent_num: Number of agents.
        state: Whether the env has a global state.
        old_api: Whether ``reset`` returns observations alone and ``step`` four dicts, as before 2022.
        options: See `ScriptedState`.

    Raises:
        ValueError: In ``step``: the actions are not those of the live agents, or one is not allowed.
    """

    def __init__(
        self,
        script: ScriptLike | None = None,
        *,
        agent_num: int = 3,
        state: bool = False,
        old_api: bool = False,
        env_index: int = 0,
        render_mode: str | None = None,
        **options: Any,
    ) -> None:
        self.world = ScriptedState(agent_num, script, env_index=env_index, **options)
        self.metadata = {"name": "scripted_parallel", "render_modes": [], "is_parallelizable": True}
        self.possible_agents = [f"agent_{a}" for a in range(agent_num)]
        self.agents: list[str] = []
        self.render_mode = render_mode
        if state:
            self.state_space = self.world.state_space
        self._old_api = old_api

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin the next episode."""
        obs = self._begin(seed)
        self.agents = list(obs)
        infos = self._infos(self.agents)
        return obs if self._old_api else (obs, infos)

    def step(self, actions: dict[str, Any]) -> Any:
        """Take one step; exactly the live agents must act."""
        here = self._advance(actions, self.agents)
        obs = {agent: self.world.observe_masked(step.place) for agent, step in here.items()}
        rewards = {agent: step.reward for agent, step in here.items()}
        terminations = {agent: step.terminated for agent, step in here.items()}
        truncations = {agent: step.truncated for agent, step in here.items()}
        infos = self._infos(list(here))
        self.agents = [agent for agent, step in here.items() if step.alive]
        if self._old_api:
            return obs, rewards, *old_flags(terminations, truncations, infos)
        return obs, rewards, terminations, truncations, infos


class CounterEnv(ScriptedParallelEnv):
    """The simplest scripted env: all agents live from the reset to the last step.

    Args:
        length: Steps of an episode, or a list of lengths, repeated.
        agent_num: Number of agents.
        end: How episodes end.
        options: See `ScriptedParallelEnv`.
    """

    def __init__(
        self,
        length: int | list[int] = 5,
        *,
        agent_num: int = 3,
        end: End = "truncated",
        env_index: int = 0,
        **options: Any,
    ) -> None:
        lengths = [length] if isinstance(length, int) else length
        script = [Script.together(agent_num, n, end) for n in lengths]
        super().__init__(script, agent_num=agent_num, env_index=env_index, **options)


class NoOpEnv:
    """A PettingZoo Parallel env that returns the same five dicts in every step.

    Args:
        agent_num: Number of agents.
        width: Size of one agent's observation, float32.
        length: Steps of an episode, which ends by truncation; None: no end.
    """

    def __init__(self, agent_num: int = 3, width: int = 18, length: int | None = None) -> None:
        names = [f"agent_{a}" for a in range(agent_num)]
        self.metadata: dict[str, Any] = {"name": "noop"}
        self.possible_agents = names
        self.agents = names[:]
        self._spaces = Box(-1.0, 1.0, (width,), np.float32), Discrete(5)
        obs = {name: np.full(width, a / agent_num, np.float32) for a, name in enumerate(names)}
        rewards = dict.fromkeys(names, 0.0)
        no, yes = dict.fromkeys(names, False), dict.fromkeys(names, True)
        infos: dict[str, dict[str, Any]] = {name: {} for name in names}
        self._first = obs, infos
        self._step = obs, rewards, no, no, infos
        self._last = obs, rewards, no, yes, infos
        self._length = self._left = -1 if length is None else length

    def observation_space(self, agent: str) -> Space[Any]:
        """Space of every agent's observations."""
        return self._spaces[0]

    def action_space(self, agent: str) -> Space[Any]:
        """Space of every agent's actions."""
        return self._spaces[1]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin an episode."""
        self._left = self._length
        self.agents = self.possible_agents[:]
        return self._first

    def step(self, actions: dict[str, Any]) -> Any:
        """Do nothing."""
        self._left -= 1
        if self._left == 0:
            self.agents = []
            return self._last
        return self._step

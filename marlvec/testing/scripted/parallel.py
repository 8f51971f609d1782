"""Scripted PettingZoo Parallel envs, a constant one, and one with any spaces."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete, Space
from pettingzoo import ParallelEnv

from marlvec.testing.scripted.script import End, Script, ScriptLike
from marlvec.testing.scripted.scripted_state import ScriptedState, ZooShell, old_flags
from marlvec.testing.scripted.stamp import ALIVE_CHECKSUM, next_checksum

__all__ = ["CounterEnv", "ScriptedParallelEnv", "NoOpEnv", "SampledEnv"]


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


class SampledEnv(ParallelEnv):  # type: ignore[misc]  # pettingzoo has no type information
    """A PettingZoo Parallel env with any spaces.

    Observations are samples of the observation space, from the env's random stream. Every action is checked against the
    action space, and an agent's reward is the running checksum of its actions, so that changed or misrouted actions
    show.

    Args:
        observation_space: A space for all agents, or a list with one per agent.
        action_space: As ``observation_space``.
        agent_num: Number of agents.
        length: Steps of an episode, which ends by truncation.

    Raises:
        ValueError: In ``step``: the action is not in the action space.
    """

    def __init__(
        self,
        observation_space: Space[Any] | Sequence[Space[Any]],
        action_space: Space[Any] | Sequence[Space[Any]],
        *,
        agent_num: int = 2,
        length: int = 5,
        env_index: int = 0,
    ) -> None:
        self.metadata = {"name": "sampled", "render_modes": []}
        self.possible_agents = [f"agent_{a}" for a in range(agent_num)]
        self.agents: list[str] = []
        self.render_mode = None
        self.closed = False
        self._observation_spaces = self._by_agent(observation_space)
        self._action_spaces = self._by_agent(action_space)
        # Copies to sample: callers may sample the public spaces, which advances their streams.
        self._sources = {agent: deepcopy(space) for agent, space in self._observation_spaces.items()}
        self._length, self._t = length, 0
        self._checksums: dict[str, int] = {}
        self._seed(env_index)

    def observation_space(self, agent: str) -> Space[Any]:
        return self._observation_spaces[agent]

    def action_space(self, agent: str) -> Space[Any]:
        return self._action_spaces[agent]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if seed is not None:
            self._seed(seed)
        self._t = 0
        self.agents = self.possible_agents[:]
        self._checksums = dict.fromkeys(self.agents, ALIVE_CHECKSUM)
        return self._sample(), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        """Check the actions and draw the next observations."""
        if actions.keys() != set(self.agents):
            raise ValueError(f"expected actions of {self.agents}, got {list(actions)}")
        for agent, action in actions.items():
            if not self._action_spaces[agent].contains(action):
                raise ValueError(f"action {action!r} of {agent} is not in {self._action_spaces[agent]}")
            self._checksums[agent] = next_checksum(self._checksums[agent], action)
        self._t += 1
        obs = self._sample()
        rewards = {agent: float(number) for agent, number in self._checksums.items()}
        over = self._t >= self._length
        truncations = dict.fromkeys(self.agents, over)
        infos: dict[str, dict[str, Any]] = {agent: {} for agent in self.agents}
        self.agents = [] if over else self.agents
        return obs, rewards, dict.fromkeys(self.possible_agents, False), truncations, infos

    def render(self) -> None:
        pass

    def close(self) -> None:
        """Record that the env was closed."""
        self.closed = True

    def _by_agent(self, spaces: Space[Any] | Sequence[Space[Any]]) -> dict[str, Space[Any]]:
        if isinstance(spaces, Space):
            return dict.fromkeys(self.possible_agents, spaces)
        return dict(zip(self.possible_agents, spaces, strict=True))

    def _seed(self, seed: int) -> None:
        for a, source in enumerate(self._sources.values()):
            source.seed(seed + a)

    def _sample(self) -> dict[str, Any]:
        return {agent: source.sample() for agent, source in self._sources.items()}

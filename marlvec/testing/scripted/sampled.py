"""An env with any spaces that checks every action and draws every observation."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from gymnasium.spaces import Space
from pettingzoo import ParallelEnv

from marlvec.testing.scripted.stamp import ALIVE_CHECKSUM, next_checksum

__all__ = ["SampledEnv"]


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
        """Begin an episode."""
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
        """Show nothing."""

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

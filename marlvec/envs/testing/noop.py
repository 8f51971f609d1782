"""An env that does nothing, for benchmarks: whatever time a step takes is not its own."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete, Space

__all__ = ["NoOpEnv"]


class NoOpEnv:
    """A PettingZoo Parallel env that returns the same five dicts in every step, made beforehand.

    Args:
        agent_num: Number of agents.
        width: Numbers in one agent's observation, float32.
        length: Steps of an episode, which ends by truncation; None: it never ends.
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

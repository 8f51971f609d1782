"""`Forgetful`: an env whose agents get an action mask with their infos, now and then."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete
from pettingzoo import ParallelEnv

__all__ = ["Forgetful"]


class Forgetful(ParallelEnv):  # type: ignore[misc]  # pettingzoo has no type information
    """Two agents; ``gives(t, a)`` says whether agent ``a`` has a mask, which allows action ``t % 3`` alone."""

    metadata = {"name": "forgetful", "render_modes": []}

    def __init__(self, gives: Any, length: int = 4, action_space: Any = None) -> None:
        self.possible_agents = ["ann", "bob"]
        self.gives, self.length = gives, length
        self.space = Discrete(3) if action_space is None else action_space

    def observation_space(self, agent: str) -> Any:
        return Box(0, 9, (1,))

    def action_space(self, agent: str) -> Any:
        return self.space

    def _told(self) -> tuple[dict[str, Any], dict[str, Any]]:
        obs = {agent: np.full(1, self.t, np.float32) for agent in self.possible_agents}
        return obs, {
            agent: {"action_mask": np.arange(3) == self.t % 3}
            for a, agent in enumerate(self.possible_agents)
            if self.gives(self.t, a)
        }

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.t, self.agents = 0, self.possible_agents[:]
        return self._told()

    def step(self, actions: dict[str, Any]) -> Any:
        self.t += 1
        over = dict.fromkeys(self.agents, self.t == self.length)
        obs, infos = self._told()
        rewards, never = dict.fromkeys(self.agents, 0.0), dict.fromkeys(self.agents, False)
        self.agents = [] if self.t == self.length else self.agents
        return obs, rewards, never, over, infos

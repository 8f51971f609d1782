"""`Forgetful`: an env whose agents get an action mask with their infos, now and then."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete

from tests.vector.support.drivers import LivesEnv


class Forgetful(LivesEnv):
    """Two agents; ``gives(t, a)`` says whether agent ``a`` has a mask, which allows action ``t % 3`` alone."""

    metadata = {"name": "forgetful", "render_modes": []}

    def __init__(self, gives: Any, length: int = 4, action_space: Any = None) -> None:
        lives = dict.fromkeys(["ann", "bob"], (0, length))
        space = Discrete(3) if action_space is None else action_space
        super().__init__(lives, Box(0, 9, (1,)), space, "truncated")
        self.gives = gives

    def look(self, agents: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        obs = {agent: np.full(1, self.t, np.float32) for agent in agents}
        given = [agent for a, agent in enumerate(agents) if self.gives(self.t, a)]
        return obs, {agent: {"action_mask": np.arange(3) == self.t % 3} for agent in given}

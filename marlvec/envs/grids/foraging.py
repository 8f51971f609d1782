"""lbforaging's env, whose grid observations today's Gymnasium refuses as they stand."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Space
from lbforaging.foraging import environment

__all__ = ["ForagingEnv"]


class ForagingEnv(environment.ForagingEnv):  # type: ignore[misc]  # Any where lbforaging is not installed
    """lbforaging's ``ForagingEnv``; with ``grid_observation=True`` it can be built, too.

    lbforaging 2.0.0 says that the space of its three planes has the shape ``(3,)``, which Gymnasium refuses. Bounds,
    observations and everything else are lbforaging's own.
    """

    def _get_observation_space(self) -> Space[Any]:
        if not self._grid_observation:
            space: Space[Any] = super()._get_observation_space()
            return space
        levels = sorted(self.max_player_level)
        food = sum(levels[:3]) if self.max_food_level is None else max(self.max_food_level)
        tops = np.array([levels[-1] if self._observe_agent_levels else 1, food, 1], np.float32)
        side = 2 * self.sight + 1
        high = np.broadcast_to(tops[:, None, None], (3, side, side))
        return Box(np.zeros_like(high), high, dtype=np.float32)

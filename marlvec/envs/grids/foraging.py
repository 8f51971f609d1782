"""lbforaging's env, with frames, and with grid observations, which today's Gymnasium refuses as they stand."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Space
from lbforaging.foraging import environment


class ForagingEnv(environment.ForagingEnv):  # type: ignore[misc]  # Any where lbforaging is not installed
    """lbforaging's ``ForagingEnv``.

    With ``grid_observation=True`` it can be built, too: lbforaging 2.0.0 says that the space of its three planes has
    the shape ``(3,)``, which Gymnasium refuses. With ``render_mode="rgb_array"``, which lbforaging does not know,
    ``render()`` returns a frame. Bounds, observations and everything else are lbforaging's own.
    """

    metadata = {**environment.ForagingEnv.metadata, "render_modes": ["human", "rgb_array"]}

    def render(self, mode: str | None = None) -> Any:
        """Draw the env: ``"rgb_array"`` returns a frame, ``"human"`` opens a window; None: as ``render_mode`` says."""
        if self.viewer is not None:  # lbforaging wipes the window that was drawn in last, which may be another env's
            self.viewer.window.switch_to()
        return super().render(mode or self.render_mode or "human")

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

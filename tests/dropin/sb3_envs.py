"""Envs of test_sb3_vec_envs.py, beside it so that workers need not import Stable-Baselines3."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

__all__ = ["BOX", "CountEnv", "CustomEnv", "Outer", "wrapped"]

BOX = spaces.Box(np.zeros(2, np.float32), np.ones(2, np.float32))


class CustomEnv(gymnasium.Env[Any, Any]):
    """Draws its observations, and rewards with them; episodes of 80 steps."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}

    def __init__(self, space: Any = BOX, render_mode: str | None = "rgb_array") -> None:
        self.observation_space, self.action_space, self.render_mode = space, BOX, render_mode
        self.current_step = 0
        self.current_options: dict[str, Any] | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.current_step, self.current_options = 0, options
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        self.current_step += 1
        return self.observation_space.sample(), float(self.np_random.random()), False, self.current_step >= 80, {}

    def render(self) -> Any:
        return np.full((4, 4, 3), 7, np.uint8)

    def custom_method(self, dim_0: int = 1, dim_1: int = 1) -> Any:
        return np.ones((dim_0, dim_1))


class CountEnv(gymnasium.Env[Any, Any]):
    """Counts its steps, up to so many."""

    metadata = {"render_modes": []}
    observation_space = spaces.Box(np.array([0]), np.array([999]), dtype=np.int64)
    action_space = spaces.Discrete(2)

    def __init__(self, length: int) -> None:
        self.length, self.count = length, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return np.array([0]), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        return np.array([self.count]), 0.0, False, self.count >= self.length, {}


class Outer(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper that changes nothing."""


def wrapped() -> Any:
    return Outer(CustomEnv())

"""Gymnasium envs to look at through a view, and PettingZoo's own test functions."""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple

from marlvec.registry import resolve

# PettingZoo's checkers import envs through its old names on their way, which warns.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from pettingzoo.test import (  # noqa: F401  # for the tests of views
        api_test,
        max_cycles_test,
        parallel_api_test,
        parallel_seed_test,
        render_test,
        seed_test,
        state_test,
    )

IMAGE = Box(0, 255, (4, 6, 3), np.uint8)

SPACES: dict[str, Space[Any]] = {
    "box": Box(-1.0, 1.0, (2, 3), np.float32),
    "scalar box": Box(-1.0, 1.0, (), np.float64),
    "image": IMAGE,
    "discrete": Discrete(5),
    "discrete from 3": Discrete(4, start=3),
    "multi discrete": MultiDiscrete([2, 3, 4]),
    "multi binary": MultiBinary(3),
    "dict": Dict({"where": Box(0, 9, (2,), np.int64), "what": Discrete(3)}),
    "tuple": Tuple((Discrete(2), Box(-1.0, 1.0, (1,), np.float64))),
    "tree": Dict({"a": Tuple((MultiBinary(2), Discrete(2))), "b": Dict({"c": Box(0.0, 1.0, (2,), np.float32)})}),
}


def archers(max_cycles: int = 200) -> Any:
    """Knights and archers that die one by one."""
    return resolve("knights_archers_zombies")(spawn_delay=2, max_zombies=30, line_death=True, max_cycles=max_cycles)


class CountEnv(gymnasium.Env[Any, Any]):
    """Counts its steps; the observation is the count, the reward the action.

    Args:
        length: Steps of an episode.
        talks: Whether it says ``{"began": True}`` at a reset and ``{"action": …}`` in a step.
    """

    metadata = {"name": "count", "render_modes": ["rgb_array", "ansi"], "render_fps": 7}
    observation_space = Discrete(100)
    action_space = Discrete(5)

    def __init__(self, length: int = 3, *, talks: bool = False, render_mode: str | None = None) -> None:
        self.length, self.talks, self.render_mode = length, talks, render_mode
        self.heard: list[Any] = []
        self.count = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.heard.append((seed, options))
        self.count = 0
        return 0, {"began": True} if self.talks else {}

    def step(self, action: Any) -> Any:
        self.count += 1
        over = self.count >= self.length
        return self.count, float(action), over, False, {"action": action} if self.talks else {}

    def render(self) -> Any:
        return np.full((2, 4, 3), self.count, np.uint8) if self.render_mode == "rgb_array" else f"count {self.count}"


class SampleEnv(gymnasium.Env[Any, Any]):
    """Any spaces: it draws its observations from its own stream and gives infos of many kinds.

    Args:
        observation_space: Drawn from.
        action_space: Every action is checked against it.
        length: Steps of an episode; every other one is truncated.
    """

    metadata = {"name": "sample", "render_modes": []}

    def __init__(self, observation_space: Space[Any], action_space: Space[Any], length: int = 4) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        self._source = deepcopy(observation_space)
        self._length, self._t, self._episode = length, 0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._source.seed(int(self.np_random.integers(2**31)))
        self._t, self._episode = 0, self._episode + 1
        return self._source.sample(), {"episode_number": self._episode}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self._t += 1
        over, cut = self._t >= self._length, self._episode % 2 == 0
        info: dict[str, Any] = {"half": self._t / 2, "deep": {"t": self._t, "even": self._t % 2 == 0}}
        if self._t % 2:
            info |= {"word": f"t{self._t}", "marks": np.arange(3, dtype=np.int16) * self._t}
            info |= dict.fromkeys(("state", "alive", "acting", "reset_mask"), self._t)  # marlvec's words
        return self._source.sample(), float(self._t), over and not cut, over and cut, info

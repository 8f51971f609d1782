"""Action masks on their way into batches, also where the first one comes late."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

import marlvec

LENGTH = 4


class Late(gymnasium.Env[Any, Any]):
    """From some episode on its infos have a mask: an odd step allows odd actions, an even one even actions."""

    observation_space = Box(0, np.inf, (2,), np.float32)
    action_space = Discrete(6)

    def __init__(self, first_masked: int) -> None:
        self.first_masked, self.episode = first_masked, -1

    def told(self) -> tuple[Any, dict[str, Any]]:
        masked = self.episode >= self.first_masked
        info = {"action_mask": (np.arange(6) % 2 == self.t % 2).astype(np.int8)} if masked else {}
        return np.array([self.episode, self.t], np.float32), info

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self.told()

    def step(self, action: Any) -> Any:
        if self.episode >= self.first_masked:
            assert action % 2 == self.t % 2, "a masked action reached the env"
        self.t += 1
        obs, info = self.told()
        return obs, 1.0, False, self.t == LENGTH, info


@pytest.mark.parametrize(
    ("backend", "mode"),
    [
        ("sync", "same_step"),
        ("async", "same_step"),
        ("sync", "next_step"),
        ("sync", "disabled"),
    ],
)
def test_a_mask_that_comes_late_joins_the_batches(backend: str, mode: str) -> None:
    """One env gives masks from its third episode on, one never; what came before allowed everything."""
    with marlvec.make([partial(Late, 2), partial(Late, 99)], backend=backend, autoreset_mode=mode) as envs:
        collector = marlvec.Collector(envs, marlvec.RandomPolicy(), seed=0)
        batches = [collector.collect(env_steps=6)["main"] for _ in range(6)]
    assert "action_mask" not in batches[0]
    masked = 0
    for batch in batches:
        if "action_mask" not in batch:
            continue
        for i, (episode, t), mask in zip(batch.env_id, batch.obs, batch.action_mask, strict=True):
            if i == 0 and episode >= 2:
                np.testing.assert_array_equal(mask, np.arange(6) % 2 == t % 2)
                masked += 1
            else:
                assert mask.all()
    assert masked >= 8

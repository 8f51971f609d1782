"""Rewards of an agent that joins in the middle of an episode."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

import marlvec
from marlvec.connectors import ScaleReward


class LateJoiner:
    """A PettingZoo Parallel env: ``b`` joins after 2 steps with reward 5, then gets 7 a step; ``a`` gets 1 a step."""

    metadata: dict[str, Any] = {"name": "late_joiner"}  # as PettingZoo has it
    possible_agents = ("a", "b")

    def observation_space(self, agent: str) -> Box:
        return Box(0, 9, (1,), np.float32)

    def action_space(self, agent: str) -> Discrete:
        return Discrete(2)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.clock, self.agents = 0, ["a"]
        return self.obs(), {agent: {} for agent in self.agents}

    def obs(self) -> dict[str, Any]:
        return {agent: np.array([self.clock], np.float32) for agent in self.agents}

    def step(self, actions: dict[str, int]) -> Any:
        self.clock += 1
        rewards = {"a": 1.0}
        if self.clock >= 2:
            self.agents = ["a", "b"]
            rewards["b"] = 5.0 if self.clock == 2 else 7.0
        over = dict.fromkeys(self.agents, self.clock == 5)
        infos: dict[str, dict[str, Any]] = {agent: {} for agent in self.agents}
        result = self.obs(), rewards, over, dict.fromkeys(self.agents, False), infos
        if self.clock == 5:
            self.agents = []
        return result


@pytest.mark.parametrize("scale", [1, 10])
def test_reward_that_comes_with_the_first_observation_goes_to_the_first_decision(scale: int) -> None:
    with marlvec.make([LateJoiner], backend="sync") as envs:
        collector = marlvec.Collector(
            envs,
            marlvec.RandomPolicy(),
            agent_connectors=[ScaleReward(scale)],  # sees both at once, as one reward
            batch_mode="complete",
            seed=0,
        )
        rows = collector.collect(episodes=1)["main"]
    late = rows.take(rows.agent_index == 1)
    assert late.env_t.tolist() == [2, 3, 4]
    assert late.t.tolist() == [0, 1, 2]
    assert late.rewards.tolist() == [(5 + 7) * scale, 7 * scale, 7 * scale]
    assert rows.rewards[rows.agent_index == 0].tolist() == [scale] * 5
    assert rows.rewards.sum() == scale * collector.metrics.returns.mean == scale * (5 + 5 + 3 * 7)

"""Long runs need no more memory than short ones."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from pettingzoo import ParallelEnv

import marlvec
from marlvec.connectors import GeneralAdvantageEstimation
from marlvec.testing import NoOpEnv


def resident() -> float:
    """MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


@pytest.mark.slow("collects whole runs on several backends")
@pytest.mark.time_limit(600)
@pytest.mark.parametrize("batch_mode", ["truncate", "complete"])
def test_half_a_million_agent_rows_leave_memory_flat(batch_mode: str) -> None:
    with marlvec.make(NoOpEnv, num_envs=64, backend="sync", length=25) as envs:
        collector = marlvec.Collector(envs, marlvec.RandomPolicy(), seed=0, batch_mode=batch_mode)  # type: ignore[arg-type]
        while collector.metrics.agent_steps < 120_000:  # caches and tables have grown to what a batch needs
            collector.collect(env_steps=4096)
        before = resident()
        while collector.metrics.agent_steps < 500_000:
            collector.collect(env_steps=4096)
        assert resident() - before < 4.0
        assert collector.metrics.episodes_total > 6_000


class Pictures(ParallelEnv[str, Any, Any]):
    """Two agents that see pictures."""

    metadata: dict[str, Any] = {"name": "pictures"}  # PettingZoo's
    possible_agents = ["a", "b"]

    def observation_space(self, agent: str) -> Box:
        return Box(0, 255, (32, 32, 3), np.uint8)

    def action_space(self, agent: str) -> Discrete:
        return Discrete(2)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.t = self.possible_agents[:], 0
        return self._told(), {agent: {} for agent in self.agents}

    def step(self, actions: Any) -> Any:
        self.t += 1
        told, agents, over = self._told(), self.agents, self.t == 20
        self.agents = [] if over else agents
        flags = dict.fromkeys(agents, over)
        return told, dict.fromkeys(agents, 1.0), dict.fromkeys(agents, False), flags, {agent: {} for agent in agents}

    def _told(self) -> Any:
        return {agent: np.full((32, 32, 3), 7 * self.t + k, np.uint8) for k, agent in enumerate(self.agents)}


def test_a_batch_of_pictures_holds_each_once_until_its_successors_are_read() -> None:
    class Values(marlvec.Policy):
        def act(self, rows: Any, *, explore: bool = True) -> Any:
            return np.zeros(len(rows), np.int64), {"values": rows["obs"].mean(axis=(1, 2, 3))}

    advantages = GeneralAdvantageEstimation(value_function=lambda rows: rows["obs"].mean(axis=(1, 2, 3)))
    with marlvec.make(Pictures, num_envs=4, backend="sync") as envs:
        collector = marlvec.Collector(envs, Values(), seed=0, learner_connectors=[advantages])
        collector.collect(env_steps=4)
        tracemalloc.start()
        try:
            rows = collector.collect(env_steps=4 * 64)["main"]
            minibatches = list(rows.minibatches(64, seed=0))
            peak = tracemalloc.get_traced_memory()[1] / rows["obs"].nbytes
        finally:
            tracemalloc.stop()
    assert len(minibatches) == 8
    assert peak < 2.5  # of which the minibatches hold one; with all successors it were more than four
    assert (rows["next_obs"][:-1][~rows["truncated"][:-1]][:60].max(axis=(1, 2, 3)) > 0).all()

"""Long runs need no more memory than short ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import marlvec
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

"""Rows that a connector or a policy keeps stay as they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import marlvec
from marlvec.connectors import AgentConnector, Rows
from marlvec.testing import CounterEnv
from marlvec.trees import tree_leaves


class Keeper:
    """Keeps rows as they are, and copies of them."""

    def __init__(self) -> None:
        self.kept: list[tuple[Any, Any]] = []

    def keep(self, rows: Rows) -> None:
        for _, column in rows.items():
            self.kept += [(leaf, leaf.copy()) for _, leaf in tree_leaves(column)]

    def check(self) -> None:
        assert len(self.kept) > 200
        for leaf, then in self.kept:
            np.testing.assert_array_equal(leaf, then)


class KeepRows(AgentConnector):
    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper

    def __call__(self, rows: Rows) -> Rows:
        self.keeper.keep(rows)
        return rows


class KeepingPolicy(marlvec.RandomPolicy):
    def __init__(self, keeper: Keeper) -> None:
        super().__init__()
        self.keeper = keeper

    def act(self, rows: Any, *, explore: bool = True) -> Any:
        self.keeper.keep(rows)
        return super().act(rows, explore=explore)


@pytest.mark.mostly_slow("collects whole runs on several backends", quick=2)
@pytest.mark.parametrize("num_envs", [1, 4])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("backend", ["sync", "async"])
def test_rows_stay_as_they_were(backend: str, overlap: bool, num_envs: int) -> None:
    seen, asked = Keeper(), Keeper()
    with marlvec.make(CounterEnv, num_envs, backend=backend) as envs:
        collector = marlvec.Collector(
            envs, KeepingPolicy(asked), agent_connectors=[KeepRows(seen)], seed=0, overlap=overlap
        )
        for _ in range(3):
            collector.collect(env_steps=40)
        seen.check()
        asked.check()

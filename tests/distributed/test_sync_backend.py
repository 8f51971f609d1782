"""`Collectors(backend="sync")`: the reference for all that is distributed."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from marlvec.collect import Collector, MultiAgentBatch
from marlvec.distributed import Collectors, Place
from marlvec.distributed.server import seed_at
from tests.distributed.helpers import check_metrics, check_rows, learning, plain, same_batch


@pytest.mark.mostly_slow("many collectors, each in a process or thread of its own", quick=5)
@pytest.mark.parametrize("kind", ["python", "turns", "keyed", "native"])
def test_a_batch_is_what_each_brings_alone_with_states_merged_in_between(kind: str) -> None:
    """To the bit: ids, draws, running statistics."""
    pytest.importorskip("numba") if kind == "native" else None
    build = partial(learning, kind=kind)
    with Collectors(build, 2, "sync", seed=3, window=1000) as collectors:
        got = [collectors.collect(env_steps=31) for _ in range(4)]
        check_rows(got)
        check_metrics(collectors, got, raw=False)
        assert [place.stream for place in collectors.places] == [0, 1]
        assert collectors.pids == (None, None)
    alone = [build(Place(i, 0, i, seed_at(3, i, 0), 2)) for i in range(2)]
    for i, collector in enumerate(alone):
        collector.stream = i
        for name, policy in collector.policies.items():
            policy.set_weights(alone[0].policies[name].get_weights())
    for batch in got:
        parts = [collector.collect(env_steps=16 - i) for i, collector in enumerate(alone)]
        same_batch(batch, MultiAgentBatch.concat(parts))
        for name in ("a", "b"):
            for side in ("agent_connectors", "action_connectors"):
                chains = [getattr(collector, side)[name] for collector in alone]
                if all(chain.bound for chain in chains):
                    merged = chains[0].merge_states([chain.hand_over() for chain in chains])
                    for chain in chains:
                        chain.take_merged(merged)
    for collector in alone:
        collector.envs.close()


@pytest.mark.mostly_slow("many collectors", quick=2)
@pytest.mark.parametrize("unit", ["env_steps", "agent_steps", "episodes"])
@pytest.mark.parametrize("batch_mode", ["truncate", "complete"])
@pytest.mark.parametrize("sync", [True, False])
def test_nothing_comes_twice_and_nothing_is_missing(unit: Any, batch_mode: Any, sync: bool) -> None:
    with Collectors(partial(plain, batch_mode=batch_mode), 3, "sync", sync=sync, seed=0, window=1000) as collectors:
        batches = [collectors.collect(**{unit: 12}) for _ in range(6)]
        check_rows(batches)
        if unit == "env_steps" and batch_mode == "truncate":
            check_metrics(collectors, batches)
        sums = collectors.accounting
    assert (sums.delivered, sums.lost, sums.restarts) == (72, 0, 0)
    if batch_mode == "truncate" and unit != "episodes":
        assert [getattr(batch, unit) for batch in batches] == [12] * 6
    assert sums.outstanding == (0 if sync else 12)
    assert collectors.accounting.lost_by == ({} if sync else {"closed": 3})


@pytest.mark.slow("many collectors, each in a process or thread of its own")
def test_rows_name_the_weights_that_decided_them_and_lag_is_bounded() -> None:
    for lag in (0, 1, 3):
        with Collectors(plain, 2, "sync", sync=False, max_policy_lag=lag, fragment=4, seed=0) as collectors:
            seen: set[int] = set()
            for version in range(1, 9):
                assert collectors.set_weights({"main": {"shift": np.array([float(version)])}}) == version
                rows = collectors.collect(env_steps=8)["main"]
                np.testing.assert_array_equal(rows.weight, rows.policy_version)
                seen |= set((version - rows.policy_version).tolist())
            assert collectors.accounting.max_lag == min(lag, 2)  # no more than two are in flight a collector
            assert max(seen) == collectors.accounting.max_row_lag


def test_version_0_is_the_first_collectors_weights_for_all() -> None:
    def build(place: Place) -> Collector:
        from tests.distributed.helpers import Shift, envs_of

        return Collector(envs_of("parallel", 1, 0), Shift(10 + place.index), seed=place.seed, agent_connectors=[])

    with Collectors(build, 3, "sync", seed=0) as collectors:
        assert set(collectors.collect(env_steps=9)["main"].weight.tolist()) == {10.0}
        assert collectors.version == 0


def test_batches_that_are_too_small_for_all_have_statistics_merged_too() -> None:
    """One collector of three is not asked; rounds do not wait for it, and it gets what was merged when it is."""
    with Collectors(partial(learning, kind="python"), 3, "sync", seed=0) as collectors:
        for number in range(5):
            collectors.collect(env_steps=2)
            assert collectors._rounds.number == number + 1
        collectors.collect(env_steps=3)
        assert {remote.merged for remote in collectors._group.collectors.values()} == {5}
        state: Any = collectors._group.collectors[2].handle.server.collector.agent_connectors["a"].state_dict()
        assert state["NormalizeObs"]["moments"][""]["count"].sum() > 18, "of all, not of its own row alone"


def test_weights_are_those_that_were_given_whatever_becomes_of_the_callers_arrays() -> None:
    def build(place: Place) -> Collector:
        from tests.distributed.helpers import Shift, either, envs_of

        chains: Any = {"agent_connectors": [], "action_connectors": []}
        return Collector(envs_of("parallel", 1, 0), {"a": Shift(), "b": Shift()}, either, seed=place.seed, **chains)

    with Collectors(build, 1, "sync", seed=0) as collectors:
        given = np.array([1.0])
        collectors.set_weights({"a": {"shift": given}})
        given[:] = 7.0
        collectors.set_weights({"b": {"shift": np.array([2.0])}})
        batch = collectors.collect(env_steps=20)
        assert {name: set(rows.weight.tolist()) for name, rows in batch.items()} == {"a": {1.0}, "b": {2.0}}
        state: Any = collectors.get_state()
        assert state["policies"]["weights"]["a"]["shift"] == 1.0

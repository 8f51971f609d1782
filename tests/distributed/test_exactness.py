"""Whatever is asked of many collectors, in whatever order, and whatever dies: each row once, none missing between."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from marlvec.collect import MultiAgentBatch
from marlvec.distributed import Collectors, collectors
from marlvec.errors import CollectorDied, StateError
from tests.distributed.helpers import MANY, FaultyEngine, Shift, check_metrics, check_rows, named_by, plain

FRAGMENT = 6


class Everything(RuleBasedStateMachine):
    """Batches, versions, sizes, policies, deaths, and Ctrl-C, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[MultiAgentBatch] = []
        self.added = 0

    @initialize(
        sync=st.booleans(),
        lag=st.sampled_from([0, 1, 2, None]),
        seed=st.integers(0, 99),
        kind=st.booleans(),
        on_fault=st.sampled_from(["restart", "restart", "raise"]),
    )
    def begin(self, sync: bool, lag: int | None, seed: int, kind: bool, on_fault: Any) -> None:
        self.sync, self.lag, self.on_fault, self.engine = sync, lag, on_fault, FaultyEngine(seed, 0.0)
        options: Any = {} if sync else {"fragment": FRAGMENT, "max_policy_lag": lag}
        build = partial(plain, kind="parallel" if kind else "turns", policy_mapping=named_by(["main"]))
        with mock.patch.object(collectors, "_engine", return_value=self.engine):
            options |= {"window": 10_000, "max_restarts": MANY, "on_fault": on_fault, "sync_states": None}
            self.many = Collectors(build, 2, "sync", sync=sync, seed=seed, **options)

    @contextmanager
    def a_death_may_be_told(self) -> Iterator[None]:
        try:
            yield
        except CollectorDied:
            assert self.on_fault == "raise"

    @rule(fragments=st.integers(1, 4))
    def collect(self, fragments: int) -> None:
        steps, batch = fragments * FRAGMENT, None
        while batch is None:
            with self.a_death_may_be_told():
                try:
                    batch = self.many.collect(env_steps=steps)
                except StateError:  # another amount is unfinished, after Ctrl-C
                    assert self.sync
                    steps = self.unfinished
        assert batch.env_steps == steps
        self.batches.append(batch)
        for name in set(batch) & set(self.many.policies):  # those that were removed have no new weights
            rows = batch[name]
            np.testing.assert_array_equal(rows.weight, rows.policy_version)

    @rule(waits=st.integers(0, 3), fragments=st.integers(1, 4))
    def interrupt(self, waits: int, fragments: int) -> None:
        receive, left = self.many._receive, [waits]

        def interrupted() -> None:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            receive()

        with mock.patch.object(self.many, "_receive", interrupted):
            try:
                self.collect(fragments)
            except KeyboardInterrupt:
                goal = getattr(self.many._plan, "_goal", None)
                self.unfinished = goal.amount if goal is not None else 0

    @rule()
    def publish(self) -> None:
        version, stored = self.many.version + 1, self.engine.puts
        try:
            new = self.many.set_weights({name: {"shift": np.array([float(version)])} for name in self.many.policies})
        except StateError:  # what is on its way would get too old
            assert self.many.accounting.requests_outstanding
        else:
            assert new == version
            assert self.engine.puts == stored + 1, "one a version"

    @rule(number=st.integers(1, 4))
    def resize(self, number: int) -> None:
        with self.a_death_may_be_told():
            self.many.resize(number)
            assert len(self.many.places) == number

    @precondition(lambda self: self.added < 4)
    @rule()
    def add(self) -> None:
        name, self.added = f"p{self.added}", self.added + 1
        mapping = named_by([*self.many.policies, name])
        chains: Any = {"agent_connectors": [], "action_connectors": []}
        with self.a_death_may_be_told():
            self.many.add_policy(name, Shift(float(self.many.version)), **chains, policy_mapping=mapping)
            assert self.many.policies[-1] == name

    @precondition(lambda self: self.added and len(self.many.policies) > 1)
    @rule(data=st.data())
    def remove(self, data: Any) -> None:
        name = data.draw(st.sampled_from(self.many.policies[1:]))
        left = [other for other in self.many.policies if other != name]
        with self.a_death_may_be_told():
            self.many.remove_policy(name, policy_mapping=named_by(left))

    @rule(learns=st.sampled_from([None, lambda policy_id: True]))
    def train(self, learns: Any) -> None:
        with self.a_death_may_be_told():
            self.many.policies_to_train = learns

    @rule(which=st.integers(0, 3))
    def die(self, which: int) -> None:
        """One that was not waiting for anything, or has answers that were not fetched yet."""
        handles = [remote.handle for remote in self.many._group.collectors.values() if remote.handle is not None]
        if handles:  # lost collectors are restarted at the next collect()
            handles[which % len(handles)].is_gone = True

    @rule(rate=st.sampled_from([0.0, 0.0, 0.2]))
    def weather(self, rate: float) -> None:
        """How likely a death is from now on, whenever an answer is waited for."""
        self.engine.rate = rate

    @invariant()
    def each_row_once_and_all_counted(self) -> None:
        if self.batches:
            check_rows(self.batches)
            check_metrics(self.many, self.batches, raw=False)
            sums = self.many.accounting
            assert sums.delivered == sum(batch.env_steps for batch in self.batches)
            assert sum(stats.env_steps for stats in self.many.metrics.collectors) <= sums.delivered
            assert sums.refused == 0
            assert self.lag is None or sums.max_lag <= (0 if self.sync else self.lag)

    @invariant()
    def collectors_that_know_of_all_changes_have_the_policies_that_there_are(self) -> None:
        for remote in self.many._group.collectors.values():
            if remote.handle is None or remote.handle.is_gone or remote.tickets:
                continue
            if len(remote.changes) and not self.many._log.unsent(remote.changes):
                server = remote.handle.server
                leaving = {content.policy_id for content in server._leaving}
                assert set(server.collector.policies) - leaving == set(self.many.policies)

    def teardown(self) -> None:
        if hasattr(self, "many"):
            self.many.close()
            assert self.many.accounting.outstanding == 0


Everything.TestCase.settings = settings(max_examples=25, stateful_step_count=20)
TestEverything = Everything.TestCase


@pytest.mark.slow("hundreds of runs of many collectors")
class TestEverythingForLonger(Everything.TestCase):  # type: ignore[name-defined,misc]  # made at run time
    settings = settings(max_examples=100, stateful_step_count=30)


class Stored(bytes):
    """What an engine has stored; counts how many of them there are."""

    alive = 0

    def __init__(self, *_: Any) -> None:
        Stored.alive += 1

    def __del__(self) -> None:
        Stored.alive -= 1


@pytest.mark.slow("many collectors, each in a process or thread of its own")
@pytest.mark.parametrize("sync", [True, False])
def test_of_a_thousand_versions_few_are_kept(sync: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those alone that fragments on their way name."""
    engine = FaultyEngine(0, 0.0)
    put = engine.put
    monkeypatch.setattr(engine, "put", lambda value: Stored(put(value)))
    monkeypatch.setattr(collectors, "_engine", lambda *_: engine)
    with Collectors(plain, 2, "sync", sync=sync, fragment=None if sync else 2, max_policy_lag=2, seed=0) as many:
        for version in range(1, 1001):
            many.collect(env_steps=4)
            assert many.set_weights({"main": {"shift": np.array([float(version)])}}) == version
            engine.kept.clear()
            gc.collect() if version % 100 == 0 else None
            assert Stored.alive <= 4
    assert engine.puts == 1001

"""Collectors whose processes die at any moment: accounting balances, no row comes twice, none is missing in between."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import marlvec.distributed
from marlvec import RestartLimit
from marlvec.collect import Collector, MultiAgentBatch
from marlvec.distributed import Collectors, Place, collectors
from marlvec.distributed.engine import UnsentError
from marlvec.distributed.server import Raised
from marlvec.errors import CollectorDied, CollectorTimeout, RemoteCause, StateError
from marlvec.policies import FunctionPolicy
from tests.distributed.helpers import (
    MANY,
    FaultyEngine,
    Shift,
    check_metrics,
    check_rows,
    envs_of,
    learning,
    named_by,
    plain,
)
from tests.tracer import Tracer
from tests.vector.support.reference import refused

Engines = Callable[[int, float], FaultyEngine]


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Engines:
    """Have the next `Collectors` run on an engine whose hosts die."""

    def use(seed: int, rate: float) -> FaultyEngine:
        engine = FaultyEngine(seed, rate)
        monkeypatch.setattr(collectors, "_engine", lambda *_: engine)
        return engine

    return use


@pytest.mark.slow("many collectors, each in a process or thread of its own")
@settings(max_examples=8)
@given(seed=st.integers(0, 2**32), rate=st.sampled_from([0.05, 0.2]), sync=st.booleans())
def test_statistics_are_merged_whatever_dies_in_a_round(seed: int, rate: float, sync: bool) -> None:
    """They are of no more rows than were made, and of all that was handed over."""
    with pytest.MonkeyPatch.context() as patch:
        engine = FaultyEngine(seed, rate)
        patch.setattr(collectors, "_engine", lambda *_: engine)
        with Collectors(learning, 2, "sync", sync=sync, seed=seed, max_restarts=MANY, fragment=None) as many:
            batches = [many.collect(env_steps=20) for _ in range(6)]
            check_rows(batches)
            merged: Any = many._rounds.merged
            steps, episodes = (
                many.accounting.requested,
                many.accounting.requested // 7 + 6 * (1 + many.accounting.restarts),
            )
            made = 3 * (steps + episodes)  # an observation a step, and one more an episode
            counts = [state[0]["NormalizeObs"]["moments"][""]["count"].item() for state in (merged or {}).values()]
            assert sum(counts) <= made
            if engine.deaths == 0:
                assert counts


@pytest.mark.parametrize("sync", [True, False])
def test_other_collectors_make_up_for_a_masked_one(sync: bool, faulty: Engines) -> None:
    engine = faulty(0, 0.0)
    with Collectors(plain, 3, "sync", sync=sync, on_fault="mask", seed=0, window=1000) as many:
        batches = [many.collect(env_steps=24)]
        for left in (2, 1):
            victim = next(collector for collector in many._group.collectors.values() if collector.handle is not None)
            victim.handle.is_gone = True
            batches += [many.collect(env_steps=24) for _ in range(3)]
            assert len(many.places) == left
            check_rows(batches)
        engine.rate = 1.0
        for _ in range(2):
            with pytest.raises(CollectorDied, match="was the last one"):
                for _ in range(9):
                    batches.append(many.collect(env_steps=24))
        check_metrics(many, batches)


def test_too_many_deaths_of_a_collector_raise(faulty: Engines) -> None:
    engine = faulty(1, 0.0)
    lost: list[Any] = []
    started: list[Place] = []
    told: Any = {
        "on_collector_lost": lambda place, why, requests: lost.append((place.index, place.incarnation, why)),
        "on_collector_start": lambda place: started.append(place),
    }
    with Collectors(plain, 2, "sync", max_restarts=2, seed=0, callbacks=[told]) as many:
        many.collect(env_steps=8)
        engine.rate = 1.0
        with pytest.raises(CollectorDied, match=r"collector [01], incarnation 2: .*restarted 2 times") as caught:
            many.collect(env_steps=8)
        engine.rate = 0.0
        assert many.accounting.restarts >= 2
        assert [place.index for place in started[:2]] == [0, 1]
        assert (caught.value.index, 2) in {(index, incarnation) for index, incarnation, _ in lost}
        refused(CollectorDied, "restarted 2 times", many.collect, env_steps=8)


def test_hanging_collector_is_killed_and_loses_its_requests(faulty: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = faulty(0, 0.0)
    with Collectors(plain, 1, "sync", sync=False, fragment=4, timeout=1e-9, on_fault="raise", seed=0) as many:
        monkeypatch.setattr(engine, "ready", lambda tickets, timeout: [])
        with pytest.raises(CollectorTimeout, match="collector 0, incarnation 0: a request has run for more than 1e-09"):
            many.collect(env_steps=4)
        monkeypatch.undo()
        assert many.accounting.lost_by == {"timeout": 1, "after_a_loss": 1}
        check_rows([many.collect(env_steps=4)])
        assert many.accounting.restarts == 1


def test_answers_made_before_a_death_are_good_and_what_follows_on_a_gap_is_not(faulty: Engines) -> None:
    """The first of two answers went with its node and the second is there, or the other way round."""
    for gone in (0, 1):
        engine = faulty(0, 0.0)
        with Collectors(
            plain, 1, "sync", sync=False, fragment=4, max_in_flight=3, max_policy_lag=2, seed=0, window=1000
        ) as many:
            batches = [many.collect(env_steps=4)]
            collector = many._group.collectors[0]
            tickets = list(collector.tickets.values())
            engine._work(tickets[-1])
            engine.kept += tickets
            engine.lost.add(id(tickets[gone]))
            collector.handle.is_gone = True
            batches += [many.collect(env_steps=4) for _ in range(4)]
            check_metrics(many, batches)
            # Two more were asked for when it was dead already.
            assert many.accounting.lost_by == {"object_lost": 1, "after_a_loss": 2}


@pytest.mark.parametrize("sync", [True, False])
def test_an_answer_that_cannot_be_sent_takes_its_collector_along(
    sync: bool, faulty: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are gone, and what the same collector made next would follow on a gap."""
    engine = faulty(0, 0.0)
    take, taken = engine.take, list[Any]()

    def unsent(ticket: Any, timeout: float) -> Any:
        reply = take(ticket, timeout)
        taken.append(ticket)
        if taken[4:5] == [ticket]:
            raise UnsentError(Raised.of(TypeError("cannot pickle"), "while its answer was sent"))
        return reply

    with Collectors(plain, 2, "sync", sync=sync, seed=0, window=1000) as many:
        monkeypatch.setattr(engine, "take", unsent)
        batches = []
        with pytest.raises(TypeError, match="cannot pickle"):
            for _ in range(9):
                batches.append(many.collect(env_steps=12))
        batches += [many.collect(env_steps=12) for _ in range(4)]
        check_metrics(many, batches)
        assert many.accounting.restarts == 1
        assert set(many.accounting.lost_by) - {"after_a_loss"} == {"object_lost"}


def test_collector_without_room_is_not_restarted_for_ever(
    faulty: Engines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However long a timeout is beside the seconds of the limit."""
    engine = faulty(0, 0.0)
    limit = RestartLimit(3, seconds=0.0, backoff=0.0)
    with Collectors(plain, 1, "sync", seed=0, max_restarts=limit, timeout=7.0) as many:
        with monkeypatch.context() as patch:
            patch.setattr(engine, "ready", lambda tickets, timeout: [])
            refused(CollectorTimeout, r"than 7 s; has the cluster room.*begun 4 times in a row", many.resize, 2)
        assert len(caplog.messages) == 4
        assert caplog.messages[0].startswith("collector 1, incarnation 0, is lost: while it was built: it took more")
        many.collect(env_steps=4)
        assert len(many.places) == 2


class Fussy(Exception):
    """Cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("no")
        self.lock = threading.Lock()


@pytest.mark.parametrize("sync", [True, False])
def test_what_a_collector_raises_comes_out_typed_and_its_rows_come_next(sync: bool) -> None:
    def build(place: Place) -> Collector:
        calls = [0]

        def act(rows: Any) -> Any:
            calls[0] += 1
            if place.index == 1 and calls[0] == 4:
                error = ZeroDivisionError("fourth")
                error.add_note("a note")
                raise error
            return np.zeros(len(rows), np.int64)

        return Collector(envs_of("parallel", 2, 0), FunctionPolicy(act), seed=place.seed, agent_connectors=[])

    with Collectors(build, 2, "sync", sync=sync, seed=0, window=1000) as many:
        batches = [many.collect(env_steps=12)] if not sync else []
        with pytest.raises(ZeroDivisionError, match="fourth") as caught:
            for _ in range(9):
                batches.append(many.collect(env_steps=12))
        notes = "".join(caught.value.__notes__)
        assert "a note" in notes
        assert "in collector 1, incarnation 0; its rows come with its next answer" in notes
        assert "in act" in notes
        assert many.accounting.lost_by == {"raised": 1}
        batches += [many.collect(env_steps=12) for _ in range(4)]
        assert {batch.env_steps for batch in batches} == {12}
        check_metrics(many, batches)
        assert many.accounting.restarts == 0


def test_an_exception_that_cannot_travel_comes_as_its_text() -> None:
    told = Raised.of(Fussy(), "here").exception()
    assert isinstance(told, RemoteCause)
    assert "Fussy: no" in str(told)
    assert "here" in told.__notes__


def test_ctrl_c_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a batch is awaited, joined, or told of."""
    with Collectors(plain, 2, "sync", seed=0, window=1000) as many, Collectors(plain, 2, "sync", seed=0) as other:
        batches = []
        for name in ("joined", "oldest_row"):
            with monkeypatch.context() as patch:
                patch.setattr(collectors, name, _interrupt)
                before = many.accounting.delivered, many.metrics.env_steps
                refused(KeyboardInterrupt, "", many.collect, env_steps=10)
                assert (many.accounting.delivered, many.metrics.env_steps) == before
            batches.append(many.collect(env_steps=10))
            with monkeypatch.context() as patch:
                patch.setattr(many._callbacks, "sample_end", _interrupt)
                refused(KeyboardInterrupt, "", many.collect, env_steps=10)
                assert many.accounting.outstanding == 10
                assert many.metrics.env_steps == many.accounting.delivered
            batches.append(many.collect(env_steps=10))
        check_metrics(many, batches)
        for batch in batches:
            np.testing.assert_array_equal(batch["main"].eps_id, other.collect(env_steps=10)["main"].eps_id)


@pytest.mark.parametrize("on_fault", ["restart", "mask"])
def test_ctrl_c_while_one_is_built_has_it_built_once_more(
    on_fault: Any, faulty: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = faulty(0, 0.0)
    with Collectors(plain, 2, "sync", seed=0, on_fault=on_fault, window=1000) as many:
        batches = [many.collect(env_steps=10)]
        with monkeypatch.context() as patch:
            patch.setattr(engine, "ready", _interrupt)
            refused(KeyboardInterrupt, "", many.resize, 4)
        batches += [many.collect(env_steps=10) for _ in range(2)]
        assert [(place.index, place.incarnation) for place in many.places] == [(0, 0), (1, 0), (2, 1), (3, 1)]
        assert many.accounting.restarts == 0
        check_rows(batches)


def _interrupt(*_: Any) -> Any:
    raise KeyboardInterrupt


# --- Ctrl-C at the lines of the head: the next call goes on, each row comes once, and all is counted
# (At some lines here, at every single one in the soak. What runs beside the envs is another process's.)


HERE = str(Path(marlvec.distributed.__file__).parent)
ELSEWHERE = tuple(f"{HERE}/{name}" for name in ("server", "engine.py"))
CHAINS: Any = {"agent_connectors": [], "action_connectors": []}


def publish(many: Collectors) -> None:
    many.set_weights({"main": {"shift": np.array([float(many.version + 1)])}})


def die(many: Collectors) -> None:
    many._group.collectors[1].handle.is_gone = True


CALLS: dict[str, tuple[Callable[[Collectors], Any], Callable[[Collectors], Any]]] = {
    "collect": (lambda many: None, lambda many: many.collect(env_steps=12)),
    "die": (die, lambda many: many.collect(env_steps=12)),
    "grow": (lambda many: None, lambda many: many.resize(3)),
    "shrink": (lambda many: None, lambda many: many.resize(1)),
    "add": (lambda many: None, lambda many: many.add_policy("b", Shift(), **CHAINS)),
    "remove": (lambda many: many.add_policy("b", Shift(), **CHAINS), lambda many: many.remove_policy("b")),
    "state": (lambda many: None, lambda many: many.get_state()),
}
"""What is done before, and the call in which Ctrl-C comes."""


def interrupted(name: str, sync: bool, number: int, on_fault: Any = "restart") -> int:
    """Interrupt a call at a line of it, and go on; returns how many lines it lacks to have so many."""
    before, call = CALLS[name]
    options: Any = {"sync": sync, "fragment": None if sync else 6, "on_fault": on_fault, "max_restarts": MANY}
    with Collectors(plain, 2, "sync", seed=0, window=1000, **options) as many:
        batches = [many.collect(env_steps=12)]
        publish(many)
        batches.append(many.collect(env_steps=12))
        before(many)
        tracer = Tracer((HERE,), number, but=ELSEWHERE, everywhere=True)
        try:
            with tracer:
                call(many)
        except KeyboardInterrupt:
            pass
        else:
            assert tracer.left > 0, f"nobody heard of Ctrl-C at {tracer.place}"
            return tracer.left
        try:
            if name == "add" and "b" in many.policies:
                publish(many)  # it was added
            elif not (name == "remove" and "b" not in many.policies) and name not in ("collect", "die"):
                call(many)
            told = sum(batch.env_steps for batch in batches)
            lost = many.accounting.delivered - told  # by Ctrl-C in the last line of collect()
            for _ in range(4):
                batches.append(many.collect(env_steps=12))
                publish(many)
            assert lost in (0, 12)
            if not lost:
                check_metrics(many, batches)
            for rows in (batch["main"] for batch in batches):
                np.testing.assert_array_equal(rows.weight, rows.policy_version)
            sums = many.accounting
            assert sums.delivered == sum(batch.env_steps for batch in batches) + lost
            assert sums.refused == 0
            assert sums.restarts <= (name == "die")
            assert len(many.places) == {"grow": 3, "shrink": 1}.get(name, 2), "Ctrl-C costs no collector"
        except BaseException as error:
            error.add_note(f"after Ctrl-C at line {number}: {tracer.place}")
            raise
        return 0


@pytest.mark.slow("interrupts at many lines")
@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("name", list(CALLS))
def test_at_some_lines(name: str, sync: bool) -> None:
    lines = 10**6 - interrupted(name, sync, 10**6)
    assert lines > 10
    for number in random.Random(f"{name} {sync}").sample(range(1, lines + 1), 8):
        interrupted(name, sync, number)


@pytest.mark.parametrize("on_fault", ["restart", "mask"])
@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("name", list(CALLS))
@pytest.mark.soak
@pytest.mark.time_limit(3600)
def test_at_every_line(name: str, sync: bool, on_fault: Any) -> None:
    if (name, on_fault) == ("die", "mask"):
        pytest.skip("one that died stays away")
    number = 1
    while not interrupted(name, sync, number, on_fault):
        number += 1


# --- Whatever is asked of many collectors, in whatever order, and whatever dies: each row once, none missing between


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

"""Collectors whose processes die at any moment: accounting balances, no row comes twice, none is missing in between."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marlvec import RestartLimit
from marlvec.collect import Collector
from marlvec.distributed import Collectors, Place, collectors
from marlvec.distributed.engine import UnsentError
from marlvec.distributed.server import Raised
from marlvec.errors import CollectorDied, CollectorTimeout, RemoteCause
from marlvec.policies import FunctionPolicy
from tests.distributed.helpers import MANY, FaultyEngine, check_metrics, check_rows, envs_of, learning, plain

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
        check_rows(batches)
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
        with pytest.raises(CollectorDied, match="restarted 2 times"):
            many.collect(env_steps=8)


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
            check_rows(batches)
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
        check_rows(batches)
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
            with pytest.raises(CollectorTimeout, match=r"than 7 s; has the cluster room.*begun 4 times in a row"):
                many.resize(2)
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
        check_rows(batches)
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
                with pytest.raises(KeyboardInterrupt):
                    many.collect(env_steps=10)
                assert (many.accounting.delivered, many.metrics.env_steps) == before
            batches.append(many.collect(env_steps=10))
            with monkeypatch.context() as patch:
                patch.setattr(many._callbacks, "sample_end", _interrupt)
                with pytest.raises(KeyboardInterrupt):
                    many.collect(env_steps=10)
                assert many.accounting.outstanding == 10
                assert many.metrics.env_steps == many.accounting.delivered
            batches.append(many.collect(env_steps=10))
        check_rows(batches)
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
            with pytest.raises(KeyboardInterrupt):
                many.resize(4)
        batches += [many.collect(env_steps=10) for _ in range(2)]
        assert [(place.index, place.incarnation) for place in many.places] == [(0, 0), (1, 0), (2, 1), (3, 1)]
        assert many.accounting.restarts == 0
        check_rows(batches)


def _interrupt(*_: Any) -> Any:
    raise KeyboardInterrupt

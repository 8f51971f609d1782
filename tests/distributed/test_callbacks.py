"""Callbacks on the head: told of what is handed out, and of who comes and goes."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from marlvec import JSONLinesLogger, LiveTable, TensorBoardLogger
from marlvec.collect import Collector, Metrics, MultiAgentBatch
from marlvec.connectors import Standardize
from marlvec.distributed import Collectors, CollectorStats, Place, collectors
from marlvec.errors import ArgumentError, ClosedError, SerialisationError, StateError
from tests.collect.test_loggers import read_events
from tests.distributed.helpers import MANY, FaultyEngine, check_metrics, check_rows, plain


def test_loggers_and_the_table_work_on_the_head_as_they_are(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    out = io.StringIO()
    with (
        LiveTable(console=Console(file=out), plain_seconds=1e-6) as table,
        JSONLinesLogger(tmp_path / "log.jsonl") as lines,
        TensorBoardLogger(tmp_path / "logs") as board,
        Collectors(plain, 2, "sync", seed=0, callbacks=[table, lines, board]) as many,
    ):
        for _ in range(3):
            many.collect(env_steps=40)
        metrics = many.metrics
    told = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["eps_id"] for line in told] == [record.eps_id for record in metrics.episodes]
    assert "120 env steps" in out.getvalue()
    assert any((tmp_path / "logs").iterdir())


def test_each_collector_has_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its restarts, its lag, its env steps, and the share of its time that it waited: in metrics, table and curves."""
    pytest.importorskip("tensorboard")
    engine, out, shown = FaultyEngine(0, 0.0), io.StringIO(), io.StringIO()
    monkeypatch.setattr(collectors, "_engine", lambda *_: engine)
    screen = Console(file=shown, force_terminal=True, width=120)
    with (
        LiveTable(console=Console(file=out), plain_seconds=1e-6) as lines,
        LiveTable(console=screen, refresh_seconds=1e-6) as table,
        TensorBoardLogger(tmp_path) as board,
        Collectors(
            plain, 2, "sync", sync=False, fragment=10, seed=0, callbacks=[lines, table, board], max_restarts=MANY
        ) as many,
    ):
        assert many.metrics.collectors == ()
        many.collect(env_steps=20)
        many.set_weights({})
        many._group.collectors[1].handle.is_gone = True
        many.collect(env_steps=20)
        found = many.metrics.collectors
        assert [(stats.index, stats.restarts) for stats in found] == [(0, 0), (1, 1)]
        assert sum(stats.env_steps for stats in found) == 40
        assert max(stats.lag for stats in found) == 1
        assert all(0 < stats.waiting < 1 for stats in found)
        monkeypatch.setattr(many._callbacks, "sample_end", _fail)
        with pytest.raises(ZeroDivisionError):
            many.collect(env_steps=20)
        assert many.metrics.collectors == found, "they move with the batch"
        monkeypatch.undo()
        many.resize(1)
        while len(many.metrics.collectors) > 1:
            many.collect(env_steps=10)
    assert "collector 1: 1 restarts, lag " in out.getvalue()
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", shown.getvalue())
    assert re.search(r"restarts +lag +waiting +env steps", text)
    assert re.search(r"collector 1 +1 +[01] +\d+% +\d+", text)
    scalars = read_events(tmp_path)
    assert [values["collectors/restarts"] for _, values in scalars][:2] == [0.0, 1.0]
    assert {"collectors/lag_max", "collectors/waiting_mean"} <= set(scalars[0][1])


def _fail(*_: Any) -> Any:
    raise ZeroDivisionError


def test_of_many_collectors_the_table_shows_some() -> None:
    out = io.StringIO()
    metrics = Metrics(("a",), ("main",))
    metrics.collectors = tuple(map(CollectorStats, range(40)))
    with LiveTable(console=Console(file=out, force_terminal=True, width=120)) as table:
        table.on_sample_end(MultiAgentBatch({}, env_steps=0), metrics)
    assert "collector 31 " in out.getvalue()
    assert "collector 32 " not in out.getvalue()
    assert "and 8 more" in out.getvalue()


def test_hooks_come_in_order_and_one_that_fails_costs_nothing() -> None:
    heard: list[Any] = []
    fails = [True]

    def on_sample_end(batch: Any, metrics: Any) -> None:
        heard.append(("sample", metrics.env_steps))
        if fails.pop():
            raise ValueError("not now")
        fails.append(False)

    told: Any = {
        "on_collector_start": lambda place: heard.append(("start", place.index)),
        "on_episode_end": lambda episode, record: heard.append(("end", record.eps_id)),
        "on_sample_end": on_sample_end,
    }
    with Collectors(plain, 2, "sync", seed=0, callbacks=[told], window=1000) as many:
        fails.append(True)
        assert heard == [("start", 0), ("start", 1)]
        with pytest.raises(ValueError, match="not now") as caught:
            many.collect(env_steps=40)
        assert "on_sample_end" in "".join(caught.value.__notes__)
        assert many.metrics.env_steps == 0
        fails[:] = [False]
        with pytest.raises(StateError, match="a batch of 40 env_steps is unfinished"):
            many.collect(env_steps=20)
        batches = [many.collect(env_steps=40)]
        check_rows(batches)
        check_metrics(many, batches)
    assert heard[-1] == ("sample", 40)
    ends = [record for kind, record in heard if kind == "end"]
    assert ends[: len(ends) // 2] == ends[len(ends) // 2 :], "told once more, with the batch that comes once more"


def test_what_happens_beside_the_envs_is_for_build() -> None:
    with pytest.raises(ArgumentError, match=r"on_episode_step.*give it to the Collector in build"):
        Collectors(plain, 1, "sync", callbacks=[{"on_episode_step": print}])

    def across(place: Place) -> Collector:
        return plain(place, learner_connectors=[Standardize()])

    with pytest.raises(ArgumentError, match=r"\['Standardize'\].*give them to Collectors\(learner_connectors"):
        Collectors(across, 2, "sync")


def test_arguments_that_are_wrong_are_refused_by_name() -> None:
    wrong: list[tuple[Any, str]] = [
        ({"backend": "spark"}, "backend must be one of 'ray', 'sync'"),
        ({"on_fault": "ignore"}, "on_fault must be one of"),
        ({"fragment": 4}, "fragment is for sync=False"),
        ({"timeout": 0}, "timeout must be above 0"),
        ({"sync_states": 0}, "sync_states=0.*at least 1"),
        ({"remote_args": {}}, 'remote_args are for backend="ray"'),
        ({"sync": False, "max_policy_lag": -1}, "max_policy_lag must be an integer of at least 0"),
        ({"sync": False, "max_in_flight": 0}, "max_in_flight=0.*at least 1"),
    ]
    for options, text in wrong:
        with pytest.raises(ArgumentError, match=text):
            Collectors(plain, 1, **({"backend": "sync"} | options))
    with pytest.raises(ArgumentError, match="num_collectors=0.*at least 1"):
        Collectors(plain, 0, "sync")
    with pytest.raises(ArgumentError, match=r"build must be a function \(place\) -> Collector"):
        Collectors(None, 1, "sync")  # type: ignore[arg-type]  # on purpose
    with pytest.raises(ArgumentError, match=r"must return a marlvec.Collector, got 3"):
        Collectors(lambda place: 3, 1, "sync")  # type: ignore[arg-type,return-value]  # on purpose
    file = io.StringIO()
    lock: Any = __import__("threading").Lock()
    with pytest.raises(SerialisationError, match="build cannot be pickled"):
        Collectors(lambda place: plain(place, callbacks=[lock, file]), 1, "sync")


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"timeout": None}, "timeout must be above 0"),
        ({"timeout": math.nan}, "timeout must be above 0"),
        ({"max_restarts": "often"}, "max_restarts: expected a count"),
        ({"window": "all"}, r"window='all'\): expected an integer of at least 1"),
        ({"seed": -1}, "seed must be an integer from 0"),
    ],
)
def test_what_can_be_seen_to_be_wrong_begins_no_cluster(wrong: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be left behind."""
    begun: list[Any] = []
    monkeypatch.setattr(collectors, "_engine", lambda *given: begun.append(given))
    with pytest.raises(ArgumentError, match=text):
        Collectors(plain, 1, **wrong)
    assert not begun


def test_weights_that_are_none() -> None:
    lock: Any = __import__("threading").Lock()
    with Collectors(plain, 2, "sync", seed=0, timeout=math.inf) as many:
        with pytest.raises(SerialisationError, match=r"weights of \['main'\] cannot be pickled: .*lock"):
            many.set_weights({"main": {"shift": lock}})
        with pytest.raises(ArgumentError, match="weights must be a dict by policy id, got 3"):
            many.set_weights(3)  # type: ignore[arg-type]  # on purpose
        assert many.version == 0
        assert many.collect(env_steps=4).env_steps == 4


def test_amounts_and_versions_that_cannot_be() -> None:
    with Collectors(plain, 2, "sync", sync=False, seed=0) as many:
        with pytest.raises(ArgumentError, match="9 env_steps cannot be shared by 2 collectors: ask for 10"):
            many.collect(env_steps=9)
        many.collect(env_steps=8)
        with pytest.raises(ArgumentError, match="no multiple of fragment=4: ask for 8"):
            many.collect(env_steps=6)
        with pytest.raises(ArgumentError, match="outstanding fragments are of env_steps"):
            many.collect(episodes=8)
        with pytest.raises(ArgumentError, match=r"unknown policies \['other'\]"):
            many.set_weights({"other": {}})
        assert many.set_weights({}) == 1
        with pytest.raises(StateError, match="older than max_policy_lag=1: call collect"):
            many.set_weights({})
        assert [batch.env_steps for batch in many.batches(env_steps=8, total=20)] == [8, 8, 4]
        assert many.set_weights({}) == 2
        with pytest.raises(KeyError):
            many.place_of(99 << 43)
    for call in (many.collect, many.resize, many.set_weights):
        with pytest.raises(ClosedError):
            call(1)  # type: ignore[operator]  # each takes something


def test_fewer_and_more_collectors_bring_whole_rows() -> None:
    for sync in (True, False):
        with Collectors(plain, 2, "sync", sync=sync, fragment=None if sync else 6, seed=0, window=1000) as many:
            batches = []
            for number in (5, 1, 3):
                many.resize(number)
                assert [place.index for place in many.places] == list(range(number))
                batches += [many.collect(env_steps=30) for _ in range(3)]
            check_rows(batches)
            check_metrics(many, batches)
            assert many.accounting.lost == 0
            assert len({place.stream for place in many.places} | {0}) == 3


def test_a_collector_in_the_place_of_one_that_left_has_another_seed() -> None:
    """Else it would make the same episodes once more, under other ids."""
    started: list[Place] = []
    told: Any = {"on_collector_start": started.append}
    with Collectors(plain, 3, "sync", seed=0, callbacks=[told]) as many:
        for number in (1, 3, 2, 4):
            many.resize(number)
        many.collect(env_steps=40)
        assert [(place.index, place.incarnation) for place in many.places] == [(0, 0), (1, 1), (2, 2), (3, 0)]
        assert [stats.restarts for stats in many.metrics.collectors] == [0, 1, 2, 0]
        assert many.accounting.restarts == 0
    assert len(started) == len({place.seed for place in started}) == len({place.stream for place in started}) == 7

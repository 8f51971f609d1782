"""Many collectors that were saved go on as those that were kept, and as those that were never stopped, to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marlvec.collect import Collector, MultiAgentBatch
from marlvec.collect.callbacks import Callback
from marlvec.connectors import LearnerConnector, NormalizeObs
from marlvec.distributed import Collectors, Place, collectors
from marlvec.errors import ArgumentError, CheckpointError, ClosedError, CollectorDied, StateError
from marlvec.policies import RandomPolicy
from tests.collect.saved import columns_of, without_clock
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
    same_batch,
)
from tests.vector.support.reference import refused, same

Make = Callable[[], Collectors]
Do = Callable[[Collectors, list[MultiAgentBatch]], None]


def shown(many: Collectors) -> dict[str, Any]:
    """Metrics but for times, and the books."""
    found: dict[str, Any] = without_clock(many.metrics.summary())
    sums = many.accounting
    assert sums.requested == sums.delivered + sums.lost + sums.outstanding
    stats = [(one.index, one.restarts, one.lag, one.env_steps) for one in many.metrics.collectors]
    return {**found, "books": repr(sums), "collectors": stats, "version": many.version, "places": many.places}


def without_books(found: dict[str, Any]) -> dict[str, Any]:
    """What a question that was asked in between does not change."""
    return {name: part for name, part in found.items() if name != "books"}


def state_of(many: Collectors) -> Any:
    """All but times, and what a question counts for."""
    return without_clock({name: part for name, part in many.get_state().items() if name not in ("stats", "ledger")})


def columns(batches: Sequence[MultiAgentBatch]) -> list[Any]:
    return [columns_of(batch) for batch in batches]


def goes_on_alike(make: Make, folder: Path, before: Do, after: Do, again: Do | None = None, never: bool = True) -> None:
    """Hold three runs against each other: one that is saved and goes on, one from the file, one that was never stopped.

    Args:
        make: Builds collectors, always alike.
        folder: Where to save.
        before: What is done before.
        after: And then.
        again: What is done to new collectors to make them such as were saved.
        never: Whether the one that was never stopped makes the same batches.
    """
    path = folder / "many.npz"
    first: list[MultiAgentBatch] = []
    want: list[MultiAgentBatch] = []
    with make() as many:
        before(many, first)
        many.save(path)
        books = many.accounting
        state = state_of(many)
        after(many, want)
        sums, last = shown(many), state_of(many)
    if never:
        rows: list[MultiAgentBatch] = []
        with make() as other:
            before(other, rows)
            after(other, rows)
            same(columns(rows), columns([*first, *want]))
            assert without_books(shown(other)) == without_books(sums)
    got: list[MultiAgentBatch] = []
    with make() as other:
        if again is not None:
            again(other, [])
        other.load(path)
        assert other.accounting == books
        other.load(path)  # and once more
        same(state_of(other), state)
        after(other, got)
        same(columns(got), columns(want))
        assert shown(other) == sums
        same(state_of(other), last)
    check_rows([*first, *got])


def collects(*steps: int, weights: bool = True) -> Do:
    """Batches of so many steps, with new weights after each."""

    def do(many: Collectors, batches: list[MultiAgentBatch]) -> None:
        for amount in steps:
            batches.append(many.collect(env_steps=amount))
            if weights:
                name = many.policies[0]
                many.set_weights({name: {"shift": np.array([float(many.version + 1)])}})

    return do


@pytest.mark.slow("many collectors, each in a process or thread of its own")
@pytest.mark.parametrize("kind", ["parallel", "turns"])
@pytest.mark.parametrize("sync_states", [1, 2, None])
def test_merged_statistics_go_on(kind: str, sync_states: Any, tmp_path: Path) -> None:
    make = partial(Collectors, partial(learning, kind=kind, exact=True), 2, "sync", seed=3, sync_states=sync_states)
    goes_on_alike(make, tmp_path, collects(31, 20, 31), collects(31, 9, 40))


@pytest.mark.slow("many collectors, each in a process or thread of its own")
@pytest.mark.parametrize("kind", ["python", "keyed", "native"])
@pytest.mark.parametrize("batch_mode", ["truncate", "complete"])
def test_whole_runs_go_on(kind: str, batch_mode: str, tmp_path: Path) -> None:
    pytest.importorskip("numba") if kind == "native" else None
    build = partial(learning, kind=kind, exact=True, batch_mode=batch_mode)
    make = partial(Collectors, build, 2, "sync", seed=3, window=5)
    goes_on_alike(make, tmp_path, collects(31, 20), collects(31, 9, 40))


@pytest.mark.slow("many collectors, each in a process or thread of its own")
def test_nothing_was_collected_yet(tmp_path: Path) -> None:
    make = partial(Collectors, partial(learning, exact=True), 2, "sync", seed=3)
    goes_on_alike(make, tmp_path, collects(), collects(31, 9))


@pytest.mark.slow("many collectors, each in a process or thread of its own")
@pytest.mark.parametrize("sync_states", [1, 3])
@pytest.mark.parametrize("kind", ["parallel", "turns"])
def test_fragments_on_their_way_are_saved_and_handed_out_once(kind: str, sync_states: int, tmp_path: Path) -> None:
    """In the order in which they came here; what is not saved is asked for while the learner learns."""
    build = partial(learning, kind=kind, exact=True, callbacks=[{"on_episode_end": notes}])
    make = partial(
        Collectors, build, 3, "sync", sync=False, fragment=6, max_policy_lag=2, seed=3, sync_states=sync_states
    )
    goes_on_alike(make, tmp_path, collects(12, 12, 12), collects(12, 12, 12), never=False)
    goes_on_alike(make, tmp_path, collects(12), collects(12, 12), never=False)


def notes(episode: Any, record: Any) -> None:
    episode.custom["even"] = float(record.length % 2)


@pytest.mark.slow("many collectors, each in a process or thread of its own")
def test_more_and_fewer_collectors(tmp_path: Path) -> None:
    make = partial(Collectors, partial(learning, kind="parallel", exact=True), 2, "sync", seed=3)

    def before(many: Collectors, batches: list[MultiAgentBatch]) -> None:
        for number in (4, 1, 3):
            many.resize(number)
            collects(31, 20)(many, batches)

    def after(many: Collectors, batches: list[MultiAgentBatch]) -> None:
        collects(31)(many, batches)
        many.resize(4)
        collects(31)(many, batches)

    goes_on_alike(make, tmp_path, before, after, lambda many, _: many.resize(3))


@pytest.mark.slow("many collectors, each in a process or thread of its own")
def test_policies_that_have_come_and_gone(tmp_path: Path) -> None:
    """New collectors get those that were there by the same calls; an id that was used is not used again."""
    make = partial(Collectors, partial(learning, kind="parallel", exact=True), 2, "sync", seed=3)

    def before(many: Collectors, batches: list[MultiAgentBatch]) -> None:
        collects(31)(many, batches)
        many.add_policy("old", Shift(3.0), like="a", frozen=True)
        many.add_policy("c", Shift(4.0), like="b", policy_mapping=named_by(["a", "b", "c", "old"]))
        collects(31)(many, batches)
        many.remove_policy("old", policy_mapping=named_by(["a", "b", "c"]))
        many.set_weights({"c": {"shift": np.array([9.0])}})
        collects(40, 40)(many, batches)

    def again(many: Collectors, _: Any) -> None:
        many.add_policy("c", Shift(4.0), like="b", policy_mapping=named_by(["a", "b", "c"]))

    def after(many: Collectors, batches: list[MultiAgentBatch]) -> None:
        collects(31, 20)(many, batches)
        refused(ArgumentError, "there is, or was, a policy 'old'", many.add_policy, "old", Shift(), like="a")
        many.remove_policy("c", policy_mapping=named_by(["a", "b"]))
        collects(31, 40)(many, batches)

    goes_on_alike(make, tmp_path, before, after, again)


@pytest.mark.slow("many collectors, each in a process or thread of its own")
def test_a_policy_that_is_leaving_is_waited_for(tmp_path: Path) -> None:
    with Collectors(partial(learning, exact=True), 2, "sync", seed=3) as many:
        many.collect(env_steps=31)
        many.remove_policy("b", policy_mapping=named_by(["a"]))
        caught = refused(StateError, r"\['b'\] were removed", many.get_state)
        assert "in collector 0, incarnation 0" in "".join(caught.__notes__)
        many.collect(env_steps=60)
        many.save(tmp_path / "many.npz")
        want = [many.collect(env_steps=31) for _ in range(2)]
    with Collectors(partial(learning, exact=True), 2, "sync", seed=3) as other:
        with pytest.raises(
            ArgumentError, match=r"policies: the state is of \['a'\], these collectors have \['a', 'b'\]"
        ):
            other.load(tmp_path / "many.npz")
        other.remove_policy("b", policy_mapping=named_by(["a"]))
        other.load(tmp_path / "many.npz")
        same(columns([other.collect(env_steps=31) for _ in range(2)]), columns(want))


@pytest.mark.slow("many collectors, each in a process or thread of its own")
def test_a_batch_that_was_not_finished_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = partial(Collectors, partial(learning, exact=True), 3, "sync", seed=3)

    def before(many: Collectors, batches: list[MultiAgentBatch]) -> None:
        collects(31)(many, batches)
        receive, left = many._receive, [1]

        def interrupted() -> None:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            receive()

        with monkeypatch.context() as patch:
            patch.setattr(many, "_receive", interrupted)
            refused(KeyboardInterrupt, "", many.collect, env_steps=31)

    def after(many: Collectors, batches: list[MultiAgentBatch]) -> None:
        refused(StateError, "a batch of 31 env_steps is unfinished", many.collect, env_steps=30)
        collects(31, 20)(many, batches)

    goes_on_alike(make, tmp_path, before, after)


class Counting(Callback):
    """A callback of the head with a state of its own."""

    def __init__(self) -> None:
        self.batches = 0

    def on_sample_end(self, batch: Any, metrics: Any) -> None:
        self.batches += 1
        metrics.add_value("batches", self.batches)

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: Any) -> None:
        self.batches = state["batches"]


class Seen(LearnerConnector):
    """How many batches it has seen, in a column."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0

    def __call__(self, batch: Any) -> Any:
        self.batches += 1
        return batch.replace(seen=np.full(len(batch), self.batches))

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: Any) -> None:
        self.batches = state["batches"]


@pytest.mark.slow("many collectors, each in a process or thread of its own")
def test_callbacks_and_learner_connectors_of_the_head_go_on(tmp_path: Path) -> None:
    def make() -> Collectors:
        build = partial(learning, kind="parallel", exact=True)
        return Collectors(build, 2, "sync", seed=3, callbacks=[Counting()], learner_connectors=[Seen()])

    goes_on_alike(make, tmp_path, collects(31, 20), collects(31, 9))


def test_learner_connectors_of_the_head_see_each_batch_once() -> None:
    with Collectors(plain, 2, "sync", learner_connectors=[Seen()]) as many:
        for number in (1, 2, 3):
            (batch,) = many.collect(env_steps=12).values()
            assert "seen" in list(batch.keys())
            assert batch["seen"].tolist() == [number] * len(batch)


class Draws(RandomPolicy):
    """Draws actions from its own stream, and has no weights."""


@pytest.mark.slow("many collectors, each in a process or thread of its own")
def test_each_has_the_random_stream_of_its_own(tmp_path: Path) -> None:
    def build(place: Place) -> Collector:
        return Collector(envs_of("parallel", 2, place.seed, exact=True), Draws(), seed=place.seed, overlap=True)

    make = partial(Collectors, build, 2, "sync", seed=None)
    with make() as many, make() as other:
        many.collect(env_steps=30)
        many.save(tmp_path / "many.npz")
        other.collect(env_steps=8)
        other.load(tmp_path / "many.npz")
        for amount in (30, 17):
            same_batch(other.collect(env_steps=amount), many.collect(env_steps=amount))
        many.resize(3)
        other.resize(3)
        assert many.places == other.places
        same_batch(other.collect(env_steps=30), many.collect(env_steps=30))


@pytest.mark.mostly_slow("many collectors, each in a process or thread of its own", quick=2)
@pytest.mark.parametrize("sync", [True, False])
def test_envs_without_a_state_begin_new_episodes(sync: bool, tmp_path: Path) -> None:
    """What was in the old ones and in no batch is lost, and counted; what was on the head is handed out."""
    make = partial(Collectors, plain, 3, "sync", sync=sync, seed=3, window=1000)
    with make() as many:
        before = [many.collect(env_steps=30) for _ in range(3)]
        many.save(tmp_path / "many.npz")
        kept = many.accounting
    with make() as other:
        other.load(tmp_path / "many.npz")
        assert other.accounting == kept
        after = [other.collect(env_steps=30) for _ in range(4)]
        assert other.metrics.episodes_restarted == 6
        assert other.metrics.env_steps == 30 * 7 + other.metrics.env_steps_lost
        sums = other.accounting
    check_rows([*before, *after])
    assert (sums.requested, sums.delivered, sums.lost) == (210 + sums.outstanding, 210, 0)
    assert sums.outstanding == kept.outstanding


@pytest.mark.slow("many collectors, each in a process or thread of its own")
@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**32),
    rate=st.sampled_from([0.02, 0.1]),
    sync=st.booleans(),
    on_fault=st.sampled_from(["restart", "raise", "mask"]),
)
def test_rows_are_whole_whatever_dies_before_while_and_after_it_is_saved_and_loaded(
    seed: int, rate: float, sync: bool, on_fault: Any
) -> None:
    batches: list[MultiAgentBatch] = []
    options: Any = {"window": 10_000, "max_restarts": MANY, "on_fault": on_fault, "sync": sync, "seed": seed}
    with pytest.MonkeyPatch.context() as patch, ExitStack() as opened:
        patch.setattr(collectors, "_engine", lambda *_: FaultyEngine(seed, rate))
        build = partial(plain, exact=True)
        many = opened.enter_context(Collectors(build, 3, "sync", **options))
        for number in range(10):
            try:
                while True:
                    with suppress(CollectorDied) if on_fault == "raise" else nullcontext():
                        batches.append(many.collect(env_steps=24))
                        break
                if number % 3 != 2:
                    continue
                while True:
                    with suppress(CollectorDied) if on_fault == "raise" else nullcontext():
                        state = many.get_state()
                        break
                sums = many.accounting
                patch.setattr(collectors, "_engine", lambda *_, k=number: FaultyEngine(seed + k, rate))
                many = opened.enter_context(Collectors(build, 3, "sync", **options))
                while True:
                    with suppress(CollectorDied) if on_fault == "raise" else nullcontext():
                        many.set_state(state)
                        break
                assert (many.accounting.delivered, many.accounting.requested) == (sums.delivered, sums.requested)
            except CollectorDied:
                if on_fault == "mask":  # that was the last one
                    return
                raise
            check_metrics(many, batches)


def test_masked_collector_stays_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Collectors:
        monkeypatch.setattr(collectors, "_engine", lambda *_: FaultyEngine(0, 0.0))
        return Collectors(partial(plain, exact=True), 3, "sync", on_fault="mask", seed=0)

    with make() as many:
        many.collect(env_steps=24)
        many._group.collectors[1].handle.is_gone = True
        many.collect(env_steps=24)
        many.save(tmp_path / "many.npz")
        want = columns([many.collect(env_steps=24) for _ in range(2)])
    with make() as other:
        other.load(tmp_path / "many.npz")
        assert [place.index for place in other.places] == [0, 2]
        same(columns([other.collect(env_steps=24) for _ in range(2)]), want)


NORMALIZED = partial(plain, agent_connectors=[NormalizeObs()])
REFUSED: list[tuple[Any, str]] = [
    (lambda: Collectors(plain, 3, "sync"), "num_collectors: the state is of 2, these collectors have 3"),
    (lambda: Collectors(plain, 2, "sync", sync=False), "plan:(.|\n)*sync"),
    (lambda: Collectors(plain, 2, "sync", sync_states=None), "sync_states: the state is of 1, these"),
    (lambda: Collectors(learning, 2, "sync"), "agents: the state is of(.|\n)*policies: the state is of"),
    (lambda: Collectors(partial(plain, kind="turns"), 2, "sync"), "agents: the state is of"),
    (
        lambda: Collectors(partial(plain, batch_mode="complete"), 2, "sync"),
        "batch_mode: the state is of 'truncate', this",
    ),
    (lambda: Collectors(NORMALIZED, 2, "sync"), r"connectors:(.|\n)*NormalizeObs"),
    (
        lambda: Collectors(plain, 2, "sync", callbacks=[Counting()]),
        r"state: expected \['callbacks\[0\], Counting'\], got \[\]",
    ),
    (lambda: Collectors(plain, 2, "sync", learner_connectors=[Seen()]), "learner_connectors:(.|\n)*Seen"),
]


@pytest.mark.mostly_slow("many collectors, each in a process or thread of its own", quick=3)
@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_what_belongs_to_others_is_refused_and_nothing_changes(make: Make, message: str, tmp_path: Path) -> None:
    with Collectors(plain, 2, "sync", seed=1) as many:
        many.collect(env_steps=20)
        many.save(tmp_path / "many.npz")
    with make() as other:
        first = other.collect(env_steps=24)
        before, metrics, places = other.accounting, without_clock(other.metrics.summary()), other.places
        refused(ArgumentError, message, other.load, tmp_path / "many.npz")
        after = other.accounting
        assert (after.requested, after.delivered, after.outstanding) == (
            before.requested,
            before.delivered,
            before.outstanding,
        )
        assert without_clock(other.metrics.summary()) == metrics
        assert other.places == places
        check_rows([first, other.collect(env_steps=24)])


def test_invalid_state_raises(tmp_path: Path) -> None:
    with Collectors(plain, 2, "sync", seed=1) as many, Collectors(plain, 2, "sync", seed=1) as other:
        same_batch(many.collect(env_steps=20), other.collect(env_steps=20))
        state = many.get_state()
        for path, value in wrong_values(state):
            wrong = copy.deepcopy(state)
            put(wrong, path, value)
            refused(ArgumentError, "", many.set_state, wrong)
        refused(ArgumentError, "set_state.*: expected other fields; missing", many.set_state, {})
        refused(CheckpointError, "No such file", many.load, tmp_path / "none.npz")
        collector = plain(many.places[0])
        collector.save(tmp_path / "one.npz")
        collector.envs.close()
        refused(CheckpointError, r"holds no collectors, but \['collector'\]", many.load, tmp_path / "one.npz")
        same_batch(many.collect(env_steps=20), other.collect(env_steps=20))
        many.close()
        for call in (many.get_state, lambda: many.set_state(state), lambda: many.save(tmp_path / "one.npz")):
            refused(ClosedError, "", call)


def wrong_values(state: Any) -> Iterator[tuple[list[Any], Any]]:
    """Of each part of what the head says one thing that is none."""
    yield ["format"], 2
    yield ["group", "entropy"], None
    yield ["group", "places", 1, 2], 0
    yield ["group", "collectors", 0, "epoch"], 1
    yield ["group", "collectors", 0, "merged"], "1"
    yield ["group", "collectors", 0, "state"], {}
    yield ["group", "collectors", 0, "state", "collector", "belongs_to", "num_envs"], 7
    yield ["ledger", "requested"], (21, 4)
    yield ["ledger", "lost_by"], None
    yield ["answers"], [1]
    yield ["answers"], None
    yield ["plan"], {}
    yield ["plan", "goal"], 3
    yield ["rounds", "number"], None
    yield ["rounds", "came"], []
    yield ["policies", "weights"], {"other": {}}
    yield ["policies", "version"], "new"
    yield ["policies", "learner_connectors"], {"main": {}}
    yield ["metrics", "policies"], None
    yield ["metrics", "numbers"], None
    yield ["counters"], {}
    yield ["stats"], [1]
    yield ["callbacks"], [["callbacks[0], Counting", {}]]
    for name in state:
        yield [name], None


def put(state: Any, path: list[Any], value: Any) -> None:
    for part in path[:-1]:
        state = state[part]
    state[path[-1]] = value


fails: list[type[BaseException]] = []


def at_times(place: Place) -> Collector:
    """Cannot always be built. In a module, it is pickled by its name."""
    if fails and place.index == 1:
        raise fails.pop()("no")
    return plain(place, exact=True)


@pytest.mark.slow("many collectors, each in a process or thread of its own")
@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt])
def test_where_one_cannot_be_built_the_next_call_goes_on(kind: type[BaseException], tmp_path: Path) -> None:
    with Collectors(at_times, 3, "sync", seed=3) as many, Collectors(at_times, 3, "sync", seed=3) as other:
        many.collect(env_steps=30)
        many.save(tmp_path / "many.npz")
        want = columns([many.collect(env_steps=30) for _ in range(2)])
        fails.append(kind)
        refused(kind, "", other.load, tmp_path / "many.npz")
        same(columns([other.collect(env_steps=30) for _ in range(2)]), want)
        assert [place.incarnation for place in other.places] == [0, 0, 0]
        fails.extend([kind, kind])
        for _ in range(2):
            refused(kind, "", other.load, tmp_path / "many.npz")
        other.load(tmp_path / "many.npz")
        same(columns([other.collect(env_steps=30) for _ in range(2)]), want)

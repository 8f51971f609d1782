"""`Collectors`: the reference in one process, and its pieces: pacing, the ledger, policies and callbacks."""

from __future__ import annotations

import contextlib
import io
import json
import math
import random
import re
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from marlvec import JSONLinesLogger, LiveTable, TensorBoardLogger
from marlvec.collect import Collector, Metrics, MultiAgentBatch, SampleBatch
from marlvec.connectors import EpsilonGreedy, NormalizeObs, Standardize
from marlvec.distributed import Collectors, CollectorStats, Place, collectors
from marlvec.distributed.accounting import Ledger, Pacing, Shares, in_pieces, joined, may_publish
from marlvec.distributed.server import Answer, Raised, seed_at
from marlvec.errors import ArgumentError, ClosedError, ProtocolError, SerialisationError, StateError
from marlvec.trees import tree_leaves
from tests.collect.test_loggers import read_events
from tests.distributed.helpers import (
    MANY,
    FaultyEngine,
    Shift,
    check_metrics,
    check_rows,
    either,
    envs_of,
    learning,
    named_by,
    plain,
    same_batch,
)
from tests.vector.support.reference import refused

# --- `Collectors(backend="sync")`: the reference for all that is distributed


@pytest.mark.mostly_slow("many collectors, each in a process or thread of its own", quick=5)
@pytest.mark.parametrize("kind", ["python", "turns", "keyed", "native"])
def test_a_batch_is_what_each_brings_alone_with_states_merged_in_between(kind: str) -> None:
    """To the bit: ids, draws, running statistics."""
    pytest.importorskip("numba") if kind == "native" else None
    build = partial(learning, kind=kind)
    with Collectors(build, 2, "sync", seed=3, window=1000) as collectors:
        got = [collectors.collect(env_steps=31) for _ in range(4)]
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


# --- The pacing rule alone: lag is bounded, there is always a batch, and nobody starves


@pytest.mark.slow("many collectors, each in a process or thread of its own")
@settings(max_examples=200)
@given(st.integers(1, 6), st.integers(0, 4), st.integers(0, 2**32))
def test_lag_is_bounded_whatever_comes_when_and_is_lost(fragments: int, lag: int, seed: int) -> None:
    """Stragglers that come last of all, losses, one to four batches a version."""
    rng, pacing = random.Random(seed), Pacing(fragments, lag)
    bases: list[int] = []
    ready: list[int] = []
    for version in range(60):
        for _ in range(rng.choice((1, 1, 1, 2, 4)) if lag else 1):
            bases += [version] * (pacing.most - len(bases))  # type: ignore[operator]  # there is a bound
            while (chosen := pacing.pick(ready, bases, version)) is None:
                absent = [k for k in range(len(bases)) if k not in ready]
                assert absent, "all that was asked for is there, and yet it waits"
                k = rng.choice(absent) if rng.random() < 0.7 else max(absent)
                if rng.random() < 0.1:  # lost; another one is asked for at the present version
                    del bases[k]
                    ready = [x - (x > k) for x in ready]
                    bases.append(version)
                else:
                    ready.append(k)
            assert len(set(chosen)) == fragments
            assert chosen == [k for k in ready if k in chosen], "in the order in which they came"
            assert max(version - bases[k] for k in chosen) <= lag
            kept = [k for k in range(len(bases)) if k not in chosen]
            ready = [kept.index(k) for k in ready if k in kept]
            bases = [bases[k] for k in kept]
        bases += [version] * (fragments * lag - len(bases))
        assert may_publish(bases, version, lag)


def test_without_a_bound_it_is_first_come_first_served() -> None:
    pacing = Pacing(2, None)
    assert pacing.most is None
    assert pacing.pick([3], [0, 0, 0, 0], 9) is None
    assert pacing.pick([3, 1, 2], [0, 7, 0, 9], 9) == [3, 1]
    assert may_publish([0], 99, None)


@pytest.mark.parametrize(
    ("bases", "version", "may"), [([], 3, True), ([3], 3, True), ([2], 3, False), ([3, 2], 3, False)]
)
def test_a_version_waits_for_what_it_would_make_too_old(bases: list[int], version: int, may: bool) -> None:
    assert may_publish(bases, version, 1) is may


def test_a_smaller_batch_than_what_is_due_takes_the_oldest() -> None:
    assert Pacing(1, 1).pick([2, 0, 1], [0, 0, 1], 1) == [0]


def test_a_plan_saved_with_the_ids_of_its_requests_is_read() -> None:
    shares, ledger = Shares(), Ledger()
    shares.prepare({"goal": ["env_steps", 5], "shares": [[0, 3, 7], [1, 2, None]]})()
    assert shares.requests(ledger, [0, 1]) == [(0, 3), (1, 2)]
    ledger.issue(1, 0, 2, 0)
    assert shares.requests(ledger, [0, 1]) == [(0, 3)]
    assert shares.requests(ledger, [1]) == [(1, 3)], "collector 0 is masked"


# --- The ledger alone: what it refuses. That each request ends once, whatever happens, is in test_faults.py


def test_what_is_not_held_is_not_delivered_and_nothing_is_taken_out_of_order() -> None:
    ledger = Ledger()
    first, second = ledger.issue(0, 0, 1, 0), ledger.issue(0, 0, 1, 0)
    refused(ProtocolError, "not on the head", ledger.after_delivery, [first.id], 0)
    refused(ProtocolError, "not outstanding", ledger.hold, second.id, 0)
    refused(ProtocolError, "not outstanding", ledger.hold, first.id, 1)
    assert ledger.accounting.refused == 2
    assert ledger.lose([99], "died") == []
    assert first.id in ledger
    assert ledger[first.id] == first


# --- An answer's rows in pieces: the same rows once the head has joined them


def rows_of(number: int, start: int = 0) -> SampleBatch:
    """Rows whose largest leaf has 32 bytes each, inside a tree; with a column of Python objects."""
    ids = np.arange(start, start + number)
    wide = np.repeat(ids[:, None], 4, axis=1)
    objects = np.array([{"id": i} for i in ids.tolist()], dtype=object)
    return SampleBatch({"obs": {"wide": wide, "flag": ids % 2 == 0}, "t": ids, "infos": objects})


def answer_of(rows: dict[str, int]) -> Answer:
    found = {name: rows_of(number, 1000 * k) for k, (name, number) in enumerate(rows.items())}
    return Answer(7, 2, (MultiAgentBatch(found, env_steps=11, known=("a", "b", "gone"), agent_steps=29),))


def leaves(batch: MultiAgentBatch) -> list[tuple[Any, ...]]:
    return [
        (policy, name, path, leaf.dtype, leaf.tolist())
        for policy, rows in batch.items()
        for name, column in rows.items()
        for path, leaf in tree_leaves(column)
    ]


@pytest.mark.parametrize("rows", [{"a": 100}, {"a": 3, "b": 50}, {"b": 64, "a": 33}, {"a": 1}, {}], ids=str)
def test_pieces_are_small_views_and_join_to_the_same_batch(rows: dict[str, int]) -> None:
    limit, answer = 320, answer_of(rows)  # ten rows
    cut = in_pieces(answer, limit)
    assert isinstance(cut, Answer)
    assert (cut.id, cut.epoch) == (7, 2)
    assert len(cut.parts) == max([1, *(-(-number // 10) for number in rows.values())])
    for part in cut.parts:
        for policy, own in part.items():
            for name, column in own.items():
                for path, leaf in tree_leaves(column):
                    assert 0 < leaf.nbytes <= limit
                    assert np.shares_memory(leaf, dict(tree_leaves(answer.parts[0][policy][name]))[path])
    whole, again = joined(answer.parts, {}, ("a", "b")), joined(cut.parts, {}, ("a", "b"))
    assert (again.env_steps, again.agent_steps, again.known) == (11, 29, whole.known)
    assert list(again) == list(rows)
    assert leaves(again) == leaves(whole)


def test_several_answers_keep_their_order() -> None:
    answers = [answer_of({"a": 25, "b": 5}), answer_of({"b": 30})]
    whole = joined([part for answer in answers for part in answer.parts], {}, ())
    cut = [in_pieces(answer, 64) for answer in answers]
    again = joined([part for answer in cut if isinstance(answer, Answer) for part in answer.parts], {}, ())
    assert leaves(again) == leaves(whole)
    assert (again.env_steps, again.agent_steps) == (22, 58)


def test_a_row_larger_than_the_limit_is_a_piece_of_its_own() -> None:
    cut = in_pieces(answer_of({"a": 5}), 1)
    assert isinstance(cut, Answer)
    assert [len(part["a"]) for part in cut.parts] == [1] * 5


def test_what_has_no_rows_is_left_as_it_is() -> None:
    for reply in (Answer(1, 0, value=3), Raised("it failed", (), None)):
        assert in_pieces(reply, 10) == reply


# --- Policies that come and go while many collectors run: the same in all, also in those that are restarted


def growing(place: Place, kind: str = "parallel") -> Collector:
    """Each agent is played by one of all policies that there are."""
    pieces: Any = [NormalizeObs()]
    options: Any = {"agent_connectors": pieces, "action_connectors": [EpsilonGreedy(0.3, seed=0)]}
    collector: Collector
    collector = Collector(envs_of(kind, 2, place.seed), {"a": Shift()}, lambda *_: "a", seed=place.seed, **options)
    return collector


def test_many_change_as_each_would_alone() -> None:
    """To the bit what two collectors bring that are changed by hand at the same points."""
    with Collectors(growing, 2, "sync", seed=3, sync_states=None, window=1000) as many:
        got = [many.collect(env_steps=20)]
        many.add_policy("b", Shift(5.0), agent_connectors=[], action_connectors=[], policy_mapping=named_by("ab"))
        assert many.policies == ("a", "b")
        got += [many.collect(env_steps=20) for _ in range(2)]
        many.policies_to_train = ["b"]
        got += [many.collect(env_steps=20) for _ in range(2)]
        many.policies_to_train = None
        many.remove_policy("b", policy_mapping=named_by("a"))
        got += [many.collect(env_steps=20) for _ in range(4)]
        sums = many.accounting
        assert len(many._log.unsent(())) == 3, "of two lists of policies to train the last alone"
    alone = [growing(Place(i, 0, i, seed_at(3, i, 0), 2)) for i in range(2)]
    for i, collector in enumerate(alone):
        collector.stream = i
    for k, batch in enumerate(got):
        for collector in alone:
            if k == 1:
                collector.policy_mapping = named_by("ab")
                collector.add_policy("b", Shift(5.0), agent_connectors=[], action_connectors=[])
            if k == 3:
                collector.policies_to_train = ["b"]
            if k == 5:
                collector.policies_to_train = None
                collector.policy_mapping = named_by("a")
            if k >= 5 and "b" in collector.policies:
                try:
                    collector.remove_policy("b")
                except StateError:
                    assert k < len(got) - 1, "its episodes are over by then"
        same_batch(batch, MultiAgentBatch.concat([collector.collect(env_steps=10) for collector in alone]))
    for collector in alone:
        collector.envs.close()
    assert "b" in got[2]
    assert set(got[4]) <= {"b"}
    assert not len(got[-1].get("b", ()))
    assert set(got[1]["b"].weight.tolist()) == {5.0}
    assert (sums.requested, sums.delivered, sums.lost) == (180, 180, 0)
    assert sums.requests_requested == 2 * 9 + 2 * 4  # four changes, each collector


@pytest.mark.parametrize("sync", [True, False])
def test_a_policy_comes_with_the_connectors_of_the_first_collector(sync: bool) -> None:
    """What was learnt is the same in all, counted once, and is there in one that is built later."""
    with Collectors(learning, 2, "sync", sync=sync, seed=0) as many:
        for _ in range(3):
            many.collect(env_steps=24)
        many.add_policy("old", Shift(3.0), like="a", frozen=True, policy_mapping=named_by(["a", "old"]))
        many.resize(3)
        servers = [remote.handle.server.collector for remote in many._group.collectors.values()]
        chains = [server.agent_connectors["old"] for server in servers]
        states = [chain.state_dict() for chain in chains]
        np.testing.assert_equal(states[0], states[1])
        np.testing.assert_equal(states[0], states[2])
        assert states[0]["NormalizeObs"]["moments"][""]["count"].item() > 0
        assert not any(piece.training for chain in chains for piece in chain)
        batches = [many.collect(env_steps=24) for _ in range(3)]
        assert all("old" not in batch for batch in batches)
        for chain, state in zip(chains, states, strict=True):
            np.testing.assert_equal(chain.state_dict()["NormalizeObs"]["moments"], state["NormalizeObs"]["moments"])


def test_what_the_new_policy_knows_of_itself_stays_itself() -> None:
    """One pickle for the policy and its connectors; new weights reach what is added, and its rows name the version."""

    def build(place: Place) -> Collector:
        return plain(place, policy_mapping=named_by(["main"]))

    with Collectors(build, 2, "sync", seed=0) as many:
        many.collect(env_steps=8)
        many.set_weights({"main": {"shift": np.array([1.0])}})
        many.add_policy("b", Shift(1.0), agent_connectors=[], action_connectors=[], policy_mapping=named_by(["b"]))
        many.collect(env_steps=40)
        for version in (2, 3):
            assert many.set_weights({"b": {"shift": np.array([float(version)])}}) == version
            rows = many.collect(env_steps=40)["b"]
            np.testing.assert_array_equal(rows.weight, rows.policy_version)
        many.remove_policy("b", policy_mapping=named_by(["main"]))
        refused(ArgumentError, r"unknown policies \['b'\]; the policies are \['main'\]", many.set_weights, {"b": {}})
        many.set_weights({"main": {"shift": np.array([4.0])}})
        for _ in range(3):
            batch = many.collect(env_steps=40)
        assert set(batch["main"].policy_version.tolist()) == {4}


def test_what_cannot_be_changed_changes_nothing() -> None:
    rejected: list[tuple[Any, type[Exception], str]] = [
        (lambda many: many.add_policy("a", Shift(), like="a"), ArgumentError, "there is, or was, a policy 'a'"),
        (lambda many: many.add_policy(3, Shift(), like="a"), ArgumentError, "must be a string"),
        (lambda many: many.add_policy("c", Shift(), like="z"), KeyError, "no policy 'z'"),
        (lambda many: many.add_policy("c", Shift()), ArgumentError, "one chain of connectors was given"),
        (lambda many: many.add_policy("c", "no policy", like="a"), ArgumentError, "policy 'c'"),
        (lambda many: many.add_policy("c", threading.Lock(), like="a"), SerialisationError, "cannot be pickled"),
        (
            lambda many: many.add_policy("c", Shift(), like="a", policy_mapping="c"),
            ArgumentError,
            "policy_mapping must",
        ),
        (lambda many: many.remove_policy("z"), KeyError, "no policy 'z'"),
        (lambda many: setattr(many, "policies_to_train", ["z"]), ArgumentError, "unknown policies"),
    ]
    with Collectors(growing, 2, "sync", seed=0) as many, Collectors(growing, 2, "sync", seed=0) as other:
        for call, kind, text in rejected:
            refused(kind, text, call, many)
        own: Any = {"agent_connectors": [], "action_connectors": []}
        with pytest.raises(ArgumentError, match=r"\['Standardize'\] of policy 'c' look across a batch"):
            many.add_policy("c", Shift(), **own, learner_connectors=[Standardize()])
        assert many.policies == ("a",)
        assert many.policies_to_train is None
        same_batch(many.collect(env_steps=20), other.collect(env_steps=20))
        many.add_policy("c", Shift(), **own)
        many.remove_policy("c")
        refused(ArgumentError, "there is, or was, a policy 'c'", many.add_policy, "c", Shift(), **own)
        same_batch(many.collect(env_steps=20), other.collect(env_steps=20))
    with Collectors(plain, 2, "sync", seed=0) as many:
        refused(StateError, "by the policy_mapping it plays", many.remove_policy, "main")
        refused(StateError, "the policy_mapping is fixed", many.remove_policy, "main", policy_mapping=either)
        assert many.policies == ("main",)
        assert many.collect(env_steps=8).env_steps == 8


def test_what_is_undone_is_kept_nowhere() -> None:
    """Thousands of opponents may come and go: one that is restarted gets those that there are, and the last mapping."""
    build = partial(plain, policy_mapping=named_by(["main"]))
    with Collectors(build, 2, "sync", seed=0, window=1000) as many:
        own: Any = {"agent_connectors": [], "action_connectors": []}
        for number in range(30):
            many.add_policy(f"p{number}", Shift(), **own, policy_mapping=named_by(["main", f"p{number}"]))
            if number:
                last = None if number % 2 else named_by(["main", f"p{number}"])
                many.remove_policy(f"p{number - 1}", policy_mapping=last)
            many.collect(env_steps=20)
            assert len(many._log.unsent(())) <= 2
        many.resize(1)
        many.resize(2)
        rows = [many.collect(env_steps=40) for _ in range(3)]
        assert set(many._group.collectors[1].handle.server.collector.policies) == {"main", "p29"}
        assert {name for batch in rows for name in batch} == {"main", "p29"}


def test_ctrl_c_while_one_is_added_adds_it_to_none_or_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for after in range(4):
        build = partial(plain, policy_mapping=named_by(["main"]))
        with Collectors(build, 2, "sync", seed=0, window=1000) as many:
            batches = [many.collect(env_steps=10)]
            waits, receive = [0], many._receive

            def interrupt(waits: Any = waits, receive: Any = receive, after: int = after) -> None:
                waits[0] += 1
                if waits[0] > after:
                    raise KeyboardInterrupt
                receive()

            own: Any = {"agent_connectors": [], "action_connectors": []}
            with monkeypatch.context() as patch:
                patch.setattr(many, "_receive", interrupt)
                with contextlib.suppress(KeyboardInterrupt):
                    many.add_policy("b", Shift(), **own)
            batches += [many.collect(env_steps=10) for _ in range(2)]
            check_metrics(many, batches)
            for remote in many._group.collectors.values():
                assert ("b" in remote.handle.server.collector.policies) == (after > 0)
            assert ("b" in many.policies) == (after > 0)
            if after:
                many.set_weights({"b": {"shift": np.array([1.0])}})


# --- Callbacks on the head: told of what is handed out, and of who comes and goes


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
        refused(ZeroDivisionError, "", many.collect, env_steps=20)
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
        caught = refused(ValueError, "not now", many.collect, env_steps=40)
        assert "on_sample_end" in "".join(caught.__notes__)
        assert many.metrics.env_steps == 0
        fails[:] = [False]
        refused(StateError, "a batch of 40 env_steps is unfinished", many.collect, env_steps=20)
        batches = [many.collect(env_steps=40)]
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
        refused(ArgumentError, text, Collectors, plain, 1, **({"backend": "sync"} | options))
    refused(ArgumentError, "num_collectors=0.*at least 1", Collectors, plain, 0, "sync")
    refused(ArgumentError, r"build must be a function \(place\) -> Collector", Collectors, None, 1, "sync")
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
    refused(ArgumentError, text, Collectors, plain, 1, **wrong)
    assert not begun


def test_weights_that_are_none() -> None:
    lock: Any = __import__("threading").Lock()
    with Collectors(plain, 2, "sync", seed=0, timeout=math.inf) as many:
        with pytest.raises(SerialisationError, match=r"weights of \['main'\] cannot be pickled: .*lock"):
            many.set_weights({"main": {"shift": lock}})
        refused(ArgumentError, "weights must be a dict by policy id, got 3", many.set_weights, 3)
        assert many.version == 0
        assert many.collect(env_steps=4).env_steps == 4


def test_amounts_and_versions_that_cannot_be() -> None:
    with Collectors(plain, 2, "sync", sync=False, seed=0) as many:
        refused(ArgumentError, "9 env_steps cannot be shared by 2 collectors: ask for 10", many.collect, env_steps=9)
        many.collect(env_steps=8)
        refused(ArgumentError, "no multiple of fragment=4: ask for 8", many.collect, env_steps=6)
        refused(ArgumentError, "outstanding fragments are of env_steps", many.collect, episodes=8)
        refused(ArgumentError, r"unknown policies \['other'\]", many.set_weights, {"other": {}})
        assert many.set_weights({}) == 1
        refused(StateError, "older than max_policy_lag=1: call collect", many.set_weights, {})
        assert [batch.env_steps for batch in many.batches(env_steps=8, total=20)] == [8, 8, 4]
        assert many.set_weights({}) == 2
        refused(KeyError, "", many.place_of, 99 << 43)
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

"""Policies that come and go while many collectors run: the same in all, also in those that are restarted."""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

from marlvec.collect import Collector, MultiAgentBatch
from marlvec.connectors import EpsilonGreedy, NormalizeObs, Standardize
from marlvec.distributed import Collectors, Place
from marlvec.distributed.server import seed_at
from marlvec.errors import ArgumentError, SerialisationError, StateError
from tests.distributed.helpers import (
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
        with pytest.raises(ArgumentError, match=r"unknown policies \['b'\]; the policies are \['main'\]"):
            many.set_weights({"b": {}})
        many.set_weights({"main": {"shift": np.array([4.0])}})
        for _ in range(3):
            batch = many.collect(env_steps=40)
        assert set(batch["main"].policy_version.tolist()) == {4}


def test_what_cannot_be_changed_changes_nothing() -> None:
    refused: list[tuple[Any, type[Exception], str]] = [
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
        for call, kind, text in refused:
            with pytest.raises(kind, match=text):
                call(many)
        own: Any = {"agent_connectors": [], "action_connectors": []}
        with pytest.raises(ArgumentError, match=r"\['Standardize'\] of policy 'c' look across a batch"):
            many.add_policy("c", Shift(), **own, learner_connectors=[Standardize()])
        assert many.policies == ("a",)
        assert many.policies_to_train is None
        same_batch(many.collect(env_steps=20), other.collect(env_steps=20))
        many.add_policy("c", Shift(), **own)
        many.remove_policy("c")
        with pytest.raises(ArgumentError, match="there is, or was, a policy 'c'"):
            many.add_policy("c", Shift(), **own)
        same_batch(many.collect(env_steps=20), other.collect(env_steps=20))
    with Collectors(plain, 2, "sync", seed=0) as many:
        with pytest.raises(StateError, match="by the policy_mapping it plays"):
            many.remove_policy("main")
        with pytest.raises(StateError, match="the policy_mapping is fixed"):
            many.remove_policy("main", policy_mapping=either)
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
            check_rows(batches)
            check_metrics(many, batches)
            for remote in many._group.collectors.values():
                assert ("b" in remote.handle.server.collector.policies) == (after > 0)
            assert ("b" in many.policies) == (after > 0)
            if after:
                many.set_weights({"b": {"shift": np.array([1.0])}})

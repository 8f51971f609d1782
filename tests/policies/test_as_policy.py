"""What may stand for a policy: a class with one method ``act(rows)``, or a function of rows, wherever one is wanted."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

import marlvec
from marlvec import Collector, external
from marlvec.connectors import Rows
from marlvec.errors import ArgumentError
from marlvec.external import Client, LocalInference, Server
from marlvec.policies import FunctionPolicy, ObjectPolicy, Policy, PolicyMap, as_policy, load_policy, save_policy
from marlvec.selfplay import OpponentPool, evaluate_match
from tests.external.served import play_parallel
from tests.selfplay.nim import Nim


def by_place(rows: Rows) -> Any:
    """Depends on the rows alone, so that all forms of it answer alike."""
    choices = rows["action_mask"].sum(axis=1) if "action_mask" in rows else 3
    return (rows["t"] + rows["agent_index"] + rows["env_id"]) % choices


class Reference(Policy):
    """As policies were always written."""

    def act(self, rows: Rows, *, explore: bool = True) -> Any:
        return by_place(rows)


class OneMethod:
    """As README says."""

    def act(self, rows: Rows) -> Any:
        return by_place(rows)


class Told:
    """It is told whether to explore."""

    def __init__(self) -> None:
        self.told: list[bool] = []

    def act(self, rows: Rows, *, explore: bool) -> Any:
        self.told.append(explore)
        return by_place(rows)


class Derived(Policy):
    """Derives from Policy, and has the one method all the same."""

    def act(self, rows: Rows) -> Any:  # type: ignore[override]  # which is allowed
        return by_place(rows)


class Full:
    """All that a policy can have, without deriving from it."""

    def __init__(self, shift: int = 0) -> None:
        self.shift, self.version, self.seeds, self.calls = shift, 0, [], []  # type: ignore[var-annotated]  # lists

    def setup(self, observation_space: Any, action_space: Any, *, seed: int) -> None:
        self.calls.append(("setup", action_space.n))
        self.reseed(seed)

    def reseed(self, seed: int) -> None:
        self.seeds.append(seed)

    def act(self, rows: Rows, *, explore: bool = True) -> Any:
        return (by_place(rows) + self.shift) % 3, {"explored": np.full(len(rows), explore)}

    def state_dict(self) -> dict[str, Any]:
        return {"shift": self.shift}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shift = state["shift"]

    def get_weights(self) -> dict[str, Any]:
        return {"shift": self.shift}

    def set_weights(self, weights: dict[str, Any]) -> None:
        self.shift = weights["shift"]


FORMS: dict[str, Callable[[], Any]] = {
    "object": OneMethod,
    "told": Told,
    "derived": Derived,
    "function": lambda: by_place,
    "lambda": lambda: lambda rows: by_place(rows),
    "method": lambda: OneMethod().act,
}
forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def envs(n: int = 3) -> Any:
    return marlvec.make("simple_spread", n, backend="sync", max_cycles=7)


def same(one: Any, other: Any) -> None:
    assert list(one) == list(other)
    for name in one:
        assert one[name].keys() == other[name].keys()
        for column, values in one[name].items():
            np.testing.assert_array_equal(values, other[name][column], err_msg=column, strict=True)


def episodes(policies: Any, **options: Any) -> Any:
    """Whole episodes."""
    with envs() as each:
        return Collector(each, policies, batch_mode="complete", seed=0, **options).collect(episodes=6)


@pytest.mark.mostly_slow("collects whole runs with many policies", quick=3)
@forms
def test_a_collector_takes_it(form: Callable[[], Any]) -> None:
    expected = episodes(Reference())
    same(episodes(form()), expected)
    same(episodes({"main": form()}), expected)
    same(episodes(PolicyMap({"main": form()}, capacity=1)), expected)
    with envs() as each:
        collector = Collector(each, form(), batch_mode="complete", seed=0)
        with collector.background(episodes=6, ahead=1) as batches:
            same(next(batches), expected)
        assert collector.metrics.episodes_total >= 6


@pytest.mark.mostly_slow("collects whole runs with many policies", quick=8)
@forms
def test_policies_may_be_added_later_or_replaced(form: Callable[[], Any]) -> None:
    found, who = [], ["a"]
    for make in (Reference, form):
        with envs() as each:
            collector = Collector(each, {"a": make()}, lambda agent, episode: who[0], seed=0)
            who[0] = "a"
            batches = [collector.collect(env_steps=12)]
            collector.add_policy("b", make())
            who[0] = "b"
            batches.append(collector.collect(episodes=6))
            batches.append(collector.collect(episodes=6))
            collector.remove_policy("a")
            found.append([*batches, collector.collect(env_steps=12)])
    for one, other in zip(*found, strict=True):
        same(one, other)


@pytest.mark.mostly_slow("collects whole runs with many policies", quick=8)
@forms
def test_it_is_evaluated(form: Callable[[], Any]) -> None:
    def returns(policy: Any) -> list[float]:
        with envs() as each, envs(2) as others:
            collector = Collector(each, policy, evaluation_envs=others, seed=0)
            collector.collect(env_steps=9)
            return [record.returns_A.tolist() for record in collector.evaluate(4, seed=3).episodes]

    assert returns(form()) == returns(Reference())
    policies = {"a": form(), "b": form()}
    assert evaluate_match(policies, Nim, 8, backend="sync") == evaluate_match(
        {"a": Reference(), "b": Reference()}, Nim, 8, backend="sync"
    )


@pytest.mark.mostly_slow("collects whole runs with many policies", quick=2)
@forms
def test_it_is_an_opponent(form: Callable[[], Any], tmp_path: Path) -> None:
    """Added as it is, snapshot of a learner, built by the pool's function, and again from the disk."""
    pool = OpponentPool(form, folder=tmp_path)
    pool.add("rule", form(), anchor=True)
    with marlvec.make(Nim, 3, backend="sync") as each:
        collector = Collector(each, {"main": form()}, seed=0)
        pool.snapshot(collector, "main")
        for name, opponent in OpponentPool.load(tmp_path, form).items():
            collector.add_policy(name, opponent.policy(), frozen=True)
    expected = evaluate_match({"rule": Reference(), "main_0": Reference()}, Nim, 8, backend="sync")
    for found in (pool, OpponentPool.load(tmp_path, form)):
        assert evaluate_match(found, Nim, 8, backend="sync") == expected


@pytest.mark.mostly_slow("collects whole runs with many policies", quick=2)
@forms
def test_it_decides_on_the_clients_side(form: Callable[[], Any]) -> None:
    """And its server publishes what it has learned, which is nothing."""
    found = []
    for make in (Reference, form):
        with external.make("simple_spread", 1, max_cycles=6) as each, Server(each) as server:
            collector = Collector(each, make(), batch_mode="complete", seed=0)
            assert [server.publish(collector), server.publish(make()), server.publish({"main": make()})] == [1, 2, 3]
            env = marlvec.registry.resolve("simple_spread")(max_cycles=6)

            def play(url: str, env: Any = env, make: Any = make) -> None:
                with Client(url, timeout=10, local=LocalInference(policies=make())) as client:
                    play_parallel(client, env, 0, 1)
                    play_parallel(client, env, 0, 2)
                env.close()

            thread = threading.Thread(target=play, args=(server.url,))
            thread.start()
            found.append(collector.collect(episodes=2)["main"])
            thread.join()
    for name in ("obs", "actions", "rewards", "t"):
        np.testing.assert_array_equal(found[0][name], found[1][name], err_msg=name)


def test_what_more_an_object_has_is_used() -> None:
    """Spaces, seeds, state and version; its attributes show, and ``explore`` is told."""
    full = Full(shift=1)
    with envs() as each, envs(1) as others:
        collector = Collector(each, full, seed=0)
        assert collector.collect(env_steps=9)["main"].explored.all()
        collector.explore, full.version = False, 4
        batch = collector.collect(env_steps=9)["main"]
        assert not batch.explored.any()
        assert set(batch.policy_version) == {4}
        assert full.calls == [("setup", 5)]
        collector.reset(seed=1)
        assert len(set(full.seeds)) == 2
        before = copy.deepcopy(vars(full))
        collector.evaluate(2, others)
        assert vars(full) == before
        held: Any = collector.policies["main"]
        assert (held.shift, held.wrapped) == (1, full)
        assert "Full object" in repr(held)
    told = Told()
    with envs() as each:
        Collector(each, told, explore=False, seed=0).collect(env_steps=9)
    assert set(told.told) == {False}


def test_a_wrapped_objects_state_is_saved(tmp_path: Path) -> None:
    """In a checkpoint, in a map that swaps it out, and in a pool."""
    save_policy(tmp_path / "policy.npz", as_policy(Full(2)))
    assert load_policy(tmp_path / "policy.npz").state == {"shift": 2}
    policies = PolicyMap({"a": Full, "b": Full}, capacity=1)
    policies["a"].load_state_dict({"shift": 2})
    policies["a"].version = 7
    assert policies["b"].state_dict() == {"shift": 0}
    assert policies.in_memory == ("b",)
    assert (policies["a"].state_dict(), policies["a"].version) == ({"shift": 2}, 7)
    policies["b"].set_weights(policies["a"].get_weights())
    assert (policies["b"].state_dict(), policies["b"].version) == ({"shift": 2}, 0)
    pool = OpponentPool(Full)
    pool.add("two", Full(2))
    assert pool["two"].policy_state() == {"shift": 2}
    rows = Rows(t=np.arange(3), agent_index=np.zeros(3, int), env_id=np.zeros(3, int))
    policy = pool["two"].policy()
    policy.setup(Box(0, 50, (2,)), Discrete(3), seed=0)
    assert policy.act(rows)[0].tolist() == [2, 0, 1]


def test_one_object_is_one_policy() -> None:
    """Under two ids it is refused, as a Policy is; a function may be many; nothing outlives who uses it."""
    one = OneMethod()
    with envs() as each:
        with pytest.raises(ArgumentError, match="one policy object has two ids"):
            Collector(each, {"a": one, "b": one}, "a")
        collector = Collector(each, {"a": one}, seed=0)
        with pytest.raises(ArgumentError, match="has the id 'a' already"):
            collector.add_policy("b", one)
        Collector(each, {"a": by_place, "b": by_place}, "a", seed=0)
    assert as_policy(one) is collector.policies["a"]
    policy = Derived()
    assert as_policy(policy) is policy
    gone = weakref.ref(one)
    del one, collector
    gc.collect()
    assert gone() is None


def no_arguments() -> Policy:
    return Reference()


@pytest.mark.mostly_slow("imports libraries", quick=3)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Reference, r"the class Reference: give an instance of it, Reference\(\.\.\.\)"),
        (OneMethod, r"the class OneMethod: give an instance"),
        (Nim, "the class Nim: give an instance"),
        (no_arguments, r"a function of \(\) -> .*: call it, if it builds a policy"),
        (lambda obs, explore: 0, r"a function of \(obs, explore\)"),
        ("random", "'random'"),
        (None, "None"),
        (3, "3"),
        (object(), "<object"),
    ],
    ids=[
        "a policy class",
        "a class with act",
        "an env class",
        "a builder",
        "a function of two",
        "a name",
        "None",
        "a number",
        "an object",
    ],
)
def test_a_value_that_is_not_a_policy_raises_with_advice(given: Any, message: str) -> None:
    """Wherever it is given, and nothing has changed there."""
    expected = (
        rf"must be a marlvec Policy, an object with a method act\(rows\), or a function of rows.*; got .*{message}"
    )
    with envs() as each:
        collector = Collector(each, {"a": Reference()}, "a", seed=0)
        calls: list[Callable[[], object]] = [
            lambda: as_policy(given),
            lambda: Collector(each, given),
            lambda: Collector(each, {"main": given}),
            lambda: collector.add_policy("b", given),
            lambda: OpponentPool(Reference).add("x", given),
            lambda: evaluate_match({"a": Reference(), "b": given}, Nim, 2, backend="sync"),
        ]
        for call in calls:
            with pytest.raises(ArgumentError, match=expected):
                call()
        assert list(collector.policies) == ["a"]
    with pytest.raises(ArgumentError, match=r"act\(rows\)"):
        PolicyMap({"a": lambda: given}, capacity=1)["a"]


def test_a_torch_module_raises_and_names_torch_policy() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(ArgumentError, match=r"a torch module: give TorchPolicy\(module\)"):
        as_policy(torch.nn.Linear(2, 3))


def test_functions_are_function_policies_and_objects_object_policies() -> None:
    assert isinstance(as_policy(by_place), FunctionPolicy)
    assert isinstance(as_policy(OneMethod()), ObjectPolicy)
    assert isinstance(as_policy(len), FunctionPolicy)  # type: ignore[arg-type]  # it takes one argument
    again = copy.deepcopy(as_policy(Full(2)))
    assert again.state_dict() == {"shift": 2}


def test_policies_without_weights_return_none_and_refuse_weights() -> None:
    for policy in (as_policy(OneMethod()), as_policy(by_place), Derived()):
        assert policy.get_weights() == {}
        policy.set_weights({})
        with pytest.raises(ArgumentError, match=r"weights of a .*expected none, got \['shift'\]; override get_weights"):
            policy.set_weights({"shift": 2})

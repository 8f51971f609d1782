"""Policies on their own: functions, classes with one method, and scripts for one agent at a time."""

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
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Text, Tuple
from hypothesis import given
from hypothesis import strategies as st

import marlvec
from marlvec import Collector, external
from marlvec.connectors import FilterRows, Rows
from marlvec.errors import ArgumentError, ContractError, StateError
from marlvec.external import Client, LocalInference, Server
from marlvec.policies import (
    FunctionPolicy,
    Memory,
    ObjectPolicy,
    Policy,
    PolicyMap,
    RandomPolicy,
    ScriptedPolicy,
    as_policy,
    load_policy,
    save_policy,
)
from marlvec.selfplay import OpponentPool, evaluate_match
from tests.collect.players import KINDS, MODES, sync
from tests.external.served import play_parallel
from tests.selfplay.nim import Nim
from tests.vector.support.reference import refused

# --- Policies on their own


OBS = Box(-1, 1, (2,), np.float32)


def rows(n: int, **columns: Any) -> Rows:
    return Rows(env_id=np.arange(n) // 2, agent_index=np.arange(n) % 2, obs=np.zeros((n, 2), np.float32), **columns)


def made(space: Space[Any], seed: int = 0) -> RandomPolicy:
    policy = RandomPolicy()
    policy.setup(OBS, space, seed=seed)
    return policy


def leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in leaves(value)]
    if isinstance(tree, tuple):
        return [leaf for value in tree for leaf in leaves(value)]
    return [tree]


def row(space: Space[Any], tree: Any, i: int) -> Any:
    if isinstance(space, Dict):
        return {key: row(sub, tree[key], i) for key, sub in space.spaces.items()}
    if isinstance(space, Tuple):
        return tuple(row(sub, part, i) for sub, part in zip(space.spaces, tree, strict=True))
    return tree[i] if isinstance(space, Discrete) else np.asarray(tree[i])


boxes = st.sampled_from(
    [
        Box(-1, 1, (), np.float32),
        Box(-3, 5, (2, 3), np.float64),
        Box(-np.inf, np.inf, (2,), np.float32),
        Box(0, np.inf, (2,), np.float64),
        Box(-np.inf, 7, (2,), np.float16),
        Box(np.float32([-np.inf, 0, -1]), np.float32([1, np.inf, 1]), dtype=np.float32),
        Box(-np.finfo(np.float32).max, np.finfo(np.float32).max, (3,), np.float32),
        Box(-np.finfo(np.float64).max, np.finfo(np.float64).max, (3,), np.float64),
        Box(0, 255, (2, 2), np.uint8),
        Box(-128, 127, (4,), np.int8),
        Box(0, 1, (3,), np.bool_),
        Box(np.iinfo(np.int64).min, np.iinfo(np.int64).max, (2,), np.int64),
        Box(-1, 1, (0,), np.float32),
        Box(2, 2, (2,), np.float32),
    ]
)
discrete = st.builds(
    lambda n, start, dtype: Discrete(n, start=dtype(start)),
    st.integers(1, 7),
    st.integers(-3, 3),
    st.sampled_from([np.int64, np.int32]),
)
simple = st.one_of(
    boxes,
    discrete,
    st.lists(st.integers(1, 5), min_size=1, max_size=4).map(MultiDiscrete),
    st.sampled_from([MultiDiscrete([[2, 3], [4, 1]]), MultiDiscrete([3, 2], start=[-1, 5]), MultiBinary([2, 2])]),
)
nested = st.recursive(
    simple,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=2).map(Dict),
        st.lists(inner, min_size=1, max_size=2).map(Tuple),
    ),
    max_leaves=4,
)


@given(space=nested, n=st.integers(0, 9), seed=st.integers(0, 2**64 - 1))
def test_random_actions_are_in_any_space_and_a_seed_fixes_them(space: Space[Any], n: int, seed: int) -> None:
    drawn, again = made(space, seed).act(rows(n)), made(space, seed).act(rows(n))
    for a, b in zip(leaves(drawn), leaves(again), strict=True):
        assert len(a) == n
        np.testing.assert_array_equal(a, b, strict=True)
    for i in range(n):
        assert space.contains(row(space, drawn, i)), (space, row(space, drawn, i))


@pytest.mark.parametrize(
    ("space", "choices"),
    [
        (Discrete(4, start=-1), 4),
        (MultiDiscrete([4, 4]), 4),
        (MultiBinary(3), 2),
        (Box(3, 6, (2,), np.int16), 4),
        (Box(0, 1, (2,), np.bool_), 2),
    ],
)
def test_every_choice_is_as_likely(space: Any, choices: int) -> None:
    drawn = np.asarray(made(space).act(rows(8000))).reshape(8000, -1)
    for column in drawn.T:
        _, counts = np.unique(column, return_counts=True)
        assert len(counts) == choices
        assert np.abs(counts - 8000 / choices).max() < 5 * np.sqrt(8000 / choices)


def test_boxes_are_drawn_as_gymnasium_draws_them() -> None:
    """Not from the same stream, but from the same distribution, whatever bounds an element has."""
    low, high = np.float64([-2, -np.inf, 1, -np.inf]), np.float64([3, 1, np.inf, np.inf])
    space = Box(low, high, dtype=np.float64, seed=0)
    ours = made(space).act(rows(4000))
    theirs = np.stack([space.sample() for _ in range(4000)])
    assert ours.dtype == theirs.dtype
    for q in (0.02, 0.25, 0.5, 0.75, 0.98):
        np.testing.assert_allclose(np.quantile(ours, q, axis=0), np.quantile(theirs, q, axis=0), atol=0.3)


def test_half_bounded_integers_are_rounded_down_within_their_bounds() -> None:
    space = Box(0, 10, (3,), np.int32)
    space.bounded_below, space.bounded_above = np.array([True, False, True]), np.array([True, True, False])
    drawn = made(space).act(rows(2000))
    assert drawn.dtype == np.int32
    assert set(np.unique(drawn[:, 0])) == set(range(11))
    assert drawn[:, 1].max() <= 10
    assert drawn[:, 2].min() >= 0
    assert len(np.unique(drawn[:, 1])) > 3


masks = st.lists(st.lists(st.booleans(), min_size=5, max_size=5).filter(any), min_size=1, max_size=6)


@given(mask=masks, seed=st.integers(0, 1000), start=st.integers(-2, 2))
def test_a_masked_choice_is_always_allowed(mask: list[list[bool]], seed: int, start: int) -> None:
    allowed = np.array(mask)
    actions = made(Discrete(5, start=start), seed).act(rows(len(mask), action_mask=allowed))
    assert allowed[np.arange(len(mask)), actions - start].all()


@pytest.mark.slow("collects whole runs with many policies")
@given(mask=masks, seed=st.integers(0, 1000))
def test_masks_of_a_multidiscrete_stand_one_after_the_other(mask: list[list[bool]], seed: int) -> None:
    allowed = np.array([[*row[:3], any(row[3:]) or True, row[4]] if any(row[:3]) else [True] * 5 for row in mask])
    actions = made(MultiDiscrete([3, 2], start=[0, 7]), seed).act(rows(len(mask), action_mask=allowed))
    n = np.arange(len(mask))
    assert allowed[n, actions[:, 0]].all()
    assert allowed[n, 3 + actions[:, 1] - 7].all()


def test_allowed_choices_are_equally_likely() -> None:
    mask = np.tile([True, False, True, False, True], (6000, 1))
    _, counts = np.unique(made(Discrete(5)).act(rows(6000, action_mask=mask)), return_counts=True)
    assert len(counts) == 3
    assert np.abs(counts - 2000).max() < 250


def test_a_mask_that_allows_nothing_or_does_not_fit_is_an_error() -> None:
    mask = np.ones((4, 5), np.bool_)
    mask[3] = False
    refused(ContractError, "env 1, agent 1 allows nothing", made(Discrete(5)).act, rows(4, action_mask=mask))
    refused(ContractError, "5 entries.* 4 choices", made(Discrete(4)).act, rows(4, action_mask=mask))
    refused(ContractError, "5 entries.* 6 choices", made(MultiDiscrete([4, 2])).act, rows(4, action_mask=mask))
    mask = np.ones((4, 5), np.bool_)
    mask[2, :2] = False
    refused(ContractError, "env 1, agent 0", made(MultiDiscrete([2, 3])).act, rows(4, action_mask=mask))


def test_a_seed_of_its_own_beats_the_collectors() -> None:
    space = Discrete(1000)

    def draw(policy: RandomPolicy, seed: int) -> list[int]:
        policy.setup(OBS, space, seed=seed)
        policy.reseed(seed)
        return list(policy.act(rows(5)))

    assert draw(RandomPolicy(), 1) != draw(RandomPolicy(), 2)
    assert draw(RandomPolicy(seed=7), 1) == draw(RandomPolicy(seed=7), 2)
    assert (repr(RandomPolicy()), repr(RandomPolicy(seed=7))) == ("RandomPolicy()", "RandomPolicy(seed=7)")


def test_setup_comes_first_and_stores_the_spaces() -> None:
    policy = RandomPolicy()
    assert policy.action_space is None
    refused(StateError, r"setup\(\)", policy.act, rows(2))
    policy.setup(OBS, Discrete(3), seed=0)
    assert (policy.observation_space, policy.action_space, policy.version) == (OBS, Discrete(3), 0)


def test_a_function_is_a_policy() -> None:
    def still(given: Rows) -> Any:
        return np.zeros(len(given), int), {"logp": np.zeros(len(given))}

    policy = FunctionPolicy(still)
    policy.setup(OBS, Discrete(3), seed=0)
    actions, columns = policy.act(rows(3), explore=False)
    assert actions.tolist() == [0, 0, 0]
    assert list(columns) == ["logp"]
    assert isinstance(policy, Policy)
    assert repr(policy) == "FunctionPolicy(still)"
    refused(ArgumentError, "expected a function", FunctionPolicy, 3)


# --- What may stand for a policy: a class with one method ``act(rows)``, or a function of rows, wherever one is wanted


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
        refused(ArgumentError, "one policy object has two ids", Collector, each, {"a": one, "b": one}, "a")
        collector = Collector(each, {"a": one}, seed=0)
        refused(ArgumentError, "has the id 'a' already", collector.add_policy, "b", one)
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
            refused(ArgumentError, expected, call)
        assert list(collector.policies) == ["a"]
    with pytest.raises(ArgumentError, match=r"act\(rows\)"):
        PolicyMap({"a": lambda: given}, capacity=1)["a"]


def test_a_torch_module_raises_and_names_torch_policy() -> None:
    torch = pytest.importorskip("torch")
    refused(ArgumentError, r"a torch module: give TorchPolicy\(module\)", as_policy, torch.nn.Linear(2, 3))


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


# --- Scripts that are written for one agent at a time


FIVE = Discrete(5)


def scripted(script: Any, space: Any = FIVE, seed: int = 0) -> ScriptedPolicy:
    policy = ScriptedPolicy(script)
    policy.setup(OBS, space, seed=seed)
    return policy


def rows_seen(n: int, t: int = 0, **columns: Any) -> Rows:
    ids = np.arange(n)
    obs = np.stack([ids, ids * 10], axis=1).astype(np.float32)
    given = {"env_id": ids // 2, "agent_index": ids % 2, "obs": obs, "t": np.full(n, t), "eps_id": ids // 2}
    return Rows({**given, **columns})


def test_actions_depend_on_the_agents_observation_name_and_memory() -> None:
    asked = []

    def script(obs: Any, agent: int, t: int, memory: Memory) -> int:
        memory["sum"] = memory.get("sum", 0) + int(obs[1])
        asked.append((agent, t, memory["sum"], type(agent), type(t)))
        return int(obs[0]) % 5

    policy = scripted(script)
    for t in range(3):
        actions = policy.act(rows_seen(4, t))
        assert actions.dtype == np.int64
        assert actions.tolist() == [0, 1, 2, 3]
    assert asked == [(i % 2, t, 10 * i * (t + 1), int, int) for t in range(3) for i in range(4)]


@pytest.mark.mostly_slow("collects whole runs", quick=2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_memories_begin_anew_with_each_episode_and_never_in_between(kind: str, mode: str) -> None:
    """Whatever agents come late, go early, wait for their turn or are left out."""

    def script(obs: Any, agent: int, t: int, memory: Memory) -> int:
        turns.append((t, memory.setdefault("turns", 0)))
        memory["turns"] += 1
        allowed = np.arange(5) if memory.action_mask is None else np.flatnonzero(memory.action_mask)
        return int(allowed[0])

    turns: list[tuple[int, int]] = []
    with sync(kind, 3, 3, mode) as envs:
        collector = Collector(envs, ScriptedPolicy(script), seed=1)
        for amount in (40, 1, 7, 60):
            collector.collect(env_steps=amount)
        assert collector.metrics.episodes_total > 6
    assert len(turns) == collector.metrics.agent_steps
    assert all(t == remembered for t, remembered in turns)


def test_a_memory_is_new_though_the_episodes_first_rows_were_filtered() -> None:
    def script(obs: Any, agent: int, t: int, memory: Memory) -> int:
        assert memory.setdefault("episode", int(obs[0])) == int(obs[0])
        return 0

    policy = scripted(script)
    first = rows_seen(2, 0, eps_id=np.array([5, 5]), obs=np.zeros((2, 2)))
    later = rows_seen(2, 3, eps_id=np.array([6, 6]), obs=np.ones((2, 2)))
    for part in (first, first.replace(t=np.full(2, 1)), later):
        policy.act(part)
    with sync("parallel", 2, 2) as envs:
        keep = FilterRows(lambda rows: ~rows.first | rows.last, noop=0)
        turns: list[int] = []
        counts = ScriptedPolicy(lambda obs, agent, t, memory: turns.append(memory.setdefault("n", t)) or 0)
        Collector(envs, counts, agent_connectors=[keep], seed=0).collect(env_steps=60)
        assert set(turns) == {0}  # `t` counts decisions, and the no-op was none


def test_random_numbers_belong_to_seed_env_agent_and_episode() -> None:
    def script(obs: Any, agent: int, t: int, memory: Memory) -> int:
        return int(memory.rng.integers(10**9))

    space = Discrete(10**9)
    together = scripted(script, space, seed=3).act(rows_seen(6))
    alone = scripted(script, space, seed=3).act(rows_seen(6).take(np.array([4])))
    assert together[4] == alone[0]
    assert len(set(together.tolist())) == 6
    assert scripted(script, space, seed=4).act(rows_seen(6)).tolist() != together.tolist()
    again = scripted(script, space, seed=3)
    again.act(rows_seen(6))
    assert again.act(rows_seen(6, 1)).tolist() != together.tolist()
    again.reseed(3)
    assert again.act(rows_seen(6)).tolist() == together.tolist()


def test_actions_of_any_space_are_stacked() -> None:
    space = Dict(
        go=Box(-1, 1, (2,), np.float32),
        pair=Tuple((Discrete(3, start=-1), MultiDiscrete([2, 3]))),
        press=MultiBinary(2),
        say=Text(5),
    )

    def script(obs: Any, agent: int, t: int, memory: Memory) -> Any:
        return {"go": [agent, 0.5], "pair": (agent - 1, [1, 2]), "press": [0, 1], "say": "ab"[agent]}

    out = scripted(script, space).act(rows_seen(3))
    np.testing.assert_array_equal(out["go"], np.array([[0, 0.5], [1, 0.5], [0, 0.5]], np.float32), strict=True)
    assert out["pair"][0].tolist() == [-1, 0, -1]
    assert out["pair"][1].tolist() == [[1, 2]] * 3
    assert out["press"].dtype == np.int8
    assert out["say"].tolist() == ["a", "b", "a"]


@pytest.mark.parametrize("space", [Box(0, 255, (2,), np.uint8), Box(0, 1, (2,), np.bool_)], ids=str)
def test_ints_of_a_list_that_the_dtype_of_the_space_can_hold_are_an_action(space: Box) -> None:
    actions = scripted(lambda obs, agent, t, memory: [0, 1], space).act(rows_seen(2))
    assert actions.dtype == space.dtype
    assert actions.tolist() == [[0, 1]] * 2


@pytest.mark.parametrize("bad", [None, 1.5, [1], "left", {"a": 1}, [[1], [1, 2]], 2**70])
def test_a_wrong_action_names_the_script_the_env_and_the_agent(bad: Any) -> None:
    def clumsy(obs: Any, agent: int, t: int, memory: Memory) -> Any:
        return bad if obs[0] == 3 else 1

    refused(ContractError, r"ScriptedPolicy\(clumsy\).*env 1, agent 1.*Discrete", scripted(clumsy).act, rows_seen(4))
    with pytest.raises(ContractError, match="env 1, agent 1"):
        scripted(lambda obs, agent, t, memory: 300 if obs[0] == 3 else 1, Box(-128, 127, (), np.int8)).act(rows_seen(4))


def test_a_scripts_exception_names_the_agent() -> None:
    def script(obs: Any, agent: int, t: int, memory: Memory) -> int:
        return 1 // int(obs[0] - 2)

    caught = refused(ZeroDivisionError, "", scripted(script).act, rows_seen(4, 7))
    assert "env 1, agent 0, decision 7" in caught.__notes__[0]
    refused(ArgumentError, "expected a function", ScriptedPolicy, 3)
    refused(StateError, r"setup\(\)", ScriptedPolicy(script).act, rows_seen(1))


def test_a_copy_from_its_state_goes_on_alike() -> None:
    def script(obs: Any, agent: int, t: int, memory: Memory) -> int:
        memory.setdefault("seen", []).append(np.asarray(obs))
        memory["last"] = (agent, {"t": t})
        return int(memory.rng.integers(1000)) + len(memory["seen"])

    one, other = scripted(script, Discrete(10**6), seed=5), scripted(script, Discrete(10**6), seed=6)
    one.act(rows_seen(4))
    state = one.state_dict()
    ahead = one.act(rows_seen(4, 1))
    other.load_state_dict(state)
    assert other.act(rows_seen(4, 1)).tolist() == ahead.tolist()
    other.load_state_dict(state)  # neither of them has changed it
    assert other.act(rows_seen(4, 1)).tolist() == ahead.tolist()
    refused(ArgumentError, "state of a ScriptedPolicy", other.load_state_dict, RandomPolicy(1).state_dict())

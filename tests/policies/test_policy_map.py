"""More policies than memory holds."""

from __future__ import annotations

import errno
import gc
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from hypothesis import given
from hypothesis import strategies as st

from marlvec.collect import Collector
from marlvec.connectors import Rows
from marlvec.errors import ArgumentError, CheckpointError, ResourceError, SerialisationError
from marlvec.policies import FunctionPolicy, Policy, PolicyMap, RandomPolicy, ScriptedPolicy
from tests.collect.players import KINDS, MODES, sync
from tests.vector.support.reference import refused

OBS = Box(-1, 1, (2,), np.float32)
ACTIONS = Discrete(1000)


class Net(Policy):
    """Weights that its state brings back, and a random stream."""

    def __init__(self) -> None:
        self.weights: dict[str, Any] = {"w": np.zeros((2, 3), np.float32)}
        self.rng = np.random.default_rng(0)

    def reseed(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def act(self, rows: Rows, *, explore: bool = True) -> Any:
        return self.rng.integers(5, size=len(rows)), {"w": np.full(len(rows), np.float64(self.weights["w"].sum()))}

    def state_dict(self) -> dict[str, Any]:
        return {"weights": {k: np.copy(v) for k, v in self.weights.items()}, "rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.weights = dict(state["weights"])
        self.rng.bit_generator.state = state["rng"]


def nets(n: int, capacity: int, folder: Path | None = None) -> PolicyMap:
    return PolicyMap({f"p{i}": Net for i in range(n)}, capacity=capacity, folder=folder)


def weigh(policy: Policy, value: float) -> None:
    assert isinstance(policy, Net)
    policy.weights = {"w": np.full((2, 3), value, np.float32)}


AWKWARD: dict[str, Any] = {
    "nan": np.array([np.nan, -0.0, np.inf, 5e-324]),
    "payload": np.array([0x7FC12345], np.uint32).view(np.float32),
    "half": np.array([1e-7], np.float16),
    "empty": np.zeros((0, 3), np.int8),
    "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "complex": np.array([1 + 2j]),
    "bool": np.array(True),
    "big": np.array([2**63 - 1, -(2**63)]),
    "text": np.array(["ä", "bc"]),
    "swapped": np.array([1.5, 2.5], ">f8"),
}


@pytest.mark.checklist(107)
def test_weights_come_back_to_the_bit(tmp_path: Path) -> None:
    policies = nets(3, 1, tmp_path)
    first = policies["p0"]
    assert isinstance(first, Net)
    first.setup(OBS, ACTIONS, seed=7)
    first.weights, first.version = dict(AWKWARD), 41
    first.rng.random(3)
    known, stream = (
        {name: (v.dtype, v.shape, v.tobytes()) for name, v in AWKWARD.items()},
        first.rng.bit_generator.state,
    )
    watch = weakref.ref(first)
    del first
    policies["p1"]
    assert watch() is None  # it is out of memory indeed
    assert policies.in_memory == ("p1",)
    back = policies["p0"]
    assert isinstance(back, Net)
    assert {name: (v.dtype, v.shape, v.tobytes()) for name, v in back.weights.items()} == known
    assert (back.version, back.rng.bit_generator.state) == (41, stream)
    assert (back.observation_space, back.action_space) == (OBS, ACTIONS)


@pytest.mark.slow("collects whole runs with many policies")
@given(asked=st.lists(st.integers(0, 5), max_size=40), capacity=st.integers(1, 6))
def test_the_one_asked_for_longest_ago_goes_first_and_nothing_is_lost(asked: list[int], capacity: int) -> None:
    policies = nets(6, capacity)
    order: OrderedDict[str, None] = OrderedDict()  # what a least-recently-used cache holds
    weights = dict.fromkeys(policies, 0.0)
    for turn, i in enumerate(asked):
        name = f"p{i}"
        policy = policies[name]
        assert isinstance(policy, Net)
        assert (policy.weights["w"] == weights[name]).all()
        order.pop(name, None)
        order[name] = None
        while len(order) > capacity:
            order.popitem(last=False)
        assert policies.in_memory == tuple(order)
        weights[name] = turn + 0.5
        weigh(policy, weights[name])
        del policy
    files = list(policies.folder.iterdir())
    assert len(files) == len(set(asked)) - len(order)
    for name, value in weights.items():
        assert (policies[name].weights["w"] == value).all()  # type: ignore[attr-defined]  # they are Nets


def test_policies_given_as_objects_stay_and_do_not_count() -> None:
    main, script = Net(), ScriptedPolicy(lambda obs, agent, t, memory: 0)
    policies = PolicyMap({"main": main, "script": script, "a": Net, "b": Net}, capacity=1)
    for name in ("a", "main", "b", "script", "a"):
        policies[name]
    assert policies["main"] is main
    assert policies.in_memory == ("a",)
    assert list(policies) == ["main", "script", "a", "b"]
    assert len(policies) == 4
    assert "b" in policies
    assert policies.in_memory == ("a",)  # looking whether it is there swaps nothing in


@pytest.mark.slow("collects whole runs with many policies")
def test_what_the_caller_holds_is_not_swapped_out_under_its_hands() -> None:
    policies = nets(4, 1)
    mine = policies["p0"]
    policies["p1"]
    assert policies["p0"] is mine
    weigh(mine, 5.0)
    for name in ("p2", "p3", "p1"):
        policies[name]
    assert policies["p0"] is mine
    del mine
    policies["p1"]
    policies["p2"]
    assert "p0" not in policies.in_memory
    assert len(policies.in_memory) == 1
    assert (policies["p0"].weights["w"] == 5.0).all()  # type: ignore[attr-defined]  # a Net


@pytest.mark.slow("collects whole runs with many policies")
def test_a_policy_that_refers_to_itself_is_swapped_out_too() -> None:
    class Loop(Net):
        def __init__(self) -> None:
            super().__init__()
            self.me = self

    policies = PolicyMap({"a": Loop, "b": Loop}, capacity=1)
    gc.disable()
    try:
        weigh(policies["a"], 3.0)
        policies["b"]
    finally:
        gc.enable()
    assert policies.in_memory == ("b",)
    assert (policies["a"].weights["w"] == 3.0).all()  # type: ignore[attr-defined]  # a Net


def test_random_and_scripted_policies_go_on_where_they_were() -> None:
    def script(obs: Any, agent: int, t: int, memory: Any) -> int:
        memory["n"] = memory.get("n", 0) + 1
        return int(memory.rng.integers(100)) + 100 * memory["n"]

    def rows(t: int) -> Rows:
        ids = np.arange(3)
        return Rows(env_id=ids, agent_index=ids * 0, eps_id=ids, t=np.full(3, t), obs=np.zeros((3, 2)))

    kinds: list[Callable[[], Policy]] = [RandomPolicy, lambda: ScriptedPolicy(script)]
    for make in kinds:
        stays = make()
        stays.setup(OBS, ACTIONS, seed=9)
        policies = PolicyMap({"a": make, "b": make}, capacity=1)
        policies["a"].setup(OBS, ACTIONS, seed=9)
        for t in range(5):
            assert policies["a"].act(rows(t)).tolist() == stays.act(rows(t)).tolist()
            policies["b"]


def _full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.checklist(107)
def test_a_full_disk_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    policies = nets(3, 1)
    weigh(policies["p0"], 2.0)
    policies["p1"]
    weigh(policies["p1"], 3.0)
    with monkeypatch.context() as patch:
        patch.setattr("marlvec.serialization.archive.os.fsync", _full_disk)
        for _ in range(2):
            with pytest.raises(ResourceError, match=r"'p1' cannot be swapped out to .*No space left.*nothing is lost"):
                policies["p2"]
        assert policies.in_memory == ("p1",)
        assert (policies["p1"].weights["w"] == 3.0).all()  # type: ignore[attr-defined]  # a Net
        assert [path.name for path in policies.folder.iterdir() if path.name.endswith(".tmp")] == []
    for name, value in (("p2", 0.0), ("p0", 2.0), ("p1", 3.0)):
        assert (policies[name].weights["w"] == value).all()  # type: ignore[attr-defined]  # a Net


def test_a_folder_that_is_gone_loses_nothing(tmp_path: Path) -> None:
    policies = nets(2, 1, tmp_path)
    weigh(policies["p0"], 2.0)
    policies.folder.rmdir()
    with pytest.raises(ResourceError, match="No such file"):
        policies["p1"]
    assert (policies["p0"].weights["w"] == 2.0).all()  # type: ignore[attr-defined]  # a Net
    refused(FileNotFoundError, "", nets, 2, 1, tmp_path / "nowhere")


def test_a_state_that_no_file_can_hold_stays_in_memory() -> None:
    policies = nets(2, 1)
    thing = object()
    policies["p0"].weights = {"w": thing}  # type: ignore[attr-defined]  # a Net
    with pytest.raises(SerialisationError, match="'p0'") as caught:
        policies["p1"]
    assert "nothing is lost" in caught.value.__notes__[0]
    assert policies["p0"].weights["w"] is thing  # type: ignore[attr-defined]  # a Net


def test_a_damaged_or_stolen_file_says_so_and_works_again_when_it_is_put_back() -> None:
    policies = nets(2, 1)
    weigh(policies["p0"], 2.0)
    policies["p1"]
    (file,) = policies.folder.iterdir()
    content = file.read_bytes()
    for damage in (content[:-1], content[:40] + b"?" + content[41:], b""):
        file.write_bytes(damage)
        with pytest.raises(CheckpointError, match=file.name):
            policies["p0"]
    policies["p1"]
    (file,) = [path for path in policies.folder.iterdir() if path.name == file.name]
    file.write_bytes(content)
    assert (policies["p0"].weights["w"] == 2.0).all()  # type: ignore[attr-defined]  # a Net


def test_policies_are_added_replaced_and_taken_out() -> None:
    policies = nets(2, 1)
    weigh(policies["p0"], 2.0)
    policies["p1"]
    policies["p0"] = Net  # what it was is forgotten, its file too
    assert (policies["p0"].weights["w"] == 0.0).all()  # type: ignore[attr-defined]  # a Net
    policies["p2"] = Net()
    del policies["p1"]
    assert list(policies) == ["p0", "p2"]
    assert list(policies.folder.iterdir()) == []
    with pytest.raises(KeyError, match=r"'p1'.*\['p0', 'p2'\]"):
        policies["p1"]
    with pytest.raises(KeyError, match="'p1'"):
        del policies["p1"]
    assert repr(policies).startswith("<PolicyMap of 2, 1 of at most 1 built ones in memory")


def test_ids_may_be_any_text() -> None:
    names = ["a/b", "..", "", "A", "a", "ä" * 300, "x" * 300, "x" * 301, "\x00", "\ud800"]
    policies = PolicyMap(dict.fromkeys(names, Net), capacity=1)
    for i, name in enumerate(names):
        weigh(policies[name], float(i))
    assert len(list(policies.folder.iterdir())) == len(names) - 1
    for i, name in enumerate(names):
        assert (policies[name].weights["w"] == i).all()  # type: ignore[attr-defined]  # a Net


def test_its_folder_is_removed_with_it(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("stays")
    one, other = nets(2, 1, tmp_path), nets(2, 1, tmp_path)
    for policies, value in ((one, 1.0), (other, 2.0)):
        weigh(policies["p0"], value)
        policies["p1"]
    assert (one["p0"].weights["w"] == 1.0).all()  # type: ignore[attr-defined]  # a Net
    del one
    assert (other["p0"].weights["w"] == 2.0).all()  # type: ignore[attr-defined]  # a Net
    del other, policies
    gc.collect()
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_value_that_is_not_a_policy_is_refused() -> None:
    for capacity in (0, -1, 1.5, True, None):
        refused(ArgumentError, "capacity=.*expected an integer of at least 1", PolicyMap, capacity=capacity)
    policies = PolicyMap({"odd": lambda: 3}, capacity=1)  # type: ignore[arg-type,return-value]  # on purpose
    with pytest.raises(
        ArgumentError, match="object that the function of policy 'odd' built must be a marlvec Policy.* got 3"
    ):
        policies["odd"]
    with pytest.raises(ArgumentError, match="policy 'x' must be a marlvec Policy.* got 3"):
        policies["x"] = 3  # type: ignore[assignment]  # on purpose
    with pytest.raises(ArgumentError, match="must be a string"):
        policies[3] = Net  # type: ignore[index]  # on purpose


@pytest.mark.slow("collects whole runs with many policies")
@pytest.mark.checklist(107)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["parallel", "turns", "keyed"])
def test_a_collector_gives_the_same_whatever_fits_into_memory(kind: str, mode: str) -> None:
    """Four policies, one of them in memory at a time: every call swaps, and no number differs."""
    assert kind in KINDS
    names = [f"p{i}" for i in range(4)]

    def mapping(agent: str, episode: Any) -> str:
        return names[int(episode.rng.integers(4))]

    def batches(policies: Any) -> list[Any]:
        with sync(kind, 3, 3, mode) as envs:
            collector = Collector(envs, policies, mapping, seed=3)
            found = []
            for k, amount in enumerate((30, 7, 40)):
                found.append(collector.collect(env_steps=amount))
                weigh(policies["p2"], float(k))
                policies["p2"].version += 1
            collector.reset(seed=8)
            return [*found, collector.collect(env_steps=30)]

    swapped = nets(4, 1)
    for mine, other in zip(batches(swapped), batches({name: Net() for name in names}), strict=True):
        assert list(mine) == list(other)
        for name, own in mine.items():
            assert own.keys() == other[name].keys()
            for column, values in own.items():
                np.testing.assert_array_equal(values, other[name][column], strict=True)
    assert len(swapped.in_memory) == 1


def test_a_collector_takes_a_function_for_a_policy_where_a_map_holds_them() -> None:
    with sync("parallel", 2, 2) as envs:
        policies = nets(2, 1)
        collector = Collector(envs, policies, lambda name, episode: "p0" if episode.number < 2 else "late", seed=0)
        collector.collect(env_steps=4)
        collector.add_policy("late", Net)
        assert collector.policies is policies
        assert "late" in collector.collect(episodes=8)
        with pytest.raises(ArgumentError, match="must be a marlvec Policy"):
            Collector(envs, {"a": FunctionPolicy(len)}).add_policy("b", Net)

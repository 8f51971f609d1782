"""`save_checkpoint` and `load_checkpoint`: all that was learned comes back, from a file that holds data alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import marlvec
from marlvec.connectors import NormalizeObs
from marlvec.errors import ArgumentError, CheckpointError, SerialisationError
from marlvec.serialization.archive import write_archive
from marlvec.serialization.values import encode, outline


class Kept:
    """Something with a state."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Learner(marlvec.RandomPolicy):
    """Has weights."""

    weights = np.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "weights": self.weights}

    def load_state_dict(self, state: Any) -> None:
        self.weights = state["weights"]
        super().load_state_dict({key: value for key, value in state.items() if key != "weights"})


def collector_of(envs: marlvec.VectorEnv, policy: marlvec.Policy, **options: Any) -> marlvec.Collector:
    return marlvec.Collector(
        envs,
        {"main": policy, "other": marlvec.RandomPolicy()},
        {"agent_0": "main", "agent_1": "main", "agent_2": "other"},
        agent_connectors={"main": [NormalizeObs()]},
        policies_to_train=["main"],
        seed=0,
        **options,
    )


def test_policies_connectors_and_the_rest_come_back(tmp_path: Path) -> None:
    with marlvec.make("simple_spread", num_envs=4, backend="sync") as envs:
        learner = Learner()
        collector = collector_of(envs, learner)
        collector.collect(env_steps=200)
        learner.weights, learner.version = np.arange(2.0), 7
        rest = Kept({"step": 3, "moments": (np.ones(3), [1.5, None])})
        path = marlvec.save_checkpoint(
            tmp_path / "a" / "b",
            collector=collector,
            learner={"rest": rest},
            progress={"done": 200, "curve": [(1, 2.5)]},
        )
        assert path == tmp_path / "a" / "b" / "last.npz"
        assert sorted(file.name for file in path.parent.iterdir()) == ["last.npz"]
        fresh, other = Learner(), Kept()
        found = collector_of(envs, fresh)
        progress = marlvec.load_checkpoint(path.parent, collector=found, learner={"rest": other})
        assert progress == {"done": 200, "curve": [(1, 2.5)]}
        assert (fresh.weights.tolist(), fresh.version) == ([0.0, 1.0], 7)
        assert other.state["step"] == 3
        np.testing.assert_array_equal(other.state["moments"][0], np.ones(3))
        assert found.trained_policies == ("main",)
        states = [one.agent_connectors["main"].state_dict() for one in (collector, found)]
        assert outline(encode(states[0], "it")) == outline(encode(states[1], "it"))
        assert outline(encode(states[0], "it")) != outline(
            encode(collector_of(envs, Learner()).agent_connectors["main"].state_dict(), "it")
        )


def test_the_best_is_kept_beside_the_last(tmp_path: Path) -> None:
    for step, score in enumerate([1.0, 3.0, float("nan"), 2.0, 3.0, -5.0]):
        marlvec.save_checkpoint(tmp_path, progress={"step": step}, score=score)
    marlvec.save_checkpoint(tmp_path, progress={"step": 6})
    assert marlvec.load_checkpoint(tmp_path)["step"] == 6
    assert marlvec.load_checkpoint(tmp_path, which="best")["step"] == 4, "the later of two that are as good"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["best.npz", "last.npz"]


_PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
_VALUES = st.recursive(
    _PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=3)
    ),
    max_leaves=10,
)


@settings(max_examples=30)
@given(value=_VALUES)
def test_plain_values_come_back_as_they_were(value: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("checkpoint")
    kept = Kept(value)
    marlvec.save_checkpoint(folder, learner={"kept": kept}, progress={"value": value})
    other = Kept()
    assert marlvec.load_checkpoint(folder, learner={"kept": other}) == {"value": value}
    assert other.state == value


def test_tensors_come_back_as_tensors_and_training_goes_on_to_the_bit(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    def trainee() -> tuple[Any, Any]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            net = torch.nn.Linear(3, 2)
        return net, torch.optim.Adam(net.parameters(), lr=0.1)

    def step(net: Any, adam: Any) -> None:
        adam.zero_grad()
        net(torch.ones(1, 3)).square().sum().backward()
        adam.step()

    net, adam = trainee()
    step(net, adam)
    marlvec.save_checkpoint(tmp_path, learner={"net": net, "adam": adam}, progress={"pair": (torch.ones(2), [1])})
    step(net, adam)
    again, adam_again = trainee()
    progress = marlvec.load_checkpoint(tmp_path, learner={"net": again, "adam": adam_again})
    assert torch.equal(progress["pair"][0], torch.ones(2))
    step(again, adam_again)
    assert torch.equal(net.weight, again.weight)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), again.parameters(), strict=True))
    with pytest.raises(SerialisationError, match="bfloat16"):
        marlvec.save_checkpoint(tmp_path, learner={"net": net.to(torch.bfloat16)})


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"last\.npz"):
        marlvec.load_checkpoint(tmp_path)
    marlvec.save_checkpoint(tmp_path, learner={"one": Kept(1)})
    with pytest.raises(ArgumentError, match=r"holds the learner \['one'\], not \['two'\]"):
        marlvec.load_checkpoint(tmp_path, learner={"two": Kept()})
    assert marlvec.load_checkpoint(tmp_path) == {}, "who names no learner asks for progress alone"
    with pytest.raises(ArgumentError, match=r"not \[\]"):
        marlvec.load_checkpoint(tmp_path, learner={})
    with pytest.raises(ArgumentError, match="which must be 'last' or 'best'"):
        marlvec.load_checkpoint(tmp_path, which="first")  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"best\.npz"):
        marlvec.load_checkpoint(tmp_path, which="best")
    with pytest.raises(SerialisationError, match="cannot be written down"):
        marlvec.save_checkpoint(tmp_path, progress={"envs": object()})
    with marlvec.make("simple_spread", num_envs=1, backend="sync") as envs:
        collector = collector_of(envs, Learner())
        with pytest.raises(ArgumentError, match="saved without a collector"):
            marlvec.load_checkpoint(tmp_path, collector=collector, learner={"one": Kept()})
        marlvec.save_checkpoint(tmp_path, collector=collector)
        collector.policies_to_train = ["main", "other"]
        with pytest.raises(ArgumentError, match=r"holds the policies \['main'\], not \['main', 'other'\]"):
            marlvec.load_checkpoint(tmp_path, collector=collector)
    write_archive(tmp_path / "last.npz", {"parts": encode({}, "it")})
    with pytest.raises(CheckpointError, match="holds no checkpoint of a training"):
        marlvec.load_checkpoint(tmp_path)

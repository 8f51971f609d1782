"""`save_checkpoint` and `load_checkpoint`: a training goes on where it was, also one that was killed."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from hypothesis import given, settings
from hypothesis import strategies as st

import marlvec
from marlvec.collect import Episode
from marlvec.collect.loggers import JSONLinesLogger, TensorBoardLogger
from marlvec.connectors import NormalizeObs, Rows
from marlvec.errors import ArgumentError, CheckpointError, SerialisationError
from marlvec.policies import Policy, RandomPolicy, ScriptedPolicy, checkpoint
from marlvec.selfplay import (
    BradleyTerry,
    Elo,
    Every,
    Latest,
    Mixture,
    OnWinRate,
    OpenSkill,
    OpponentPool,
    Prioritised,
    RatingTracker,
    SelfPlayMapping,
)
from marlvec.serialization.archive import read_archive, write_archive
from marlvec.serialization.values import decode, encode, outline
from tests.checkpoints.training import CASES
from tests.faults.test_resources import limited
from tests.programs import DYING
from tests.selfplay.nim import Net, Nim, play, player
from tests.tracer import Tracer
from tests.vector.support.reference import refused

# --- `save_checkpoint` and `load_checkpoint`: all that was learned comes back, from a file that holds data alone


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


@pytest.mark.parametrize("exact", [True, False])
def test_policies_connectors_and_the_rest_come_back(exact: bool, tmp_path: Path) -> None:
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
            exact=exact,
        )
        assert path == tmp_path / "a" / "b" / "last.npz"
        assert sorted(file.name for file in path.parent.iterdir()) == ["last.npz"]
        fresh, other = Learner(), Kept()
        found = collector_of(envs, fresh)
        progress = marlvec.load_checkpoint(path.parent, collector=found, learner={"rest": other}, exact=False)
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


@pytest.mark.slow("trains, saves and goes on")
def test_a_collector_comes_back_whole(tmp_path: Path) -> None:
    """In the middle of episodes, with rows in no batch; and its policies go into one of another size."""
    make: dict[str, Any] = {"env": "simple_spread", "backend": "sync", "env_state": "deepcopy"}
    options: dict[str, Any] = {"batch_mode": "complete"}
    with marlvec.make(num_envs=2, **make) as envs, marlvec.make(num_envs=2, **make) as others:
        collector, again = collector_of(envs, Learner(), **options), collector_of(others, Learner(), **options)
        collector.collect(env_steps=30)
        again.collect(env_steps=10)
        assert again.resumes_exactly.all()
        marlvec.save_checkpoint(tmp_path, collector=collector)
        expected = [encode(dict(collector.collect(env_steps=30)["main"]), "rows") for _ in range(3)]
        marlvec.load_checkpoint(tmp_path, collector=again)
        found = [encode(dict(again.collect(env_steps=30)["main"]), "rows") for _ in range(3)]
        np.testing.assert_equal(found, expected)
        assert again.metrics.env_steps == collector.metrics.env_steps
    with marlvec.make("simple_spread", num_envs=1, backend="sync") as one:
        other = collector_of(one, Learner(), **options)
        with pytest.raises(ArgumentError, match=r"num_envs: the state is of 2, this collector has 1"):
            marlvec.load_checkpoint(tmp_path, collector=other)
        marlvec.load_checkpoint(tmp_path, collector=other, exact=False)
        other.collect(env_steps=30)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("is_known", [True, False], ids=["of this process", "of another"])
def test_a_training_of_another_env_is_replaced_only_with_overwrite(
    exact: bool, is_known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(env: str, score: float, **options: Any) -> None:
        with marlvec.make(env, 1, backend="native", **options.pop("kwargs", {})) as envs:
            collector = marlvec.Collector(envs, marlvec.RandomPolicy())
            marlvec.save_checkpoint(tmp_path, collector=collector, score=score, keep=2, exact=exact, **options)

    save("simple_spread", 8)
    save("simple_spread", 9)
    if not is_known:
        monkeypatch.setattr(checkpoint, "_known_envs", {})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    expected = "expected one of connect_four_v3 .*'player_1'.*, got '.*', which holds a training of simple_spread_v3 .*"
    with pytest.raises(ArgumentError, match=f"{expected}'agent_2'.*; save into another folder, or pass overwrite=True"):
        save("connect_four", 1)
    refused(ArgumentError, "simple_spread_v3 with the agents", save, "simple_spread", 1, kwargs={"N": 2})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    save("connect_four", 1, overwrite=True)
    save("connect_four", 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.npz", "last.npz", "old-000001.npz"]
    (tmp_path / "last.npz").write_bytes(b"damaged")
    save("simple_spread", 2)


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


@pytest.mark.slow("trains, saves and goes on")
@settings(max_examples=30)
@given(value=_VALUES)
def test_plain_values_come_back_as_they_were(value: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("checkpoint")
    kept = Kept(value)
    marlvec.save_checkpoint(folder, learner={"kept": kept}, progress={"value": value})
    other = Kept()
    assert marlvec.load_checkpoint(folder, learner={"kept": other}) == {"value": value}
    assert other.state == value


def test_tensors_stay_tensors_and_training_resumes_exactly(tmp_path: Path) -> None:
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
    refused(SerialisationError, "bfloat16", marlvec.save_checkpoint, tmp_path, learner={"net": net.to(torch.bfloat16)})


def test_mismatches_raise(tmp_path: Path) -> None:
    refused(CheckpointError, r"last\.npz", marlvec.load_checkpoint, tmp_path)
    marlvec.save_checkpoint(tmp_path, learner={"one": Kept(1)})
    with pytest.raises(ArgumentError, match=r"holds the learner \['one'\], not \['two'\]"):
        marlvec.load_checkpoint(tmp_path, learner={"two": Kept()})
    assert marlvec.load_checkpoint(tmp_path) == {}, "who names no learner asks for progress alone"
    refused(ArgumentError, r"not \[\]", marlvec.load_checkpoint, tmp_path, learner={})
    with pytest.raises(ArgumentError, match="which: expected 'last', 'best' or the number"):
        marlvec.load_checkpoint(tmp_path, which="first")  # type: ignore[arg-type]
    refused(CheckpointError, r"best\.npz", marlvec.load_checkpoint, tmp_path, which="best")
    refused(SerialisationError, "cannot be saved", marlvec.save_checkpoint, tmp_path, progress={"envs": object()})
    with marlvec.make("simple_spread", num_envs=1, backend="sync") as envs:
        collector = collector_of(envs, Learner())
        with pytest.raises(ArgumentError, match="collector: .* was saved without a collector"):
            marlvec.load_checkpoint(tmp_path, collector=collector, learner={"one": Kept()})
        marlvec.save_checkpoint(tmp_path, collector=collector, exact=False)
        with pytest.raises(ArgumentError, match=r"only policies and connectors, .*\(exact=False\)"):
            marlvec.load_checkpoint(tmp_path, collector=collector)
        collector.policies_to_train = ["main", "other"]
        with pytest.raises(ArgumentError, match=r"holds the policies \['main'\], not \['main', 'other'\]"):
            marlvec.load_checkpoint(tmp_path, collector=collector, exact=False)
        marlvec.save_checkpoint(tmp_path, collector=collector)
        stranger = marlvec.Collector(envs, {"stranger": Learner()}, "stranger")
        with pytest.raises(ArgumentError, match=r"holds the policies \['main', 'other'\], not \['stranger'\]"):
            marlvec.load_checkpoint(tmp_path, collector=stranger, exact=False)
        with pytest.raises(ArgumentError, match="the state is of another collector"):
            marlvec.load_checkpoint(tmp_path, collector=stranger)
    none: list[dict[str, Any]] = [{"parts": {}}, {"parts": {}, "score": None, "tensors": []}]
    none.append({**none[1], "parts": {"progress": {}, "learner": [1]}})
    for data in none:
        write_archive(tmp_path / "last.npz", data)
        with pytest.raises(CheckpointError, match="holds no checkpoint of a training"):
            marlvec.load_checkpoint(tmp_path, learner={"one": Kept()})
    with marlvec.make("simple_spread", num_envs=1, backend="sync") as envs:
        collector = collector_of(envs, Learner())
        for saved in (3, {"policies": {}}):
            parts = {"progress": {}, "learner": {}, "collector": saved}
            write_archive(tmp_path / "last.npz", {**none[1], "parts": parts})
            with pytest.raises(CheckpointError, match="holds no (collector|policies)"):
                marlvec.load_checkpoint(tmp_path, collector=collector, exact=False)


# --- several, and kills


def test_as_many_are_kept_as_asked_for(tmp_path: Path) -> None:
    def there() -> dict[str, int]:
        files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        steps = {}
        for name in sorted(files):
            which: Any = {"last.npz": "last", "best.npz": "best"}.get(name)
            if which is None:
                which = len([other for other in files if other.startswith("old-") and other >= name])
            steps[name] = marlvec.load_checkpoint(tmp_path, which=which)["step"]
        return steps

    for step in range(6):
        marlvec.save_checkpoint(tmp_path, progress={"step": step}, score=float(step == 3), keep=3)
    assert there() == {"best.npz": 3, "last.npz": 5, "old-000004.npz": 3, "old-000005.npz": 4}
    assert [marlvec.load_checkpoint(tmp_path, which=k)["step"] for k in range(3)] == [5, 4, 3]
    refused(CheckpointError, "holds 2 checkpoints before the last, not 3", marlvec.load_checkpoint, tmp_path, which=3)
    assert (tmp_path / "best.npz").stat().st_nlink == 2, "two names of one file"
    marlvec.save_checkpoint(tmp_path, progress={"step": 6}, keep=2)
    assert there() == {"best.npz": 3, "last.npz": 6, "old-000006.npz": 5}
    (tmp_path / "old-mine.npz").write_bytes(b"of the user's")
    marlvec.save_checkpoint(tmp_path, progress={"step": 7})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.npz", "last.npz", "old-mine.npz"]
    for wrong in (0, -1, 1.5, "two"):
        with pytest.raises(ArgumentError, match="keep=.*: expected an integer of at least 1"):
            marlvec.save_checkpoint(tmp_path, keep=wrong)  # type: ignore[arg-type]


def test_a_best_that_another_process_wrote_is_known_by_its_score(tmp_path: Path) -> None:
    marlvec.save_checkpoint(tmp_path / "a", progress={"step": 0}, score=1.0)
    marlvec.save_checkpoint(tmp_path / "b", progress={"step": 1}, score=9.0)
    (tmp_path / "b" / "best.npz").replace(tmp_path / "a" / "best.npz")
    marlvec.save_checkpoint(tmp_path / "a", progress={"step": 2}, score=5.0)
    assert marlvec.load_checkpoint(tmp_path / "a", which="best")["step"] == 1


def test_without_hard_links_files_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    for step in range(4):
        marlvec.save_checkpoint(tmp_path, progress={"step": step}, score=float(step), keep=2)
    assert [marlvec.load_checkpoint(tmp_path, which=which)["step"] for which in ("best", 0, 1)] == [3, 3, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.npz", "last.npz", "old-000003.npz"]


# Not in the one line that closes a folder's descriptor, where Ctrl-C leaves it open.
_WRITERS = "/marlvec/serialization/", "/marlvec/policies/", "/marlvec/collect/batch", "zipfile", "contextlib"


def _saves(folder: Path, collector: marlvec.Collector, batch: Any) -> dict[str, Callable[[], Any]]:
    return {
        "checkpoint": lambda: marlvec.save_checkpoint(folder, collector=collector, score=1.0, keep=3),
        "collector": lambda: collector.save(folder / "one.npz"),
        "pipeline": lambda: collector.agent_connectors["main"].save(folder / "one.npz"),
        "npz": lambda: batch["main"].save(folder / "one.npz"),
        "parquet": lambda: batch["main"].save(folder / "one.parquet"),
    }


# Where Ctrl-C comes in the middle of making or dropping a ZipFile, Python says that its __del__ has failed.
@pytest.mark.filterwarnings("ignore:Exception ignored in.*ZipFile:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.mostly_slow("writes each file at many lines and lengths", quick=5)
@pytest.mark.parametrize("what", ["pipeline", "checkpoint", "collector", "npz", "parquet"])
@pytest.mark.parametrize("stop", ["a full disk", "Ctrl-C"])
def test_a_save_that_is_stopped_leaves_whole_files_and_nothing_else(what: str, stop: str, tmp_path: Path) -> None:
    """Where the disk is full after each so many bytes; or Ctrl-C comes at each so manieth line."""
    if what == "parquet":
        pytest.importorskip("pyarrow")
    with marlvec.make("simple_spread", 1, backend="native") as envs:
        collector = collector_of(envs, Learner())
        save = _saves(tmp_path, collector, collector.collect(env_steps=9))[what]
        for _ in range(4):
            save()
        with Tracer(_WRITERS, 1 << 40, but=("atomic_file",)) as tracer:
            save()
        names = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
        lines, size = (1 << 40) - tracer.left, min(names.values())
        for at in np.unique(np.linspace(1, lines if stop == "Ctrl-C" else size - 1, 30).astype(int)).tolist():
            before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
            if stop == "Ctrl-C":
                with (
                    contextlib.suppress(KeyboardInterrupt),
                    Tracer(_WRITERS, at, but=("atomic_file",)),
                ):  # no other error comes of it
                    save()
            else:
                with limited(resource.RLIMIT_FSIZE, at), pytest.raises(OSError, match="File too large") as caught:
                    save()
                assert Path(str(caught.value.filename)).parent == tmp_path
                assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
            found = {path.name for path in tmp_path.iterdir()}
            assert not [name for name in found if name.endswith(".tmp")]
            for path in tmp_path.glob("*.npz"):
                read_archive(path)
        save()
        assert len([*tmp_path.iterdir()]) == len(names)


AT_ONCE = """
import os, sys
import marlvec
from marlvec.errors import CheckpointError

folder, children = sys.argv[1], []
for who in range(3):
    if (pid := os.fork()) == 0:
        for step in range(150):
            marlvec.save_checkpoint(folder, progress={"by": who, "step": step}, score=step % 7, keep=1 + step % 4)
            for which in ("last", "best", 1):
                try:
                    marlvec.load_checkpoint(folder, which=which)
                except CheckpointError as error:
                    assert "holds 0 checkpoints before the last" in str(error)
        os._exit(0)
    children.append(pid)
print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children])
"""


@pytest.mark.slow("runs three trainings")
def test_several_processes_may_save_into_a_folder_and_load_from_it_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", AT_ONCE, str(tmp_path)]
    result = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)
    assert (result.stdout, result.stderr) == ("[0, 0, 0]\n", "")
    assert marlvec.load_checkpoint(tmp_path)["step"] == 149
    assert {path.name for path in tmp_path.iterdir()} >= {"best.npz", "last.npz"}
    assert not [*tmp_path.glob(".*")]


SAVE = f"""{DYING}
import shutil
import marlvec

score = float(sys.argv[2])

def child(folder, at):
    spoil(at)
    os.link, Path.unlink = deadly(os.link, at), deadly(Path.unlink, at)
    marlvec.save_checkpoint(folder, progress={{"step": 3}}, score=score, keep=3)
    os._exit(7)

for at in range(1, 300):
    folder = Path(path) / str(at)
    for step in range(3):
        marlvec.save_checkpoint(folder, progress={{"step": step}}, score=step, keep=3)
    pid = os.fork()
    if pid == 0:
        child(folder, at)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    after = [marlvec.load_checkpoint(folder, which=which)["step"] for which in ("best", 0, 1)]
    marlvec.save_checkpoint(folder, progress={{"step": 3}}, score=score, keep=3)  # as one that goes on does
    again = [marlvec.load_checkpoint(folder, which=which)["step"] for which in ("best", 0, 1)]
    names = sorted(file.name for file in folder.iterdir())
    print(*after, *again, len(names), code)
    shutil.rmtree(folder)
    if code == 7:
        break
"""


@pytest.mark.slow("trains, saves and goes on")
@pytest.mark.fault("H8")
@pytest.mark.parametrize("score", ["5", "-5"], ids=["a new best", "no new best"])
def test_a_training_killed_while_it_saves_goes_on_from_a_whole_checkpoint(score: str, tmp_path: Path) -> None:
    """Killed before each write, flush, fsync, link, rename and removal, one after the other."""
    command = [sys.executable, "-W", "ignore", "-c", SAVE, str(tmp_path), score]
    result = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    lines = [[int(word) for word in line.split()] for line in result.stdout.splitlines()]
    assert len(lines) > 20
    assert lines[-1][-1] == 7, "the last one was not killed"
    assert all(line[-1] == -9 for line in lines[:-1])
    best = 3 if score == "5" else 2
    for at, (best_after, last, before, *again, files, _) in enumerate(lines, 1):
        assert (last, before) in ((2, 1), (3, 2)), f"killed at {at}"
        assert best_after in (2, best)
        assert again[:2] == [best, 3]
        assert again[2] == (2 if last == 2 else 3), "what was done twice is there twice"
        assert files == 4, "no drafts are left, nor more than are to be kept"
    assert {line[1] for line in lines} == {2, 3}


# --- Each part of a training goes on where it was: half a run, its state in a fresh object, and the other half


def through_a_file(state: Any) -> Any:
    """A state as it comes back from a file."""
    return decode(encode(state, "the state"))


# --- policies


def _torch() -> Policy:
    torch = pytest.importorskip("torch")
    from marlvec.interop.torch import TorchPolicy

    torch.manual_seed(0)
    return TorchPolicy(torch.nn.Linear(2, 3))


POLICIES: dict[str, Callable[[], Policy]] = {
    "random": RandomPolicy,
    "scripted": lambda: ScriptedPolicy(play_and_count),
    "torch": _torch,
}


def play_and_count(obs: Any, agent: int, t: int, memory: Any) -> int:
    """Draws from its random stream, and remembers."""
    memory["count"] = memory.get("count", 0) + 1
    return (play(0.5, obs, agent, t, memory) + int(memory["count"])) % 3


@pytest.mark.parametrize("kind", POLICIES)
def test_policies_draw_what_they_would_have_drawn(kind: str) -> None:
    def asked(policy: Policy, calls: range) -> list[Any]:
        where = np.arange(20)
        ids = {"env_id": where, "agent_index": where % 2, "eps_id": where, "action_mask": np.ones((20, 3), np.bool_)}
        obs = np.stack([where, -where], axis=1).astype(np.float32)
        return [np.asarray(_actions(policy.act(Rows({"obs": obs, "t": where * 0 + call, **ids})))) for call in calls]

    def made(seed: int) -> Policy:
        policy = POLICIES[kind]()
        policy.setup(Box(-50, 50, (2,)), Discrete(3), seed=seed)
        return policy

    whole, first, second = made(1), made(1), made(2)
    expected = asked(whole, range(20))
    found = asked(first, range(10))
    second.load_state_dict(through_a_file(first.state_dict()))
    np.testing.assert_equal(found + asked(second, range(10, 20)), expected)
    refused(ArgumentError, "", second.load_state_dict, {"nothing": "of it"})


def _actions(said: Any) -> Any:
    return said[0] if isinstance(said, tuple) else said


# --- ratings


RATINGS: dict[str, Callable[[], Any]] = {"Elo": Elo, "BradleyTerry": BradleyTerry, "OpenSkill": OpenSkill}


@pytest.mark.mostly_slow("trains, saves and goes on", quick=3)
@pytest.mark.parametrize("kind", RATINGS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), half=st.integers(0, 30))
def test_ratings_tables_and_rules_go_on_to_the_bit(kind: str, seed: int, half: int) -> None:
    if kind == "OpenSkill":
        pytest.importorskip("openskill")
    rng = np.random.default_rng(seed)
    pairs = [tuple(map(str, rng.choice(list("abcd"), 2, replace=False))) for _ in range(30)]
    games = [(pair, tuple(rng.integers(0, 3, 2).tolist())) for pair in pairs]

    def made() -> tuple[Any, RatingTracker, list[Any]]:
        board = RatingTracker(["one", "two"], ratings=RATINGS[kind](), keep=9)
        board.table.decay = 0.97
        return board, board, [Every(4), OnWinRate(board.table, 0.6, games=3)]

    def played(board: RatingTracker, rules: list[Any], numbers: range) -> list[Any]:
        found = []
        for n in numbers:
            (one, other), scores = games[n]
            board.add(_game(one, other, scores, n))
            due = [rule.is_due(one, n) for rule in rules]
            if any(due):
                for rule in rules:
                    rule.taken(one, n)
            found.append((due, board.ratings.ranking(), board.table.payoffs().tolist(), list(board.games)))
        return found

    _, whole, whole_rules = made()
    _, first, first_rules = made()
    _, second, second_rules = made()
    expected = played(whole, whole_rules, range(30))
    found = played(first, first_rules, range(half))
    second.load_state_dict(through_a_file(first.state_dict()))
    for rule, saved in zip(second_rules, first_rules, strict=True):
        rule.load_state_dict(through_a_file(saved.state_dict()))
    found += played(second, second_rules, range(half, 30))
    np.testing.assert_equal(found, expected)
    np.testing.assert_equal(second.state_dict(), whole.state_dict())


def _game(one: str, other: str, scores: tuple[int, ...], number: int) -> Any:
    from marlvec.selfplay import Game

    won = tuple(map(float, scores))
    return Game(("one", "two"), ((one,), (other,)), won, 7, number % 3 == 0, ("two",) * (number % 2), 0, number)


# --- pools


def _rule() -> Policy:
    return player(0.7)


MAKE = {"main": Net, "rule": _rule}


class League:
    """A training in self-play but for the playing: who would meet, and what would come of it."""

    def __init__(self, folder: Path | None) -> None:
        self.net = Net()
        self.envs = marlvec.make(Nim, 1, backend="sync")
        self.board = RatingTracker(self.envs.agents)
        self.pool = OpponentPool(MAKE, folder=folder, capacity=2, when=[Every(40)], board=self.board)
        self.pool.add("rule", _rule(), of="rule", anchor=True)
        matchmaker = Mixture((1.0, Latest(2)), (2.0, Prioritised(self.board.table)))
        self.mapping = SelfPlayMapping(self.pool, self.envs.agents, {"main": matchmaker})
        self.collector = marlvec.Collector(self.envs, {"main": self.net}, self.mapping, seed=0)
        self.mapping.update(self.collector)

    def play(self, rounds: range) -> list[Any]:
        """Choose line-ups, rate their games, learn."""
        found: list[Any] = []
        for k in rounds:
            rng = np.random.default_rng(k)
            for number in range(20 * k, 20 * k + 20):
                episode = Episode(number, number % 3, number, 7)
                one, other = (self.mapping(agent, episode) for agent in self.envs.agents)
                self.board.add(_game(one, other, tuple(rng.integers(0, 3, 2).tolist()), number))
                found.append((one, other))
            self.net.learn(0.05)
            if self.pool.offer(self.collector, "main", step=50 * k) is not None:
                self.mapping.update(self.collector)
            found.append([(one.opponent_id, one.digest, one.step) for one in self.pool.values()])
            found.append(list(self.collector.policies))
        return found

    def get_state(self) -> Any:
        """All of it."""
        state = [self.mapping.get_state(), self.net.state_dict(), self.net.version, self.board.state_dict()]
        return through_a_file(state)

    def set_state(self, state: Any) -> None:
        """Go on from there."""
        self.mapping.set_state(state[0], self.collector)
        self.net.load_state_dict(state[1])
        self.net.version = state[2]
        self.board.load_state_dict(state[3])


@pytest.mark.slow("trains, saves and goes on")
@pytest.mark.parametrize("kept", [None, "folder"])
def test_a_league_goes_on_with_its_opponents(kept: str | None, tmp_path: Path) -> None:
    """Also where the run that was killed had changed the pool after its state was saved."""
    whole = League(None)
    expected = whole.play(range(8))
    first = League(tmp_path / kept if kept else None)
    found = first.play(range(4))
    state = first.get_state()
    first.play(range(4, 7))  # goes on, and is killed
    second = League(tmp_path / "second")
    second.set_state(state)
    np.testing.assert_equal(found + second.play(range(4, 8)), expected)
    np.testing.assert_equal(second.board.state_dict(), whole.board.state_dict())
    first.set_state(state)  # one that is there already goes back, too
    np.testing.assert_equal(found + first.play(range(4, 8)), expected)
    for league in (whole, first, second):
        league.envs.close()


def test_a_pool_goes_back_with_its_folder(tmp_path: Path) -> None:
    pool = OpponentPool(MAKE, folder=tmp_path / "pool", capacity=2, when=[Every(10)])
    net = Net()
    for step in range(3):
        net.learn()
        pool.add(f"main_{step}", net, of="main", step=step)
    state = through_a_file(pool.state_dict())
    kept = {name: one.digest for name, one in pool.items()}
    same = pool["main_2"]
    for step in range(3, 5):
        net.learn()
        pool.add(f"main_{step}", net, of="main", step=step)
    again = OpponentPool.load(tmp_path / "pool", MAKE, capacity=2, when=[Every(10)])
    again.load_state_dict(state)
    assert {name: one.digest for name, one in again.items()} == kept
    loaded = OpponentPool.load(tmp_path / "pool", MAKE, when=[Every(10)])
    assert {name: one.digest for name, one in loaded.items()} == kept, "its folder followed"
    pool.load_state_dict(state)
    assert {name: one.digest for name, one in pool.items()} == kept
    del same, again, loaded
    gc.collect()
    assert {name: one.digest for name, one in pool.items()} == kept, "what was let go took no files of these"
    before = pool["main_2"]
    pool.load_state_dict(state)
    assert pool["main_2"] is before, "one that is the same stays"


def test_an_invalid_pool_state_changes_nothing(tmp_path: Path) -> None:
    pool = OpponentPool(MAKE, folder=tmp_path, when=[Every(10)])
    pool.add("main_0", Net(), of="main")
    state = pool.state_dict()
    refused(
        ArgumentError, "the state of an OpponentPool: expected other fields", pool.load_state_dict, {"opponents": []}
    )
    refused(ArgumentError, "expected 1 snapshot rules, got 0", pool.load_state_dict, {**state, "rules": []})
    with pytest.raises(ArgumentError, match=r"no function for policies of 'other'"):
        pool.load_state_dict({**state, "opponents": [{**state["opponents"][0], "of": "other"}]})
    with pytest.raises(ArgumentError, match="'main_0' occurs twice"):
        pool.load_state_dict({**state, "opponents": state["opponents"] * 2})
    broken = {**state["opponents"][0], "files": [np.arange(9, dtype=np.uint8), None, None]}
    refused(CheckpointError, "", pool.load_state_dict, {**state, "opponents": [broken]})
    assert list(pool) == ["main_0"]
    assert pool["main_0"].policy_state()["weights"].shape == (50, 3)
    envs = marlvec.make(Nim, 1, backend="sync")
    mapping = SelfPlayMapping(pool, envs.agents, {"main": Latest()})
    other = SelfPlayMapping(pool, envs.agents, {"another": Latest()})
    collector = marlvec.Collector(envs, {"main": Net()}, mapping)
    with pytest.raises(ArgumentError, match=r"expected the learners \['main'\], got \['another'\]"):
        mapping.set_state(other.get_state(), collector)
    envs.close()


# --- loggers


def test_lines_after_the_checkpoint_are_cut_off(tmp_path: Path) -> None:
    path, other = tmp_path / "episodes.jsonl", tmp_path / "other.jsonl"
    path.write_text("one\n")
    logger = JSONLinesLogger(path)
    logger._file.add(b"two\n")
    state = through_a_file(logger.state_dict())
    logger._file.add(b"three\n")
    logger.close()
    with JSONLinesLogger(path) as again:
        again.load_state_dict(state)
        again._file.add(b"three, again\n")
        refused(ArgumentError, "the state of a JSONLinesLogger: expected other fields", again.load_state_dict, {})
    assert path.read_text() == "one\ntwo\nthree, again\n"
    other.write_text("something else that is longer\n")
    with JSONLinesLogger(other) as again:
        again.load_state_dict(state)
    assert other.read_text() == "something else that is longer\n", "another file stays as it is"
    with JSONLinesLogger("/dev/null") as nothing:
        nothing.load_state_dict(through_a_file(nothing.state_dict()))
    assert json.dumps(state)


def test_curves_go_on_at_their_step_and_what_came_after_it_is_forgotten(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def collect(logger: TensorBoardLogger, batches: int) -> Any:
        with marlvec.make(Nim, 2, backend="sync") as envs:
            collector = marlvec.Collector(envs, RandomPolicy(), callbacks=[logger], seed=0)
            for _ in range(batches):
                collector.collect(env_steps=20)

    with TensorBoardLogger(tmp_path, first_step=1000) as logger:
        collect(logger, 2)
        state = through_a_file(logger.state_dict())
        assert state["env_steps"] == 40
        logger._env_steps = 0
        collect(logger, 4)  # further than the checkpoint, and then it is killed
    with TensorBoardLogger(tmp_path) as again:
        again.load_state_dict(state)
        refused(ArgumentError, "the state of a TensorBoardLogger: expected other fields", again.load_state_dict, {})
    found = EventAccumulator(str(tmp_path)).Reload().Scalars("totals/agent_steps")
    assert sorted({event.step for event in found}) == [1020, 1040]


# --- A training that is killed goes on from its last checkpoint, and makes the batches of one that never was


ROOT = Path(__file__).parents[2]
BATCHES = 8


@dataclass
class Life:
    """What one process has written.

    Attributes:
        begins: With which batch it began.
        batches: Number of a batch to its digest.
        end: What was there at the end; None where it was killed before.
    """

    begins: int
    batches: dict[int, str]
    end: str | None = None


def lives_in(folder: Path) -> list[Life]:
    """What all processes have written, one after the other."""
    found: list[Life] = []
    for line in (folder / "batches.txt").read_text().splitlines():
        *words, last = line.split()
        if words == ["begins", "at"]:
            found.append(Life(int(last), {}))
        elif words == ["end"]:
            found[-1].end = last
        else:
            found[-1].batches[int(words[0])] = last
    return found


def start(case: str, folder: Path, *flags: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.checkpoints.training", case, str(folder), "--batches", str(BATCHES), *flags]
    one_thread = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
    env = os.environ | one_thread | {"TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(case: str, folder: Path, *flags: str) -> None:
    """Let it come to its end."""
    with start(case, folder, *flags) as process:
        _, said = process.communicate(timeout=150)
    assert process.returncode == 0, said


def kill_in_the_middle(case: str, folder: Path, draw: random.Random, *flags: str) -> None:
    """Kill it somewhere in the batch after one that is drawn: in steps, in learning, or while it saves.

    It cannot get away: at the last batch but one it waits.
    """
    with start(case, folder, *flags, "--hold-at", str(BATCHES - 1)) as process:
        assert process.stdout is not None
        at, before, pause = draw.randrange(2, BATCHES - 1), None, 0.02
        for line in process.stdout:
            now = time.monotonic()
            pause = pause if before is None else now - before  # what the batch before has taken
            if int(line) >= at:
                time.sleep(draw.random() * 1.5 * pause)
                break
            before = now
        process.kill()
        process.communicate(timeout=60)
    assert process.returncode == -9


@dataclass
class Count:
    """What was seen.

    Attributes:
        kills: How often a training was killed.
        resumed: How often it went on from a checkpoint that was neither the first nor the last.
        compared: How many batches were held against those of the training that was never killed.
        differ: How many of them were others.
    """

    kills: int = 0
    resumed: int = 0
    compared: int = 0
    differ: int = 0


def hunt(case: str, folder: Path, seeds: range, kills: int) -> Count:
    """Kill trainings at random moments, let them go on, and compare."""
    run(case, folder / "whole")
    (whole,) = lives_in(folder / "whole")
    assert (whole.begins, list(whole.batches)) == (0, list(range(BATCHES)))
    count = Count()
    for seed in seeds:
        draw, mine = random.Random(f"{case} {seed}"), folder / str(seed)
        for life in range(kills):
            kill_in_the_middle(case, mine, draw, *(["--resume"] if life else []))
        run(case, mine, "--resume")
        lives = lives_in(mine)
        assert len(lives) == kills + 1
        for before, after in pairwise(lives):
            assert before.end is None
            # A checkpoint follows on each batch: the last of them may be there yet, or not.
            reached = before.begins + len(before.batches)
            assert after.begins in (reached - 1, reached)
            count.resumed += 0 < after.begins < BATCHES
        assert {k for life in lives for k in life.batches} == set(range(BATCHES))
        count.kills += kills
        for life in lives:
            count.compared += len(life.batches)
            count.differ += sum(whole.batches[k] != found for k, found in life.batches.items())
        assert lives[-1].end == whole.end
    return count


@pytest.mark.slow("kills trainings and trains again")
@pytest.mark.time_limit(400)
@pytest.mark.parametrize("case", CASES)
def test_batches_are_those_of_the_training_that_was_never_killed(case: str, tmp_path: Path) -> None:
    count = hunt(case, tmp_path, range(1), kills=2)
    assert count.differ == 0, count
    assert count.resumed == count.kills == 2
    assert count.compared >= BATCHES


@pytest.mark.soak
@pytest.mark.time_limit(1200)
@pytest.mark.parametrize("case", CASES)
def test_batches_are_equal_after_repeated_kills_for_twenty_seeds(case: str, tmp_path: Path) -> None:
    count = hunt(case, tmp_path, range(20), kills=2)
    sys.stdout.write(f"{case}: {count}\n")
    assert count.differ == 0, count
    assert count.resumed >= 20

"""Pipelines saved and loaded, restored and merged: they go on as if nothing had happened."""

from __future__ import annotations

import copy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from marlvec import Collector, RandomPolicy, VectorEnv, make
from marlvec import connectors as c
from marlvec.connectors.pipeline import with_inner
from marlvec.errors import ArgumentError, CheckpointError, RegistryError, SerialisationError, StateError
from marlvec.serialization.archive import read_archive, write_archive
from marlvec.serialization.values import CLASSES
from tests.connectors.lives import (
    ACTION,
    AGENTS,
    HALF,
    OBS,
    LastObs,
    action_pipelines,
    agent_pipelines,
    live,
    sampled_steps,
    whole,
)
from tests.connectors.samples import any_spaces, same_tree
from tests.vector.support.reference import refused

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow("interrupts at many lines")
@pytest.mark.checklist(83)
@given(pipeline=st.one_of(agent_pipelines(), action_pipelines()), cut=st.integers(0, 12), training=st.booleans())
def test_restored_mid_episode_a_pipeline_goes_on_as_if_never_interrupted(
    pipeline: Any, cut: int, training: bool
) -> None:
    """From a file into a new one, and into one that lived through something else; any pieces, any moment."""
    used = type(pipeline).from_config(pipeline.to_config())
    used.bind(pipeline.input_space if isinstance(pipeline, c.AgentPipeline) else pipeline.env_space, AGENTS, ACTION)
    _ = pipeline.train() if training else pipeline.eval()
    steps = sampled_steps(1, 18)
    live(pipeline, steps[:cut])
    live(used, sampled_steps(2, 5))
    with tempfile.TemporaryDirectory() as folder:
        pipeline.save(f"{folder}/chain.npz")
        loaded = type(pipeline).load(f"{folder}/chain.npz")
        used.restore(f"{folder}/chain.npz")
    outs = live(pipeline, steps[cut:])
    for other in (loaded, used):
        for expected, got in zip(outs, live(other, steps[cut:]), strict=True):
            same_tree(got, expected)
        same_tree(other.state_dict(), pipeline.state_dict())
        assert repr(other.to_config()) == repr(pipeline.to_config())
        assert other.training == training


@pytest.mark.slow("draws many batches")
@pytest.mark.checklist(82)
@pytest.mark.checklist(83)
@pytest.mark.fault("E10")
def test_a_process_that_was_killed_is_gone_on_with_in_another(tmp_path: Path) -> None:
    """Order, names, parameters, statistics, histories, modes and spaces; a user's own class and functions."""
    file, out = tmp_path / "chain.npz", tmp_path / "out.npz"
    command = [sys.executable, "-W", "error", "-m", "tests.connectors.lives"]
    begun = subprocess.run([*command, "begin", file], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (begun.returncode, begun.stderr) == (-9, "")
    gone_on = subprocess.run([*command, "go-on", file, out], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (gone_on.returncode, gone_on.stderr) == (0, "")

    pipeline, steps = whole(), sampled_steps(5, 2 * HALF)
    live(pipeline, steps[:HALF])
    expected = {f"{i}/{k}": v for i, row in enumerate(live(pipeline, steps[HALF:])) for k, v in row.items()}
    with np.load(out) as got:
        same_tree({name: got[name] for name in got.files}, expected)
    loaded = c.AgentPipeline.load(file)
    same_tree(loaded.state_dict(), pipeline.state_dict())
    assert repr(loaded) == repr(pipeline)
    assert loaded.names == pipeline.names
    assert loaded["norm"].names == pipeline["norm"].names == ("NormalizeObs_2",)  # type: ignore[attr-defined]
    assert loaded.describe() == pipeline.describe()
    assert (loaded.agents, loaded.action_space, loaded.input_space) == (AGENTS, ACTION, OBS)
    assert [piece.training for piece in with_inner(loaded)] == [piece.training for piece in with_inner(pipeline)]
    assert not loaded["norm"][0].training  # type: ignore[index]  # a pipeline


@pytest.mark.slow("draws many batches")
@given(space=any_spaces())
def test_a_pipeline_bound_to_any_space_is_loaded_bound_to_it(space: Any) -> None:
    pipeline = c.AgentPipeline([c.FlattenObs()])
    pipeline.bind(space, ["a"])
    actions = c.ActionPipeline.default()
    actions.bind(space)
    with tempfile.TemporaryDirectory() as folder:
        for chain in (pipeline, actions):
            chain.save(f"{folder}/chain.npz")
            loaded: Any = type(chain).load(f"{folder}/chain.npz")
            assert loaded.describe() == chain.describe()
            assert loaded.agents == chain.agents
            assert loaded.action_space == chain.action_space


def test_unbound_pipeline_is_loaded_unbound(tmp_path: Path) -> None:
    learner = c.LearnerPipeline([c.GeneralAdvantageEstimation(gamma=0.9)])
    for chain in (c.AgentPipeline([c.NormalizeObs(), c.FrameStack(2)]), learner, c.ActionPipeline()):
        chain.save(tmp_path / "chain.npz")
        loaded: Any = type(chain).load(tmp_path / "chain.npz")
        assert not loaded.bound
        assert repr(loaded) == repr(chain)
        loaded.restore(tmp_path / "chain.npz")


# --- what is refused


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    pipeline = whole()
    live(pipeline, sampled_steps(1, 4))
    pipeline.save(tmp_path / "chain.npz")
    return tmp_path / "chain.npz"


def test_only_a_whole_chain_is_saved(tmp_path: Path) -> None:
    pipeline = whole()
    with pytest.raises(ArgumentError, match="norm is part of AgentPipeline; save AgentPipeline"):
        pipeline["norm"].save(tmp_path / "chain.npz")  # type: ignore[attr-defined]  # a pipeline
    pipeline.append(c.agent_connector(lambda rows: rows))
    refused(SerialisationError, "not registered", pipeline.save, tmp_path / "chain.npz")

    class OwnSpace(spaces.Box):
        pass

    own = c.AgentPipeline()
    own.bind(OwnSpace(0, 1, (2,)))
    refused(SerialisationError, "the space is a OwnSpace", own.save, tmp_path / "chain.npz")
    assert list(tmp_path.iterdir()) == []


def edited(**changes: Any) -> c.AgentPipeline:
    """The saved pipeline, with something else in it."""
    pipeline = whole()
    if (remove := changes.get("remove")) is not None:
        pipeline.remove(remove)
    if (append := changes.get("append")) is not None:
        pipeline.append(append)
    pipeline.bind(changes.get("space", OBS), changes.get("agents", AGENTS), changes.get("action_space", ACTION))
    return pipeline


@pytest.mark.fault("H10")
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"remove": "FrameStack"}, r"is of another pipeline:\n--- here\n\+\+\+ file\n(.*\n)*\+.*\"FrameStack\""),
        ({"append": c.AgentIndicator()}, r"is of another pipeline:\n(.*\n)*-.*\"AgentIndicator\""),
        ({"agents": ["wolf_0", "hare", "bear"]}, r"expected the agents .*'bear'\], got \['wolf_0', 'wolf_1', 'hare'\]"),
        ({"space": spaces.Box(-1, 1, (3,))}, r"is of another space: at /: expected Box\(-1.0.*got Box\(-inf"),
        ({"action_space": spaces.Box(-2, 2, (2,))}, "is of another action space: at /: expected Box"),
    ],
)
def test_the_file_of_another_pipeline_is_refused_with_the_difference(changes: Any, text: str, saved: Path) -> None:
    pipeline = edited(**changes)
    live(pipeline, sampled_steps(3, 4))
    before = pipeline.state_dict()
    raised = refused(CheckpointError, text, pipeline.restore, saved)
    assert raised.file == str(saved)
    same_tree(pipeline.state_dict(), before)


@pytest.mark.fault("H10")
def test_a_difference_in_one_parameter_is_shown(saved: Path) -> None:
    pipeline = whole()
    pipeline.replace(LastObs, LastObs(np.float32(2.5)))
    raised = refused(CheckpointError, "", pipeline.restore, saved)
    lines = raised.reason.splitlines()
    changed = [line.replace(" ", "") for line in lines if line[:1] in "-+" and line[:3] not in ("---", "+++")]
    assert changed == ['-"value":2.5', '+"value":1.5']


@pytest.mark.fault("H10")
def test_the_file_of_another_side_or_of_one_not_bound_is_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected the config of a ActionPipeline, got that of a AgentPipeline"):
        c.ActionPipeline.load(saved)
    unbound = c.AgentPipeline([c.FlattenObs()])
    bound = c.AgentPipeline([c.FlattenObs()])
    bound.bind(OBS)
    unbound.save(tmp_path / "unbound.npz")
    bound.save(tmp_path / "bound.npz")
    with pytest.raises(CheckpointError, match=r"this one is not bound: call bind\(\) first, or reset\(\)"):
        unbound.restore(tmp_path / "bound.npz")
    refused(CheckpointError, "is of another space: expected Box.*, got None", bound.restore, tmp_path / "unbound.npz")


@pytest.mark.slow("draws many batches")
@pytest.mark.fault("H10")
def test_chains_of_a_new_collector_are_restored_once_it_knows_who_plays_whom(tmp_path: Path) -> None:
    """Which group of agents a policy plays, and so its chain's spaces, a function tells when episodes begin."""

    def build(envs: VectorEnv) -> Collector:
        chains = {name: [c.FlattenObs(), c.NormalizeObs()] for name in ("hunter", "prey")}
        policies = {name: RandomPolicy() for name in chains}
        return Collector(
            envs, policies, lambda who, *_: "prey" if who == "agent_0" else "hunter", agent_connectors=chains
        )

    with make("simple_tag", num_envs=2, backend="sync") as envs, make("simple_tag", num_envs=2) as others:
        old, new = build(envs), build(others)
        old.collect(env_steps=20)
        chain, fresh = old.agent_connectors["hunter"], new.agent_connectors["hunter"]
        chain.save(tmp_path / "hunter.npz")
        refused(CheckpointError, r"reset\(\) of its Collector", fresh.restore, tmp_path / "hunter.npz")
        refused(StateError, r"in a Collector .* call its reset\(\) first", fresh.load_state_dict, chain.state_dict())
        new.reset()
        fresh.restore(tmp_path / "hunter.npz")
        same_tree(fresh.state_dict(), chain.state_dict())
        new.collect(env_steps=20)


@pytest.mark.fault("H10")
def test_what_another_version_wrote_and_this_one_cannot_build_is_refused(saved: Path, tmp_path: Path) -> None:
    """A sound file whose pieces take other arguments, or remember something else."""
    data = read_archive(saved)
    arguments, state, training = (copy.deepcopy(data) for _ in range(3))
    arguments["config"]["pieces"][3]["args"]["depth"] = 3
    state["state"]["FrameStack"] = {"rings": []}
    training["training"].pop()
    cases = {"FrameStack takes no": arguments, "cannot be built here": state, "argument 2 is": training}
    for text, case in cases.items():
        write_archive(tmp_path / "other.npz", case)
        refused(CheckpointError, text, c.AgentPipeline.load, tmp_path / "other.npz")
    pipeline = whole()
    live(pipeline, sampled_steps(3, 4))
    before = pipeline.state_dict()
    for case in (state, training):
        write_archive(tmp_path / "other.npz", case)
        refused(CheckpointError, "", pipeline.restore, tmp_path / "other.npz")
        same_tree(pipeline.state_dict(), before)
    for case in ({}, {"config": {}}, {**data, "config": 3}, {**data, "state": 3}, {**data, "space": {"$space": "x"}}):
        write_archive(tmp_path / "other.npz", case)
        refused(CheckpointError, "", c.AgentPipeline.load, tmp_path / "other.npz")


def test_a_class_that_is_not_registered_here_is_named(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {name: cls for name, cls in CLASSES._things.items() if name != "tests/LastObs"}
    monkeypatch.setattr(CLASSES, "_things", known)
    with pytest.raises(RegistryError, match=r"no connector is registered as 'tests/LastObs': first import the module"):
        c.AgentPipeline.load(saved)


# --- many workers


@pytest.mark.fault("E10")
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_states_of_any_number_of_workers_are_merged_and_all_go_on_alike(workers: int, tmp_path: Path) -> None:
    """What was learnt is one to the bit on all of them, and counts every row once; running episodes stay their own."""
    pipelines = [whole() for _ in range(workers)]
    main = whole()
    for seed, pipeline in enumerate(pipelines):
        pipeline.train()
        live(pipeline, sampled_steps(seed, 8))
    before = main.state_dict()
    merged = main.merge_states([pipeline.state_dict() for pipeline in pipelines])
    write_archive(tmp_path / "merged.npz", {"state": merged})
    histories = [pipeline.state_dict()["FrameStack"] for pipeline in pipelines]
    for pipeline in [*pipelines, main]:
        pipeline.load_state_dict(read_archive(tmp_path / "merged.npz")["state"])
    states = [pipeline.state_dict() for pipeline in [*pipelines, main]]
    for state in states[:-1]:
        same_tree(state["norm"]["NormalizeObs_2"]["moments"], states[-1]["norm"]["NormalizeObs_2"]["moments"])
    for state, history in zip(states, histories, strict=False):
        same_tree(state["FrameStack"], history)
    rows = sum(len(step.rows) for seed in range(workers) for step in sampled_steps(seed, 8))
    assert _counted(main) == rows
    if not workers:
        same_tree(main.state_dict(), before)


def _counted(pipeline: c.AgentPipeline) -> float:
    norm: Any = pipeline["norm"]
    return float(norm[0].counts.sum())


def test_a_state_that_is_not_ones_own_leaves_all_pieces_as_they_were() -> None:
    pipeline = whole()
    live(pipeline, sampled_steps(1, 4))
    before = pipeline.state_dict()
    other = whole()
    live(other, sampled_steps(2, 6))
    wrong = other.state_dict()
    wrong["PrevActions"] = {"nonsense": 1}
    raised = refused(ArgumentError, "", pipeline.load_state_dict, wrong)
    assert raised.__notes__ == ["in connector 'PrevActions' of AgentPipeline"]
    same_tree(pipeline.state_dict(), before)


def test_an_interrupt_at_any_line_of_loading_comes_out_as_itself_and_loads_all_or_nothing() -> None:
    def made(seed: int) -> c.AgentPipeline:
        pipeline = c.AgentPipeline([c.NormalizeObs(), c.AgentIndicator(), c.FrameStack(2)])
        with make("simple_spread", 2, backend="sync") as envs:
            Collector(envs, RandomPolicy(), agent_connectors=pipeline, seed=seed).collect(env_steps=10)
        return pipeline

    code = c.AgentPipeline.load_state_dict.__code__
    lines: list[int] = []

    def interrupt(frame: Any, event: str, arg: Any) -> Any:
        if event == "call":
            return interrupt if frame.f_code is code else None
        if event == "line" and frame.f_lineno not in lines:
            lines.append(frame.f_lineno)
            sys.settrace(None)
            raise KeyboardInterrupt
        return interrupt

    old, new = made(0).state_dict(), made(1).state_dict()
    refused(AssertionError, "", same_tree, old, new)
    while True:
        pipeline, known = made(0), len(lines)
        before = sys.gettrace()
        sys.settrace(interrupt)
        try:
            pipeline.load_state_dict(new)
        except KeyboardInterrupt:
            sys.settrace(before)
            same_tree(pipeline.state_dict(), old)
        finally:
            sys.settrace(before)
        if len(lines) == known:
            break
    same_tree(pipeline.state_dict(), new)
    assert len(lines) >= 7


def test_state_saved_before_any_row_clears_memory(tmp_path: Path) -> None:
    """A view of a column whose form only rows show; in a pipeline in a pipeline."""
    chain = c.AgentPipeline([c.AgentPipeline([c.View("before", "h", -1, fill=np.zeros(2, np.float32))])])
    chain.bind(OBS, AGENTS, ACTION)
    chain.save(tmp_path / "chain.npz")
    used = c.AgentPipeline.load(tmp_path / "chain.npz")
    live(used, sampled_steps(2, 5))
    assert used.state_dict() != chain.state_dict()
    used.restore(tmp_path / "chain.npz")
    assert used.state_dict() == chain.state_dict()
    steps = sampled_steps(1, 9)[3:]
    for expected, got in zip(live(chain, steps), live(used, steps), strict=True):
        same_tree(got, expected)

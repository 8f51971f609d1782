"""Recordings as d3rlpy's datasets."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

import marlvec
from marlvec.collect import MultiAgentBatch, SampleBatch
from marlvec.errors import ArgumentError, MissingExtraError
from marlvec.recording import to_mdp_dataset
from tests.recording.runs import two_lives, write

pytest.importorskip("pyarrow")


class _Arguments(dict[str, Any]):
    """Stands in for ``MDPDataset``: keeps what it is given."""

    def __init__(self, observations: Any, actions: Any, rewards: Any, terminals: Any, timeouts: Any, **options: Any):
        super().__init__(obs=observations, actions=actions, rewards=rewards, **options)
        self.terminals, self.timeouts = np.flatnonzero(terminals).tolist(), np.flatnonzero(timeouts).tolist()


@pytest.fixture
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("d3rlpy.dataset")
    module.MDPDataset = _Arguments
    monkeypatch.setitem(sys.modules, "d3rlpy", types.ModuleType("d3rlpy"))
    monkeypatch.setitem(sys.modules, "d3rlpy.dataset", module)
    constants: Any = types.ModuleType("d3rlpy.constants")
    constants.ActionSpace = types.SimpleNamespace(DISCRETE="discrete", CONTINUOUS="continuous")
    monkeypatch.setitem(sys.modules, "d3rlpy.constants", constants)


def _batch(**columns: Any) -> MultiAgentBatch:
    """Rows of two agents: 0 terminates, 1 is truncated; then 0 again, with a gap and without an end."""
    rows = {
        "agent_index": [1, 0, 1, 0, 1, 0, 0, 0],
        "eps_id": [0, 0, 0, 0, 0, 1, 1, 1],
        "t": [0, 0, 1, 1, 2, 0, 1, 3],
        "terminated": [False, False, False, True, False, False, False, False],
        "truncated": [False, False, False, False, True, False, False, False],
    }
    found = {name: np.array(values) for name, values in rows.items()}
    number = np.arange(8)
    found |= {"obs": number[:, None] * 1.0, "rewards": number * 0.5, "actions": number % 3} | columns
    return MultiAgentBatch({"main": SampleBatch(found)}, env_steps=8)


@pytest.mark.usefixtures("_stand_in")
def test_timeouts_are_told_from_terminals(tmp_path: Path) -> None:
    write(tmp_path / "run", [_batch()])
    write(tmp_path / "run", [_batch()], append=True)  # another session, with the same eps_ids
    with marlvec.load_dataset(tmp_path / "run") as data:
        got = to_mdp_dataset(data, transition_picker="theirs")
    order = [1, 3, 0, 2, 4, 5, 6, 7]  # by episode, agent and time
    np.testing.assert_array_equal(got["obs"][:, 0], order * 2)
    np.testing.assert_array_equal(got["actions"][:, 0], np.tile(order, 2) % 3)
    np.testing.assert_array_equal(got["rewards"], np.tile(order, 2) * 0.5)
    assert got.terminals == [1, 9]
    assert got.timeouts == [4, 6, 7, 12, 14, 15]
    assert got["transition_picker"] == "theirs"
    assert "action_size" not in got  # without spaces, d3rlpy counts


@pytest.mark.usefixtures("_stand_in")
def test_an_agent_that_came_back_has_an_end_a_life(tmp_path: Path) -> None:
    write(tmp_path / "run", [two_lives()])
    with marlvec.load_dataset(tmp_path / "run") as data:
        got = to_mdp_dataset(data)
    assert (got.terminals, got.timeouts) == ([4, 11], [1])


@pytest.mark.usefixtures("_stand_in")
def test_kinds_of_actions(tmp_path: Path) -> None:
    number = np.arange(8)
    for name, action_space, columns, size in (
        ("discrete", Discrete(7), {}, 7),
        ("shifted", Discrete(7, start=-2), {}, 7),
        ("another space", Discrete(7, start=1), {}, None),  # connectors gave the policy 0 to 2
        ("whole floats", Box(-9, 9, (1,)), {"actions": number[:, None] % 3 * 1.0}, None),
        ("executed", Discrete(7), {"actions_executed": number % 2}, 7),
        ("known", Discrete(7), {"actions_executed": number % 2, "actions_executed_missing": number < 0}, 7),
        ("floats", Box(-1, 1, (2,)), {"actions": number.repeat(2).reshape(8, 2) / 16}, None),
        ("one float", Box(-1, 1, (), np.float32), {"actions": (number / 16).astype(np.float32)}, None),
    ):
        spaces = {agent: (Box(-9, 9, (1,)), action_space) for agent in ("a", "b")}
        with marlvec.external.make(spaces) as envs:
            write(tmp_path / name, [_batch(**columns)], envs=envs)
        with marlvec.load_dataset(tmp_path / name) as data:
            got = to_mdp_dataset(data)
            rows = data["main"].read()
        want = rows["actions_executed" if "actions_executed" in columns else "actions"][[1, 3, 0, 2, 4, 5, 6, 7]]
        assert got["actions"].dtype == want.dtype
        np.testing.assert_array_equal(got["actions"], want.reshape(8, -1) + (2 if name == "shifted" else 0))
        assert got["action_space"] == ("continuous" if "float" in name else "discrete")
        assert got.get("action_size") == size


@pytest.mark.usefixtures("_stand_in")
def test_what_d3rlpy_cannot_hold_is_refused(tmp_path: Path) -> None:
    pairs = np.arange(16).reshape(8, 2)
    cases: dict[str, dict[str, Any]] = {
        "expected one int or several floats an action, got .* of int64": {"actions": pairs},
        "expected discrete actions from 0, got -5": {"actions": pairs[:, 0] - 5},
        "got .* of bool": {"actions": pairs[:, 0] > 3},
        "column 'obs': expected one array, got a dict": {"obs": {"a": pairs}},
        "column 'actions': expected one array, got a tuple": {"actions": (pairs[:, 0], pairs[:, 1])},
    }
    for k, (message, columns) in enumerate(cases.items()):
        write(tmp_path / str(k), [_batch(**columns)])
        with marlvec.load_dataset(tmp_path / str(k)) as data, pytest.raises(ArgumentError, match=message):
            to_mdp_dataset(data)
    with marlvec.load_dataset(tmp_path / "0") as data, pytest.raises(KeyError, match="no policy 'other'"):
        to_mdp_dataset(data, "other")


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "d3rlpy", None)
    write(tmp_path / "run", [_batch()])
    with (
        marlvec.load_dataset(tmp_path / "run") as data,
        pytest.raises(MissingExtraError, match="needs d3rlpy.*pip install --no-deps d3rlpy"),
    ):
        to_mdp_dataset(data)


@pytest.mark.slow("imports d3rlpy and torch, in a process of its own")
def test_d3rlpy_s_own_episodes_are_the_recorded_ones(tmp_path: Path) -> None:
    if importlib.util.find_spec("d3rlpy") is None:
        pytest.skip("d3rlpy is not installed")
    subprocess.run([sys.executable, "-W", "ignore", "-m", "tests.recording.mdp_datasets", str(tmp_path)], check=True)

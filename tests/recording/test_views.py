"""Recordings as other libraries' datasets and replay buffers, and back."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Tuple

import marlvec
from marlvec.collect import MultiAgentBatch, SampleBatch
from marlvec.errors import ArgumentError, MissingExtraError
from marlvec.recording import from_minari, to_mdp_dataset, to_minari
from marlvec.spaces import AnyText
from tests.recording.runs import collector, two_lives, write
from tests.vector.support.reference import refused

pytest.importorskip("pyarrow")


# --- Recordings as d3rlpy's datasets


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
    subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.recording.foreign", "compare_mdp_datasets", str(tmp_path)],
        check=True,
    )


# --- Recordings as Minari's datasets, and back


needs_minari = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("minari", "numba"))), reason="needs minari and numba"
)


@pytest.fixture
def batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MultiAgentBatch:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    with (
        marlvec.make("simple_tag", 2, backend="native", max_cycles=5) as envs,
        marlvec.Recorder(tmp_path / "run", part_bytes=4000) as recorder,
    ):
        collects = collector(envs, [recorder])
        return MultiAgentBatch.concat([collects.collect(env_steps=33) for _ in range(3)])


@needs_minari
@pytest.mark.slow("writes HDF5 by an episode")
@pytest.mark.filterwarnings(
    "ignore:.*(is set to None|env_spec is None):UserWarning"
)  # Minari asks for an author, and so on
@pytest.mark.parametrize("format", ["hdf5", "arrow"])
def test_an_agent_s_episodes_go_to_minari_and_back(format: str, batch: MultiAgentBatch, tmp_path: Path) -> None:
    import minari

    with marlvec.load_dataset(tmp_path / "run") as data:
        made = {
            agent: to_minari(data, f"tag/{agent}/random-v0", agent, data_format=format, description="A test.")
            for agent in ("adversary_1", "agent_0")
        }
        refused(ArgumentError, r"it has \['adversary_0', .*\]; name one", to_minari, data, "tag/all-v0")
        refused(KeyError, "no agent 'nobody'", to_minari, data, "tag/nobody-v0", "nobody")
        assert data.agents is not None
        places = {agent: data.agents.index(agent) for agent in made}
    for agent, policy_id in (("adversary_1", "chasers"), ("agent_0", "runner")):
        rows = batch[policy_id].take(np.flatnonzero(batch[policy_id]["agent_index"] == places[agent]))
        dataset = minari.load_dataset(f"tag/{agent}/random-v0")
        episodes = list(dataset.iterate_episodes())
        ids = np.unique(rows["eps_id"])
        assert len(episodes) == len(ids)
        for episode, eps_id in zip(episodes, ids, strict=True):
            want = rows.take(np.flatnonzero(rows["eps_id"] == eps_id))
            np.testing.assert_array_equal(episode.observations[:-1], want["obs"])
            np.testing.assert_array_equal(episode.observations[-1], want["next_obs"][-1])
            np.testing.assert_array_equal(episode.actions, want["actions_for_env"])
            np.testing.assert_array_equal(episode.rewards, want["rewards"])
            assert episode.truncations.tolist() == [False] * (len(want) - 1) + [True]
        from_minari(dataset, tmp_path / f"back {agent}")
        with marlvec.load_dataset(tmp_path / f"back {agent}") as back:
            got = back["main"].read()
            assert back.agents == ("agent_0",)
            assert back.observation_space("agent_0") == dataset.observation_space
            assert back.episode_table().whole.all()
            assert len(list(back.episodes())) == len(ids)
        order = np.lexsort([rows["t"], rows["eps_id"]])
        for name in ("obs", "actions", "rewards", "next_obs", "t", "env_t", "next_env_t"):
            np.testing.assert_array_equal(got[name], rows[name][order])


@needs_minari
def test_observations_behind_connectors_need_a_space(batch: Any, tmp_path: Path) -> None:
    from marlvec.connectors import AgentIndicator

    with (
        marlvec.make("simple_spread", 2, backend="native", max_cycles=5) as envs,
        marlvec.Recorder(tmp_path / "wide") as recorder,
    ):
        marlvec.Collector(
            envs, marlvec.RandomPolicy(), callbacks=[recorder], agent_connectors=[AgentIndicator()]
        ).collect(env_steps=10)
    with marlvec.load_dataset(tmp_path / "wide") as data, pytest.raises(ArgumentError, match="give their space as"):
        to_minari(data, "wide/agent_0/random-v0", "agent_0")


@needs_minari
@pytest.mark.filterwarnings("ignore:.*(is set to None|env_spec is None):UserWarning")
def test_an_agent_that_came_back_has_an_episode_a_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    spaces = {agent: (Box(-99, 99, (1,), np.float64), Discrete(3)) for agent in ("a", "b")}
    with marlvec.external.make(spaces) as envs:
        write(tmp_path / "run", [two_lives()], envs=envs)
    with marlvec.load_dataset(tmp_path / "run") as data:
        dataset = to_minari(data, "lives/a/test-v0", "a", data_format="arrow", description="A test.")
        episodes = list(dataset.iterate_episodes())
    assert [one.observations[:, 0].tolist() for one in episodes] == [[0, 1, 2], [4, 5, 6, 7]]
    assert [one.truncations.tolist() for one in episodes] == [[False, True], [False, False, False]]
    assert [one.terminations.tolist() for one in episodes] == [[False, False], [False, False, True]]


@needs_minari
def test_spaces_that_minari_cannot_save_are_refused(tmp_path: Path) -> None:
    obs = Dict({"a/b": Box(-9, 9, (1,), np.float64)})
    for spaces, message in (
        ((obs, Discrete(3)), "observation space of 'a' has the key 'a/b', which HDF5 reads as a path"),
        ((Box(-9, 9, (1,)), Tuple([Dict({"x": obs})])), "action space of 'a' has the key 'a/b'"),
        (
            (Dict(said=AnyText(9)), Discrete(3)),
            r"space of 'a' is .*AnyText.*: give observation_space=, for texts gymna",
        ),
    ):
        folder = tmp_path / str(spaces[0]).replace("/", "")
        with marlvec.external.make({"a": spaces, "b": spaces}) as envs:
            write(folder, [two_lives()], envs=envs)
        with marlvec.load_dataset(folder) as data, pytest.raises(ArgumentError, match=message):
            to_minari(data, "keys/a/test-v0", "a")


@needs_minari
def test_an_episode_with_one_observation_too_few_is_named(tmp_path: Path) -> None:
    def episode(observations: int) -> Any:
        obs, flags = {"x": np.zeros((observations, 1))}, np.zeros(3, np.bool_)
        return SimpleNamespace(
            observations=obs, actions=np.zeros(3, np.int64), rewards=np.zeros(3), terminations=flags, truncations=flags
        )

    dataset = SimpleNamespace(
        spec=SimpleNamespace(dataset_id="few-v0"),
        observation_space=Dict({"x": Box(-9, 9, (1,), np.float64)}),
        action_space=Discrete(3),
        iterate_episodes=lambda: iter([episode(4), episode(3)]),
    )
    with pytest.raises(ArgumentError, match="episode 1, observations at .*x.*: expected 4 .* of 3 steps, got 3"):
        from_minari(dataset, tmp_path / "few")


# --- Recordings in TorchRL's replay buffers


@pytest.mark.slow("imports torchrl, in a process of its own")
def test_a_replay_buffer_has_all_rows_under_torchrl_s_names(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    pytest.importorskip("torchrl")
    subprocess.run([sys.executable, "-m", "tests.recording.foreign", "fill_replay_buffers", str(tmp_path)], check=True)

"""Recordings as Minari's datasets, and back."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Tuple

import marlvec
from marlvec.collect import MultiAgentBatch
from marlvec.errors import ArgumentError
from marlvec.recording import from_minari, to_minari
from tests.recording.runs import collector, two_lives, write

minari = pytest.importorskip("minari")
pytest.importorskip("pyarrow")
pytest.importorskip("numba")


@pytest.fixture
def batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MultiAgentBatch:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    with (
        marlvec.make("simple_tag", 2, backend="native", max_cycles=5) as envs,
        marlvec.Recorder(tmp_path / "run", part_bytes=4000) as recorder,
    ):
        collects = collector(envs, [recorder])
        return MultiAgentBatch.concat([collects.collect(env_steps=33) for _ in range(3)])


@pytest.mark.slow("writes HDF5 by an episode")
@pytest.mark.filterwarnings(
    "ignore:.*(is set to None|env_spec is None):UserWarning"
)  # Minari asks for an author, and so on
@pytest.mark.parametrize("format", ["hdf5", "arrow"])
def test_an_agent_s_episodes_go_to_minari_and_back(format: str, batch: MultiAgentBatch, tmp_path: Path) -> None:
    with marlvec.load_dataset(tmp_path / "run") as data:
        made = {
            agent: to_minari(data, f"tag/{agent}/random-v0", agent, data_format=format, description="A test.")
            for agent in ("adversary_1", "agent_0")
        }
        with pytest.raises(ArgumentError, match=r"it has \['adversary_0', .*\]; name one"):
            to_minari(data, "tag/all-v0")
        with pytest.raises(KeyError, match="no agent 'nobody'"):
            to_minari(data, "tag/nobody-v0", "nobody")
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


def test_keys_that_hdf5_reads_as_paths_are_refused(tmp_path: Path) -> None:
    obs = Dict({"a/b": Box(-9, 9, (1,), np.float64)})
    for spaces, message in (
        ((obs, Discrete(3)), "observation space of 'a' has the key 'a/b', which HDF5 reads as a path"),
        ((Box(-9, 9, (1,)), Tuple([Dict({"x": obs})])), "action space of 'a' has the key 'a/b'"),
    ):
        with marlvec.external.make({"a": spaces, "b": spaces}) as envs:
            write(tmp_path / message[:3], [two_lives()], envs=envs)
        with marlvec.load_dataset(tmp_path / message[:3]) as data, pytest.raises(ArgumentError, match=message):
            to_minari(data, "keys/a/test-v0", "a")


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

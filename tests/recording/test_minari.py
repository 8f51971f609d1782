"""Recordings as Minari's datasets, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import marlvec
from marlvec.collect import MultiAgentBatch
from marlvec.errors import ArgumentError
from marlvec.recording import from_minari, to_minari
from tests.recording.runs import collector

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

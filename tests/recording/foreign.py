"""Other libraries' own objects of a recording, each in a process of its own.

``python -m tests.recording.foreign NAME FOLDER``: NAME is that of a function here.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import marlvec
from marlvec.errors import ArgumentError
from marlvec.recording import replay_buffers as torchrl
from marlvec.recording import to_mdp_dataset, to_replay_buffer
from tests.recording.runs import collector, make_batch, write

STEPS, AGENTS, EPISODE = 53, 3, 7


def experience() -> dict[str, Any]:
    """OG-MARL's arrays (1, T, …): episodes of 7 time steps, terminated and truncated by turns, and the begin of one."""
    rng = np.random.default_rng(0)
    number = np.arange(STEPS)
    ends = (number % EPISODE == EPISODE - 1)[:, None] & np.ones(AGENTS, np.bool_)
    by_turns = (number // EPISODE % 2 == 0)[:, None]
    arrays = {
        "observations": rng.standard_normal((STEPS, AGENTS, 4)).astype(np.float32),
        "actions": rng.integers(0, 5, (STEPS, AGENTS)).astype(np.int32),
        "rewards": rng.standard_normal((STEPS, AGENTS)).astype(np.float32),
        "terminals": ends & by_turns,
        "truncations": ends & ~by_turns,
    }
    state = rng.standard_normal((STEPS, 12)).astype(np.float32)
    legals = rng.random((STEPS, AGENTS, 5)) < 0.7
    found: dict[str, Any] = {name: array[None] for name, array in arrays.items()}
    return found | {"infos": {"state": state[None], "legals": legals[None].astype(np.float32)}}


def exchange_vaults(folder: Path) -> None:
    """Write ``FOLDER/vaults/mpe/theirs.vlt/Random`` with flashbax alone, and read ours, which must hold the same.

    jax leaves threads behind.
    """
    import flashbax
    import jax
    from flashbax.vault import Vault

    os.chdir(folder)
    want = experience()
    buffer = flashbax.make_trajectory_buffer(
        add_batch_size=1,
        sample_batch_size=1,
        sample_sequence_length=2,
        period=1,
        min_length_time_axis=2,
        max_length_time_axis=STEPS + 1,
    )
    state = buffer.init(jax.tree.map(lambda array: array[0, 0], want))
    vault = Vault("mpe/theirs.vlt", state.experience, rel_dir="vaults", vault_uid="Random")
    for start, stop in ((0, 20), (20, STEPS)):  # a Vault grows
        state = buffer.add(state, jax.tree.map(lambda array, a=start, b=stop: array[:, a:b], want))
        assert vault.write(state) == stop - start

    got = Vault("mpe/ours.vlt", rel_dir="vaults", vault_uid="Random").read().experience
    acting = got["infos"].pop("acting")
    assert np.asarray(acting).all()
    want["truncations"][0, -1] = True  # where the recording ends
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(one), other)


def compare_mdp_datasets(folder: Path) -> None:
    """Record two runs, and compare d3rlpy's episodes and transitions; d3rlpy warns when it is imported."""
    for name, options in (("discrete", {}), ("continuous", {"continuous_actions": True})):
        with (
            marlvec.make("simple_spread", 2, max_cycles=5, backend="sync", **options) as envs,
            marlvec.Recorder(folder / name) as recorder,
        ):
            collects = marlvec.Collector(envs, marlvec.RandomPolicy(), callbacks=[recorder], seed=0)
            rows = marlvec.SampleBatch.concat([collects.collect(env_steps=13)["main"] for _ in range(2)])
        with marlvec.load_dataset(folder / name) as data:
            dataset = to_mdp_dataset(data)
        keys = np.unique(np.stack([rows["eps_id"], rows["agent_index"]], axis=1), axis=0).tolist()
        assert len(dataset.episodes) == len(keys)
        for episode, (eps_id, agent) in zip(dataset.episodes, keys, strict=True):
            want = rows.take(np.flatnonzero((rows["eps_id"] == eps_id) & (rows["agent_index"] == agent)))
            np.testing.assert_array_equal(episode.observations, want.obs)
            np.testing.assert_array_equal(episode.actions, want.actions.reshape(len(want), -1))
            np.testing.assert_array_equal(episode.rewards[:, 0], want.rewards.astype(np.float32))
            assert not episode.terminated
            assert episode.transition_count == len(want) - 1
        info = dataset.dataset_info
        assert (info.action_space.name, info.action_size) == (name.upper(), 5)


def fill_replay_buffers(folder: Path) -> None:
    """Compare TorchRL's buffers with the rows that they are made of; they leave processes behind."""
    from torchrl.data import LazyTensorStorage
    from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement

    with (
        marlvec.make("simple_tag", 2, backend="native", max_cycles=5) as envs,
        marlvec.Recorder(folder / "run") as recorder,
    ):
        collector(envs, [recorder]).collect(env_steps=60)
    more: dict[str, Any] = {"storage": LazyTensorStorage(60), "sampler": SamplerWithoutReplacement(shuffle=False)}
    with marlvec.load_dataset(folder / "run") as data:
        want = data["runner"].read()
        buffer = to_replay_buffer(data["runner"], batch_size=60, columns=["eps_id"], **more)
        with pytest.raises(KeyError, match="no columns"):
            to_replay_buffer(data["runner"], 8, columns=["logp"], storage=LazyTensorStorage(60))
    got = buffer.sample()
    np.testing.assert_array_equal(got["observation"].numpy(), want["obs"])
    np.testing.assert_array_equal(got["action"].numpy(), want["actions"])
    np.testing.assert_array_equal(got["eps_id"].numpy(), want["eps_id"])
    np.testing.assert_array_equal(got["next", "observation"].numpy(), want["next_obs"])
    np.testing.assert_array_equal(got["next", "reward"].numpy()[:, 0], want["rewards"].astype(np.float32))
    np.testing.assert_array_equal(got["next", "terminated"].numpy()[:, 0], want["terminated"])
    np.testing.assert_array_equal(got["next", "done"].numpy()[:, 0], want["terminated"] | want["truncated"])
    write(folder / "none", [make_batch(0, 3, lambda n: {"x": n}), make_batch(0, 0, lambda n: {"x": n})])
    with marlvec.load_dataset(folder / "none") as data, pytest.raises(KeyError):
        to_replay_buffer(data["main"], 8, storage=LazyTensorStorage(60))
    slices_stay_inside_trajectories(folder)
    dtypes_that_torch_cannot_index(folder)


def slices_stay_inside_trajectories(folder: Path) -> None:
    """A slice sampler mixes no agents, episodes or batches, also where rows come in several chunks."""
    from torchrl.data import LazyTensorStorage
    from torchrl.data.replay_buffers.samplers import SliceSampler

    with (
        marlvec.make("simple_tag", 2, backend="native", max_cycles=5) as envs,
        marlvec.Recorder(folder / "slices") as recorder,
    ):
        collects = collector(envs, [recorder])
        for _ in range(4):
            collects.collect(env_steps=26)
    rows_at_once, torchrl._ROWS = torchrl._ROWS, 50
    with marlvec.load_dataset(folder / "slices") as data:
        rows, want = data["chasers"], data["chasers"].read(columns=["unroll_id"])["unroll_id"]
        names = ["eps_id", "agent_index", "t", "unroll_id"]
        buffer = to_replay_buffer(
            rows, 60, columns=names, storage=LazyTensorStorage(len(rows)), sampler=SliceSampler(slice_len=3)
        )
    torchrl._ROWS = rows_at_once
    traj_ids = buffer[:]["collector", "traj_ids"].numpy()
    np.testing.assert_array_equal(traj_ids, np.unique(want, return_inverse=True)[1])
    for _ in range(20):
        found = buffer.sample()
        slices = {name: found[name].numpy().reshape(-1, 3) for name in names}
        for name in ("eps_id", "agent_index", "unroll_id"):
            assert (np.diff(slices[name]) == 0).all(), name
        assert (np.diff(slices["t"]) == 1).all()


def dtypes_that_torch_cannot_index(folder: Path) -> None:
    """They are widened, or refused by the column's name."""
    from torchrl.data import LazyTensorStorage

    def columns(obs: Any) -> dict[str, Any]:
        n = len(obs)
        flags = np.zeros(n, np.bool_)
        return {
            "obs": obs,
            "actions": np.zeros(n, np.uint32),
            "rewards": np.zeros(n),
            "next_obs": obs,
            "terminated": flags,
            "truncated": flags,
        }

    for dtype, wider in (("uint16", "int32"), ("uint32", "int64"), ("uint64", "int64"), ("uint8", "uint8")):
        obs = np.arange(8, dtype=dtype)[:, None]
        write(folder / dtype, [make_batch(0, 8, lambda n, obs=obs: columns(obs))])  # type: ignore[misc]
        with marlvec.load_dataset(folder / dtype) as data:
            got = to_replay_buffer(data["main"], 4)[:]
        np.testing.assert_array_equal(got["observation"].numpy(), obs)
        assert str(got["observation"].dtype) == f"torch.{wider}"
        assert str(got["action"].dtype) == "torch.int64"
    for name, obs, message in (
        ("large", np.full((8, 1), 2**63, np.uint64), "column 'obs': expected numbers below"),
        ("empty", np.zeros((8, 0)), r"column 'obs': rows of shape \(0,\) have no entries"),
    ):
        write(folder / name, [make_batch(0, 8, lambda n, obs=obs: columns(obs))])  # type: ignore[misc]
        with marlvec.load_dataset(folder / name) as data, pytest.raises(ArgumentError, match=message):
            to_replay_buffer(data["main"], 4)
    with marlvec.load_dataset(folder / "empty") as data:
        buffer = to_replay_buffer(data["main"], 4, storage=LazyTensorStorage(8))
    assert buffer.sample()["observation"].shape == (4, 0)


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))

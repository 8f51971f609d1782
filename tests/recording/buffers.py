"""A program that fills TorchRL's replay buffers, which leave processes behind.

``python -m tests.recording.buffers FOLDER``
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchrl.data import LazyTensorStorage
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement, SliceSampler

import marlvec
from marlvec.errors import ArgumentError
from marlvec.recording import replay_buffers as torchrl
from marlvec.recording import to_replay_buffer
from tests.recording.runs import collector, make_batch, write


def main(folder: Path) -> None:
    """Compare a buffer with the rows it is made of."""
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
    main(Path(sys.argv[1]))

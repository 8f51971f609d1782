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
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement

import marlvec
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


if __name__ == "__main__":
    main(Path(sys.argv[1]))

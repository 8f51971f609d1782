"""`save_state` and `load_state`: states of envs in files, through which they go on bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import marlvec
from marlvec.errors import ArgumentError, CheckpointError
from marlvec.serialization.archive import read_archive, write_archive


def carts(num_envs: int, backend: str = "sync") -> marlvec.VectorEnv:
    return marlvec.make("CartPole-v1", num_envs, backend=backend, env_state="deepcopy")


def walk(envs: marlvec.VectorEnv, steps: int) -> list[bytes]:
    return [envs.step(envs.random_action(seed=t))[0].tobytes() for t in range(steps)]


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=2)
@pytest.mark.parametrize("backend", ["sync", "async"])
def test_envs_go_on_from_a_file(backend: str, tmp_path: Path) -> None:
    path = tmp_path / "state.npz"
    with carts(3, backend) as envs, carts(1) as one:
        envs.reset(seed=0)
        walk(envs, 3)
        marlvec.save_state(path, envs.get_state())
        expected = walk(envs, 60)
        envs.set_state(marlvec.load_state(path))
        assert walk(envs, 60) == expected
        obs, _ = envs.set_state(marlvec.load_state(path))
        alone, _ = one.set_state(marlvec.load_state(path), env_ids=[0], from_ids=[2])
        np.testing.assert_array_equal(alone[0], obs[2])
    assert [file.name for file in tmp_path.iterdir()] == ["state.npz"], "no drafts"


def test_what_is_no_state_is_not_written(tmp_path: Path) -> None:
    for wrong in ({"envs": 1}, None, np.zeros(3)):
        with pytest.raises(ArgumentError, match=r"save_state\(\): expected a state from envs.get_state\(\), got"):
            marlvec.save_state(tmp_path / "state.npz", wrong)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_what_is_no_file_of_a_state_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.npz"

    def refused(match: str) -> None:
        with pytest.raises(CheckpointError, match=match):
            marlvec.load_state(path)

    refused("state.npz")
    with carts(2) as envs:
        envs.reset(seed=0)
        marlvec.save_state(path, envs.get_state())
        found: dict[str, Any] = read_archive(path)["envs"]
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        refused("state.npz")
        path.write_bytes(whole.replace(b"$items", b"$itemx", 1) if b"$items" in whole else whole[:-1] + b"0")
        refused("state.npz")
        write_archive(path, {"envs": {**found, "format": 2}})
        refused("of the format 2; this version reads 1")
        write_archive(path, {"envs": {"format": 1}})
        refused("holds a state of envs of the format 1")
        write_archive(path, {"envs": {"$nothing": 1}})
        refused("holds no state of envs: expected one of")
        marlvec.Collector(envs, marlvec.RandomPolicy(), seed=0).save(path)
        refused(r"holds no state of envs, but \['collector'\]")

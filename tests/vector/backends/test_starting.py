"""Where envs are built: in workers of every start method, once, from whatever a factory may be."""

from __future__ import annotations

import os
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from marlvec import AsyncVectorEnv
from marlvec.making import make
from marlvec.testing.scripted import CounterEnv

CONTEXTS = ("forkserver", "spawn", "fork")


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=3)
@pytest.mark.fault("A23")
@pytest.mark.parametrize("context", CONTEXTS)
def test_the_thread_that_made_the_envs_may_end(context: str) -> None:
    made: list[AsyncVectorEnv] = []
    factories = [partial(CounterEnv, env_index=i) for i in range(4)]
    thread = threading.Thread(target=lambda: made.append(AsyncVectorEnv(factories, num_workers=2, context=context)))
    thread.start()
    thread.join()
    with made[0] as envs:
        time.sleep(0.05)
        envs.reset()
        for _ in range(12):
            envs.step(np.ones((4, 3), np.int64))
        time.sleep(0.05)
        assert all(Path(f"/proc/{pid}").exists() for pid in envs.worker_pids)


def surroundings(env: CounterEnv) -> Any:
    """Let the env tell in its infos what process it lives in."""
    whole = env.reset

    def reset(seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        obs, infos = whole(seed, options)
        mpi = [key for key in os.environ if key.startswith(("OMPI_", "PMI", "MPI_", "HYDRA_", "I_MPI_"))]
        told = {"pid": os.getpid(), "mpi": mpi, "other": os.environ.get("MARLVEC_OTHER")}
        return obs, {**infos, **told}

    env.reset = reset  # type: ignore[method-assign]  # as a wrapper would
    return env


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=3)
@pytest.mark.checklist(31)
@pytest.mark.parametrize("context", CONTEXTS)
def test_start_methods_lambdas_and_mpi(context: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MPI_LOCALRANKID", "HYDRA_X", "I_MPI_X"):
        monkeypatch.setenv(key, "1")
    monkeypatch.setenv("MARLVEC_OTHER", "here")
    lengths = [2, 3]
    with make(
        [lambda k=k: surroundings(CounterEnv(lengths[k])) for k in range(2)], num_workers=2, context=context
    ) as envs:
        _, infos = envs.reset()
        assert tuple(infos["pid"]) == envs.worker_pids  # type: ignore[attr-defined]  # async by default
        assert list(infos["mpi"]) == [[], []]
        assert list(infos["other"]) == ["here", "here"]
        for t in range(1, 7):
            truncated = envs.step(np.ones((2, 3), np.int64))[3]
            assert truncated[:, 0].tolist() == [t % 2 == 0, t % 3 == 0]
    assert os.environ["OMPI_COMM_WORLD_RANK"] == "1", "the parent's own environment is left as it is"


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=2)
@pytest.mark.checklist(32)
@pytest.mark.parametrize("context", CONTEXTS)
def test_every_env_is_built_once_and_never_in_the_parent(context: str, tmp_path: Path) -> None:
    def build(env_index: int) -> CounterEnv:
        with (tmp_path / "built").open("a") as file:  # one short line at a time is written in one piece
            file.write(f"{env_index} {os.getpid()}\n")
        return CounterEnv(3, env_index=env_index)

    with make(build, 5, num_workers=2, context=context) as envs:
        assert envs.observation_space.shape == (5, 3, 7)
        assert envs.agent_action_space(0) == envs.agent_action_space("agent_2")
        envs.reset(seed=0)
        envs.step(envs.action_space.sample())
        built = sorted(tuple(map(int, line.split())) for line in (tmp_path / "built").read_text().splitlines())
        assert [i for i, _ in built] == [0, 1, 2, 3, 4]
        assert [pid for _, pid in built] == [envs.worker_pids[w] for w in (0, 0, 0, 1, 1)]  # type: ignore[attr-defined]
        assert os.getpid() not in {pid for _, pid in built}

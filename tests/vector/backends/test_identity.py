"""Every backend, however many workers, gives what a plain loop over the raw envs gives, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest

from marlvec import AsyncVectorEnv
from marlvec.testing.scripted import decode
from tests.vector.support.kinds import REAL, SCRIPTED, asynchronous, factories_of, recorded, sync
from tests.vector.support.reference import MODES, record, replay

pytestmark = pytest.mark.many_processes

N = 5
# Which start method, how many workers and which mode go together changes nothing: tests/properties draws them freely.
SETUPS = [
    ("forkserver", 1, "disabled"),
    ("forkserver", 5, "next_step"),
    ("fork", 2, "next_step"),
    ("fork", 3, "same_step"),
]


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=12)
@pytest.mark.checklist(15)
@pytest.mark.checklist(43)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [*REAL, *SCRIPTED, "single"])
@pytest.mark.parametrize("copy", [True, False], ids=["copies", "views"])
def test_sync_is_the_plain_loop(kind: str, mode: str, copy: bool) -> None:
    with sync(kind, N, mode, copy=copy) as envs:
        assert envs.autoreset_mode == envs.metadata["autoreset_mode"] == mode
        replay(envs, recorded(kind, N, mode))


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=12)
@pytest.mark.checklist(15)
@pytest.mark.checklist(17)
@pytest.mark.checklist(31)
@pytest.mark.checklist(43)
@pytest.mark.parametrize(("context", "workers", "mode"), [*SETUPS, ("spawn", 2, "same_step")])
@pytest.mark.parametrize("kind", REAL)
def test_workers_are_the_plain_loop(kind: str, workers: int, context: str, mode: str) -> None:
    with asynchronous(kind, N, mode, num_workers=workers, context=context) as envs:
        assert envs.num_workers == len(set(envs.worker_pids)) == workers
        assert envs.autoreset_mode == envs.metadata["autoreset_mode"] == mode
        replay(envs, recorded(kind, N, mode))


@pytest.mark.checklist(17)
def test_sixteen_envs_on_five_workers() -> None:
    factories = factories_of("parallel", 16)
    with AsyncVectorEnv(factories, num_workers=5) as envs:
        assert envs.num_workers == len(set(envs.worker_pids)) == 5
        obs, infos = envs.reset(seed=3)
        for i in range(16):
            alive = np.flatnonzero(infos["alive"][i])
            assert {decode(obs[i, a]).env for a in alive} == {i}, "rows come in env order"
    calls = record(factories, "same_step", seed=3)
    with AsyncVectorEnv(factories, num_workers=5) as envs:
        replay(envs, calls)


def test_a_multiprocessing_context_is_a_context_too() -> None:
    import multiprocessing

    calls = recorded("parallel", 2, "same_step")
    for name in ("fork", "forkserver", "spawn"):
        with asynchronous("parallel", 2, context=multiprocessing.get_context(name), num_workers=1) as envs:
            assert envs.context == name
            replay(envs, calls)

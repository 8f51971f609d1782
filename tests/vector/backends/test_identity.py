"""Every backend, however many workers, gives what a plain loop over the raw envs gives, byte for byte."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Discrete
from hypothesis import given, settings
from hypothesis import strategies as st

from marlvec import AsyncVectorEnv, SyncVectorEnv
from marlvec.testing.scripted import SampledEnv, decode
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


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=6)
@pytest.mark.checklist(15)
@pytest.mark.checklist(43)
@pytest.mark.parametrize(("workers", "context"), [(2, "forkserver"), (3, "fork")])
@pytest.mark.parametrize("kind", [*SCRIPTED, "single"])
def test_scripted_envs_in_workers_are_the_plain_loop(kind: str, workers: int, context: str) -> None:
    mode = MODES[(workers + len(kind)) % 3]
    with asynchronous(kind, N, mode, num_workers=workers, context=context, copy=workers != 2) as envs:
        assert envs.metadata["autoreset_mode"] == mode
        replay(envs, recorded(kind, N, mode))


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=4)
@pytest.mark.checklist(15)
@pytest.mark.parametrize("kind", [*REAL, *SCRIPTED])
def test_without_shared_memory_too(kind: str) -> None:
    mode = MODES[len(kind) % 3]
    with asynchronous(kind, N, mode, num_workers=2, shared_memory=False, context="fork") as envs:
        replay(envs, recorded(kind, N, mode))


@pytest.mark.slow("plays whole episodes in worker processes")
@pytest.mark.checklist(15)
@pytest.mark.checklist(22)
@pytest.mark.checklist(51)
@pytest.mark.fault("B8")
@pytest.mark.time_limit(600)  # shrinking a counterexample takes its time
@settings(max_examples=20)
@given(data=st.data())
def test_any_script_any_backend_any_mode(data: st.DataObject) -> None:
    """Random agents, lengths, births, deaths and flags, with explicit resets of some envs thrown in anywhere."""
    draw = data.draw
    n, mode = draw(st.integers(1, 5), "envs"), draw(st.sampled_from(MODES), "mode")
    kind = draw(st.sampled_from(sorted(SCRIPTED)), "kind")
    factories = factories_of(kind, n, agent_num=draw(st.integers(1, 4), "agents"), longest=draw(st.integers(1, 6)))
    interrupt = draw(st.sampled_from([0.0, 0.1, 0.4]), "interrupt")
    calls = record(factories, mode, seed=draw(st.integers(0, 2**31)), interrupt=interrupt)
    copy, grouped = draw(st.booleans(), "copy"), draw(st.booleans(), "grouped")
    with SyncVectorEnv(factories, autoreset_mode=mode, copy=copy, grouped=grouped) as envs:
        replay(envs, calls)
    workers, shared = draw(st.integers(1, n), "workers"), draw(st.booleans(), "shared memory")
    context = draw(st.sampled_from(["fork", "forkserver"]), "context")
    with AsyncVectorEnv(
        factories,
        autoreset_mode=mode,
        num_workers=workers,
        copy=copy,
        grouped=grouped,
        shared_memory=shared,
        context=context,
    ) as envs:
        replay(envs, calls)


@pytest.mark.slow("plays whole episodes in worker processes")
@pytest.mark.checklist(15)
@pytest.mark.time_limit(600)  # shrinking a counterexample takes its time
@settings(max_examples=60)
@given(
    kind=st.sampled_from(sorted(SCRIPTED)),
    n=st.integers(1, 4),
    mode=st.sampled_from(MODES),
    agent_num=st.integers(1, 5),
    seed=st.integers(0, 2**31),
    interrupt=st.sampled_from([0.0, 0.2, 0.5]),
)
def test_any_script_in_this_process(kind: str, n: int, mode: str, agent_num: int, seed: int, interrupt: float) -> None:
    factories = factories_of(kind, n, agent_num=agent_num, longest=5)
    with SyncVectorEnv(factories, autoreset_mode=mode) as envs:
        replay(envs, record(factories, mode, seed=seed, interrupt=interrupt))


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


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=3)
@pytest.mark.checklist(31)
@pytest.mark.parametrize("context", ["fork", "forkserver", "spawn"])
def test_lambdas_work_and_mpi_is_hidden(context: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mpi = ("OMPI_COMM_WORLD_RANK", "PMI_SIZE", "MPI_LOCALRANKID")
    monkeypatch.setenv("MY_OWN_VARIABLE", "kept")
    here = os.getpid()

    class Checked(SampledEnv):  # a local class: it travels by value
        def __init__(self) -> None:
            if os.getpid() != here:
                assert not set(mpi) & set(os.environ)
            assert os.environ["MY_OWN_VARIABLE"] == "kept"
            super().__init__(Discrete(4), Discrete(3), length=3)

    factories: Any = [lambda: Checked() for _ in range(3)]
    for name in mpi:
        monkeypatch.setenv(name, "3")
    with AsyncVectorEnv(factories, num_workers=2, context=context) as envs:
        assert envs.context == context
        replay(envs, record(factories, "same_step"))
    assert all(os.environ[name] == "3" for name in mpi), "the parent keeps its own"


def test_a_multiprocessing_context_is_a_context_too() -> None:
    import multiprocessing

    calls = recorded("parallel", 2, "same_step")
    for name in ("fork", "forkserver", "spawn"):
        with asynchronous("parallel", 2, context=multiprocessing.get_context(name), num_workers=1) as envs:
            assert envs.context == name
            replay(envs, calls)

"""Every backend: where envs are built, that each gives what a plain loop gives, and which `make` chooses."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

import marlvec
from marlvec import AsyncVectorEnv, SyncVectorEnv, ThreadVectorEnv, VectorEnv
from marlvec.envs import adapt
from marlvec.errors import ArgumentError, ContractError, EnvFault, EnvRaised
from marlvec.interop.pettingzoo import ParallelView
from marlvec.making import make
from marlvec.testing import CounterEnv, NoOpEnv, decode
from marlvec.vector import async_env as auto
from marlvec.vector.cores import quota, usable_cores
from tests.families.trace import Trace
from tests.faults.harness.spoilt import FORMS, Spoil
from tests.vector.support.drivers import INCOMPLETE, JOINT, IncompleteEnv, JointEnv
from tests.vector.support.kinds import REAL, SCRIPTED, Factories, asynchronous, factories_of, recorded, sync, vectorize
from tests.vector.support.reference import MODES, record, refused, replay

# Where envs are built: in workers of every start method, once, from whatever a factory may be.


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


# Every backend, however many workers, gives what a plain loop over the raw envs gives, byte for byte.


# Which start method, how many workers and which mode go together changes nothing: tests/properties draws them freely.
SETUPS = [
    ("forkserver", 1, "disabled"),
    ("forkserver", 5, "next_step"),
    ("fork", 2, "next_step"),
    ("fork", 3, "same_step"),
]


@pytest.mark.many_processes
@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=12)
@pytest.mark.checklist(15)
@pytest.mark.checklist(43)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [*REAL, *SCRIPTED, "single"])
@pytest.mark.parametrize("copy", [True, False], ids=["copies", "views"])
def test_sync_is_the_plain_loop(kind: str, mode: str, copy: bool) -> None:
    with sync(kind, 5, mode, copy=copy) as envs:
        assert envs.autoreset_mode == envs.metadata["autoreset_mode"] == mode
        replay(envs, recorded(kind, 5, mode))


@pytest.mark.many_processes
@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=12)
@pytest.mark.checklist(15)
@pytest.mark.checklist(17)
@pytest.mark.checklist(31)
@pytest.mark.checklist(43)
@pytest.mark.parametrize(("context", "workers", "mode"), [*SETUPS, ("spawn", 2, "same_step")])
@pytest.mark.parametrize("kind", REAL)
def test_workers_are_the_plain_loop(kind: str, workers: int, context: str, mode: str) -> None:
    with asynchronous(kind, 5, mode, num_workers=workers, context=context) as envs:
        assert envs.num_workers == len(set(envs.worker_pids)) == workers
        assert envs.autoreset_mode == envs.metadata["autoreset_mode"] == mode
        replay(envs, recorded(kind, 5, mode))


@pytest.mark.many_processes
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


@pytest.mark.many_processes
def test_a_multiprocessing_context_is_a_context_too() -> None:
    import multiprocessing

    calls = recorded("parallel", 2, "same_step")
    for name in ("fork", "forkserver", "spawn"):
        with asynchronous("parallel", 2, context=multiprocessing.get_context(name), num_workers=1) as envs:
            assert envs.context == name
            replay(envs, calls)


# Gymnasium envs of several agents: what a plain loop over them gives, byte for byte, in every form they may have.


N = 3


def joint_envs(form: str) -> list[Callable[[], Any]]:
    return [partial(JointEnv, env_index=i, **JOINT[form]) for i in range(N)]


@pytest.mark.mostly_slow("plays whole episodes", quick=2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", JOINT)
def test_joint_envs_in_sync_are_the_plain_loop(form: str, mode: str) -> None:
    with vectorize("sync", joint_envs(form), autoreset_mode=mode) as envs:
        agent_num = JOINT[form].get("agent_num", 3)
        assert envs.agent_num == agent_num
        assert len(envs.groups) == (2 if form == "unlike" else 1)
        replay(envs, record(joint_envs(form), mode))


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=3)
@pytest.mark.parametrize("backend", ["thread", "async"])
@pytest.mark.parametrize("form", JOINT)
def test_joint_envs_in_threads_and_processes_are_the_plain_loop(form: str, backend: str) -> None:
    mode = MODES[(len(form) + len(backend)) % 3]
    with vectorize(backend, joint_envs(form), autoreset_mode=mode) as envs:
        replay(envs, record(joint_envs(form), mode))


# Parallel envs that leave things out, with ``lenient=True``: what a plain loop gives, on every backend.


def incomplete_envs(form: str) -> Factories:
    return [partial(IncompleteEnv, env_index=i, **INCOMPLETE[form]) for i in range(N)]


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick="each")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", INCOMPLETE)
def test_lenient_sync_is_the_plain_loop(form: str, mode: str) -> None:
    with marlvec.make(incomplete_envs(form), backend="sync", autoreset_mode=mode, lenient=True) as envs:
        replay(envs, record(incomplete_envs(form), mode, episodes=5))


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=2)
@pytest.mark.parametrize("backend", ["thread", "async"])
@pytest.mark.parametrize("form", INCOMPLETE)
def test_lenient_threads_and_processes_are_the_plain_loop(form: str, backend: str) -> None:
    mode = MODES[(len(form) + len(backend)) % 3]
    with marlvec.make(incomplete_envs(form), backend=backend, num_workers=2, autoreset_mode=mode, lenient=True) as envs:
        replay(envs, record(incomplete_envs(form), mode, episodes=5))


@pytest.mark.parametrize("form", ["gone", "observed"])
def test_a_last_observation_that_the_env_did_not_give_is_marked(form: str) -> None:
    plain = IncompleteEnv(**INCOMPLETE[form])
    with marlvec.make(partial(IncompleteEnv, **INCOMPLETE[form]), backend="sync", lenient=True) as envs:
        envs.reset(seed=[0])
        plain.reset(seed=0)
        missing = 0
        for _ in range(30):
            before = list(plain.agents)
            actions = envs.random_action()
            obs, *_ = plain.step({name: actions[0, a] for a, name in enumerate(envs.agents) if name in before})
            infos = envs.step(actions)[-1]
            gone = [name in before and name not in plain.agents and name not in obs for name in envs.agents]
            got = infos.get("final_observation_missing", np.zeros((1, 3), bool))
            assert got.tolist() == [gone]
            missing += sum(gone)
            if not plain.agents:
                plain.reset()
    assert (missing > 0) is (form == "gone")


@pytest.mark.parametrize("form", INCOMPLETE)
def test_by_default_each_is_refused_and_told_of_lenient(form: str) -> None:
    with (
        pytest.raises((ContractError, EnvFault), match="lenient=True"),
        marlvec.make(incomplete_envs(form), backend="sync") as envs,
    ):
        envs.reset(seed=0)
        for _ in range(9):
            envs.step(envs.random_action())


def test_the_view_plays_it_too() -> None:
    plain = IncompleteEnv(**INCOMPLETE["all"])
    plain.reset()
    view = ParallelView.make(partial(IncompleteEnv, **INCOMPLETE["all"]), lenient=True)
    for seed in (3, None, None):
        obs, _ = view.reset(seed=seed)
        assert obs.keys() == plain.reset(seed=seed)[0].keys()
        while view.agents:
            assert view.agents == plain.agents
            actions = {agent: int(obs[agent]["action_mask"].argmax()) for agent in view.agents}
            obs = view.step(actions)[0]
            plain.step(actions)
        assert plain.agents == []
    view.close()


def test_an_agent_that_left_does_not_come_back() -> None:
    class Returning(CounterEnv):
        def step(self, actions: dict[str, Any]) -> Any:
            self.agents = self.possible_agents[:]
            result = super().step({agent: actions.get(agent, 0) for agent in self.agents})
            if self.world.t == 2:
                self.agents = self.agents[1:]
                for table in result:
                    del table["agent_0"]
            return result

    envs = marlvec.make(Returning, backend="sync", lenient=True)
    envs.reset(seed=0)
    envs.step(envs.random_action())
    _, _, terminated, truncated, infos = envs.step(envs.random_action())
    assert truncated.tolist() == [[True, False, False]]
    assert not terminated.any()
    assert infos["alive"].tolist() == [[False, True, True]]
    refused(EnvFault, r"agent_0.*has ended and cannot come back", envs.step, envs.random_action())
    envs.close()


class Looks:
    """A Parallel env by its looks alone."""

    def observation_space(self, agent: str) -> Box:
        return Box(0, 1, (2,))

    def action_space(self, agent: str) -> Discrete:
        return Discrete(2)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = ["left", "right"]
        return {agent: np.zeros(2, np.float32) for agent in self.agents}, {}

    def step(self, actions: dict[str, Any]) -> Any:
        self.agents = []
        return {}, {}, {}, {}, {}


def test_an_env_that_only_looks_like_one() -> None:
    assert adapt(Looks(), lenient=True).agents == ("left", "right")
    with marlvec.make(Looks, 2, backend="sync", lenient=True) as envs:
        envs.reset(seed=0)
        assert envs.step(envs.random_action())[3].all()
    refused(ContractError, r"Looks.possible_agents: missing.*lenient=True", adapt, Looks())


ODD = [
    *(Spoil("reward", value, "2.0") for value in (np.full(1, 2.0), np.full((1, 1), 2, np.int8), np.array(2))),
    *(Spoil("terminated", value, "0.0") for value in (0, np.int8(0), np.zeros(1, bool), np.array(0))),
    *(Spoil("truncated", value, "1.0") for value in (1, np.uint8(1), np.ones((1, 1), int), np.array(True))),
]


@pytest.mark.parametrize("form", FORMS)
def test_arrays_of_one_element_and_ints_are_taken_for_rewards_and_flags(form: str) -> None:
    with marlvec.make(partial(FORMS[form], ODD, True), backend="sync", lenient=True) as envs:
        whose = envs.agents.index({"single": "agent_0", "turns": "ann"}.get(form, "bob"))
        for k, spoil in enumerate(ODD):
            envs.reset(seed=0, options={"spoil": k})
            envs.step(envs.random_action())
            _, rewards, terminated, truncated, _ = envs.step(envs.random_action())
            got = {"reward": rewards, "terminated": terminated, "truncated": truncated}[spoil.place]
            assert got[0, whose] == float(spoil.words)


def test_an_env_behind_an_adapter_takes_no_lenient() -> None:
    refused(ArgumentError, "has an adapter already", adapt, adapt(CounterEnv()), lenient=True)
    refused(ArgumentError, "lenient=True", marlvec.make, "simple_spread", backend="native", lenient=True)


# One seed, one trace: SHA-256 of 8,000 env steps (100,000 in the soak), whatever runs them, and how many of it.


SIXTEEN = 16
STEPS = 500
MANY_STEPS = 6_250
FEW_STEPS = 100  # of an env that takes a hundred times as long

PLACES = ("thread", "fork", "forkserver", "spawn")
WORKERS = (1, 2, 4)
EVERYWHERE = [(place, workers) for place in PLACES for workers in WORKERS]
SOMEWHERE = list(zip(PLACES, (2, 4, 2, 1), strict=True))


def made(place: str, workers: int, factories: list[Callable[[], Any]]) -> VectorEnv:
    if place == "sync":
        return SyncVectorEnv(factories)
    if place == "thread":
        return ThreadVectorEnv(factories, num_workers=workers)
    return AsyncVectorEnv(factories, num_workers=workers, context=place)


def trace_of(place: str, workers: int, factories: list[Callable[[], Any]], steps: int) -> str:
    """Hash of all that a run brings, its random actions included."""
    trace = Trace()
    with made(place, workers, factories) as envs:
        trace.add(envs.reset(seed=2026))
        for _ in range(steps):
            actions = envs.random_action()
            trace.add((actions, envs.step(actions)))
    return str(trace)


@cache
def expected(kind: str, steps: int) -> str:
    return trace_of("sync", 1, factories_of(kind, SIXTEEN), steps)


@pytest.mark.slow("plays whole episodes in worker processes")
@pytest.mark.parametrize(("place", "workers"), SOMEWHERE)
def test_eight_thousand_steps(place: str, workers: int) -> None:
    assert trace_of(place, workers, factories_of("masked", SIXTEEN), STEPS) == expected("masked", STEPS)


@pytest.mark.slow("plays whole episodes in worker processes")
@pytest.mark.parametrize(("place", "workers"), SOMEWHERE)
def test_simple_spread(place: str, workers: int) -> None:
    trace = trace_of(place, workers, factories_of("simple_spread", SIXTEEN), FEW_STEPS)
    assert trace == expected("simple_spread", FEW_STEPS)


@pytest.mark.soak
@pytest.mark.parametrize(("place", "workers"), EVERYWHERE)
@pytest.mark.parametrize("kind", ["masked", "simple_spread", "parallel", "turns", "keyed"])
def test_a_hundred_thousand_steps(kind: str, place: str, workers: int) -> None:
    assert trace_of(place, workers, factories_of(kind, SIXTEEN), MANY_STEPS) == expected(kind, MANY_STEPS)


def test_a_trace_tells_of_the_smallest_change() -> None:
    """The hash is of all there is: another seed, another action, another bit make another one."""
    with made("sync", 1, factories_of("masked", SIXTEEN)) as envs:
        envs.reset(seed=1)
        result = envs.step(envs.random_action(seed=0))
    same, other = Trace(), Trace()
    same.add(result)
    for array in (result[0], result[1], result[3], result[4]["alive"], result[4]["action_mask"]):
        other = Trace()
        before = array.flat[-1]
        array.flat[-1] = not before if array.dtype == bool else np.nextafter(before, np.inf, dtype=array.dtype)
        other.add(result)
        array.flat[-1] = before
        assert str(other) != str(same)
    again = Trace()
    again.add(result)
    assert str(again) == str(same)


# ``make(backend="auto")``: where envs run is measured, said, and changes no number.


class Slow(NoOpEnv):
    """A hundred times the work at which processes pay, or a wait that takes as long."""

    def __init__(self, waits: bool = False) -> None:
        super().__init__()
        self._waits = waits

    def step(self, actions: dict[str, Any]) -> Any:
        until = time.thread_time() + 0.01
        if self._waits:
            time.sleep(0.01)
        while not self._waits and time.thread_time() < until:
            pass
        return super().step(actions)


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "usable_cores", lambda: 2)


@pytest.mark.usefixtures("two_cores")
@pytest.mark.slow("plays whole episodes in worker processes")
@pytest.mark.parametrize("waits", [False, True], ids=["works", "waits"])
def test_envs_with_much_to_do_go_to_processes(waits: bool) -> None:
    with marlvec.make(Slow, num_envs=2, backend="auto", waits=waits) as envs:
        assert envs.backend == "async"
        assert "worker processes would save" in repr(envs)


@pytest.mark.usefixtures("two_cores")
def test_envs_with_nothing_to_do_stay_here() -> None:
    with marlvec.make(NoOpEnv, num_envs=2, backend="auto") as envs:
        assert (envs.backend, envs.autoreset_mode) == ("sync", "same_step")
        assert "backend='sync' (a step of one env takes" in repr(envs)


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize(
    ("options", "backend", "reason"),
    [
        ({"num_workers": 2}, "async", "num_workers"),
        ({"step_timeout": 60.0}, "async", "worker processes"),
        ({}, "sync", "one core, or one env"),
    ],
)
def test_nothing_is_measured_where_nothing_is_to_choose(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], backend: str, reason: str
) -> None:
    monkeypatch.setattr(auto, "usable_cores", lambda: 1)
    monkeypatch.setattr(auto, "_seconds_of_a_step", lambda *_: pytest.fail("measured"))
    with marlvec.make(NoOpEnv, num_envs=2, backend="auto", **options) as envs:
        assert envs.backend == backend
        assert reason in envs.backend_reason


@pytest.mark.usefixtures("two_cores")
@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=2)
@pytest.mark.parametrize(("seconds", "backend"), [(1e-6, "sync"), (1e-3, "async")])
@pytest.mark.parametrize("mode", ["same_step", "next_step", "disabled"])
def test_numbers_are_those_of_the_backend_that_is_asked_for_by_name(
    monkeypatch: pytest.MonkeyPatch, seconds: float, backend: str, mode: str
) -> None:
    monkeypatch.setattr(auto, "_seconds_of_a_step", lambda *_: seconds)
    seen: list[list[Any]] = []
    for name in ("auto", "sync"):
        env = "mpe2.simple_spread_v3:parallel_env"  # by an id it would be native
        with marlvec.make(env, num_envs=3, backend=name, autoreset_mode=mode, max_cycles=7) as envs:
            assert envs.backend == (backend if name == "auto" else "sync")
            rows = [envs.reset(seed=3)[0]]
            for t in range(30):
                over = envs.step(np.full((3, 3), t % 5))[3].all(axis=1)
                if mode == "disabled" and over.any():
                    rows.append(envs.reset()[0])
            seen.append([*rows, envs.step(np.zeros((3, 3), np.int64))[0]])
    assert len(seen[0]) == len(seen[1])
    assert all(np.array_equal(a, b) for a, b in zip(*seen, strict=True))


@pytest.mark.usefixtures("two_cores")
def test_an_env_that_raises_says_so_and_leaves_nothing_behind() -> None:
    class Broken(NoOpEnv):
        def step(self, actions: dict[str, Any]) -> Any:
            raise RuntimeError("gears")

    refused(EnvRaised, "gears", marlvec.make, Broken, num_envs=2, backend="auto")


# How many cores there are: those a process may run on, or what its control groups grant, if that is less.


def say(root: Path, files: dict[str, str], own: str) -> float:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "own").write_text(own)
    return quota(root / "own", root)


@pytest.mark.parametrize(
    ("files", "own", "expected"),
    [
        ({}, "0::/\n", math.inf),
        ({"cpu.max": "max 100000\n"}, "0::/\n", math.inf),
        ({"cpu.max": "250000 100000\n"}, "0::/\n", 2.5),
        ({"cpu.max": "250000 100000\n"}, "0::/docker/5ab\n", 2.5),  # seen from inside, where that path leads nowhere
        ({"a/b/cpu.max": "400000 100000\n", "a/cpu.max": "150000 100000\n"}, "0::/a/b\n", 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, "1:cpu:/\n", math.inf),
        ({"cpu/x/cpu.cfs_quota_us": "50000\n", "cpu/x/cpu.cfs_period_us": "100000\n"}, "3:cpu,cpuacct:/x\n0::/\n", 0.5),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, "3:cpuset:/\n", math.inf),
        ({"cpu.max": "nonsense"}, "0::/\n", math.inf),
    ],
)
def test_the_strictest_quota_holds(tmp_path: Path, files: dict[str, str], own: str, expected: float) -> None:
    assert say(tmp_path, files, own) == expected


def test_without_control_groups_there_is_no_quota(tmp_path: Path) -> None:
    assert quota(tmp_path / "none", tmp_path) == math.inf


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system grants no share of its cores")
@pytest.mark.parametrize(("granted", "most"), [(math.inf, 10**6), (0.2, 1), (1.5, 2)])
def test_cores_are_what_is_granted_and_never_none(monkeypatch: pytest.MonkeyPatch, granted: float, most: int) -> None:
    monkeypatch.setattr("marlvec.vector.cores.quota", lambda own, root: granted)
    assert usable_cores() == max(1, min(len(os.sched_getaffinity(0)), most))

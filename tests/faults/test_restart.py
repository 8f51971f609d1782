"""on_fault="restart" and "mask": an env is built anew, or out for good, and the rest goes on."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from marlvec import (
    AsyncVectorEnv,
    Collector,
    RandomPolicy,
    RestartLimit,
    RestartQuietly,
    VectorEnv,
    VectorStep,
    env_seeds,
    make,
)
from marlvec.errors import BrokenError, EnvRaised, EnvTimeout, NotResetError, WorkerDied
from marlvec.testing import CounterEnv, ExitingEnv, HangingEnv, RaisingEnv, Script, ScriptedParallelEnv, SlowEnv, decode
from marlvec.vector.settings import restart_seed
from marlvec.vector.workers import channel as stack_dump
from marlvec.vector.workers.pool import WorkerProcess
from tests.faults.harness.programs import wait_gone
from tests.vector.support.kinds import SCRIPTED, acts, factories_of, vectorize
from tests.vector.support.reference import refused
from tests.waiting import LONG, Gate, GatedEnv, overdue, until

# on_fault="restart": one env is built anew, its episode is told to be lost, and nobody else notices.


N = 4
A = 3
MODES = ("same_step", "next_step", "disabled")
BACKENDS = ("sync", "thread", "async")
HOWS: dict[str, tuple[Any, dict[str, Any]]] = {
    "raises": (RaisingEnv, {}),
    "exits": (ExitingEnv, {"code": 3}),
    "is killed": (ExitingEnv, {"signal": 9}),
    "hangs": (HangingEnv, {}),
}


# What may happen where: in this process, nothing that takes it along.
PLACES = [("sync", "raises"), ("thread", "raises"), *(("async", how) for how in HOWS)]


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "marlvec")
    return caplog


def faulty(folder: Path, how: str, where: str = "step", at: int = 2, **options: Any) -> list[Callable[[], Any]]:
    """Four envs with episodes of four steps; at the third step of its life something happens to env 1, once."""
    kind, more = HOWS[how]
    options = {"length": 4, "where": where, "at": at, "only_env": 1, "only_incarnation": 0, "marks": folder, **options}
    return [partial(kind, env_index=i, **options, **more) for i in range(N)]


def vec(backend: str, factories: list[Any], how: str, **options: Any) -> VectorEnv:
    options = {"on_fault": "restart", **options}
    if how == "hangs":
        options["step_timeout"] = 0.3
    return vectorize(backend, factories, **options)


Row = dict[str, Any]


def play(envs: VectorEnv, steps: int, streams: bool) -> list[list[Row]]:
    """Every row of every env, as the caller sees them, resets of ended episodes included."""
    rows: list[list[Row]] = [[] for _ in range(N)]

    def note(step: VectorStep) -> None:
        infos = step.infos
        for k, i in enumerate(step.env_ids.tolist()):
            row = {
                "obs": step.obs[k].copy(),
                "reward": step.rewards[k].copy(),
                "flags": [step.terminated[k].tolist(), step.truncated[k].tolist(), bool(step.done[k])],
                "alive": [step.alive[k].tolist(), step.acting[k].tolist(), bool(step.reset_mask[k])],
                "fault": bool(step.fault[k]),
                "final": step.final_obs[k].copy() if step.done[k] and not step.fault[k] else None,
                "told": bool(infos["fault"][k]) if "fault" in infos else False,
                "has_final": bool(infos["_final_observation"][k]) if "_final_observation" in infos else False,
            }
            rows[i].append(row)

    envs.reset_send(seed=7)
    note(envs.recv())
    for t in range(steps):
        if streams:
            envs.send(acts(envs, t % 5)[: N // 2], [0, 2])
            envs.send(acts(envs, t % 5)[: N // 2], [1, 3])
            done = []
            while sum(map(len, done)) < N:
                step = envs.recv(1)
                note(step)
                done.append(step.env_ids)
        else:
            envs.step_send(acts(envs, t % 5))
            note(envs.recv())
        if envs.autoreset_mode == "disabled":
            ended = [i for i in range(N) if rows[i][-1]["flags"][2]]
            if ended:
                envs.async_reset(env_ids=ended)
                note(envs.recv())
    return rows


def same(one: Row, other: Row) -> bool:
    return all(
        np.array_equal(one[key], other[key]) if isinstance(one[key], np.ndarray) else one[key] == other[key]
        for key in one
    )


def told(rows: list[Row]) -> list[tuple[int, int, int]]:
    """Incarnation, episode and t of every row in which somebody is there."""
    return [tuple(decode(row["obs"][0])[1:4]) for row in rows if row["alive"][0][0]]


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=3)
@pytest.mark.checklist(69)
@pytest.mark.fault("C1")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("backend", "how"), PLACES)
def test_one_env_begins_anew_and_the_others_do_not_notice(backend: str, how: str, mode: str, tmp_path: Path) -> None:
    steps, streams = 11, backend != "sync" and mode == "same_step"
    options: dict[str, Any] = {"num_workers": 2} if backend != "sync" else {}
    (tmp_path / "quiet").mkdir()
    with vec(backend, faulty(tmp_path / "quiet", how, at=999), how, autoreset_mode=mode, **options) as envs:
        expected = play(envs, steps, streams)
        assert envs.faults == ()
    with vec(backend, faulty(tmp_path, how), how, autoreset_mode=mode, **options) as envs:
        rows = play(envs, steps, streams)
        (fault,) = envs.faults
        incarnations = envs.incarnations.tolist()
    with_it = [1] if how == "raises" else [0, 1]  # whose worker went
    assert fault.lost_env_ids == tuple(with_it)
    assert fault.env_ids == (1,)
    assert (fault.action, fault.quiet) == ("restart", False)
    assert incarnations == [1 if i in with_it else 0 for i in range(N)]
    for i in range(N):
        if i not in with_it:
            assert len(rows[i]) == len(expected[i])
            assert all(map(same, rows[i], expected[i])), i
            continue
        faults = [k for k, row in enumerate(rows[i]) if row["fault"]]
        assert faults == [k for k, row in enumerate(rows[i]) if row["told"]]
        (k,) = faults
        assert k in (3, 4), "the third step, or one later for an env that had answered it"
        assert all(map(same, rows[i][:k], expected[i][:k]))
        row = rows[i][k]
        assert row["flags"] == [[False] * A, [True] * A, True]
        assert (row["reward"] == 0).all()
        assert not row["has_final"]
        begun = mode == "same_step"
        assert row["alive"] == [[begun] * A, [begun] * A, False]
        if not begun:
            assert (row["obs"] == 0).all()
        # The new incarnation plays whole episodes of four, as any env in this mode does.
        after = told(rows[i][k:])
        assert len(after) >= 5
        assert after == [(1, e, t) for e in range(9) for t in range(4)][: len(after)]


class Seeded(RaisingEnv):
    """Says in its infos how a reset was seeded; -1: not at all."""

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        obs, infos = super().reset(seed, options)
        return obs, {agent: {"seed": -1 if seed is None else seed} for agent in infos}


@pytest.mark.parametrize("mode", ["same_step", "next_step"])
def test_only_the_first_episode_of_a_new_incarnation_is_seeded(mode: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"length": 3, "marks": tmp_path, "only_env": 1, "only_incarnation": 0}
    factories = [partial(Seeded, env_index=i, at=1, **options) for i in range(2)]
    with vectorize("sync", factories, on_fault="restart", autoreset_mode=mode) as envs:
        envs.reset(seed=5)
        steps = [envs.step(acts(envs))[4] for _ in range(20)]
    found = [int(infos["seed"][1, 0]) for infos in steps if "seed" in infos and infos["_seed"][1, 0]]
    assert found[0] == restart_seed(env_seeds(5, 2)[1], 1)
    assert len(found) >= 4
    assert set(found[1:]) == {-1}


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=2)
@pytest.mark.checklist(69)
@pytest.mark.parametrize("backend", ["sync", "async"])
def test_new_incarnations_are_seeded_from_seed_env_and_number(backend: str, tmp_path: Path) -> None:
    """A function of these alone: neither of the fault's moment nor of what the old incarnation had drawn."""

    options: dict[str, Any] = {"length": 3, "marks": tmp_path, "only_env": 1}
    factories = [partial(Seeded, env_index=i, at=2, **options) for i in range(2)]
    with vectorize(backend, factories, on_fault="restart") as envs:
        _, infos = envs.reset(seed=5)
        seeds = env_seeds(5, 2)
        assert infos["seed"][:, 0].tolist() == seeds
        found = []
        for _ in range(9):
            infos = envs.step(acts(envs))[4]
            if "fault" in infos:
                found.append(int(infos["seed"][1, 0]))
        assert found == [restart_seed(seeds[1], k) for k in (1, 2, 3)]
        assert len(set(found)) == 3
        _, infos = envs.reset(seed=[11, 12])
        for _ in range(3):
            infos = envs.step(acts(envs))[4]
        assert int(infos["seed"][1, 0]) == restart_seed(12, 1), "counted from that seed on"


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick="each")
@pytest.mark.checklist(73)
@pytest.mark.parametrize("where", ["init", "reset"])
@pytest.mark.parametrize(("backend", "how"), [place for place in PLACES if place[1] in ("raises", "exits")])
def test_constructor_and_reset_go_the_same_way(backend: str, where: str, how: str, tmp_path: Path) -> None:
    with vec(backend, faulty(tmp_path, how, where=where, at=0), how) as envs:
        obs, infos = envs.reset(seed=0, options={"hello": 1})
        assert "fault" not in infos
        assert infos["alive"].all()
        told = [(fault.env_ids, fault.action) for fault in envs.faults]
        assert told == [((0, 1) if (where, how) == ("init", "exits") else (1,), "restart")]
        assert decode(obs[1, 0])[1:4] == (1, 0, 0)
        for _ in range(9):
            assert "fault" not in envs.step(acts(envs))[4]


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick="each")
@pytest.mark.checklist(73)
@pytest.mark.fault("A15")
@pytest.mark.parametrize("where", ["init", "reset", "step"])
@pytest.mark.parametrize(("backend", "how"), [("sync", "raises"), ("async", "raises"), ("async", "exits")])
def test_too_many_restarts_end_it_and_list_the_history(backend: str, where: str, how: str, tmp_path: Path) -> None:
    limit = RestartLimit(3, seconds=60, backoff=0.01)
    factories = faulty(tmp_path, how, where=where, at=None, only_incarnation=None)
    error = EnvRaised if how == "raises" else WorkerDied
    with (
        pytest.raises(error, match="(?s)restarted 3 times within 60 s.*3 x") as caught,
        vec(backend, factories, how, max_restarts=limit) as envs,
    ):
        envs.reset(seed=0)
        for _ in range(9):
            envs.step(acts(envs))
    assert caught.value.env_ids == ((1,) if how == "raises" else tuple(caught.value.lost_env_ids))
    built = len(list(tmp_path.glob("env1-*")))
    assert built == 4, "the first one, and three more"


def test_after_too_many_restarts_the_others_go_on(tmp_path: Path) -> None:
    factories = faulty(tmp_path, "raises", at=None, only_incarnation=None)
    with vec("async", factories, "raises", max_restarts=1) as envs:
        envs.reset(seed=0)
        assert envs.step(acts(envs))[4]["fault"].tolist() == [False, True, False, False]
        caught = refused(EnvRaised, "Gave up", envs.step, acts(envs))
        assert caught.result.env_ids.tolist() == [0, 2, 3]
        refused(NotResetError, r"\[1\]", envs.step, acts(envs))
        envs.send(acts(envs)[:3], [0, 2, 3])
        assert decode(envs.recv().obs[0, 0])[3] == 3
        envs.reset(env_ids=[1])
        assert envs.get_attr("num_agents") == (A,) * N


@pytest.mark.parametrize("overlap", [False, True])
def test_a_batch_does_not_depend_on_how_long_a_restart_takes(overlap: bool, tmp_path: Path) -> None:
    batches = []
    for pause in (0.0, 0.3):
        (folder := tmp_path / str(pause)).mkdir()
        factories = faulty(folder, "raises", only_incarnation=None)
        limit = RestartLimit(100, backoff=pause)
        with vec("async", factories, "raises", max_restarts=limit, num_workers=2) as envs:
            collector = Collector(envs, RandomPolicy(), seed=0, overlap=overlap)
            batch = collector.collect(env_steps=32)["main"]
            batches.append([batch[name].tolist() for name in ("env_id", "t", "obs", "actions", "rewards")])
            assert len(envs.faults) > 2
    assert batches[0] == batches[1]


@pytest.mark.slow("kills, stops or starts many workers")
def test_backoff_grows_and_siblings_do_not_wait_for_it(tmp_path: Path) -> None:
    limit = RestartLimit(4, backoff=0.2)
    assert [limit.pause(k) for k in (1, 2, 3, 4, 99)] == [0, 0.2, 0.4, 0.8, 2.0]
    limit = RestartLimit(4, backoff=1.0)
    factories = faulty(tmp_path, "raises", at=0, only_incarnation=None)
    with vec("async", factories, "raises", max_restarts=limit, num_workers=2) as envs:
        envs.reset(seed=0)
        envs.step(acts(envs))
        begin, mine = time.monotonic(), 0
        envs.send(acts(envs))
        arrived: list[int] = []
        while 1 not in arrived:
            step = envs.recv(1)
            arrived = step.env_ids.tolist()
            mine += 0 in arrived
            if others := [i for i in arrived if i != 1]:
                envs.send(acts(envs)[: len(others)], others)
        assert time.monotonic() - begin >= 1.0
        # Its second row on would have to wait; there are a thousand of them, as a rule.
        assert mine > 5, "the env next door in the same worker"
        envs.drain()


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick="each")
@pytest.mark.checklist(74)
@pytest.mark.parametrize("on_fault", ["raise", "restart", "mask"])
@pytest.mark.parametrize("where", ["init", "reset", "step"])
@pytest.mark.parametrize("backend", ["sync", "async"])
def test_restart_me_quietly(
    backend: str, where: str, on_fault: str, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    factories = faulty(tmp_path, "raises", where=where, at=1 if where == "step" else 0, error=RestartQuietly)
    with vectorize(backend, factories, on_fault=on_fault, max_restarts=5) as envs:
        envs.reset(seed=0)
        lost = []
        for _ in range(3):
            envs.step_send(acts(envs))
            step = envs.recv()
            lost.append((step.fault.tolist(), step.quiet.tolist()))
            assert step.alive.all()
        calm, one = [False] * N, [False, True, False, False]
        assert lost == [(calm, calm), (one, one) if where == "step" else (calm, calm), (calm, calm)]
        assert all(fault.quiet for fault in envs.faults)
        assert decode(step.obs[1, 0])[1] == 1
    assert log.records == []


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick="each")
@pytest.mark.checklist(74)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", ["init", "reset", "step"])
def test_quiet_restarts_without_a_step_are_bounded_too(where: str, mode: str, tmp_path: Path) -> None:
    factories = faulty(tmp_path, "raises", where=where, at=None, only_incarnation=None, length=50, error=RestartQuietly)
    with (
        pytest.raises(EnvRaised, match="RestartQuietly"),
        vectorize("async", factories, max_restarts=4, autoreset_mode=mode) as envs,
    ):
        envs.reset(seed=0)
        for _ in range(20):
            infos = envs.step(acts(envs))[4]
            if mode == "disabled" and "fault" in infos:
                envs.reset(env_ids=infos["fault"])
    assert len(list(tmp_path.glob("env1-*"))) == 5


def test_an_env_that_always_asks_quietly_is_masked_in_the_end(tmp_path: Path) -> None:
    factories = faulty(tmp_path, "raises", at=None, only_incarnation=None, error=RestartQuietly)
    with vectorize("sync", factories, max_restarts=4, on_fault="mask") as envs:
        envs.reset(seed=0)
        for _ in range(9):
            envs.step(acts(envs))
        assert envs.masked_env_ids == (1,)
        assert [fault.quiet for fault in envs.faults] == [True] * 4 + [False]


def test_what_goes_wrong_while_a_new_worker_builds_its_envs_is_noted(tmp_path: Path) -> None:
    class FailsOnce(CounterEnv):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            if self.world.incarnation == 1 and self.world.env_index == 1:
                raise ValueError("not yet")

    factories = [partial(FailsOnce, env_index=i, marks=tmp_path) for i in range(2)]
    with vectorize("async", factories, on_fault="restart", num_workers=1) as envs:
        envs.reset(seed=0)
        os.kill(envs.worker_pids[0], signal.SIGKILL)
        envs.step(acts(envs))
        assert [fault.operation for fault in envs.faults] == ["step", "__init__"]
        assert envs.incarnations.tolist() == [1, 2]


@pytest.mark.slow("kills, stops or starts many workers")
def test_what_had_arrived_is_in_the_error_also_when_the_death_shows_in_sending(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    factories = [partial(GatedEnv, gate, env_index=i, only_env=1) for i in range(3)]
    with gate, vectorize("async", factories, num_workers=3) as envs:
        envs.reset(seed=0)
        envs.send(acts(envs)[:2], [0, 1])
        overdue(envs.recv, [1], 2)
        os.kill(envs.worker_pids[2], signal.SIGKILL)
        wait_gone(envs.worker_pids[2:], LONG)
        caught = refused(WorkerDied, "", envs.send, acts(envs)[:1], [2])
        assert caught.result.env_ids.tolist() == [0]


def test_control_calls_take_as_long_as_they_take() -> None:
    with vectorize("async", [CounterEnv] * 2, step_timeout=0.5) as envs:
        envs.reset()
        assert envs.exec_func(lambda env: time.sleep(0.8) or 1) == (1, 1)


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=3)
@pytest.mark.parametrize("mode", MODES)
def test_a_worker_that_is_killed_between_calls(mode: str) -> None:
    """All its envs are told so with their next rows; an explicit reset makes nothing of it."""
    factories = [partial(CounterEnv, 3, env_index=i) for i in range(N)]
    with vectorize("async", factories, on_fault="restart", num_workers=2, autoreset_mode=mode) as envs:
        envs.reset(seed=0)
        envs.step(acts(envs))
        os.kill(envs.worker_pids[1], signal.SIGKILL)
        wait_gone(envs.worker_pids[1:], LONG)
        envs.send(acts(envs)[:1], [2])
        step = envs.recv()
        assert (step.env_ids.tolist(), step.fault.tolist(), step.done.tolist()) == ([2], [True], [True])
        envs.send(acts(envs)[:2], [0, 3])
        step = envs.drain()
        assert dict(zip(step.env_ids.tolist(), step.fault.tolist(), strict=True)) == {0: False, 3: True}
        os.kill(envs.worker_pids[1], signal.SIGKILL)
        wait_gone(envs.worker_pids[1:], LONG)
        obs, infos = envs.reset(seed=1)
        assert "fault" not in infos
        assert [decode(row[0])[3] for row in obs] == [0] * N
        assert envs.get_attr("num_agents") == (A,) * N, "a control call finds everybody there"
        assert envs.incarnations.tolist() == [0, 0, 2, 2]


def test_a_death_during_a_control_call_is_reported_and_survived() -> None:
    factories = [partial(CounterEnv, 3, env_index=i) for i in range(N)]
    with vectorize("async", factories, on_fault="restart", num_workers=2) as envs:
        envs.reset(seed=0)
        envs.step(acts(envs))
        with pytest.raises(EnvRaised, match="env 2 raised in exec_func.*exited with code 5") as caught:
            envs.exec_func(lambda env: os._exit(5) if env.unwrapped.world.env_index == 3 else 1)
        assert isinstance(caught.value.__cause__, WorkerDied)
        assert caught.value.env_ids == (2, 3)
        assert caught.value.result == {0: 1, 1: 1}
        obs, _, _, _, infos = envs.step(acts(envs))
        assert infos["fault"].tolist() == [False, False, True, True]
        assert [decode(row[0])[3] for row in obs] == [2, 2, 0, 0]


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=2)
@pytest.mark.fault("A12")
@pytest.mark.parametrize("times", [1, 3])
def test_all_workers_die_at_once_and_all_are_back(times: int, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    factories = [partial(GatedEnv, gate, 3, env_index=i) for i in range(N)]
    with gate, vectorize("async", factories, on_fault="restart", num_workers=N) as envs:
        envs.reset(seed=0)
        for _ in range(times):
            envs.step_send(acts(envs))
            for pid in envs.worker_pids:
                os.kill(pid, signal.SIGKILL)
            infos = envs.step_fetch()[4]
            assert infos["fault"].all()
        assert envs.incarnations.tolist() == [times] * N
        gate.let_through(N)
        assert "fault" not in envs.step(acts(envs))[4]


@pytest.mark.checklist(67)
@pytest.mark.fault("A12")
def test_raise_names_all_that_died_together() -> None:
    factories = [partial(HangingEnv, 3, env_index=i) for i in range(N)]
    with AsyncVectorEnv(factories, num_workers=N) as envs:
        envs.reset(seed=0)
        envs.step_send(acts(envs))
        for pid in envs.worker_pids:
            os.kill(pid, signal.SIGKILL)
        wait_gone(envs.worker_pids, LONG)  # on a busy machine one may be killed and not know it yet
        caught = refused(WorkerDied, r"(?s)worker 0 .*worker 1 .*worker 2 .*worker 3 ", envs.step_fetch)
        assert caught.env_ids == tuple(range(N))


@pytest.mark.slow("kills, stops or starts many workers")
@pytest.mark.checklist(72)
@pytest.mark.fault("A9")
@pytest.mark.parametrize("where", ["step", "reset"])
def test_a_hung_env_is_a_timeout(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine what hangs may need longer to say where.
    monkeypatch.setattr(WorkerProcess.stacks, "__defaults__", (LONG,))
    monkeypatch.setattr(stack_dump, "_QUIET", 0.5)
    factories = [partial(HangingEnv, env_index=i, where=where, at=0, only_env=2) for i in range(N)]
    envs = AsyncVectorEnv(factories, num_workers=2, step_timeout=0.4)
    with envs, pytest.raises(EnvTimeout, match=r"env 2 did not come back within step_timeout=0.4 s") as caught:
        envs.reset(seed=0)
        envs.step(acts(envs))
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.lost_env_ids == (2, 3)
    assert caught.value.env_ids == (2,)
    assert "in strike" in str(caught.value), "where it was"


@pytest.mark.slow("kills, stops or starts many workers")
@pytest.mark.checklist(72)
def test_slow_is_not_hung() -> None:
    """Each env of a worker has the time to itself, and a caller that is away for long is no fault of theirs."""
    # A tenth of the time for each; for all of them more than the whole of it, and a look for hangs, too.
    factories = [partial(SlowEnv, 9, env_index=i, seconds=0.1) for i in range(16)]
    with vectorize("async", factories, step_timeout=1.0, num_workers=1) as envs:
        envs.reset(seed=0)
        envs.step(acts(envs))
        envs.step_send(acts(envs))
        time.sleep(2.0)
        envs.step_fetch()
        with pytest.raises(TimeoutError):
            envs.step_send(acts(envs))
            envs.step_fetch(timeout=0.01)
        envs.step_fetch()


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=3)
@pytest.mark.fault("A8")
@pytest.mark.parametrize("after", [0.15, 2.0])
def test_a_stopped_worker(after: float) -> None:
    """Woken in time it is as if nothing had been; later its answers are nobody's."""
    factories = [partial(CounterEnv, 50, env_index=i) for i in range(N)]
    with vectorize("async", factories, on_fault="restart", step_timeout=1.0, num_workers=2) as envs:
        envs.reset(seed=0)
        envs.step(acts(envs))
        pid = envs.worker_pids[0]
        os.kill(pid, signal.SIGSTOP)
        envs.step_send(acts(envs))
        if after < 1:
            time.sleep(after)
            os.kill(pid, signal.SIGCONT)
        obs, _, _, _, infos = envs.step_fetch()
        for t in range(3, 6):
            assert ("fault" in infos) == (after > 1 and t == 3)
            assert [decode(row[0])[3] for row in obs] == [
                t - 1 - (t - 1 - (t - 3)) * (i < 2 and after > 1) for i in range(N)
            ]
            obs, _, _, _, infos = envs.step(acts(envs))


def test_make_takes_them_and_says_where_they_make_no_sense() -> None:
    with make(CounterEnv, 2, on_fault="restart", step_timeout=5, max_restarts=RestartLimit(2)) as envs:
        assert envs.on_fault == "restart"
        assert envs.faults == ()
        assert envs.masked_env_ids == ()
    for wrong, text in [
        ({"on_fault": "ignore"}, "on_fault must be one of"),
        ({"max_restarts": -1}, "max_restarts: expected a count"),
        ({"max_restarts": 1.5}, "max_restarts: expected a count"),
        ({"step_timeout": 0}, "step_timeout must be seconds"),
        ({"step_timeout": True}, "step_timeout must be seconds"),
        ({"step_timeout": 1.0, "backend": "sync"}, "is for worker processes"),
        ({"step_timeout": 1.0, "backend": "thread"}, "is for worker processes"),
    ]:
        refused(ValueError, text, make, CounterEnv, 2, **wrong)


def test_an_episode_that_had_ended_is_not_lost_when_the_next_one_cannot_begin(tmp_path: Path) -> None:
    for backend in BACKENDS:
        (folder := tmp_path / backend).mkdir()
        with vec(backend, faulty(folder, "raises", where="reset", at=1), "raises") as envs:
            envs.reset(seed=0)
            for _ in range(3):
                envs.step(acts(envs))
            envs.step_send(acts(envs))
            step = envs.recv()
            assert step.done.all()
            assert not step.fault.any()
            assert [tuple(decode(row[0])[1:4]) for row in step.final_obs] == [(0, 0, 4)] * N
            assert [tuple(decode(row[0])[1:4]) for row in step.obs] == [(0, 1, 0), (1, 0, 0), (0, 1, 0), (0, 1, 0)]
            assert (step.rewards != 0).all()
            assert len(envs.faults) == 1


def test_agents_that_were_gone_already_are_not_truncated(tmp_path: Path) -> None:
    class Raises(ScriptedParallelEnv):
        def step(self, actions: dict[str, Any]) -> Any:
            if self.world.t == 3 and self.world.incarnation == 0:
                raise ValueError
            return super().step(actions)

    script = Script([0, 0, 4], [2, 6, 6], ["terminated"] * A)
    factory = partial(Raises, script, agent_num=A, marks=tmp_path)
    with vectorize("sync", [factory], on_fault="restart") as envs:
        envs.reset(seed=0)
        for _ in range(3):
            envs.step(acts(envs))
        _, _, terminated, truncated, infos = envs.step(acts(envs))
        assert (terminated.tolist(), truncated.tolist()) == ([[False] * A], [[False, True, False]])
        assert infos["alive"].tolist() == [[True, True, False]], "of the next episode"


@pytest.mark.checklist(65)
def test_an_error_says_in_which_worker_and_which_request() -> None:
    with vectorize("async", [CounterEnv, RaisingEnv], num_workers=2) as envs:
        envs.reset(seed=0)
        caught = refused(EnvRaised, "RaisingEnv|scripted failure", envs.step, acts(envs))
        (failure,) = caught.failures
        pid = envs.worker_pids[1]
        assert (failure.env_id, failure.operation, failure.pid) == (1, "step", pid)
        assert f"(env 1, worker process {pid}, request {failure.request})" in str(caught)


def test_a_worker_that_dies_before_its_env_is_built_anew() -> None:
    factories = [partial(RaisingEnv, env_index=i, at=0, only_env=1, error=RestartQuietly) for i in range(2)]
    with vectorize("async", factories, num_workers=1) as envs:
        envs.reset(seed=0)
        envs.send(acts(envs))
        until(lambda: envs._worker_pool.has_unread(0))  # nothing public tells it without reading it
        os.kill(envs.worker_pids[0], signal.SIGKILL)
        wait_gone(envs.worker_pids, LONG)
        refused(WorkerDied, "", envs.drain)


def test_a_worker_that_answers_in_part_and_dies_is_not_waited_for() -> None:
    class Slow(CounterEnv):
        def step(self, actions: dict[str, Any]) -> Any:
            time.sleep(0.01)
            if self.world.env_index == 2:
                os._exit(3)
            return super().step(actions)

    for wait in (0.0, 0.3):
        with vectorize("async", [partial(Slow, env_index=i) for i in range(N)], num_workers=1) as envs:
            envs.reset(seed=0)
            envs.send(acts(envs))
            time.sleep(wait)
            caught = refused(WorkerDied, "", envs.drain, timeout=LONG)
            assert caught.result.env_ids.tolist() == [0, 1], "what it had answered"


# on_fault="mask": what failed is out for good, and the rest goes on as if it had never been.


MASK_PLACES = [place for place in PLACES if place[1] != "is killed"]


def ones(envs: VectorEnv, n: int = N) -> Any:
    return np.ones((n, A), np.int64)


def one_faulty(how: str, where: str = "step", at: int | None = 1, only_env: int = 1) -> list[Any]:
    return [partial(HOWS[how][0], 3, env_index=i, where=where, at=at, only_env=only_env) for i in range(N)]


def masking(backend: str, how: str, factories: list[Any], **options: Any) -> VectorEnv:
    if how == "hangs":
        options["step_timeout"] = 0.3
    if backend != "sync":
        options["num_workers"] = 2
    return vectorize(backend, factories, on_fault="mask", **options)


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=2)
@pytest.mark.checklist(70)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("backend", "how"), MASK_PLACES)
def test_a_masked_env_reports_once_and_then_has_no_agents(
    backend: str, how: str, mode: str, log: pytest.LogCaptureFixture
) -> None:
    gone = [1] if how == "raises" else [0, 1]
    left = [i for i in range(N) if i not in gone]
    is_gone = np.isin(np.arange(N), gone)
    with masking(backend, how, one_faulty(how), autoreset_mode=mode) as envs:
        envs.reset(seed=0)
        t = 0
        for k in range(12):
            envs.step_send(ones(envs))
            step = envs.recv()
            infos = step.infos
            resets = infos["reset_mask"][left[0]]
            t = 0 if resets or (mode == "same_step" and t == 2) else t + 1
            assert [decode(step.obs[i, 0])[3] for i in left] == [t] * len(left)
            assert step.fault.tolist() == (is_gone & (k == 1)).tolist()
            assert ("fault" in infos) == (k == 1)
            assert step.done[gone].tolist() == [k == 1] * len(gone)
            assert (step.truncated[gone] == (k == 1)).all()
            if k >= 1:
                assert (step.obs[gone] == 0).all()
                assert not np.stack([step.alive, step.acting, step.terminated])[:, gone].any()
                assert (step.rewards[gone] == 0).all()
                assert envs.masked_env_ids == tuple(gone)
                assert "_final_observation" not in infos or not infos["_final_observation"][gone].any()
            if mode == "disabled" and step.done.any():
                _, infos = envs.reset(env_ids=step.done)
                t = t if not step.done[left].all() else 0
                assert (infos["alive"].any(axis=1) == ~is_gone)[k >= 1 :].all() or k < 1
        (fault,) = envs.faults
        assert (fault.action, fault.lost_env_ids, fault.env_ids) == ("mask", tuple(gone), (1,))
        assert len(log.records) == 1
        _, infos = envs.reset(seed=1)
        assert (infos["alive"].all(axis=1) == ~is_gone).all()
        assert envs.agents_at(1) == ()
        answers = envs.get_attr("num_agents")
        assert [answers[i] for i in range(N)] == [None if i in gone else A for i in range(N)]
        envs.send(ones(envs, 2), [1, 3])
        assert sorted(envs.recv(1).env_ids.tolist() + envs.drain().env_ids.tolist()) == [1, 3]
        assert envs.render([1]) == (None,)


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_a_first_reset_that_fails_masks(backend: str) -> None:
    with masking(backend, "raises", one_faulty("raises", "reset", 0)) as envs:
        _, infos = envs.reset(seed=0)
        assert "fault" not in infos
        assert infos["alive"][:, 0].tolist() == [True, False, True, True]


@pytest.mark.slow("kills, stops or starts many workers")
@pytest.mark.checklist(70)
@pytest.mark.parametrize(("how", "error"), [("raises", EnvRaised), ("exits", WorkerDied), ("hangs", EnvTimeout)])
def test_it_raises_without_envs_left(how: str, error: type[Exception]) -> None:
    factories = [partial(HOWS[how][0], 3, env_index=i, where="step", at=1) for i in range(N)]
    envs = masking("async", how, factories)
    with envs, pytest.raises(error):
        envs.reset(seed=0)
        for _ in range(3):
            envs.step(ones(envs))
    with masking("async", "raises", [partial(RaisingEnv, 3, at=0)] * N) as envs:
        envs.reset(seed=0)
        refused(EnvRaised, "No env is left", envs.step, ones(envs))
        refused(BrokenError, "No env is left", envs.step, ones(envs))


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick="each")
@pytest.mark.parametrize("mode", MODES)
def test_an_env_that_wanted_to_be_built_anew_and_lost_its_worker_is_out(mode: str) -> None:
    """Its episode was lost because it had asked for that, whatever became of its next incarnation."""
    factories = [partial(RaisingEnv, 5, env_index=i, at=1, only_env=1, error=RestartQuietly) for i in range(N)]
    with masking("async", "raises", factories, autoreset_mode=mode) as envs:
        envs.reset(seed=0)
        envs.step(ones(envs))
        envs.step_send(ones(envs))
        pid = envs.worker_pids[0]
        while not envs._worker_pool.has_unread(0):  # type: ignore[attr-defined]  # nothing public tells it without hearing it
            time.sleep(0.002)
        os.kill(pid, signal.SIGKILL)
        wait_gone([pid], 60)
        step = envs.recv()
        assert envs.masked_env_ids == (0, 1)
        assert step.fault.tolist()[1:] == [True, False, False]
        assert step.quiet.tolist() == [False, True, False, False]
        assert not step.alive[1].any()
        assert [fault.quiet for fault in envs.faults] == [True, False]


# --- envs of every kind


KINDS = [*SCRIPTED, "simple_tag", "simple_speaker_listener", "pettingzoo/classic/connect_four"]


def failing(factory: Callable[[], Any], how: str, at: int) -> Any:
    """An env whose step number ``at`` of all raises, before or after it has stepped, or ends the process."""
    env = factory()
    step, numbers = env.step, count(1)

    def fail(*actions: Any) -> Any:
        if next(numbers) != at:
            return step(*actions)
        if how == "exits":
            os._exit(3)
        if how == "raises after":
            step(*actions)
        raise ValueError(how)

    env.step = fail
    return env


def rows_of(step: VectorStep, ids: list[int]) -> list[bytes]:
    """All that rows say of these envs, final observations where an episode has ended."""
    arrays = [*(leaf for group in step.obs_leaves for leaf in group), *step.action_masks, step.state]
    arrays += [step.rewards, step.terminated, step.truncated, step.alive, step.acting, step.done, step.reset_mask]
    arrays += [leaf for group in step.final_leaves for leaf in group] if step.done[ids].all() else []
    return [array[ids].tobytes() for array in arrays if array is not None]


@pytest.mark.mostly_slow("plays whole episodes of many envs", quick="pairs", slow="triples")
@pytest.mark.parametrize("at", [1, 3, 8])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("backend", "how"), [("sync", "raises"), ("sync", "raises after"), ("async", "raises"), ("async", "exits")]
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_others_go_on_as_if_it_had_never_been(kind: str, backend: str, how: str, mode: str, at: int) -> None:
    """Turns, groups, masks, states: bit for bit as without a fault, and in the env that is out nobody is left."""
    factories = factories_of(kind, 3)
    bad = [factories[0], partial(failing, factories[1], how, at), factories[2]]
    options = {"autoreset_mode": mode, "state": kind in ("parallel", "turns"), "validate": "off"}
    workers = {} if backend == "sync" else {"num_workers": 3}
    with (
        vectorize("sync", factories, **options) as whole,
        vectorize(backend, bad, on_fault="mask", **options, **workers) as envs,
    ):
        whole.reset(seed=3)
        envs.reset(seed=3)
        for k in range(40):
            actions = whole.random_action(seed=k)
            whole.step_send(actions)
            envs.step_send(actions)
            expected, step = whole.recv(), envs.recv()
            assert [rows_of(step, [i]) for i in (0, 2)] == [rows_of(expected, [i]) for i in (0, 2)]
            if envs.masked_env_ids:
                there = [step.alive, step.acting, step.rewards, step.terminated]
                assert not any(
                    array[1].any() for array in (*there, *(leaf for group in step.obs_leaves for leaf in group))
                )
            if mode == "disabled" and expected.done.any():
                ids = np.flatnonzero(expected.done)
                whole.reset(env_ids=ids)
                if len(left := np.setdiff1d(ids, envs.masked_env_ids)):
                    envs.reset(env_ids=left)
        assert envs.masked_env_ids == (1,)
        assert len(envs.faults) == 1

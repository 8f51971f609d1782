"""on_fault="mask": what failed is out for good, and the rest goes on as if it had never been."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest

from marlvec import VectorEnv, VectorStep
from marlvec.errors import BrokenError, EnvRaised, EnvTimeout, RestartQuietly, WorkerDied
from marlvec.testing.scripted import ExitingEnv, HangingEnv, RaisingEnv, decode
from tests.faults.harness.programs import wait_gone
from tests.vector.support.kinds import SCRIPTED, factories_of, vectorize

N, A = 4, 3
MODES = ("same_step", "next_step", "disabled")
HOWS: dict[str, Any] = {"raises": RaisingEnv, "exits": ExitingEnv, "hangs": HangingEnv}
PLACES = [("sync", "raises"), ("thread", "raises"), *(("async", how) for how in HOWS)]


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "marlvec")
    return caplog


def acts(envs: VectorEnv, n: int = N) -> Any:
    return np.ones((n, A), np.int64)


def faulty(how: str, where: str = "step", at: int | None = 1, only_env: int = 1) -> list[Any]:
    return [partial(HOWS[how], 3, env_index=i, where=where, at=at, only_env=only_env) for i in range(N)]


def vec(backend: str, how: str, factories: list[Any], **options: Any) -> VectorEnv:
    if how == "hangs":
        options["step_timeout"] = 0.3
    if backend != "sync":
        options["num_workers"] = 2
    return vectorize(backend, factories, on_fault="mask", **options)


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=2)
@pytest.mark.checklist(70)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("backend", "how"), PLACES)
def test_a_masked_env_reports_once_and_then_has_no_agents(
    backend: str, how: str, mode: str, log: pytest.LogCaptureFixture
) -> None:
    gone = [1] if how == "raises" else [0, 1]
    left = [i for i in range(N) if i not in gone]
    is_gone = np.isin(np.arange(N), gone)
    with vec(backend, how, faulty(how), autoreset_mode=mode) as envs:
        envs.reset(seed=0)
        t = 0
        for k in range(12):
            envs.step_send(acts(envs))
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
        envs.send(acts(envs, 2), [1, 3])
        assert sorted(envs.recv(1).env_ids.tolist() + envs.drain().env_ids.tolist()) == [1, 3]
        assert envs.render([1]) == (None,)


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_a_first_reset_that_fails_masks(backend: str) -> None:
    with vec(backend, "raises", faulty("raises", "reset", 0)) as envs:
        _, infos = envs.reset(seed=0)
        assert "fault" not in infos
        assert infos["alive"][:, 0].tolist() == [True, False, True, True]


@pytest.mark.slow("kills, stops or starts many workers")
@pytest.mark.checklist(70)
@pytest.mark.parametrize(("how", "error"), [("raises", EnvRaised), ("exits", WorkerDied), ("hangs", EnvTimeout)])
def test_it_raises_without_envs_left(how: str, error: type[Exception]) -> None:
    factories = [partial(HOWS[how], 3, env_index=i, where="step", at=1) for i in range(N)]
    envs = vec("async", how, factories)
    with envs, pytest.raises(error):
        envs.reset(seed=0)
        for _ in range(3):
            envs.step(acts(envs))
    with vec("async", "raises", [partial(RaisingEnv, 3, at=0)] * N) as envs:
        envs.reset(seed=0)
        with pytest.raises(EnvRaised, match="No env is left"):
            envs.step(acts(envs))
        with pytest.raises(BrokenError, match="No env is left"):
            envs.step(acts(envs))


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick="each")
@pytest.mark.parametrize("mode", MODES)
def test_an_env_that_wanted_to_be_built_anew_and_lost_its_worker_is_out(mode: str) -> None:
    """Its episode was lost because it had asked for that, whatever became of its next incarnation."""
    factories = [partial(RaisingEnv, 5, env_index=i, at=1, only_env=1, error=RestartQuietly) for i in range(N)]
    with vec("async", "raises", factories, autoreset_mode=mode) as envs:
        envs.reset(seed=0)
        envs.step(acts(envs))
        envs.step_send(acts(envs))
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

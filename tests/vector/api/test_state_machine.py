"""Which call may follow which: what comes at a wrong time raises, names what is pending, and changes nothing."""

from __future__ import annotations

import contextlib
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from marlvec import AsyncVectorEnv, VectorEnv
from marlvec.errors import (
    BusyError,
    FetchTimeout,
    NotResetError,
    StateError,
)
from marlvec.testing.scripted import CounterEnv, decode, decode_reward
from tests.vector.support.kinds import BACKENDS, vectorize
from tests.waiting import Gate, GatedEnv, overdue

N, A = 3, 3


def counters(backend: str, **options: Any) -> VectorEnv:
    return vectorize(backend, [partial(CounterEnv, [3, 5, 2], env_index=i, state=True) for i in range(N)], **options)


def acts(k: int = 1) -> Any:
    return np.full((N, A), k, np.int64)


@pytest.mark.fault("B4")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_before_the_first_reset(backend: str) -> None:
    with counters(backend) as envs:
        for call in (lambda: envs.step(acts()), lambda: envs.step_send(acts()), lambda: envs.send(acts()), envs.state):
            with pytest.raises(NotResetError, match=r"envs \[0, 1, 2\]"):
                call()
        envs.reset(env_ids=[1])
        with pytest.raises(NotResetError, match=r"envs \[0, 2\]"):
            envs.step(acts())
        envs.send(acts()[:1], [1])
        assert decode_reward(envs.recv().rewards[0, 2])[1] == 1, "the one that was reset has made exactly one step"
        envs.reset()
        envs.step(acts())


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=5)
@pytest.mark.checklist(36)
@pytest.mark.fault("A11")
@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_a_fetch_that_times_out_loses_nothing_and_brings_nothing_stale(context: str, tmp_path: Path) -> None:
    with (
        Gate(tmp_path) as gate,
        AsyncVectorEnv(
            [partial(CounterEnv, 4, env_index=0), partial(GatedEnv, gate, 4, env_index=1)],
            num_workers=2,
            context=context,
        ) as envs,
    ):
        envs.reset(seed=0)
        for t in range(1, 13):  # three episodes
            envs.step_send(np.full((2, 3), t % 5))
            for _ in range(2):
                assert isinstance(overdue(envs.step_fetch, [1]), TimeoutError)
                with pytest.raises(BusyError):
                    envs.step_send(np.zeros((2, 3), np.int64))
            gate.let_through()
            obs, rewards, _, truncated, infos = envs.step_fetch()
            k, episode = (t - 1) % 4 + 1, (t - 1) // 4
            for i in range(2):
                for a in range(3):
                    assert decode_reward(rewards[i, a]) == (episode, k, a, t % 5), "the reply of this very request"
                    final = infos["final_observation"][i, a] if k == 4 else obs[i, a]
                    assert decode(final) == (i, 0, episode, k, a)
            assert truncated.all() == (k == 4)


@pytest.mark.checklist(36)
def test_resets_time_out_too(tmp_path: Path) -> None:
    with (
        Gate(tmp_path) as gate,
        AsyncVectorEnv(
            [partial(GatedEnv, gate, 4, env_index=i, where="reset") for i in range(2)], num_workers=2
        ) as envs,
    ):
        for episode in range(3):
            envs.reset_send(seed=episode)
            with pytest.raises(FetchTimeout, match=r"reset_fetch\(\): envs \[0, 1\]"):
                envs.reset_fetch(timeout=0.01)
            with pytest.raises(FetchTimeout):
                envs.recv(1, timeout=0)
            gate.let_through(2)
            obs, _ = envs.reset_fetch(timeout=60)
            assert {decode(row) for row in obs[:, 0]} == {(i, 0, episode, 0, 0) for i in range(2)}
            envs.step(np.ones((2, 3), np.int64))


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=5)
@pytest.mark.fault("B6")
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_threads_that_step_never_get_each_others_replies(backend: str) -> None:
    """One wins and the other gets a `StateError`; what is won is always the answer to one's own actions."""
    with counters(backend, num_workers=2) if backend != "sync" else counters(backend) as envs:
        envs.reset(seed=0)
        wrong: list[Any] = []
        won = [0, 0]

        def play(me: int) -> None:
            for _ in range(1000):
                try:
                    rewards = envs.step(acts(me + 1))[1]
                except StateError:
                    continue
                except BaseException as error:
                    wrong.append(error)
                    return
                won[me] += 1
                codes = {decode_reward(reward)[3] for reward in rewards.ravel()}
                if codes != {me + 1}:
                    wrong.append(codes)

        threads = [threading.Thread(target=play, args=(me,)) for me in range(2)]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)  # as often as can be, also in the middle of a call
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(interval)
        assert wrong == []
        assert sum(won) >= 20, won  # few where the machine has other things to do
        with contextlib.suppress(StateError):
            envs.step_fetch()
        envs.step(acts())


@pytest.mark.parametrize("backend", BACKENDS)
def test_repr_says_what_it_is_doing(backend: str) -> None:
    with counters(backend) as envs:
        assert "num_envs=3" in repr(envs)
        assert "idle" in repr(envs)
        envs.reset_send()
        assert "reset pending" in repr(envs)
        envs.reset_fetch()

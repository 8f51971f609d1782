"""Streams: envs as they become ready; slow ones delay no other, and wrong calls change nothing.

Portions of any size in any order are drawn by tests/properties.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from marlvec import AsyncVectorEnv, ThreadVectorEnv, VectorEnv
from marlvec.errors import ArgumentError, BusyError, EnvRaised, NotResetError
from marlvec.testing.scripted import CounterEnv, decode, decode_reward
from tests.vector.support.kinds import BACKENDS, vectorize
from tests.waiting import Gate, GatedEnv, overdue

pytestmark = pytest.mark.many_processes

N, A = 6, 2


def counters(backend: str, n: int = N, length: int = 5, **options: Any) -> VectorEnv:
    return vectorize(backend, [partial(CounterEnv, length, agent_num=A, env_index=i) for i in range(n)], **options)


def acts(env_ids: Any) -> Any:
    return np.asarray(env_ids)[:, None] % 5 + np.zeros((1, A), np.int64)


@pytest.mark.checklist(39)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_refused_send_changes_nothing(backend: str) -> None:
    with counters(backend) as envs:
        envs.reset(seed=0, env_ids=[3, 4])
        envs.async_reset(seed=0, env_ids=[0, 1, 2])
        wrong: list[tuple[type[Exception], Any, Any]] = [
            (BusyError, acts([3]), [2]),
            (ArgumentError, acts([0, 0]), [3, 3]),
            (ArgumentError, acts([3]), [N]),
            (ArgumentError, acts([3]), [-1]),
            (ArgumentError, acts([3]), [0.5]),
            (ArgumentError, acts([3]), [[3]]),
            (ArgumentError, acts([3]), [True, False]),
            (BusyError, acts(range(N)), None),
            (BusyError, acts(range(N)), [True] * N),
            (ArgumentError, acts([3, 4]), [3]),
            (ArgumentError, acts([3])[:, :1], [3]),
            (NotResetError, acts([5]), [5]),
        ]
        for error, actions, ids in wrong:
            with pytest.raises(error):
                envs.send(actions, ids)
        with pytest.raises(BusyError, match=r"async_reset\(\) to envs \[1\]"):
            envs.async_reset(env_ids=[5, 1])
        for least in (4, 0, -1):
            with pytest.raises(ValueError, match="min_envs must be from 1 to 3"):
                envs.recv(least)
        step = envs.recv()
        assert sorted(step.env_ids.tolist()) == [0, 1, 2]
        envs.send(acts([0, 1, 2]), [0, 1, 2])
        assert {decode(row[0]).t for row in envs.recv().obs} == {1}
        envs.reset(seed=0)
        assert {decode(row[0]).t for row in envs.step(acts(range(N)))[0]} == {1}


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=3)
@pytest.mark.checklist(38)
@pytest.mark.parametrize("backend", ["thread", "async"])
def test_rows_of_a_worker_come_as_they_are_ready(backend: str, tmp_path: Path) -> None:
    """One worker, and one of its envs is slow: those before it do not wait for it."""
    factories: list[Any] = [partial(CounterEnv, 5, agent_num=A, env_index=i) for i in range(3)]
    with Gate(tmp_path) as gate:
        factories.append(partial(GatedEnv, gate, 5, agent_num=A, env_index=3))
        with vectorize(backend, factories, num_workers=1) as envs:
            envs.reset(seed=0)
            envs.send(acts(range(4)))  # the first time nobody knows that it is slow
            opener = threading.Timer(0.3, gate.let_through)
            opener.start()
            assert sorted(envs.drain().env_ids) == [0, 1, 2, 3]
            opener.join()
            envs.send(acts(range(4)))
            first = envs.recv(1)
            assert 3 not in first.env_ids
            gate.let_through()
            assert sorted([*first.env_ids, *envs.drain().env_ids]) == [0, 1, 2, 3]


@pytest.mark.checklist(38)
def test_a_slow_env_holds_up_nobody(tmp_path: Path) -> None:
    """It comes back when each of the others has made its cycles, and not before."""
    factories: list[Any] = [partial(CounterEnv, 5, agent_num=A, env_index=i) for i in range(3)]
    with (
        Gate(tmp_path) as gate,
        AsyncVectorEnv([*factories, partial(GatedEnv, gate, 5, agent_num=A, env_index=3)], num_workers=4) as envs,
    ):
        envs.reset(seed=0)
        envs.send(np.ones((4, A), np.int64))
        cycles = dict.fromkeys(range(4), 0)
        waits = True
        while cycles[3] == 0:
            step = envs.recv(min_envs=1)
            assert len(step) >= 1
            for i in step.env_ids.tolist():
                cycles[i] += 1
            if cycles[3] == 0:
                envs.send(np.ones((len(step), A), np.int64), step.env_ids)
            assert not (waits and cycles[3])
            if waits and min(cycles[i] for i in range(3)) > 50:
                gate.let_through()
                waits = False


@pytest.mark.checklist(38)
@pytest.mark.parametrize("backend", ["thread", "async"])
def test_recv_waits_for_as_many_as_asked_and_no_longer_than_allowed(backend: str, tmp_path: Path) -> None:
    with Gate(tmp_path) as gate, Gate(tmp_path) as last_gate:
        gates = {2: gate, 3: last_gate}
        factories = [
            partial(GatedEnv, gates[i], 5, agent_num=A, env_index=i)
            if i in gates
            else partial(CounterEnv, 5, agent_num=A, env_index=i)
            for i in range(4)
        ]
        with vectorize(backend, factories, num_workers=4) as envs:
            envs.reset(seed=0)
            for t in range(1, 4):
                envs.send(np.full((4, A), t))
                assert str(overdue(envs.recv, [2, 3])).startswith("recv(): ")
                with pytest.raises(BusyError):
                    envs.send(np.ones((1, A), np.int64), [0])  # it has arrived, and was not handed out
                gate.let_through()
                first = envs.recv(3)
                assert sorted(first.env_ids.tolist()) == [0, 1, 2]
                last_gate.let_through()
                rest = envs.recv()
                assert rest.env_ids.tolist() == [3]
                for step in (first, rest):
                    assert {decode_reward(r)[1] for r in step.rewards.ravel()} == {t}
                    assert {decode_reward(r)[3] for r in step.rewards.ravel()} == {t}


def test_much_to_say_on_both_sides_is_no_deadlock() -> None:
    """Requests and replies larger than a pipe, under way at once."""
    big = "x" * 300_000
    factories = [partial(CounterEnv, 5, agent_num=A, env_index=i) for i in range(4)]
    with vectorize("async", factories, num_workers=2) as envs:
        assert envs.exec_func(lambda env, text: text, None, big) == (big,) * 4
        envs.reset(seed=0, options=[{"text": big}] * 4)
        for _ in range(3):
            envs.async_reset(env_ids=[0, 2], options={"text": big})
            envs.async_reset(env_ids=[1, 3], options={"text": big})
            assert len(envs.drain()) == 4


def own_loop(link: Any) -> None:
    for request in link.requests():
        link.answer(request)
        with Path(os.environ["MARLVEC_TEST_LOG"]).open("a") as log:
            log.write(f"{link.first_env_id} {request.operation} {list(request.ids)}\n")


def test_a_worker_loop_of_ones_own(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("MARLVEC_TEST_LOG", str(log))
    factories = [partial(CounterEnv, 5, agent_num=A, env_index=i) for i in range(3)]
    with AsyncVectorEnv(factories, num_workers=2, worker=own_loop) as envs:
        plain = []
        envs.reset(seed=0)
        plain = [envs.step(acts(range(3)))[0].tobytes() for _ in range(7)]
        envs.send(acts([2]), [2])
        envs.recv()
    with AsyncVectorEnv(factories, num_workers=2) as envs:
        envs.reset(seed=0)
        assert [envs.step(acts(range(3)))[0].tobytes() for _ in range(7)] == plain
    lines = log.read_text().splitlines()
    assert Counter(lines) == Counter(
        {"0 reset [0, 1]": 1, "2 reset [0]": 1, "0 step [0, 1]": 7, "2 step [0]": 7, "2 send [0]": 1}
    )


@pytest.mark.slow("plays whole episodes in worker processes")
def test_threads_cannot_be_killed_and_close_says_so(tmp_path: Path) -> None:
    with Gate(tmp_path) as gate:
        factories = [partial(GatedEnv, gate, 5, agent_num=A, env_index=0), partial(CounterEnv, 5, agent_num=A)]
        envs = ThreadVectorEnv(factories, num_workers=2)
        envs.reset(seed=0)
        (stuck,) = (thread for thread in threading.enumerate() if thread.name == "marlvec-worker-0")
        envs.step_send(acts(range(2)))
        overdue(envs.step_fetch, [0])
        with pytest.warns(ResourceWarning, match=r"1 worker threads are still in an env after 2.0 s.*marlvec-worker-0"):
            envs.close(timeout=2.0)
        gate.let_through()
        stuck.join()


@pytest.mark.parametrize("ending", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_whatever_an_env_raises_in_a_thread_arrives(ending: type[BaseException]) -> None:
    class Leaves(CounterEnv):
        def step(self, actions: Any) -> Any:
            raise ending("gone")

    with ThreadVectorEnv([partial(Leaves, 5, agent_num=A), partial(CounterEnv, 5, agent_num=A)], num_workers=2) as envs:
        envs.reset(seed=0)
        with pytest.raises(EnvRaised, match=rf"env 0 raised in step\(\): {ending.__name__}: gone"):
            envs.step(acts(range(2)))
        envs.reset(seed=0)

"""Streams: envs reset, sent to and received in any portions, EnvPool's way, and how one gets out of them again."""

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

N, A = 6, 2


def counters(backend: str, n: int = N, length: int = 5, **options: Any) -> VectorEnv:
    return vectorize(backend, [partial(CounterEnv, length, agent_num=A, env_index=i) for i in range(n)], **options)


def acts(env_ids: Any) -> Any:
    return np.asarray(env_ids)[:, None] % 5 + np.zeros((1, A), np.int64)


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=4)
@pytest.mark.checklist(40)
@pytest.mark.parametrize("batch", [1, 4, 6])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_loop_of_an_async_pool(backend: str, batch: int) -> None:
    """`async_reset`, then `recv` and `send` of what came: each env's reset once, then its own steps in order."""
    with counters(backend) as envs:
        envs.async_reset(seed=0)
        seen: Counter[int] = Counter()
        while min((seen[i] for i in range(N)), default=0) < 18:
            step = envs.recv(batch)
            assert len(step) >= batch
            for k, i in enumerate(step.env_ids.tolist()):
                t = seen[i]
                stamps = [decode(row) for row in step.obs[k]]
                if t == 0:
                    assert {stamp.t for stamp in stamps} == {0}
                    assert not step.rewards[k].any()
                else:
                    codes = [decode_reward(reward) for reward in step.rewards[k]]
                    assert {code[1] for code in codes} == {(t - 1) % 5 + 1}
                    assert {code[3] for code in codes} == {i % 5}, "the action that was sent to this env"
                assert {stamp.env for stamp in stamps} == {i}
                seen[i] += 1
            envs.send(acts(step.env_ids), step.env_ids)
        assert len(envs.drain()) == N
        envs.step(acts(range(N)))


@pytest.mark.checklist(42)
@pytest.mark.parametrize("backend", BACKENDS)
def test_drain_is_the_way_from_a_stream_to_whole_steps(backend: str) -> None:
    with counters(backend) as envs:
        envs.reset(seed=0)
        assert len(envs.drain()) == 0, "nothing is outstanding"
        envs.send(acts([1, 4]), [1, 4])
        envs.send(acts([0]), [0])
        for whole in (lambda: envs.step(acts(range(N))), envs.reset, lambda: envs.step_send(acts(range(N)))):
            with pytest.raises(BusyError, match=r"while send\(\) is pending; recv\(\) or drain\(\) the rest first"):
                whole()
        drained = envs.drain()
        assert sorted(drained.env_ids.tolist()) == [0, 1, 4]
        for k, i in enumerate(drained.env_ids.tolist()):
            assert {decode_reward(reward)[3] for reward in drained.rewards[k]} == {i % 5}
        obs = envs.step(acts(range(N)))[0]
        assert [decode(row[0]).t for row in obs] == [2, 2, 1, 1, 2, 1], "no step was lost, none was taken twice"
        envs.step_send(acts(range(N)))
        assert len(envs.drain()) == N, "a whole step can be drained too"
        envs.async_reset(env_ids=[2])
        envs.send(acts([3]), [3])
        assert sorted(envs.drain().env_ids.tolist()) == [2, 3]


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
            (ArgumentError, acts([3, 4]), [3]),
            (ArgumentError, acts([3])[:, :1], [3]),
            (NotResetError, acts([5]), [5]),
        ]
        for error, actions, ids in wrong:
            with pytest.raises(error):
                envs.send(actions, ids)
        with pytest.raises(BusyError, match=r"async_reset\(\) to envs \[1\]"):
            envs.async_reset(env_ids=[5, 1])
        with pytest.raises(ArgumentError, match="min_envs must be from 1 to 3"):
            envs.recv(4)
        step = envs.recv()
        assert sorted(step.env_ids.tolist()) == [0, 1, 2]
        envs.send(acts([0, 1, 2]), [0, 1, 2])
        assert {decode(row[0]).t for row in envs.recv().obs} == {1}
        envs.reset(seed=0)
        assert {decode(row[0]).t for row in envs.step(acts(range(N)))[0]} == {1}


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_autoreset_a_stream_resets_its_envs_one_by_one(backend: str) -> None:
    factories = [partial(CounterEnv, 2 + i, agent_num=A, env_index=i) for i in range(N)]
    with vectorize(backend, factories, autoreset_mode="disabled") as envs:
        envs.async_reset(seed=0)
        episodes: Counter[int] = Counter()
        while min((episodes[i] for i in range(N)), default=0) < 3:
            step = envs.recv(2 if envs._call_state.outstanding > 1 else 1)
            over = step.env_ids[step.done].tolist()
            for k in np.flatnonzero(step.done).tolist():
                assert decode(step.final_obs[k][0]).t == 2 + step.env_ids[k]
            episodes.update(over)
            if over:
                with pytest.raises(NotResetError, match="have no running episode"):
                    envs.send(acts(over), over)
                envs.async_reset(env_ids=over)
            going = step.env_ids[~step.done].tolist()
            envs.send(acts(going) if going else np.zeros((0, A), np.int64), going)


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


@pytest.mark.parametrize("backend", ["thread", "async"])
def test_a_timeout_in_a_stream_keeps_what_has_come(backend: str, tmp_path: Path) -> None:
    factories: list[Any] = [partial(CounterEnv, 5, agent_num=A, env_index=i) for i in range(3)]
    with Gate(tmp_path) as gate:
        factories.append(partial(GatedEnv, gate, 5, agent_num=A, env_index=3))
        with vectorize(backend, factories, num_workers=4) as envs:
            envs.reset(seed=0)
            envs.send(acts(range(4)))
            assert str(overdue(envs.recv, [3], 4)).startswith("recv(): ")
            step = envs.recv(3)
            assert sorted(step.env_ids.tolist()) == [0, 1, 2]
            envs.send(acts([0, 1, 2]), [0, 1, 2])
            gate.let_through()
            assert sorted(envs.drain().env_ids.tolist()) == [0, 1, 2, 3]


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

"""Envs as they become ready: rows find their env, slow ones hold up nobody, and wrong calls change nothing."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marlvec import AsyncVectorEnv, VectorEnv, env_seeds
from marlvec.errors import ArgumentError, BusyError, NotResetError
from marlvec.testing.scripted import CounterEnv, decode, decode_reward
from tests.vector.support.kinds import BACKENDS, SCRIPTED, factories_of, vectorize
from tests.vector.support.reference import MODES, Reference, check_row_step, public
from tests.waiting import Gate, GatedEnv, overdue

pytestmark = pytest.mark.many_processes

N, A = 6, 2


def counters(backend: str, n: int = N, **options: Any) -> VectorEnv:
    factories = [partial(CounterEnv, [3, 4], agent_num=A, env_index=i) for i in range(n)]
    return vectorize(backend, factories, **options)


@pytest.mark.slow("plays whole episodes in worker processes")
@pytest.mark.checklist(37)
@pytest.mark.time_limit(600)  # shrinking a counterexample takes its time
@settings(max_examples=25)
@given(data=st.data())
def test_any_order_of_sends_and_recvs(data: st.DataObject) -> None:
    """Every row of every env is what a loop over that env alone gives, in whatever portions one sends and receives."""
    draw = data.draw
    n, mode = draw(st.integers(1, 6), "envs"), draw(st.sampled_from(MODES), "mode")
    kind = draw(st.sampled_from(sorted(SCRIPTED)), "kind")
    factories = factories_of(kind, n, longest=4)
    backend = draw(st.sampled_from(["sync", "async"]), "backend")
    options = {} if backend == "sync" else {"num_workers": draw(st.integers(1, n), "workers"), "context": "fork"}
    seed = draw(st.integers(0, 2**31), "seed")
    rng = np.random.default_rng(seed)
    reference = Reference(factories, mode)
    pending: dict[int, list[Any]] = {}
    with vectorize(backend, factories, autoreset_mode=mode, **options) as envs:
        envs.reset_send(seed=seed)
        first: list[int] = []
        while len(first) < n:
            step = envs.recv(int(rng.integers(1, n - len(first) + 1)))
            seeds = [env_seeds(seed, n)[i] for i in step.env_ids.tolist()]
            check_row_step(envs, step, reference.reset(step.env_ids.tolist(), seeds), "reset", stepped=False)
            first += step.env_ids.tolist()
        assert sorted(first) == list(range(n)), "each env exactly once"
        while min(world.episodes for world in reference.worlds) < 3:
            ready = [i for i in range(n) if i not in pending and not (reference.worlds[i].over and mode == "disabled")]
            if ready and (not pending or rng.random() < 0.5):
                ids = rng.permutation(ready)[: int(rng.integers(1, len(ready) + 1))].tolist()
                actions = reference.draw(ids, rng)
                envs.send(public(envs, actions), ids)
                pending |= {i: [part[k : k + 1] for part in actions] for k, i in enumerate(ids)}
            elif pending:
                least = int(rng.integers(1, len(pending) + 1))
                step = envs.recv(least)
                ids = step.env_ids.tolist()
                assert len(set(ids)) == len(ids) >= least
                for i in ids:
                    reference.step([i], pending.pop(i))
                check_row_step(envs, step, reference.frame(ids), f"envs {ids}")
            else:
                envs.reset(env_ids=list(range(n)), seed=None)
                reference.reset(range(n), [None] * n)


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=3)
@pytest.mark.checklist(37)
@pytest.mark.checklist(40)
@pytest.mark.parametrize("workers", [2, 3, 6])
def test_the_first_ones_ready_come_first_with_their_own_rewards(workers: int) -> None:
    """Half of the envs at a time, as in EnvPool; the reward says which action it was for."""
    factories = [partial(CounterEnv, 5, agent_num=A, env_index=i) for i in range(N)]
    with AsyncVectorEnv(factories, num_workers=workers) as envs:
        envs.reset_send(seed=0)
        begun: list[int] = []
        while len(begun) < N:
            received = envs.recv(min(2, N - len(begun)))
            begun += received.env_ids.tolist()
            if len(begun) < N:
                with pytest.raises(BusyError, match=r"reset\(\) is pending"):
                    envs.send(np.zeros((len(received), A), np.int64), received.env_ids)
        assert sorted(begun) == list(range(N)), "each exactly once, before any step"
        actions = np.random.default_rng(0).integers(5, size=N)
        sent = dict(enumerate(actions.tolist()))
        count = dict.fromkeys(range(N), 0)
        envs.send((actions[:, None] + np.arange(A)) % 5)
        received = envs.recv(3)
        while min(count.values()) < 15:
            assert len(received) >= 3
            for k, i in enumerate(received.env_ids.tolist()):
                count[i] += 1
                codes = [decode_reward(reward) for reward in received.rewards[k]]
                t = (count[i] - 1) % 5 + 1
                assert codes == [((count[i] - 1) // 5, t, a, (sent[i] + a) % 5) for a in range(A)]
                source = received.final_obs if received.done[k] else received.obs
                assert [decode(row)[:1] + decode(row)[3:] for row in source[k]] == [(i, t, a) for a in range(A)]
                sent[i] = int(np.random.default_rng([i, count[i]]).integers(5))
            actions = np.array([[(sent[i] + a) % 5 for a in range(A)] for i in received.env_ids.tolist()])
            envs.send(actions, received.env_ids)
            received = envs.recv(min_envs=3)


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
def test_recv_waits_for_as_many_as_asked_and_no_longer_than_allowed(tmp_path: Path) -> None:
    with Gate(tmp_path) as gate, Gate(tmp_path) as last_gate:
        gates = {2: gate, 3: last_gate}
        factories = [
            partial(GatedEnv, gates[i], 5, agent_num=A, env_index=i)
            if i in gates
            else partial(CounterEnv, 5, agent_num=A, env_index=i)
            for i in range(4)
        ]
        with AsyncVectorEnv(factories, num_workers=4) as envs:
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


@pytest.mark.checklist(39)
@pytest.mark.parametrize("backend", BACKENDS)
def test_sends_to_envs_that_cannot_take_them(backend: str) -> None:
    with counters(backend) as envs:
        envs.reset(seed=0)
        t = [0] * N
        for _ in range(12):
            envs.send(np.ones((2, A), np.int64), [1, 4])
            wrong: list[tuple[Any, type[Exception], str]] = [
                ([4], BusyError, r"envs \[4\]"),
                ([0, 1, 2], BusyError, r"envs \[1\]"),
                (None, BusyError, r"envs \[1, 4\]"),
                ([True] * N, BusyError, r"envs \[1, 4\]"),
                ([N], ArgumentError, "from 0 to 5"),
                ([-1], ArgumentError, "from 0 to 5"),
                ([0, 0], ArgumentError, "twice"),
                ([2, 3, 2], ArgumentError, "twice"),
                ([0.5], ArgumentError, "list of indices"),
                ([[0, 2]], ArgumentError, "list of indices"),
                ([True, False], ArgumentError, "list of indices"),
            ]
            for env_ids, kind, words in wrong:
                n = N if env_ids is None else len(env_ids)
                with pytest.raises(kind, match=words):
                    envs.send(np.full((n, A), 2), env_ids)
            envs.send(np.zeros((0, A), np.int64), [])  # nobody: nothing happens
            envs.send(np.full((1, A), 3), [0])
            step = envs.recv()
            assert sorted(step.env_ids.tolist()) == [0, 1, 4]
            for k, i in enumerate(step.env_ids.tolist()):
                t[i] += 1
                assert decode_reward(step.rewards[k, 0])[3] == (3 if i == 0 else 1)
        obs, *_ = envs.step(np.ones((N, A), np.int64))
        assert decode(obs[2, 0])[2:4] == decode(obs[5, 1])[2:4] == (0, 1), "who was never sent to has not moved"


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick="each")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_ended_env_may_be_sent_to_where_the_mode_says_so(backend: str, mode: str) -> None:
    with counters(backend, 2, autoreset_mode=mode) as envs:
        envs.reset(seed=0)
        for _ in range(3):
            envs.send(np.ones((1, A), np.int64), [1])
            step = envs.recv()
        assert step.done.tolist() == [True]
        if mode == "disabled":
            with pytest.raises(NotResetError, match=r"envs \[1\]"):
                envs.send(np.ones((1, A), np.int64), [1])
            envs.reset_send(env_ids=[1])
            step = envs.recv()
            assert step.env_ids.tolist() == [1]
            assert decode(step.obs[0, 0])[2:4] == (1, 0)
            assert not np.concatenate([step.done, step.reset_mask, step.rewards.ravel()]).any()
        envs.send(np.full((1, A), 4), [1])
        step = envs.recv()
        assert step.reset_mask.tolist() == [mode == "next_step"]
        assert decode(step.obs[0, 0])[2:4] == ((1, 0) if mode == "next_step" else (1, 1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_envs_come_in_order_however_they_were_sent(backend: str) -> None:
    with counters(backend) as envs:
        envs.reset(seed=0)
        for _ in range(9):
            order = np.random.default_rng(0).permutation(N)
            envs.send(np.ones((N, A), np.int64), order)
            assert envs.recv().env_ids.tolist() == list(range(N))

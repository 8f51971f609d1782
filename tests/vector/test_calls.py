"""Which call may come when: order, streams, closing from another thread; and how many functions a call runs."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

import marlvec
from marlvec import AsyncVectorEnv, Collector, RandomPolicy, ThreadVectorEnv, VectorEnv
from marlvec.errors import (
    ArgumentError,
    BrokenError,
    BusyError,
    ClosedError,
    EnvRaised,
    FetchTimeout,
    NotResetError,
    StateError,
)
from marlvec.making import make
from marlvec.testing import CounterEnv, decode, decode_reward
from marlvec.vector.calls import (
    CONTROL_CALLS,
    PUBLIC_CALLS,
    STREAM_CALLS,
    TRANSITIONS,
    CallEvent,
    CallKind,
    CallPhase,
    CallState,
)
from tests.vector.support.kinds import BACKENDS, vectorize
from tests.vector.support.reference import refused
from tests.waiting import Gate, GatedEnv, overdue, until

# Which call may follow which: what comes at a wrong time raises, names what is pending, and changes nothing.


def stated_counters(backend: str, **options: Any) -> VectorEnv:
    return vectorize(backend, [partial(CounterEnv, [3, 5, 2], env_index=i, state=True) for i in range(3)], **options)


def all_take(k: int = 1) -> Any:
    return np.full((3, 3), k, np.int64)


@pytest.mark.fault("B4")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_before_the_first_reset(backend: str) -> None:
    with stated_counters(backend) as envs:
        for call in (
            lambda: envs.step(all_take()),
            lambda: envs.step_send(all_take()),
            lambda: envs.send(all_take()),
            envs.state,
        ):
            refused(NotResetError, r"envs \[0, 1, 2\]", call)
        envs.reset(env_ids=[1])
        refused(NotResetError, r"envs \[0, 2\]", envs.step, all_take())
        envs.send(all_take()[:1], [1])
        assert decode_reward(envs.recv().rewards[0, 2])[1] == 1, "the one that was reset has made exactly one step"
        envs.reset()
        envs.step(all_take())


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
                refused(BusyError, "", envs.step_send, np.zeros((2, 3), np.int64))
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
            refused(FetchTimeout, r"reset_fetch\(\): envs \[0, 1\]", envs.reset_fetch, timeout=0.01)
            refused(FetchTimeout, "", envs.recv, 1, timeout=0)
            gate.let_through(2)
            obs, _ = envs.reset_fetch(timeout=60)
            assert {decode(row) for row in obs[:, 0]} == {(i, 0, episode, 0, 0) for i in range(2)}
            envs.step(np.ones((2, 3), np.int64))


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=5)
@pytest.mark.fault("B6")
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_threads_that_step_never_get_each_others_replies(backend: str) -> None:
    """One wins and the other gets a `StateError`; what is won is always the answer to one's own actions."""
    with stated_counters(backend, num_workers=2) if backend != "sync" else stated_counters(backend) as envs:
        envs.reset(seed=0)
        wrong: list[Any] = []
        won = [0, 0]

        def play(me: int) -> None:
            for k in range(10**6):
                if k >= 1000 and sum(won) >= 20:  # few are won where the machine has other things to do
                    return
                try:
                    rewards = envs.step(all_take(me + 1))[1]
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
        assert sum(won) >= 20, won
        with contextlib.suppress(StateError):
            envs.step_fetch()
        envs.step(all_take())


@pytest.mark.parametrize("backend", BACKENDS)
def test_repr_says_what_it_is_doing(backend: str) -> None:
    with stated_counters(backend) as envs:
        assert "num_envs=3" in repr(envs)
        assert "idle" in repr(envs)
        envs.reset_send()
        assert "reset pending" in repr(envs)
        envs.reset_fetch()


# The state machine of calls, driven by random events: what its tables say is what it does, and no request is lost.


N = 5
IDS = st.lists(st.integers(0, N - 1), unique=True, max_size=N)


def array(ids: Iterable[int]) -> NDArray[np.int64]:
    return np.array(list(ids), np.int64)


class CallsMachine(RuleBasedStateMachine):
    """What is known of each env, by plain sets; `CallState` must agree after each event."""

    @initialize()
    def start(self) -> None:
        self.state = CallState(N)
        self.phase = CallPhase.IDLE
        self.pending: str | None = None
        self.in_flight: set[int] = set()
        self.arrived: list[int] = []
        self.episodes: set[int] = set()

    def check(self, call: str, ids: list[int]) -> type[StateError] | None:
        """What a public call does before it asks, and the error that the rules ask for."""
        kind = PUBLIC_CALLS[call].kind
        if self.phase is CallPhase.CLOSED:
            return ClosedError
        if self.phase is CallPhase.BROKEN:
            return BrokenError
        if kind is CallKind.STREAM:
            if self.pending is not None and self.pending not in STREAM_CALLS:
                return BusyError
            if (self.in_flight | set(self.arrived)) & set(ids):
                return BusyError
        elif self.pending is not None:
            return BusyError
        if PUBLIC_CALLS[call].operation in ("step", "send", "state") and set(ids) - self.episodes:
            return NotResetError
        return None

    @precondition(lambda self: self.phase in (CallPhase.IDLE, CallPhase.PENDING, CallPhase.BROKEN, CallPhase.CLOSED))
    @rule(call=st.sampled_from(sorted(PUBLIC_CALLS)), ids=IDS, undone=st.integers(0, 4))
    def ask(self, call: str, ids: list[int], undone: int) -> None:
        expected, chosen = self.check(call, ids), array(ids)
        raised: type[StateError] | None = None
        try:
            if call in STREAM_CALLS:
                self.state.check_free(chosen, call)
            else:
                self.state.check_idle(call)
            if PUBLIC_CALLS[call].operation in ("step", "send", "state"):
                self.state.check_episodes(chosen, call)
        except StateError as error:
            raised = type(error)
        assert raised is expected
        if raised is not None:
            return
        if call in STREAM_CALLS and not ids:
            return  # nobody to wait for: `VectorEnvBase` asks nothing
        before = self.state.outstanding
        self.state.begin(call, chosen)
        if undone == 0:  # it could not be sent
            self.state.undo_begin(chosen, before)
            if not before:
                self.phase, self.pending = CallPhase.IDLE, None
            else:
                self.pending = call
            return
        if PUBLIC_CALLS[call].operation == "reset":
            self.state.lose_episodes(chosen)
            self.episodes -= set(ids)
        self.phase, self.pending = CallPhase.PENDING, call
        self.in_flight |= set(ids)

    @precondition(lambda self: self.in_flight and self.phase < CallPhase.TORN)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.in_flight)), unique=True, min_size=1))
        self.state.arrive(array(ids))
        self.in_flight -= set(ids)
        self.arrived += ids

    @precondition(lambda self: self.phase is CallPhase.PENDING)
    @rule()
    def hand_out(self) -> None:
        brings_rows = self.pending not in CONTROL_CALLS
        got = self.state.hand_out()
        assert sorted(got.tolist()) == sorted(self.arrived), "each once"
        if self.pending in STREAM_CALLS and len(got) < N:
            assert got.tolist() == self.arrived, "first come first"
        if brings_rows:
            self.state.have_episodes(got)
            self.episodes |= set(self.arrived)
        self.arrived = []
        if not self.in_flight:
            self.phase, self.pending = CallPhase.IDLE, None

    @rule()
    def interrupt(self) -> None:
        self.state.on(CallEvent.INTERRUPT)
        if self.phase is CallPhase.PENDING:
            self.phase = CallPhase.INTERRUPTED

    @precondition(lambda self: self.phase is CallPhase.INTERRUPTED)
    @rule()
    def drop(self) -> None:
        """What the next call does: wait for all of it, and throw it away."""
        if self.in_flight:
            self.state.arrive(array(self.in_flight))
        if self.pending not in CONTROL_CALLS:
            self.state.lose_episodes(self.state.asked)
            self.episodes -= self.in_flight | set(self.arrived)
        self.state.hand_out()
        self.in_flight, self.arrived = set(), []
        self.phase, self.pending = CallPhase.IDLE, None

    @precondition(lambda self: self.phase < CallPhase.BROKEN)
    @rule()
    def tear(self) -> None:
        self.state.on(CallEvent.TEAR, "it was interrupted")
        self.phase = CallPhase.TORN

    @precondition(lambda self: self.phase is CallPhase.TORN)
    @rule()
    def forget(self) -> None:
        self.state.forget()
        self.in_flight, self.arrived, self.episodes = set(), [], set()
        self.phase, self.pending = CallPhase.IDLE, None

    @precondition(lambda self: self.phase < CallPhase.CLOSED)
    @rule(rarely=st.integers(0, 9))
    def break_or_close(self, rarely: int) -> None:
        if rarely == 0:
            self.state.on(CallEvent.BREAK, BrokenError("a worker is gone"))
            self.phase = CallPhase.BROKEN
        elif rarely == 1:
            self.state.on(CallEvent.CLOSE)
            self.phase = CallPhase.CLOSED

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "state"):
            return
        state = self.state
        assert state.phase is self.phase
        assert state.pending == self.pending
        assert set(state.in_flight.tolist()) == self.in_flight
        assert set(state.asked.tolist()) == self.in_flight | set(self.arrived)
        assert (state.outstanding, state.arrived) == (len(self.in_flight) + len(self.arrived), len(self.arrived))
        if state.all_run:
            assert self.episodes == set(range(N))
        if self.phase is CallPhase.IDLE:
            assert not self.in_flight
            assert not self.arrived
            assert self.pending is None
        for i in range(N):
            if i in self.episodes:
                state.check_episodes(array([i]), "step")
            else:
                refused(NotResetError, rf"envs \[{i}\]", state.check_episodes, array([i]), "step")


TestCallState = CallsMachine.TestCase


def test_what_no_table_has_cannot_happen() -> None:
    """Nothing begins in a call that nobody will fetch, or that is in pieces; nothing comes after close()."""
    state = CallState(N)
    state.begin("step", array(range(N)))
    state.on(CallEvent.INTERRUPT)
    refused(KeyError, "", state.begin, "step", array(range(N)))
    assert all(
        after is CallPhase.CLOSED
        for table in TRANSITIONS.values()
        for before, after in table.items()
        if before is CallPhase.CLOSED
    )
    assert {before for before, after in TRANSITIONS[CallEvent.FORGET].items() if after is CallPhase.IDLE} == {
        CallPhase.TORN
    }
    left = {(event, before) for event in CallEvent for before in CallPhase if before not in TRANSITIONS[event]}
    assert left == {
        (CallEvent.BEGIN, CallPhase.INTERRUPTED),
        (CallEvent.BEGIN, CallPhase.TORN),
        (CallEvent.BEGIN, CallPhase.BROKEN),
        (CallEvent.FINISH, CallPhase.TORN),
        *((CallEvent.FORGET, phase) for phase in CallPhase if phase not in (CallPhase.TORN, CallPhase.CLOSED)),
    }


# Streams: envs as they become ready; slow ones delay no other, and wrong calls change nothing.
#
# Portions of any size in any order are drawn by tests/properties.


def counters(backend: str, n: int = 6, length: int = 5, **options: Any) -> VectorEnv:
    return vectorize(backend, [partial(CounterEnv, length, agent_num=2, env_index=i) for i in range(n)], **options)


def acts(env_ids: Any) -> Any:
    return np.asarray(env_ids)[:, None] % 5 + np.zeros((1, 2), np.int64)


@pytest.mark.many_processes
@pytest.mark.checklist(39)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_refused_send_changes_nothing(backend: str) -> None:
    with counters(backend) as envs:
        envs.reset(seed=0, env_ids=[3, 4])
        envs.async_reset(seed=0, env_ids=[0, 1, 2])
        wrong: list[tuple[type[Exception], Any, Any]] = [
            (BusyError, acts([3]), [2]),
            (ArgumentError, acts([0, 0]), [3, 3]),
            (ArgumentError, acts([3]), [6]),
            (ArgumentError, acts([3]), [-1]),
            (ArgumentError, acts([3]), [0.5]),
            (ArgumentError, acts([3]), [[3]]),
            (ArgumentError, acts([3]), [True, False]),
            (BusyError, acts(range(6)), None),
            (BusyError, acts(range(6)), [True] * 6),
            (ArgumentError, acts([3, 4]), [3]),
            (ArgumentError, acts([3])[:, :1], [3]),
            (NotResetError, acts([5]), [5]),
        ]
        for error, actions, ids in wrong:
            refused(error, "", envs.send, actions, ids)
        refused(BusyError, r"async_reset\(\) to envs \[1\]", envs.async_reset, env_ids=[5, 1])
        for least in (4, 0, -1):
            refused(ValueError, "min_envs must be from 1 to 3", envs.recv, least)
        step = envs.recv()
        assert sorted(step.env_ids.tolist()) == [0, 1, 2]
        envs.send(acts([0, 1, 2]), [0, 1, 2])
        assert {decode(row[0]).t for row in envs.recv().obs} == {1}
        envs.reset(seed=0)
        assert {decode(row[0]).t for row in envs.step(acts(range(6)))[0]} == {1}


@pytest.mark.many_processes
@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=3)
@pytest.mark.checklist(38)
@pytest.mark.parametrize("backend", ["thread", "async"])
def test_rows_of_a_worker_come_as_they_are_ready(backend: str, tmp_path: Path) -> None:
    """One worker, and one of its envs is slow: those before it do not wait for it."""
    factories: list[Any] = [partial(CounterEnv, 5, agent_num=2, env_index=i) for i in range(3)]
    with Gate(tmp_path) as gate:
        factories.append(partial(GatedEnv, gate, 5, agent_num=2, env_index=3))
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


@pytest.mark.many_processes
@pytest.mark.checklist(38)
def test_a_slow_env_holds_up_nobody(tmp_path: Path) -> None:
    """It comes back when each of the others has made its cycles, and not before."""
    factories: list[Any] = [partial(CounterEnv, 5, agent_num=2, env_index=i) for i in range(3)]
    with (
        Gate(tmp_path) as gate,
        AsyncVectorEnv([*factories, partial(GatedEnv, gate, 5, agent_num=2, env_index=3)], num_workers=4) as envs,
    ):
        envs.reset(seed=0)
        envs.send(np.ones((4, 2), np.int64))
        cycles = dict.fromkeys(range(4), 0)
        waits = True
        while cycles[3] == 0:
            step = envs.recv(min_envs=1)
            assert len(step) >= 1
            for i in step.env_ids.tolist():
                cycles[i] += 1
            if cycles[3] == 0:
                envs.send(np.ones((len(step), 2), np.int64), step.env_ids)
            assert not (waits and cycles[3])
            if waits and min(cycles[i] for i in range(3)) > 50:
                gate.let_through()
                waits = False


@pytest.mark.many_processes
@pytest.mark.checklist(38)
@pytest.mark.parametrize("backend", ["thread", "async"])
def test_recv_waits_for_as_many_as_asked_and_no_longer_than_allowed(backend: str, tmp_path: Path) -> None:
    with Gate(tmp_path) as gate, Gate(tmp_path) as last_gate:
        gates = {2: gate, 3: last_gate}
        factories = [
            partial(GatedEnv, gates[i], 5, agent_num=2, env_index=i)
            if i in gates
            else partial(CounterEnv, 5, agent_num=2, env_index=i)
            for i in range(4)
        ]
        with vectorize(backend, factories, num_workers=4) as envs:
            envs.reset(seed=0)
            for t in range(1, 4):
                envs.send(np.full((4, 2), t))
                assert str(overdue(envs.recv, [2, 3])).startswith("recv(): ")
                with pytest.raises(BusyError):
                    envs.send(np.ones((1, 2), np.int64), [0])  # it has arrived, and was not handed out
                gate.let_through()
                first = envs.recv(3)
                assert sorted(first.env_ids.tolist()) == [0, 1, 2]
                last_gate.let_through()
                rest = envs.recv()
                assert rest.env_ids.tolist() == [3]
                for step in (first, rest):
                    assert {decode_reward(r)[1] for r in step.rewards.ravel()} == {t}
                    assert {decode_reward(r)[3] for r in step.rewards.ravel()} == {t}


@pytest.mark.many_processes
def test_much_to_say_on_both_sides_is_no_deadlock() -> None:
    """Requests and replies larger than a pipe, under way at once."""
    big = "x" * 300_000
    factories = [partial(CounterEnv, 5, agent_num=2, env_index=i) for i in range(4)]
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


@pytest.mark.many_processes
def test_a_worker_loop_of_ones_own(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("MARLVEC_TEST_LOG", str(log))
    factories = [partial(CounterEnv, 5, agent_num=2, env_index=i) for i in range(3)]
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


@pytest.mark.many_processes
@pytest.mark.slow("plays whole episodes in worker processes")
def test_threads_cannot_be_killed_and_close_says_so(tmp_path: Path) -> None:
    with Gate(tmp_path) as gate:
        factories = [partial(GatedEnv, gate, 5, agent_num=2, env_index=0), partial(CounterEnv, 5, agent_num=2)]
        envs = ThreadVectorEnv(factories, num_workers=2)
        envs.reset(seed=0)
        (stuck,) = (thread for thread in threading.enumerate() if thread.name == "marlvec-worker-0")
        envs.step_send(acts(range(2)))
        overdue(envs.step_fetch, [0])
        with pytest.warns(ResourceWarning, match=r"1 worker threads are still in an env after 2.0 s.*marlvec-worker-0"):
            envs.close(timeout=2.0)
        gate.let_through()
        stuck.join()


@pytest.mark.many_processes
@pytest.mark.parametrize("ending", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_whatever_an_env_raises_in_a_thread_arrives(ending: type[BaseException]) -> None:
    class Leaves(CounterEnv):
        def step(self, actions: Any) -> Any:
            raise ending("gone")

    with ThreadVectorEnv([partial(Leaves, 5, agent_num=2), partial(CounterEnv, 5, agent_num=2)], num_workers=2) as envs:
        envs.reset(seed=0)
        refused(EnvRaised, rf"env 0 raised in step\(\): {ending.__name__}: gone", envs.step, acts(range(2)))
        envs.reset(seed=0)


# `close()` from another thread while a call waits: that call ends with ClosedError, and nothing stays behind.


def step(envs: VectorEnv) -> None:
    envs.step(envs.random_action(seed=0))


def step_and_fetch(envs: VectorEnv) -> None:
    envs.step_send(envs.random_action(seed=0))
    envs.step_fetch()


def send_and_receive(envs: VectorEnv) -> None:
    envs.send(envs.random_action(seed=0), np.arange(2))
    envs.recv(min_envs=2)


def drain(envs: VectorEnv) -> None:
    envs.send(envs.random_action(seed=0), np.arange(2))
    envs.drain()


def exec_func(envs: VectorEnv) -> None:
    envs.exec_func(lambda env: env.strike())


def collect(envs: VectorEnv) -> None:
    Collector(envs, RandomPolicy()).collect(env_steps=8)


CALLS: list[Callable[[VectorEnv], None]] = [step, step_and_fetch, send_and_receive, drain, exec_func, collect]


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick="each")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_call_that_waits_ends_when_another_thread_closes(
    backend: str, call: Callable[[VectorEnv], None], tmp_path: Path
) -> None:
    with Gate(tmp_path) as gate, ThreadPoolExecutor(2) as threads:
        envs = vectorize(backend, [partial(GatedEnv, gate, env_index=i) for i in range(2)])
        envs.reset(seed=0)
        waiting = threads.submit(call, envs)
        until(lambda: "pending" in str(envs))
        closing = threads.submit(envs.close, 60.0)
        until(lambda: envs.closed)
        if backend == "async":  # its call ends although no env has replied
            assert isinstance(waiting.exception(), ClosedError)
        gate.let_through(100)
        assert isinstance(waiting.exception(), ClosedError)
        closing.result()


def test_call_ends_whatever_step_timeout_says(tmp_path: Path) -> None:
    """The thread that waits looks for hanging envs, too, and notices the end all the same."""
    with Gate(tmp_path) as gate, ThreadPoolExecutor(2) as threads:
        factories = [partial(GatedEnv, gate, env_index=i) for i in range(2)]
        envs = vectorize("async", factories, step_timeout=600.0)
        envs.reset(seed=0)
        waiting = threads.submit(step, envs)
        until(lambda: "pending" in str(envs))
        closing = threads.submit(envs.close, 60.0)
        error = waiting.exception(timeout=30.0)
        gate.let_through(100)
        closing.result()
    assert isinstance(error, ClosedError)


def test_close_does_not_wait_for_ever_for_a_thread_that_cannot_leave(tmp_path: Path) -> None:
    """An env of the sync backend hangs in its step; what its thread gets later is ClosedError, too."""
    with Gate(tmp_path) as gate, ThreadPoolExecutor(1) as threads:
        envs = vectorize("sync", [partial(GatedEnv, gate)])
        envs.reset(seed=0)
        waiting = threads.submit(step, envs)
        until(lambda: "pending" in str(envs))
        envs.close(timeout=0.1)
        gate.let_through(100)
        assert isinstance(waiting.exception(), ClosedError)


def test_call_of_a_closed_vectorizer_in_another_thread_is_refused() -> None:
    envs = vectorize("sync", [partial(GatedEnv, None)])
    envs.close()
    with ThreadPoolExecutor(1) as threads:
        assert isinstance(threads.submit(step, envs).exception(), ClosedError)


# How many of marlvec's own functions run for one call, and in how many files: a count, not a clock.
#
# A step that is not checked, two envs; comprehensions are not counted, nor are other threads and processes.


HERE = Path(marlvec.__file__).resolve().parent
FOLDERS = (f"{HERE}{os.sep}", f"{(HERE / 'connectors').resolve()}{os.sep}")
# Called once for each time that the kernel hands something over, so as often as the workers' timing has it.
BY_TIMING = {"WorkerPool.wait", "AdaptivePoller.wait", "Channel.take", "Channel._more"}


def calls_by_file(call: Callable[[], Any]) -> Counter[str]:
    """Calls of functions, by file."""
    files: Counter[str] = Counter()

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and not code.co_name.startswith("<") and code.co_qualname not in BY_TIMING:
            file = os.path.realpath(code.co_filename)
            if file.startswith(FOLDERS):
                files[file] += 1

    before = sys.getprofile()
    gc.collect()
    gc.disable()  # what other tests have left behind is not to be closed in here
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
        gc.enable()
    return files


def count(call: Callable[[], Any]) -> tuple[int, int]:
    """Calls of functions, and how many files they are in."""
    files = calls_by_file(call)
    return files.total(), len(files)


def warm(envs: VectorEnv) -> Any:
    envs.reset(seed=0)
    actions = np.ones((2, 3), np.int64)
    for _ in range(20):  # the first ones are checked, and the 32nd again
        envs.step(actions)
    return actions


@pytest.mark.slow("plays whole episodes in worker processes")
@pytest.mark.parametrize(("backend", "calls", "files"), [("sync", 36, 10), ("async", 34, 8)])
def test_step(backend: str, calls: int, files: int) -> None:
    options = {"num_workers": 2} if backend == "async" else {}
    with make("simple_spread", num_envs=2, backend=backend, **options) as envs:
        actions = warm(envs)
        made = count(lambda: envs.step(actions))
    assert made[0] <= calls
    assert made[1] <= files


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=3)
@pytest.mark.parametrize(("backend", "calls", "files"), [("sync", 260, 35), ("async", 270, 36)])
def test_make(backend: str, calls: int, files: int) -> None:
    options = {"num_workers": 2} if backend == "async" else {}

    def build() -> VectorEnv:
        return make("simple_spread", num_envs=2, backend=backend, **options)

    build().close()  # what is imported and remembered once is not counted
    held: list[VectorEnv] = []
    made = count(lambda: held.append(build()))
    held[0].close()
    assert made[0] <= calls
    assert made[1] <= files

"""Worker processes: what they import, the states that the parent sees them in, deaths, channels and descriptors."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import cloudpickle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import marlvec
from marlvec import AsyncVectorEnv, VectorEnv
from marlvec.envs.detect import adapt
from marlvec.errors import BrokenError, Failure, ResourceError, WorkerDied
from marlvec.testing import CounterEnv, ExitingEnv, HangingEnv, RaisingEnv, decode_reward
from marlvec.vector.cores import Partition
from marlvec.vector.failures import pack_failures
from marlvec.vector.settings import Settings
from marlvec.vector.workers import channel as ch
from marlvec.vector.workers import pool as worker_pool
from marlvec.vector.workers.channel import ChannelClosed, ChannelMessage, StackDump, closer, pair
from marlvec.vector.workers.pool import WorkerPool, WorkerState
from tests.faults.harness.programs import wait_gone
from tests.tracer import Tracer
from tests.vector.support.kinds import acts, hooked
from tests.vector.support.reference import refused
from tests.waiting import LONG, Gate, until, within

# Classes of modules that a worker cannot import, or must not import again: the module that makes the envs while it is
# imported, the main module of a spawned child, a module loaded from a path.


ENV = """
import gymnasium
import marlvec

class Env(gymnasium.Env):
    observation_space, action_space = gymnasium.spaces.Discrete(9), gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return first(), {}

    def step(self, action):
        return 1, 0.0, False, False, {}

def first():
    return 7
"""
MAKES = ENV + 'envs = marlvec.make(Env, num_envs=4, num_workers=2, backend="async")\n'
SPAWNED = f"""
import multiprocessing, sys
{ENV}
def work():
    with marlvec.make(Env, num_envs=4, num_workers=2, backend="async") as envs:
        print(envs.reset(seed=0)[0].ravel().tolist(), envs.exec_func(lambda env: first()))

if __name__ == "__main__":
    process = multiprocessing.get_context(sys.argv[1]).Process(target=work)
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a module that makes envs of its own class while it is imported."""
    name = f"makes_envs_{id(tmp_path)}"
    (tmp_path / f"{name}.py").write_text(MAKES)
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    if imported := sys.modules.pop(name, None):
        imported.envs.close()


def test_module_that_makes_envs_while_it_is_imported_sends_their_class_by_value(module: str) -> None:
    envs = importlib.import_module(module).envs
    assert envs.reset(seed=0)[0].ravel().tolist() == [7, 7, 7, 7]
    assert envs.exec_func(lambda env: type(env).__module__) == (module,) * 4


@pytest.mark.parametrize("by_name", [False, True])
def test_worker_that_imports_such_a_module_makes_no_envs_of_its_own(module: str, by_name: bool) -> None:
    imported = importlib.import_module(module)
    env = f"{module}:Env" if by_name else imported.Env
    with pytest.raises(ResourceError, match=rf"'{module}', which makes envs .* while it is imported.*__main__"):
        marlvec.make(env, num_envs=2, num_workers=1, backend="async")


@pytest.mark.slow("plays whole episodes in worker processes")
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_class_of_the_script_reaches_workers_of_a_child_that_was_spawned(method: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SPAWNED)
    ran = subprocess.run([sys.executable, script, method], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == "[7, 7, 7, 7] (7, 7, 7, 7)\n"


def load_from_path(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["a_module_of_no_path", "no_such_package.of_no_path", "string"])
def test_class_of_a_module_that_was_loaded_from_a_path_goes_by_value(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pytest's importlib mode loads tests. ``string``: by that name a worker finds another file."""
    path = tmp_path / "module.py"
    path.write_text(ENV)
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = load_from_path(path, name)
    try:
        with marlvec.make(module.Env, num_envs=2, num_workers=1, backend="async") as envs:
            assert envs.reset(seed=0)[0].ravel().tolist() == [7, 7]
            assert envs.exec_func(module.Env.reset) == ((7, {}),) * 2
    finally:
        del sys.modules[name]


# What a worker is at, driven by random events: no request is lost. No process is started.


N = 4
W = 2
READY = WorkerState.READY
STARTING = (WorkerState.PLANNED, WorkerState.BUILDING, WorkerState.ATTACHING)


class FakeChannel:
    """The parent's end of a channel; the test says what comes in."""

    torn = ""

    def __init__(self) -> None:
        self.read_fd, self._theirs = os.pipe()
        self.inbox: deque[ChannelMessage] = deque()
        self.sent: list[tuple[int, int]] = []
        self.is_closed_there = False

    def send(self, code: int, number: int, payload: bytes = b"", timeout: float | None = None) -> None:
        if self.is_closed_there:
            raise ChannelClosed("end of file")
        self.sent.append((code, number))

    def take(self, number: int | None = None) -> ChannelMessage | None:
        return self.inbox.popleft() if self.inbox else None

    def close(self) -> None:
        if self.read_fd >= 0:
            os.close(self.read_fd)
            os.close(self._theirs)
        self.read_fd = -1


class FakeProcess:
    """A process that is nothing but its channel."""

    pid, exitcode = 1, -9

    def __init__(self, method: str, memory_fd: int) -> None:
        if method == "fails":
            raise ResourceError("no more processes")
        self.channel = FakeChannel()

    def kill(self) -> None:
        self.channel.is_closed_there = True

    def wait(self, timeout: float) -> bool:
        return True

    def stacks(self) -> str:
        return ""

    def crash_report(self) -> str:
        return ""

    def close(self) -> None:
        self.channel.close()


SPEC = adapt(CounterEnv(3)).spec()
OTHER_SPEC = adapt(CounterEnv(3, agent_num=1)).spec()


class WorkersMachine(RuleBasedStateMachine):
    """Two workers; per worker a plain state, and what it was asked and owes."""

    @initialize()
    def start(self) -> None:
        self.patch = mock.patch.object(worker_pool, "WorkerProcess", FakeProcess)
        self.patch.start()
        pool = WorkerPool(
            Partition(N, W), "forkserver", 1, [CounterEnv] * N, settings=Settings(), in_file=False, loop=None
        )
        pool._spec = SPEC
        pool._poll_one = [worker_pool.select.poll() for _ in range(W)]
        self.pool = pool
        for w in range(W):
            pool.workers.append(FakeProcess("forkserver", -1))  # type: ignore[arg-type]  # stands in for one
            pool._listen_to(w)
            pool.states[w] = READY
        self.states = [READY] * W
        self.owed: list[list[int]] = [[] for _ in range(W)]  # numbers of requests
        self.sent: list[list[int]] = [[] for _ in range(W)]  # those of them that have gone out
        self.ended: set[int] = set()
        self.number = 1

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.patch.stop()
            for worker in self.pool.workers:
                worker.close()

    def workers_in(self, data: st.DataObject, *states: WorkerState) -> int | None:
        found = [w for w in range(W) if self.states[w] in states]
        return data.draw(st.sampled_from(found)) if found else None

    @rule(data=st.data())
    def request(self, data: st.DataObject) -> None:
        w = self.workers_in(data, *STARTING, READY, WorkerState.KILLED)
        if w is None:
            return
        self.number += 1
        channel = self.pool.workers[w].channel
        gets_out = self.states[w] is READY and not channel.is_closed_there  # type: ignore[attr-defined]
        fails = self.states[w] in (READY, WorkerState.KILLED) and not gets_out
        try:
            self.pool.request(w, ch.STEP, self.number, self.pool.partition.slices[w], b"")
            raised = False
        except ChannelClosed:
            raised = True
        assert raised == fails
        self.owed[w].append(self.number)
        if fails:
            self.ended.add(w)
        if gets_out:
            self.sent[w].append(self.number)

    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        """What `AsyncVectorEnv` does once a reply was read."""
        w = self.workers_in(data, READY)
        if w is None or not self.owed[w]:
            return
        assert self.pool.outstanding[w].popleft()[0] == self.owed[w].pop(0)
        self.sent[w] = self.sent[w][1:]

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        w = self.workers_in(data, WorkerState.BUILDING, WorkerState.ATTACHING, READY)
        if w is not None:
            self.pool.workers[w].channel.is_closed_there = True  # type: ignore[attr-defined]

    @rule(data=st.data())
    def hang(self, data: st.DataObject) -> None:
        w = self.workers_in(data, READY)
        if w is not None and self.owed[w]:
            assert w in [v for v, _, _ in self.pool.busy()]
            self.pool.kill_hung(w, 1.0)
            self.states[w] = WorkerState.KILLED

    @rule(data=st.data())
    def reap(self, data: st.DataObject) -> None:
        w = self.workers_in(data, *STARTING, READY, WorkerState.KILLED)
        if w is None:
            return
        gone = self.pool.reap(w, None, "step")
        assert gone.building == (self.states[w] in STARTING)
        assert gone.request == (self.owed[w][0] if self.owed[w] else None)
        assert (gone.timeout is not None) == (self.states[w] is WorkerState.KILLED)
        self.pool.outstanding[w].clear()  # they are asked anew of the next one
        self.owed[w], self.sent[w], self.states[w] = [], [], WorkerState.REAPED
        self.ended.discard(w)

    @rule(data=st.data())
    def plan(self, data: st.DataObject) -> None:
        w = self.workers_in(data, WorkerState.REAPED)
        if w is not None:
            self.pool.plan(w)
            self.states[w] = WorkerState.PLANNED

    @rule(data=st.data(), fails=st.booleans())
    def replace(self, data: st.DataObject, fails: bool) -> None:
        w = self.workers_in(data, WorkerState.PLANNED)
        if w is None:
            return
        self.pool._context = "fails" if fails else "forkserver"
        problem = self.pool.start(w)
        assert (problem is not None) == fails
        if not fails:
            self.states[w] = WorkerState.BUILDING

    @rule(data=st.data(), says=st.sampled_from(["nothing", "fine", "other spaces", "failed"]))
    def advance(self, data: st.DataObject, says: str) -> None:
        w = self.workers_in(data, WorkerState.BUILDING, WorkerState.ATTACHING)
        if w is None:
            return
        channel: Any = self.pool.workers[w].channel
        building = self.states[w] is WorkerState.BUILDING
        if says == "failed":
            failure = pack_failures([Failure(0, "__init__", "it would not", "", RuntimeError())])
            channel.inbox.append(ChannelMessage(ch.FAILED, 0, 1, failure))
            assert "could not build its envs again" in str(self.pool.advance(w))
        elif says != "nothing":
            spec = SPEC if says == "fine" else OTHER_SPEC
            payload = cloudpickle.dumps((spec, pack_failures([]), frozenset())) if building else b""
            channel.inbox.append(ChannelMessage(ch.OK, 0, 1, payload))
            if building and says == "other spaces":
                assert "with other spaces" in str(self.pool.advance(w))
                return
            sends = building or bool(self.owed[w])
            if channel.is_closed_there and sends:
                refused(ChannelClosed, "", self.pool.advance, w)
            else:
                assert self.pool.advance(w) is None
            if building:
                self.states[w] = WorkerState.ATTACHING
            else:
                self.states[w] = READY
                self.sent[w] = [] if channel.is_closed_there else list(self.owed[w])
        else:
            assert self.pool.advance(w) is None, "some of it is yet to come"

    @precondition(lambda self: hasattr(self, "pool"))
    @invariant()
    def agrees(self) -> None:
        pool = self.pool
        assert pool.states == self.states
        assert pool.ended == self.ended
        for w in range(W):
            numbers = [number for number, _ in pool.outstanding[w]]
            assert numbers == self.owed[w]
            if pool.states[w] is READY and w not in self.ended:
                steps = [number for code, number in pool.workers[w].channel.sent if code == ch.STEP]  # type: ignore[attr-defined]
                assert steps[len(steps) - len(self.sent[w]) :] == self.sent[w], "in order, each once"
        assert {w for w, _, _ in pool.busy()} == {w for w in range(W) if self.states[w] is READY and self.owed[w]}


TestWorkers = WorkersMachine.TestCase


def test_who_has_ended_is_asked_for_nothing() -> None:
    pool = WorkerPool(Partition(N, W), "forkserver", 1, [CounterEnv] * N, settings=Settings(), in_file=False, loop=None)
    pool.states[1] = WorkerState.REAPED
    refused(AssertionError, "worker 1 has ended", pool.request, 1, ch.STEP, 1, pool.partition.slices[1], b"")
    assert not pool.outstanding[1]


# Workers that die: it is told at once, with the envs that are lost, and what is left can be closed.


CONTEXTS = ("forkserver", "spawn", "fork")
A = 3


# Exit codes, and how the env ends its worker.
DEATHS: dict[str, tuple[int, dict[str, int]]] = {
    "SIGKILL": (-9, {"signal": 9}),
    "SIGSEGV": (-11, {"signal": 11}),
    "SIGABRT": (-6, {"signal": 6}),
    "exit 0": (0, {"code": 0}),
    "exit 3": (3, {"code": 3}),
}
PLACES = [
    *(("forkserver", death) for death in DEATHS),
    *((context, death) for context in ("spawn", "fork") for death in ("SIGKILL", "exit 0")),
]


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=12)
@pytest.mark.checklist(67)
@pytest.mark.parametrize(("context", "death"), PLACES)
def test_a_worker_that_dies_in_a_step_is_reported_at_once(context: str, death: str) -> None:
    code, how = DEATHS[death]
    factories: list[Any] = [
        partial(HangingEnv, env_index=0, at=1),  # it is not waited for
        partial(CounterEnv, env_index=1),
        partial(ExitingEnv, env_index=2, where="step", at=1, **how),
        partial(CounterEnv, env_index=3),
    ]
    envs = AsyncVectorEnv(factories, num_workers=2, context=context)
    try:
        envs.reset(seed=0)
        envs.step(acts(envs))
        pids = envs.worker_pids
        with pytest.raises(WorkerDied, match=rf"worker 1 \(pid {pids[1]}, envs 2 to 3\) .* during step\(\)") as caught:
            envs.step(acts(envs))
        died = caught.value
        assert (died.pid, died.exitcode, died.env_ids, died.lost_env_ids) == (pids[1], code, (2, 3), (2, 3))
        assert ("exited with code" in str(died)) == (code >= 0)
        assert str(code).lstrip("-") in str(died)
        again = pickle.loads(pickle.dumps(died))
        assert (str(again), again.pid, again.exitcode, again.env_ids) == (str(died), died.pid, code, (2, 3))
        for call in (envs.reset, lambda: envs.step(acts(envs)), envs.step_fetch, envs.recv, lambda: envs.step_send(1)):
            broken = refused(BrokenError, rf"only close\(\) is left.*pid {pids[1]}", call)
            assert broken.__cause__ is died
        assert "broken" in repr(envs)
    finally:
        with within(4.5, usual=0.3):  # and not the five seconds of its default
            envs.close(timeout=0.2)
    envs.close()


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=3)
@pytest.mark.fault("A2")
@pytest.mark.parametrize("context", CONTEXTS)
def test_a_worker_killed_while_idle_is_noticed_by_the_next_call(context: str) -> None:
    calls: list[Callable[[VectorEnv], Any]] = [lambda envs: envs.step(acts(envs)), lambda envs: envs.reset()]
    for call in calls:
        with AsyncVectorEnv(
            [partial(CounterEnv, env_index=i) for i in range(2)], num_workers=2, context=context
        ) as envs:
            envs.reset()
            envs.step(acts(envs))
            os.kill(envs.worker_pids[0], signal.SIGKILL)
            wait_gone(envs.worker_pids[:1], LONG)
            with within(4, usual=0.02), pytest.raises(WorkerDied, match="SIGKILL.*out-of-memory") as caught:
                call(envs)
            assert (caught.value.env_ids, caught.value.exitcode) == ((0,), -9)


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=3)
@pytest.mark.fault("A6")
@pytest.mark.parametrize("context", CONTEXTS)
def test_exits_of_every_kind_in_a_step_are_deaths(context: str) -> None:
    for error, code in ((partial(SystemExit, 3), 3), (partial(SystemExit, 0), 0), (SystemExit, 0)):
        with AsyncVectorEnv([partial(RaisingEnv, error=error)], context=context) as envs:
            envs.reset()
            caught = refused(WorkerDied, f"exited with code {code}", envs.step, acts(envs))
            assert caught.exitcode == code
    for code in (0, 3):
        with AsyncVectorEnv([partial(ExitingEnv, code=code)], context=context) as envs:
            envs.reset()
            refused(WorkerDied, f"exited with code {code}", envs.step, acts(envs))


def leave_after_second_step(gate: Gate, env: Any, step: Any, actions: Any) -> Any:
    """Step; after the second step, end the process when the gate opens."""

    def leave() -> None:
        gate.wait()
        os._exit(4)

    result = step(actions)
    if env.world.t == 2:
        threading.Thread(target=leave).start()
    return result


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=3)
@pytest.mark.fault("A16")
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("fetch_late", [False, True])
def test_the_last_reply_of_a_worker_is_delivered_before_its_death(
    context: str, fetch_late: bool, tmp_path: Path
) -> None:
    with (
        Gate(tmp_path) as gate,
        AsyncVectorEnv(
            [partial(hooked, CounterEnv, hooks={"step": partial(leave_after_second_step, gate)}), CounterEnv],
            num_workers=2,
            context=context,
        ) as envs,
    ):
        envs.reset()
        envs.step(acts(envs))
        pid = envs.worker_pids[0]
        envs.step_send(acts(envs, 4))
        if fetch_late:
            until(lambda: envs._worker_pool.has_unread(0))  # nothing public tells it without hearing it
            gate.let_through()
            wait_gone([pid], LONG)
        rewards = envs.step_fetch()[1]
        assert {decode_reward(reward) for reward in rewards.ravel()} == {(0, 2, a, 4) for a in range(A)}
        if not fetch_late:
            gate.let_through()
            wait_gone([pid], LONG)
        refused(WorkerDied, f"pid {pid}, env 0.*exited with code 4", envs.step, acts(envs))


# After an interrupt that lost some of what came in, a channel finds its next answer, and what follows it.


PAYLOADS = st.lists(st.binary(max_size=40), max_size=5)


@given(
    before=PAYLOADS,
    lost=st.integers(0, 400),
    taken=st.integers(0, 3),
    answer=st.binary(max_size=40),
    split=st.integers(0, 500),
)
def test_what_was_asked_before_is_thrown_away(
    before: list[bytes], lost: int, taken: int, answer: bytes, split: int
) -> None:
    """Whole messages were taken, bytes of the next ones were read and lost, and the answer may come in two pieces."""
    ours, (their_read, their_write) = pair()
    theirs = ch.Channel(their_read, their_write)
    try:
        for number, payload in enumerate(before, start=2):
            theirs.send(ch.OK, number, payload, 3)
        for _ in before[:taken]:
            assert ours.take() is not None
        if left := sum(16 + len(payload) for payload in before[taken:]):
            os.read(ours.read_fd, min(lost, left))
        theirs.send(ch.OK, 99, answer)
        ours.skip_to(99, 10.0)
        theirs.send(ch.OK, 100, b"next", 1)
        assert ours.take(100) == (ch.OK, 1, 100, b"next")
        # In pieces: some of it is read before it is looked for.
        theirs.send(ch.OK, 101, answer)
        ours._begun += os.read(ours.read_fd, 1 + split % (16 + len(answer)))
        ours.skip_to(101, 10.0)
        assert ours.take() is None
    finally:
        ours.close()
        theirs.close()


def test_an_answer_that_does_not_come_is_not_waited_for() -> None:
    ours, (their_read, their_write) = pair()
    theirs = ch.Channel(their_read, their_write)
    theirs.send(ch.OK, 5, b"something else")
    refused(ChannelClosed, "time is up", ours.skip_to, 6, 0.05)
    theirs.close()
    refused(ChannelClosed, "end of file", ours.skip_to, 6, 10.0)
    ours.close()


# File descriptors that are closed once each, wherever Ctrl-C comes.


def made(kind: str) -> tuple[Any, list[int]]:
    """Something that can be closed, and its descriptors."""
    if kind == "channel":
        channel, theirs = pair()
        for fd in theirs:
            os.close(fd)
        return channel, [channel.read_fd, channel.write_fd]
    stacks = StackDump()
    return stacks, [stacks.fd]


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


@pytest.mark.fault("A25")
@pytest.mark.parametrize("kind", ["channel", "stacks"])
def test_what_got_the_number_meanwhile_stays_open(kind: str) -> None:
    """At each line of `close`: the next call closes what is left, and nothing that was opened since."""
    line, place = 0, ""
    while place is not None:
        line += 1
        one, fds = made(kind)
        try:
            with Tracer(("/marlvec/vector/",), line) as tracer:
                one.close()
        except KeyboardInterrupt:
            pass
        place = tracer.place
        others = [os.open(os.devnull, os.O_RDONLY) for _ in range(4)]  # they get the numbers that are free
        one.close()
        one.close()
        assert all(is_open(fd) for fd in others)
        assert not any(is_open(fd) for fd in set(fds) - set(others))
        for fd in others:
            os.close(fd)
    assert line > 2


def test_one_that_cannot_be_closed_leaves_none_open() -> None:
    a, b = os.pipe()
    close = closer(a, b)
    os.close(a)
    refused(OSError, "Bad file descriptor", close)
    close()
    assert not is_open(b)

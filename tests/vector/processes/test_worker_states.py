"""What a worker is at, driven by random events: no request is lost. No process is started."""

from __future__ import annotations

import os
from collections import deque
from typing import Any
from unittest import mock

import cloudpickle
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from marlvec.envs.detect import adapt
from marlvec.errors import Failure, ResourceError
from marlvec.testing.scripted import CounterEnv
from marlvec.vector.cores import Partition
from marlvec.vector.failures import pack_failures
from marlvec.vector.settings import Settings
from marlvec.vector.workers import channel as ch
from marlvec.vector.workers import pool as worker_pool
from marlvec.vector.workers.channel import ChannelClosed, Message
from marlvec.vector.workers.pool import WorkerPool, WorkerState

N, W = 4, 2
READY = WorkerState.READY
STARTING = (WorkerState.PLANNED, WorkerState.BUILDING, WorkerState.ATTACHING)


class FakeChannel:
    """The parent's end of a channel; the test says what comes in."""

    torn = ""

    def __init__(self) -> None:
        self.read_fd, self._theirs = os.pipe()
        self.inbox: deque[Message] = deque()
        self.sent: list[tuple[int, int]] = []
        self.is_closed_there = False

    def send(self, code: int, number: int, payload: bytes = b"", timeout: float | None = None) -> None:
        if self.is_closed_there:
            raise ChannelClosed("end of file")
        self.sent.append((code, number))

    def take(self, number: int | None = None) -> Message | None:
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
            channel.inbox.append(Message(ch.FAILED, 0, 1, failure))
            assert "could not build its envs again" in str(self.pool.advance(w))
        elif says != "nothing":
            spec = SPEC if says == "fine" else OTHER_SPEC
            payload = cloudpickle.dumps((spec, pack_failures([]), frozenset())) if building else b""
            channel.inbox.append(Message(ch.OK, 0, 1, payload))
            if building and says == "other spaces":
                assert "with other spaces" in str(self.pool.advance(w))
                return
            sends = building or bool(self.owed[w])
            if channel.is_closed_there and sends:
                with pytest.raises(ChannelClosed):
                    self.pool.advance(w)
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
    with pytest.raises(AssertionError, match="worker 1 has ended"):
        pool.request(1, ch.STEP, 1, pool.partition.slices[1], b"")
    assert not pool.outstanding[1]

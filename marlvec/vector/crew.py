"""The worker processes of one vectorizer: listening to them, and letting go of them."""

from __future__ import annotations

import math
import os
import pickle
import select
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from marlvec.errors import Failure
from marlvec.vector import channel as ch
from marlvec.vector.channel import ChannelClosed, Garbled, Patience
from marlvec.vector.cores import usable_cores
from marlvec.vector.faults import unpack_failure
from marlvec.vector.launch import WorkerProcess
from marlvec.vector.obituary import Obituary
from marlvec.vector.shares import Shares

__all__ = ["Crew", "Starting", "noise"]

_MOMENT = 0.01  # seconds in which workers that are killed together are gone
_LOOK = 400e-6  # seconds to look for an answer before sleeping
_LONG = 2e6  # seconds, as many as poll() can count in milliseconds


@dataclass
class Starting:
    """A worker that takes the place of one that is gone, and is not at work yet.

    Attributes:
        since: When it was started, by `time.monotonic`; infinity if it is still to be.
        has_spec: Whether it has built its envs.
        requests: What it will be asked then: code, number, payload.
    """

    since: float = math.inf
    has_spec: bool = False
    requests: list[tuple[int, int, bytes]] = field(default_factory=list)


def noise(news: ChannelClosed) -> str | None:
    """What a worker must go for, if its channel tells of more than its end."""
    if not isinstance(news, Garbled):
        return None
    return f"was killed for what came out of its reply pipe, which an env may have written into ({news}),"


class Crew:
    """The workers of one vectorizer; apart from it, so that they can be let go of without it.

    Args:
        shares: Who has which envs.

    Attributes:
        owner: The process that started them.
        shares: As given.
        workers: In order of their envs.
        outstanding: Per worker, the requests that it owes answers to: number, and the envs yet to be answered for.
        starting: Those that are not at work yet.
        closed: Those whose end was closed; what they said before can still be read.
        progress: (W,) int64, the env that each one is at work on, counted from 1 in its share; 0 for none.
        memory_fd: The memory that they share, while it is open here; -1 when it is not.
    """

    def __init__(self, shares: Shares) -> None:
        self.owner = os.getpid()
        self.shares = shares
        self.workers: list[WorkerProcess] = []
        self.outstanding: list[deque[tuple[int, NDArray[np.int64]]]] = [deque() for _ in shares.slices]
        self.starting: dict[int, Starting] = {}
        self.closed: set[int] = set()
        self.progress: NDArray[np.int64] = np.zeros(len(shares.slices), np.int64)
        self.memory_fd = -1
        self._hung: dict[int, tuple[float, int, str]] = {}  # put down: seconds it was given, at work on, its stacks
        self._by_fd: dict[int, int] = {}
        self._patience = Patience(0.0)
        self._any = select.poll()
        self._one: list[select.poll] = []

    def watch(self) -> None:
        """Listen to all workers from now on."""
        # Where each core has a worker, one that looks takes the core from it.
        self._patience = Patience(_LOOK if len(self.workers) < usable_cores() else 0.0)
        self._one = [select.poll() for _ in self.workers]
        for w in range(len(self.workers)):
            self._watch(w)

    def _watch(self, w: int) -> None:
        fd = self.workers[w].channel.read_fd
        self._by_fd[fd] = w
        self._any.register(fd, select.POLLIN)
        for v, poll in enumerate(self._one):
            poll.register(fd, select.POLLIN if v == w else 0)  # with 0, a closed end is still reported

    def replace(self, w: int, worker: WorkerProcess) -> None:
        """Put a new worker, which is not at work yet, in the place of one that is gone."""
        self.workers[w] = worker
        self.closed.discard(w)
        self._hung.pop(w, None)
        self.progress[w] = 0
        self.starting.setdefault(w, Starting()).since = time.monotonic()
        self._watch(w)

    def heard(self) -> list[int]:
        """Workers of whom something is there already: what came in while we were sending, or before their end."""
        if not self.closed and not any(worker.channel.inbox for worker in self.workers):
            return []
        return [
            w
            for w, worker in enumerate(self.workers)
            if (self.outstanding[w] or w in self.starting) and (w in self.closed or worker.channel.inbox)
        ]

    def has_said(self, w: int) -> bool:
        """Whether something of this worker is there to read."""
        channel = self.workers[w].channel
        return bool(channel.inbox) or bool(select.select([channel.read_fd], [], [], 0)[0])

    def busy(self) -> Iterator[tuple[int, int, int]]:
        """Workers at work that owe an answer, to which request, and how far they are."""
        for w, queue in enumerate(self.outstanding):
            if queue and w not in self.starting:
                yield w, queue[0][0], int(self.progress[w])

    def ready(self, timeout: float | None, waiting_for: int | None = None) -> list[int]:
        """Wait until a worker has said something, or died.

        Args:
            timeout: Seconds; None for ever.
            waiting_for: Wait for this worker to speak, or for any to die. Where all must answer anyway, being woken
                by each of them costs more than it brings.

        Returns:
            Workers to hear; empty if time ran out.
        """
        poll = self._any if waiting_for is None else self._one[waiting_for]
        events = self._patience.wait(poll, None if timeout is None else max(0, int(timeout * 1000 + 0.999)))
        ready = [self._by_fd[fd] for fd, _ in events]
        for fd, event in events:
            if event & ~select.POLLIN:
                self._gone(fd)
        return ready

    def _gone(self, fd: int) -> None:
        """Stop listening to an end that was closed: it would be reported for ever."""
        self.closed.add(self._by_fd[fd])
        self._forget(fd)

    def _forget(self, fd: int) -> None:
        if self._by_fd.pop(fd, None) is not None:
            for poll in (self._any, *self._one):
                poll.unregister(fd)

    # --- ends

    def put_down(self, w: int, timeout: float) -> None:
        """Kill a worker that hangs, having asked it where. Its closed end is the news of that."""
        worker = self.workers[w]
        env = int(self.progress[w])  # being asked may wake it
        report = worker.stacks()
        if torn := worker.channel.torn:
            report = f"it had sent {torn}\n{report}"
        self._hung[w] = (timeout, env, report)
        worker.kill()

    def bury(self, w: int, how: str | None, call: str | None, *, building: bool = False) -> Obituary:
        """See a worker off that is gone, or must go: kill what is left of it, and say what is known."""
        worker = self.workers[w]
        if how is None:
            worker.wait(0.2)
        worker.kill()
        timeout, env, report = self._hung.get(w, (None, int(self.progress[w]), ""))
        queue = self.outstanding[w]
        ids = self.shares.slices[w]
        obituary = Obituary(
            worker=w,
            pid=worker.pid,
            exitcode=worker.exitcode,
            first=int(ids[0]),
            last=int(ids[-1]),
            # Noise is heard when whoever made it may be done.
            at_work_on=int(ids[env - 1]) if 0 < env <= len(ids) and w not in self.starting and how is None else None,
            call=call,
            request=queue[0][0] if queue else None,
            how=how,
            timeout=timeout,
            report=report or worker.crash_report(),
            building=building or w in self.starting,
        )
        self._forget(worker.channel.read_fd)
        worker.close()
        self.closed.discard(w)
        self.starting.pop(w, None)
        return obituary

    def bury_fellows(self, first: Obituary, call: str | None) -> list[Obituary]:
        """See off those who went with another one, and a moment later."""
        time.sleep(_MOMENT)
        gone = [w for w, worker in enumerate(self.workers) if w != first.worker and worker.poll()]
        return sorted([first, *(self.bury(w, None, call) for w in gone)], key=lambda obituary: obituary.worker)

    def close_memory(self) -> None:
        """Let go of the memory's descriptor; it stays mapped where it is."""
        if self.memory_fd >= 0:
            os.close(self.memory_fd)
        self.memory_fd = -1

    def shut_down(self, timeout: float | None) -> list[Failure]:
        """Ask the workers to close, wait, kill what is left.

        Args:
            timeout: Seconds; None to wait as long as it takes.

        Returns:
            What went wrong in the envs' own ``close()``.
        """
        if self.owner != os.getpid():  # a forked child got a copy of us; the workers are not its own
            return []
        failures: list[Failure] = []
        deadline = time.monotonic() + (_LONG if timeout is None else timeout)
        asked = []
        for worker in self.workers:
            if worker.channel.write_fd < 0:  # gone and buried
                continue
            try:
                worker.channel.send(ch.CLOSE, 0, timeout=max(0.0, deadline - time.monotonic()))
                asked.append(worker)
            except ChannelClosed:
                continue
        for worker in asked:
            failures.extend(self._hear_close(worker, deadline))
        for worker in self.workers:
            if not worker.wait(max(0.0, deadline - time.monotonic())):
                worker.kill()
            worker.close()
        self.workers = []
        self.progress = np.zeros(0, np.int64)  # lets go of the memory
        self.close_memory()
        return failures

    def _hear_close(self, worker: WorkerProcess, deadline: float) -> list[Failure]:
        """Wait for a worker's answer to CLOSE, past any that are still under way."""
        channel = worker.channel
        try:
            while True:
                told = channel.recv(deadline - time.monotonic())
                if told.number == 0 and told.code == ch.OK:
                    return [unpack_failure(packed) for packed in pickle.loads(told.payload)] if told.payload else []
        except Garbled:  # an env wrote into the pipe, or an interrupt has lost half a message
            channel.skip(deadline - time.monotonic())
        except Exception:  # it is gone, time is up, or what it says cannot be
            return []
        return []

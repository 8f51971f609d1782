"""The worker processes of one vectorizer: listening to them, and letting go of them."""

from __future__ import annotations

import os
import pickle
import select
import time
from collections.abc import Sequence, Sized

from marlvec.errors import Failure
from marlvec.vector import channel as ch
from marlvec.vector.channel import ChannelClosed, Patience
from marlvec.vector.faults import unpack_failure
from marlvec.vector.launch import WorkerProcess
from marlvec.vector.shares import usable_cores

__all__ = ["Crew"]

_LONG = 2e6  # seconds, as many as poll() can count in milliseconds


class Crew:
    """The workers of one vectorizer; apart from it, so that they can be let go of without it.

    Attributes:
        owner: The process that started them.
        workers: In order of their envs.
        closed: Those whose end was closed; what they said before can still be read.
    """

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.workers: list[WorkerProcess] = []
        self.closed: set[int] = set()
        self._by_fd: dict[int, int] = {}
        self._patience = Patience()
        self._any = select.poll()
        self._one: list[select.poll] = []

    def watch(self) -> None:
        """Listen to all workers from now on."""
        fds = [worker.channel.read_fd for worker in self.workers]
        self._by_fd = {fd: w for w, fd in enumerate(fds)}
        self._patience = Patience(eager=len(fds) < usable_cores())
        for fd in fds:
            self._any.register(fd, select.POLLIN)
        for mine in fds:
            poll = select.poll()
            for fd in fds:
                poll.register(fd, select.POLLIN if fd == mine else 0)  # with 0, a closed end is still reported
            self._one.append(poll)

    def heard(self, outstanding: Sequence[Sized]) -> list[int]:
        """Workers of whom something is there already: what came in while we were sending, or before their end."""
        if not self.closed and not any(worker.channel.inbox for worker in self.workers):
            return []
        return [
            w for w, worker in enumerate(self.workers) if outstanding[w] and (w in self.closed or worker.channel.inbox)
        ]

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
        for poll in (self._any, *self._one):
            poll.unregister(fd)

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
        return failures

    def _hear_close(self, worker: WorkerProcess, deadline: float) -> list[Failure]:
        """Wait for a worker's answer to CLOSE, past any that are still under way."""
        poll = select.poll()
        poll.register(worker.channel.read_fd, select.POLLIN)
        try:
            while worker.channel.inbox or poll.poll(max(0, int(1000 * (deadline - time.monotonic())))):
                told = worker.channel.recv()
                if told.number == 0 and told.code == ch.OK:
                    return [unpack_failure(packed) for packed in pickle.loads(told.payload)] if told.payload else []
        except (ChannelClosed, EOFError, pickle.UnpicklingError):
            return []
        return []

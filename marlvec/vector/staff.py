"""Taking on worker processes: they build their envs, agree on a spec, get their rows; one that is lost is replaced."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

from marlvec.envs.spec import EnvSpec, object_leaves
from marlvec.errors import Failure, MarlvecError, SerialisationError, UnsupportedSpaceError
from marlvec.vector import channel as ch
from marlvec.vector import memory, resources
from marlvec.vector.buffers import Buffers
from marlvec.vector.channel import ChannelClosed
from marlvec.vector.crew import Crew, noise
from marlvec.vector.fault_log import Survived, survived_failures
from marlvec.vector.faults import PackedFailure, picklable, raise_failures, unpack_failure
from marlvec.vector.launch import WorkerProcess
from marlvec.vector.parcels import load_each
from marlvec.vector.restarts import Budget
from marlvec.vector.shares import agree
from marlvec.vector.watchdog import PROGRESS_BYTES, progress_of
from marlvec.vector.worker import Plan

__all__ = ["Staff"]

_HIRING = 1  # number of requests here; 0 is CLOSE's: its answer must not be taken for that to another


class Staff:
    """Hires workers into a crew.

    A new worker is told its plan and builds its envs, which may take long; it answers with their spec, is given its
    rows, and says that it has them. Replacing one never waits: `start` and `go_on` take one step each.

    Args:
        crew: Where they go.
        context: Their start method.
        factories: One per env.
        settings: Arguments of their `Shard`.
        shared: Whether rows are in shared memory.
        loop: The loop they run, pickled; None for their own.

    Raises:
        SerialisationError: A factory cannot be pickled.
    """

    def __init__(
        self,
        crew: Crew,
        context: str,
        factories: Sequence[Callable[[], Any]],
        *,
        settings: dict[str, Any],
        shared: bool,
        loop: bytes | None,
    ) -> None:
        self._crew, self._context, self._shared = crew, context, shared
        self._mode = settings["spaces"]
        plans: list[Plan] = [
            {
                "factories": picklable(list(factories[lo:hi]), f"the factory of envs {lo} to {hi - 1}"),
                "worker": loop,
                "first": lo,
                "place": w,
                "shared": shared,
                "shard": settings,
            }
            for w, (lo, hi) in enumerate(pairwise(crew.shares.starts))
        ]
        self._plans = [pickle.dumps(plan) for plan in plans]
        self._memory_fd = -1
        self._attach = b""
        self._lately: list[Survived] = []

    def begin(self, budget: Budget | None, *, require: bool, place: str) -> tuple[EnvSpec, Buffers, list[Survived]]:
        """Hire all, and wait until they are at work.

        Args:
            budget: How often one that dies while it builds its envs is replaced; None: never.
            require: Whether every leaf must be in shared memory.
            place: How to name where envs run, for messages.

        Returns:
            What one env looks like, everyone's rows, and what went wrong in building envs before it went well.
        """
        crew = self._crew
        num_envs = len(crew.shares.owner)
        resources.check_descriptors(len(self._plans))
        self._memory_fd = crew.memory_fd = memory.create()
        for _ in self._plans:
            crew.workers.append(WorkerProcess(self._context, self._memory_fd))
        crew.watch()
        for w, plan in enumerate(self._plans):
            with suppress(ChannelClosed):  # why, it may have said
                crew.workers[w].channel.send(ch.INIT, _HIRING, plan)
        specs, survived = self._hear_specs(budget, place)
        self._spec = spec = agree(specs, crew.shares.starts, self._mode)
        if require and (leaves := object_leaves(spec)):
            raise UnsupportedSpaceError(
                f"shared_memory='require', but {', '.join(leaves)} cannot be there: not of fixed size. "
                f"shared_memory=True sends such leaves, and only those, through a pipe"
            )
        head = PROGRESS_BYTES * len(self._plans)
        size = head + (Buffers.nbytes(spec, num_envs) if self._shared else 0)
        memory.grow(self._memory_fd, size)
        mapped = memory.map_memory(self._memory_fd, size)
        crew.progress = progress_of(mapped, len(self._plans))
        buffers = Buffers(spec, num_envs, memoryview(mapped)[head:] if self._shared else None)
        buffers.clear_masks()
        # The common spec, not the worker's own: where spaces are compatible only, theirs may differ.
        self._attach = picklable((num_envs, len(self._plans), size, spec), "the envs' spaces")
        for w in range(len(self._plans)):
            self._send(w, ch.ATTACH, self._attach)
        for w in range(len(self._plans)):
            self._receive(w)
        return spec, buffers, survived

    def dismiss(self) -> None:
        """Nobody will be replaced: let go of what that would take."""
        self._plans.clear()
        self._crew.close_memory()

    def start(self, w: int) -> str | None:
        """Hire a worker in the place of one that is gone. Says what went wrong, if it did."""
        try:
            worker = WorkerProcess(self._context, self._memory_fd)
        except (OSError, MarlvecError) as error:
            return f"could not be replaced: {error}"
        self._crew.replace(w, worker)
        try:
            worker.channel.send(ch.INIT, _HIRING, self._plans[w])
        except ChannelClosed:
            self._crew.closed.add(w)  # why, it may have said
        return None

    def go_on(self, w: int) -> str | None:
        """Hear what a new worker has to say, and take the next step. Says what went wrong, if it did.

        Raises:
            ChannelClosed: It is gone.
        """
        crew = self._crew
        new, channel = crew.starting[w], crew.workers[w].channel
        told = channel.take(_HIRING)
        if told is None:
            if w in crew.closed:  # it hears nothing any more, and has nothing left to say
                raise ChannelClosed("it does not read")
            return None
        if told.code == ch.FAILED:
            failure = unpack_failure(pickle.loads(told.payload)[0])
            return f"could not build its envs again: env {failure.env_id}: {failure.summary}; it ended"
        if not new.has_spec:
            try:
                spec, packed = self._open_spec(w, told.payload)
            except SerialisationError as error:
                return f"built envs again, but {error}; it ended"
            self._lately += survived_failures(map(unpack_failure, packed))
            if differs := self._spec.difference(spec, self._mode):
                return f"built envs with other spaces than before: {differs}; it ended"
            new.has_spec = True
            channel.send(ch.ATTACH, _HIRING, self._attach)
            return None
        del crew.starting[w]
        for code, number, payload in new.requests:
            channel.send(code, number, payload)
        return None

    def survived_lately(self) -> list[Survived]:
        """What went wrong, and then right, in building envs anew; each is told once."""
        lately, self._lately = self._lately, []
        return lately

    def _hear_specs(self, budget: Budget | None, place: str) -> tuple[list[EnvSpec], list[Survived]]:
        """What each worker's envs look like; raises what went wrong in building them."""
        crew = self._crew
        specs: dict[int, EnvSpec] = {}
        failures: list[Failure] = []
        survived: list[Survived] = []
        waiting = set(range(len(self._plans)))
        while waiting:
            for w in crew.ready(None):
                if w not in waiting:  # it has told why its envs could not be built, and is gone now
                    continue
                try:
                    told = crew.workers[w].channel.take(_HIRING)
                except ChannelClosed as error:
                    survived.append(self._again(w, error, budget))
                    continue
                if told is None:
                    continue
                waiting.discard(w)
                if told.code == ch.OK:
                    specs[w], packed = self._open_spec(w, told.payload)
                    survived += survived_failures(map(unpack_failure, packed))
                else:
                    failures.extend(map(unpack_failure, pickle.loads(told.payload)))
        raise_failures(failures, place)
        return [specs[w] for w in range(len(self._plans))], survived

    def _again(self, w: int, news: ChannelClosed, budget: Budget | None) -> Survived:
        """Replace a worker that died while it built its envs for the first time."""
        obituary = self._crew.bury(w, noise(news), None, building=True)
        error = obituary.error(only_close_is_left=False)
        pause = None if budget is None else budget.spend(("worker", w), obituary.reason)
        if budget is None or pause is None:
            if budget is not None:
                error.args = (f"{error} {budget.history(('worker', w))}",)
            raise error
        time.sleep(pause)
        problem = self.start(w)
        self._crew.starting.pop(w, None)
        if problem is not None:
            raise error from None
        return obituary.env_ids, str(obituary)

    def _open_spec(self, w: int, payload: bytes) -> tuple[EnvSpec, list[PackedFailure]]:
        """What a new worker says of its envs; their spaces may be of any class.

        Raises:
            SerialisationError: It cannot be rebuilt in this process.
        """
        ids = self._crew.shares.slices[w]
        spec: EnvSpec
        failures: list[PackedFailure]
        ((spec, failures),) = load_each(payload, [f"the spaces of envs {ids[0]} to {ids[-1]}"])
        return spec, failures

    def _send(self, w: int, code: int, payload: bytes) -> None:
        try:
            self._crew.workers[w].channel.send(code, _HIRING, payload)
        except ChannelClosed as error:
            raise self._crew.bury(w, noise(error), None, building=True).error(only_close_is_left=False) from None

    def _receive(self, w: int) -> None:
        try:
            self._crew.workers[w].channel.recv()
        except ChannelClosed as error:
            raise self._crew.bury(w, noise(error), None, building=True).error(only_close_is_left=False) from None

"""What there is to tell of a worker process that is gone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from marlvec.errors import EnvFault, EnvTimeout, Failure, WorkerDied
from marlvec.vector.faults import describe_exit

__all__ = ["Loss", "Obituary", "of_many"]


@dataclass(frozen=True)
class Obituary:
    """The end of one worker.

    Attributes:
        worker: Its index.
        pid: Its process id.
        exitcode: How it ended; None if that is not known.
        first: Its first env.
        last: Its last one.
        at_work_on: The env that it was at work on, or None.
        call: The call that was pending, or None.
        request: Number of the request that it owed an answer to, or None.
        how: What it did wrong, if it did not end by itself.
        timeout: Seconds that an env may take, if it was put down because one took longer.
        report: What faulthandler wrote: where it crashed, or where it hung.
        building: Whether that was while it built its envs.
    """

    worker: int
    pid: int
    exitcode: int | None
    first: int
    last: int
    at_work_on: int | None
    call: str | None
    request: int | None
    how: str | None
    timeout: float | None
    report: str
    building: bool = False

    @property
    def culprits(self) -> tuple[int, ...]:
        """The env that is to blame, if that is known."""
        return () if self.at_work_on is None else (self.at_work_on,)

    @property
    def env_ids(self) -> tuple[int, ...]:
        """Its envs."""
        return tuple(range(self.first, self.last + 1))

    def __str__(self) -> str:
        envs = f"env {self.first}" if self.first == self.last else f"envs {self.first} to {self.last}"
        who = f"worker {self.worker} (pid {self.pid}, {envs})"
        number = f" (request {self.request})" if self.request is not None else ""
        when = f"during {self.call}(){number}" if self.call else "between calls"
        when = "while it built its envs" if self.building else when
        where = "" if self.at_work_on is None else f", at work on env {self.at_work_on}"
        if self.timeout is not None:
            culprit = "an env" if self.at_work_on is None else f"env {self.at_work_on}"
            return f"{culprit} did not come back within step_timeout={self.timeout:g} s {when}; {who} was killed"
        return f"{who} {self.how or describe_exit(self.exitcode)} {when}{where}"

    @property
    def reason(self) -> str:
        """The same without what is different each time."""
        if self.timeout is not None:
            return "hung" if self.at_work_on is None else f"env {self.at_work_on} hung"
        where = "" if self.at_work_on is None else f" at work on env {self.at_work_on}"
        return (self.how or describe_exit(self.exitcode)) + where

    def error(self, *, only_close_is_left: bool) -> EnvFault:
        """The error that tells of it."""
        return of_many([self], only_close_is_left=only_close_is_left)


def of_many(gone: Sequence[Obituary], *, only_close_is_left: bool) -> EnvFault:
    """One error for all workers that ended together."""
    advice = " Their episodes are lost" + ("; only close() is left." if only_close_is_left else ".")
    text = "\n".join(map(str, gone)) + "." + advice
    for one in gone:
        if one.report:
            what = "where it was" if one.timeout is not None else "its last words"
            text += f"\n\n--- {what} (worker {one.worker}) ---\n{one.report.rstrip()}"
    lost = tuple(i for one in gone for i in one.env_ids)
    first = gone[0]
    if first.timeout is not None:
        failures = tuple(
            Failure(i, first.call or "", str(first), first.report, TimeoutError(str(first))) for i in first.culprits
        )
        return EnvTimeout(text, failures, pid=first.pid, lost_env_ids=lost)
    return WorkerDied(text, pid=first.pid, exitcode=first.exitcode, lost_env_ids=lost)


class Loss(Exception):
    """A worker is gone, and its envs with it. Never reaches users.

    Attributes:
        worker: Its index.
        error: What users are told of it.
        in_flight: Its envs that had not replied.
        idle: Its other envs.
        culprits: Those of its envs that are to blame, as far as that is known.
        reason: Why, in few words.
    """

    def __init__(
        self,
        worker: int,
        error: EnvFault,
        in_flight: NDArray[np.int64],
        idle: NDArray[np.int64],
        obituary: Obituary,
    ) -> None:
        super().__init__(str(error))
        self.culprits, self.reason = obituary.culprits, obituary.reason
        self.worker, self.error = worker, error
        self.in_flight, self.idle = in_flight, idle

    @property
    def env_ids(self) -> NDArray[np.int64]:
        """All envs of the worker."""
        return np.sort(np.concatenate([self.in_flight, self.idle]))

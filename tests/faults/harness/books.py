"""Holding the vectorizer's books of faults against what was done to it."""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

from marlvec import AsyncVectorEnv, Fault
from marlvec.errors import EnvTimeout, WorkerDied
from tests.faults.harness.model import Gone, Model

__all__ = ["Books"]

_WORKER = re.compile(r"worker (\d+) \(pid (\d+), envs? (\d+)(?: to (\d+))?\)")


class Books:
    """Who was killed, who is known to be dead, and what was written down of it.

    Every worker's death must be told once and for a reason, and every env's fault must have been planned.

    Args:
        envs: Whose workers.
        model: What is known of its envs.
        limit: How often a worker may be restarted.
    """

    def __init__(self, envs: AsyncVectorEnv, model: Model, limit: int) -> None:
        self.envs, self.model, self.limit = envs, model, limit
        bounds = [len(part) for part in envs._partition.slices]
        self.shares = [tuple(range(sum(bounds[:w]), sum(bounds[: w + 1]))) for w in range(len(bounds))]
        self.killed: set[int] = set()
        self.stopped: set[int] = set()
        self.unnoticed: dict[int, int] = {}  # pid of a worker that was killed → which one
        self._proven = set(envs.worker_pids)  # that have built their envs
        self.restarts = [0] * len(bounds)  # of each worker
        self.own_restarts = [0] * envs.num_envs  # of each env, for its own faults
        self._told: set[int] = set()
        self._read = 0
        self._loud = 0
        self._log = logging.getLogger("marlvec")
        self._records: list[logging.LogRecord] = []
        self._handler = _Keep(self._records)
        self._log.addHandler(self._handler)
        self._propagated, self._log.propagate = self._log.propagate, False

    def close(self) -> None:
        """Give the log back."""
        self._log.removeHandler(self._handler)
        self._log.propagate = self._propagated

    # --- doing harm

    def owner(self, i: int) -> int:
        """Whose env it is."""
        return next(w for w, share in enumerate(self.shares) if i in share)

    def is_up(self, w: int) -> bool:
        """Whether this worker's process is there."""
        return _state(self.envs.worker_pids[w]) != ""

    def kill(self, w: int, *, answered: bool = False) -> None:
        """Kill a worker, and wait until it is dead.

        Args:
            w: Which.
            answered: Whether it surely has answered all that it was asked.
        """
        pid = self.envs.worker_pids[w]
        os.kill(pid, signal.SIGKILL)
        while _state(pid):
            time.sleep(0.0002)
        self.killed.add(pid)
        self.stopped.discard(pid)
        self.unnoticed[pid] = w
        for i in self.shares[w]:
            self.model.death_after_answer(i) if answered else self.model.death(i)
        self._tell_model()

    def has_answered(self, w: int) -> bool:
        """Wait until this worker has nothing to do; False if it cannot be told, or something is about to happen."""
        pid, envs, calm = self.envs.worker_pids[w], [self.model.envs[i] for i in self.shares[w]], 0
        if pid not in self._proven or pid in self.stopped:
            return False
        if any(env.plan or env.gone is not Gone.NO or (env.asked and env.asked.causes) for env in envs):
            return False
        deadline = time.monotonic() + 0.5
        while calm < 3 and time.monotonic() < deadline:
            calm = calm + 1 if _state(pid) == "S" else 0  # none of these envs ever sleeps
            time.sleep(0.0005)
        return calm == 3

    def answered(self, workers: set[int]) -> None:
        """These workers have answered: they have built their envs."""
        self._proven |= {self.envs.worker_pids[w] for w in workers}

    def stop(self, w: int) -> None:
        """Stop a worker."""
        pid = self.envs.worker_pids[w]
        with suppress(ProcessLookupError):  # one that was about to exit may be gone
            os.kill(pid, signal.SIGSTOP)
            self.stopped.add(pid)

    def wake_all(self) -> None:
        """Let stopped workers go on."""
        for pid in self.stopped:
            if pid in self.envs.worker_pids and pid not in self._told:
                with suppress(ProcessLookupError):  # it was on its way out when it was stopped
                    os.kill(pid, signal.SIGCONT)
        self.stopped.clear()

    # --- reading

    def audit(self) -> None:
        """Read what was written down since the last time."""
        faults = self.envs.faults
        for fault in faults[self._read :]:
            self._loud += not fault.quiet
            worker = _WORKER.search(fault.summary)
            if worker is None:
                self._of_env(fault)
            else:
                self._of_worker(fault, int(worker[1]), int(worker[2]))
            if fault.action == "restart":
                for i in fault.lost_env_ids:
                    self.model.incarnations[i] += 1
            else:
                self.model.masked |= set(fault.lost_env_ids)
        self._read = len(faults)
        assert self.envs.incarnations.tolist() == self.model.incarnations.tolist()
        assert self.envs.masked_env_ids == tuple(sorted(self.model.masked))
        assert len(self._records) == self._loud, "every one is told once"

    def _of_worker(self, fault: Fault, w: int, pid: int) -> None:
        assert (fault.action, fault.quiet) == (self.model.on_fault, False)
        assert set(self.shares[w]) >= set(fault.lost_env_ids) >= set(self.shares[w]) - self.model.masked
        self.restarts[w] += 1
        assert self.restarts[w] <= self.limit or fault.action == "mask"
        self._bury(w, pid, fault.env_ids)

    def _of_env(self, fault: Fault) -> None:
        (i,) = fault.lost_env_ids
        env, how = self.model.envs[i], "quiet" if fault.quiet else "raise"
        assert fault.env_ids == (i,)
        assert fault.action == ("restart" if fault.quiet else self.model.on_fault)
        assert env.asked is not None, f"nothing was asked of env {i}"
        assert how in env.plan.values(), f"{fault} was not planned"
        assert fault.summary == ("RestartQuietly" if fault.quiet else "ValueError: it was told to")
        self.own_restarts[i] += not fault.quiet

    def last_words(self, error: WorkerDied | EnvTimeout) -> None:
        """An error of a worker that was not replaced: one for each that is told of."""
        told = [(int(w), int(pid)) for w, pid, _, _ in _WORKER.findall(str(error).partition("---")[0])]
        assert error.pid in {pid for _, pid in told}
        assert set(error.lost_env_ids) == {i for w, _ in set(told) for i in self.shares[w]}
        for w, pid in set(told):
            self._bury(w, pid, ())
        if self.model.on_fault == "restart":
            assert self.restarts[told[0][0]] == self.limit
            assert "Gave up" in str(error)

    def _bury(self, w: int, pid: int, blamed: tuple[int, ...]) -> None:
        assert pid not in self._told, f"worker {w} died once, and it is told twice"
        self._told.add(pid)
        planned = {i for i in self.shares[w] if {"exit", "hang"} & set(self.model.envs[i].plan.values())}
        if pid in self.unnoticed:
            del self.unnoticed[pid]
        else:
            for i in self.shares[w]:
                self.model.death(i)
            assert planned or (pid in self.stopped and self.envs.step_timeout), f"worker {w} had no reason to die"
        assert set(blamed) <= set(self.shares[w])
        if pid not in self.killed and pid not in self.stopped and blamed:
            assert set(blamed) <= planned, "a neighbour is blamed"
        self.stopped.discard(pid)
        self._tell_model()

    def _tell_model(self) -> None:
        self.model.unnoticed = {i for w in self.unnoticed.values() for i in self.shares[w]}


class _Keep(logging.Handler):
    """Keeps records in a list."""

    def __init__(self, records: list[logging.LogRecord]) -> None:
        super().__init__(logging.WARNING)
        self._records = records

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append(record)


def _state(pid: int) -> str:
    """A letter for what a worker process is doing; none if it is dead, or another process has its number."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return state if state not in "ZX" and b"marlvec.vector.workers.fork_server" in command else ""

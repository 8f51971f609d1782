"""A run of many steps under fire: who steps what, what goes wrong meanwhile, and what is left at the end."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from marlvec import AsyncVectorEnv, RestartLimit
from marlvec.vector.workers.pool import ensure_server
from tests.faults.harness.audit import Audit, LedgerEnv, Order, Rows, encode
from tests.faults.harness.havoc import Havoc, Plan

Ints = NDArray[np.int64]

__all__ = ["Campaign", "Figures", "slope"]

NUM_ENVS = 8
EVERYONE = np.arange(NUM_ENVS)
STEP_TIMEOUT = 1.0
_JOIN = 4000  # env steps between two joins
_RESET = 0.002  # share of the steps before which some envs are reset though nothing is wrong
_EXCEPTIONS = (Order.RAISE_EARLY, Order.RAISE_LATE, Order.RAISE_IN_RESET)
_HANGS = (Order.HANG, Order.HANG_IN_C)


@dataclass
class Figures:
    """What a campaign came to.

    Attributes:
        rss: Resident memory of this process in bytes, and the env steps after which it was measured.
    """

    env_steps: int = 0
    attempted: int = 0
    delivered: int = 0
    lost: int = 0
    lost_but_done: int = 0
    episodes_lost: int = 0
    kills: int = 0
    stops: int = 0
    exceptions: int = 0
    hangs: int = 0
    exits: int = 0
    restarts: int = 0
    seconds: float = 0.0
    rss: list[tuple[int, int]] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class Campaign:
    """What to do, and how.

    Args:
        autoreset_mode, context, shared_memory, copy: As in `marlvec.make`.
        style: ``"step"``, or ``"send"``: send() and recv(), envs as they become ready.
        num_workers: Workers of the eight envs.
        copies: How large observations are; see `LedgerEnv`.
        env_steps: How many, at least.
        kills, stops, gap: See `Havoc`.
        orders: What envs are told to do, and how often.
        seed: Makes the plan the same each time.
    """

    autoreset_mode: str
    style: str
    num_workers: int = 2
    context: str = "forkserver"
    shared_memory: bool = True
    copy: bool = True
    copies: int = 8
    env_steps: int = 1000
    kills: int = 0
    stops: int = 0
    gap: float = 0.1
    orders: Mapping[Order, int] = field(default_factory=dict)
    seed: int = 0

    def run(self, folder: Path) -> Figures:
        """Do it. Books and board are in the folder, which must be empty.

        Raises:
            AssertionError: Something does not add up, or is left over.
        """
        factories = [partial(LedgerEnv, folder, env_index=i, copies=self.copies) for i in range(NUM_ENVS)]
        havoc = Havoc(
            folder, workers=self.num_workers, kills=self.kills, stops=self.stops, gap=self.gap, seed=self.seed
        )
        with (
            counted_warnings() as warnings,
            AsyncVectorEnv(
                factories,
                num_workers=self.num_workers,
                context=self.context,
                shared_memory=self.shared_memory,
                copy=self.copy,
                autoreset_mode=self.autoreset_mode,
                on_fault="restart",
                step_timeout=STEP_TIMEOUT,
                max_restarts=RestartLimit(count=10**9, seconds=1.0, backoff=0.0),
            ) as envs,
        ):
            run = _Run(self, envs, folder)
            run.warm_up()
            before = Open.now(envs)
            with havoc:
                run.to_the_end(havoc)
            figures = run.settle(havoc, warnings)
            assert Open.now(envs) == before
        return figures


class _Run:
    """One campaign as it goes on."""

    def __init__(self, plan: Campaign, envs: AsyncVectorEnv, folder: Path) -> None:
        self._plan, self._envs = plan, envs
        self._audit = Audit(folder, NUM_ENVS, plan.autoreset_mode)
        self._orders = Plan(plan.orders, int(0.9 * plan.env_steps), plan.seed)
        self._draw = random.Random(plan.seed)
        self._number = 0  # of the last request
        self._joined = 0  # env steps at the last join
        self._idle = np.zeros(NUM_ENVS, np.bool_)  # envs that nothing was sent to, in send's style
        self._shares = np.array_split(EVERYONE, plan.num_workers)
        self._faults = 0  # that were told
        self._timeouts = 0  # of these
        self._timed_out = np.zeros(NUM_ENVS, np.int64)
        self._noted = time.monotonic()  # when faults were last looked at
        self._rss: list[tuple[int, int]] = []
        self._begun = time.perf_counter()

    def warm_up(self) -> None:
        """Begin, and lose each worker once: what marlvec opens only then is open."""
        self._ask_reset(EVERYONE)
        self._audit.came(Rows.of_reset(self._envs.reset(seed=self._plan.seed), EVERYONE))
        for pid in self._envs.worker_pids:
            os.kill(pid, signal.SIGKILL)
        self._step_all()
        self._step_all()

    def to_the_end(self, havoc: Havoc) -> None:
        """Step until all is done that was planned."""
        plan, audit, measured = self._plan, self._audit, 0
        self._idle[:] = True
        while audit.env_steps < plan.env_steps or self._orders or not havoc.is_over:
            havoc.aim(self._envs.worker_pids)
            if plan.style == "step":
                self._step_all()
            else:
                self._send_some()
            if audit.env_steps - self._joined >= _JOIN:
                self._joined = audit.env_steps
                audit.join()
                self._note_faults()
            if audit.env_steps - measured >= plan.env_steps // 100:
                measured = audit.env_steps
                self._rss.append((measured, resident()))
        if plan.style == "send" and not self._idle.all():
            self._audit.came(Rows.of_result(self._envs.drain()))

    def _note_faults(self) -> None:
        """Look at what the vectorizer says of itself; it remembers 1,000 faults."""
        for fault in self._envs.faults:
            if fault.time > self._noted:
                lost = list(fault.lost_env_ids)
                assert any(np.isin(lost, share).all() for share in self._shares), f"{fault}, shares: {self._shares}"
                self._faults += 1
                if "step_timeout" in fault.summary:
                    self._timeouts += 1
                    self._timed_out[lost] += 1
                self._noted = fault.time

    def settle(self, havoc: Havoc, warnings: Sequence[int]) -> Figures:
        """Close the books: all that was asked is answered, and all that was lost has a cause."""
        audit, plan = self._audit, self._plan
        self._step_all()  # who died last is told, and replaced
        self._step_all()
        audit.settle()
        self._note_faults()
        assert warnings[0] == self._faults, "every fault is logged once"
        ledger = audit.ledger
        exceptions, hangs, exits = (ledger.deeds(*orders) for orders in (_EXCEPTIONS, _HANGS, (Order.EXIT,)))
        # On a busy machine one that was stopped may be taken for one that hangs.
        assert self._timeouts <= hangs.sum() + havoc.stops
        causes = exceptions + self._timed_out
        for w, share in enumerate(self._shares):
            causes[share] += 1 + havoc.killed[w] + exits[share].sum()  # one to warm up; each takes all along
        assert (audit.fault_rows <= causes).all(), f"{audit.fault_rows} episodes lost, for {causes} reasons"
        births = ledger.births()
        assert (audit.incarnations < births).all()
        assert (births <= self._envs.incarnations + 1).all(), f"{births} births, {self._envs.incarnations} told"
        return Figures(
            env_steps=audit.env_steps,
            attempted=audit.attempted,
            delivered=audit.delivered,
            lost=audit.lost,
            lost_but_done=audit.lost_but_done,
            episodes_lost=int(audit.fault_rows.sum()),
            kills=havoc.kills + plan.num_workers,
            stops=havoc.stops,
            exceptions=int(exceptions.sum()),
            hangs=int(hangs.sum()),
            exits=int(exits.sum()),
            restarts=self._faults,
            seconds=time.perf_counter() - self._begun,
            rss=self._rss,
        )

    # --- one round

    def _step_all(self) -> None:
        """step(), after a reset of those that need one."""
        over = ~self._audit.running
        if self._plan.autoreset_mode == "disabled" and over.any():
            self._reset(np.flatnonzero(over))
        elif self._draw.random() < _RESET:
            self._reset(self._some(EVERYONE))
        actions = self._ask_step(EVERYONE)
        self._audit.came(Rows.of_step(self._envs.step(actions)))

    def _send_some(self) -> None:
        """Something to do for some of the idle ones, or all; then recv() of some."""
        envs, audit = self._envs, self._audit
        ids = np.flatnonzero(self._idle)
        if len(ids) and self._draw.random() < 0.3:
            ids = self._some(ids)
        over = ~audit.running[ids]
        if self._plan.autoreset_mode != "disabled":
            over &= self._draw.random() < _RESET
            over |= self._draw.random() < _RESET
        for some, reset in ((ids[over], True), (ids[~over], False)):
            if not len(some):
                continue
            self._idle[some] = False
            if reset:
                self._ask_reset(some)
                envs.async_reset(env_ids=some)
            else:
                envs.send(self._ask_step(some), some)
        result = envs.recv(min_envs=self._draw.randint(1, int(NUM_ENVS - self._idle.sum())))
        self._idle[result.env_ids] = True
        audit.came(Rows.of_result(result))

    def _reset(self, ids: Ints) -> None:
        self._ask_reset(ids)
        self._audit.came(Rows.of_reset(self._envs.reset(env_ids=ids), ids))

    def _ask_reset(self, ids: Ints) -> None:
        self._audit.asked_reset(ids)

    def _ask_step(self, ids: Ints) -> Ints:
        """Number the requests, and give the orders that are due."""
        numbers = self._number + 1 + np.arange(len(ids))
        self._number += len(ids)
        orders = np.zeros(len(ids), np.int64)
        if self._orders:
            for k in np.flatnonzero(self._audit.running[ids]):
                orders[k] = self._orders.order(int(numbers[k]))
        self._audit.asked_step(ids, numbers)
        return encode(numbers, orders)

    def _some(self, ids: Ints) -> Ints:
        return np.array(sorted(self._draw.sample(ids.tolist(), self._draw.randint(1, len(ids)))))


@dataclass(frozen=True)
class Open:
    """What is open and running while a vectorizer is. (What it leaves when it is closed, every test is watched for.)

    Attributes:
        fds, server_fds: How many file descriptors this process and the fork server have open.
        threads: Python threads.
        processes: Children and theirs, and so on.
    """

    fds: int
    server_fds: int
    threads: int
    processes: int

    @classmethod
    def now(cls, envs: AsyncVectorEnv, grace: float = 60.0) -> Open:
        """Count. Zombies have ``grace`` seconds to go away: whoever is to wait for them may be busy.

        Raises:
            AssertionError: There are zombies.
        """
        server = ensure_server()._process.pid
        deadline = time.monotonic() + grace
        while zombies := [pid for pid, state in descendants(os.getpid()) if state == "Z"]:
            assert time.monotonic() < deadline, f"zombies: {zombies}"
            time.sleep(0.01)
        return cls(
            fds=count_fds("self"),
            server_fds=count_fds(server),
            threads=len(threading.enumerate()),
            processes=len(list(descendants(os.getpid()))),
        )


def count_fds(pid: int | str) -> int:
    """How many file descriptors a process has open."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def descendants(pid: int) -> Iterator[tuple[int, str]]:
    """Children, their children, and so on, each with its state."""
    with suppress(OSError):  # gone meanwhile
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                yield child, Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
                yield from descendants(child)


def resident() -> int:
    """Resident memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def slope(points: Sequence[tuple[int, int]]) -> float:
    """Theil and Sen's: the median of the slopes between any two points."""
    xs, ys = np.array(points, np.float64).T
    one, other = np.triu_indices(len(points), k=1)
    return float(np.median((ys[other] - ys[one]) / (xs[other] - xs[one])))


@contextmanager
def counted_warnings() -> Iterator[list[int]]:
    """Counts what marlvec has logged, in place of showing it."""
    count = [0]

    def note(record: logging.LogRecord) -> bool:
        count[0] += 1
        return False

    logger = logging.getLogger("marlvec")
    logger.addFilter(note)
    try:
        yield count
    finally:
        logger.removeFilter(note)

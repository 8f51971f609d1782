"""Any calls in any order while workers are killed, stopped and hang, and envs raise: a machine for Hypothesis."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from numpy.typing import NDArray

from marlvec import AsyncVectorEnv, Fault, RestartLimit, env_seeds
from marlvec.errors import (
    BrokenError,
    BusyError,
    ClosedError,
    EnvFault,
    EnvRaised,
    EnvTimeout,
    FetchTimeout,
    NothingPendingError,
    NotResetError,
    StateError,
    WorkerDied,
)
from tests.faults.harness.model import FragileEnv, Gone, Model, Row, of_reset, of_step, of_tuple, order, where
from tests.vector.support.reference import MODES, NONSENSE

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


AGENT_NUM = 2
STEP_TIMEOUT = 1.0
FEW = 1  # restarts, where they are limited
STREAM = "send"
CONTROL = "exec_func"


@dataclass(frozen=True)
class Setup:
    """How a vectorizer is made.

    Attributes:
        on_fault, copy: As in `marlvec.make`.
        mode: Autoreset mode.
        n: How many envs.
        num_workers: How many workers, if there are so many envs.
        shared: Whether rows are in shared memory.
        limited: Whether only a few restarts are allowed.
        times_out: Whether envs may take a second at most.
        seed: Of the first reset.
    """

    on_fault: str
    mode: str
    n: int
    num_workers: int
    shared: bool
    copy: bool
    limited: bool
    times_out: bool
    seed: int | None

    def make(self, folder: Path) -> AsyncVectorEnv:
        """The vectorizer; its envs leave their marks in ``folder``."""
        factories = [partial(FragileEnv, env_index=i, agent_num=AGENT_NUM, marks=folder) for i in range(self.n)]
        return AsyncVectorEnv(
            factories,
            num_workers=min(self.n, self.num_workers),
            context="forkserver",
            shared_memory=self.shared,
            copy=self.copy,
            autoreset_mode=self.mode,
            on_fault=self.on_fault,
            max_restarts=RestartLimit(FEW, 3600.0, 0.002) if self.limited else RestartLimit(1000, backoff=0.0),
            step_timeout=STEP_TIMEOUT if self.times_out else None,
        )


class Caller:
    """One vectorizer, from its first reset on.

    Args:
        setup: How it is made.
        note: Writes down what is done.

    Attributes:
        n: How many envs.
        pending: What is under way: ``"step"``, ``"reset"``, `STREAM`, `CONTROL`, or None.
        end: Which error all calls but ``close`` raise from now on, or None.
        hangs: How often something was left to time out.
    """

    def __init__(self, setup: Setup, note: Callable[..., None]) -> None:
        self.setup, self.n, self.note = setup, setup.n, note
        self.everyone = list(range(setup.n))
        self.folder = Path(tempfile.mkdtemp(prefix="marlvec-machine-"))
        self.envs = setup.make(self.folder)
        self.model = Model(setup.n, AGENT_NUM, setup.mode, setup.on_fault)
        self.books = Books(self.envs, self.model, FEW if setup.limited else 1000)
        self.pending: str | None = None
        self.end: type[StateError] | None = None
        self.hangs = 0
        self._serial = 0
        self._asked: list[int] = []  # by the control call that is under way
        self._doomed: set[int] = set()  # those that cannot answer it
        with pytest.raises(NotResetError):
            self.envs.step(self.actions(self.everyone))
        self.reset("reset", self.everyone, setup.seed)

    def close(self, timeout: float) -> None:
        """Close it, whatever is under way, and whoever is stopped or dead."""
        begin = time.monotonic()
        self.envs.close(timeout)
        assert time.monotonic() - begin < timeout + 20.0  # a tenth of a second more, as a rule
        self.end = ClosedError

    def clear_away(self) -> None:
        """The end of it."""
        self.books.wake_all()
        self.close(1.0)
        self.books.close()
        shutil.rmtree(self.folder)

    # --- what may be called

    @property
    def is_idle(self) -> bool:
        return self.end is None and self.pending is None

    def free(self, ids: Sequence[int]) -> list[int]:
        """Those of these envs that nothing was asked of."""
        return [i for i in ids if not self.model.envs[i].asked]

    def settle(self) -> None:
        """Wait for what is under way."""
        if self.end is None and self.pending == CONTROL:
            self.fetch_answers(None)
        elif self.end is None and self.pending:
            self.drain(None)

    # --- resets and steps

    def reset(self, call: str, ids: Sequence[int], seed: int | None = None, salt: int | None = None) -> None:
        """Reset these envs by ``reset``, ``reset_send`` or ``async_reset``."""
        own = [None] * len(ids) if seed is None else [env_seeds(seed, self.n)[i] for i in ids]
        options = None if salt is None else {"salt": salt}
        for i, each in zip(ids, own, strict=True):
            self.model.ask_reset(i, each, options)
        self.pending = STREAM if call == "async_reset" else "reset"
        everyone = list(ids) == self.everyone
        self._take(call, of_reset, seed=seed, options=options, env_ids=None if everyone else list(ids))

    def step(self, call: str) -> None:
        """Step all envs by ``step`` or ``step_send``; those that must be reset before are."""
        if homeless := [env.i for env in self.model.envs if env.phase == "none"]:
            self.note("step, although not all have an episode:", homeless)
            with pytest.raises(NotResetError, match=rf"envs \[{', '.join(map(str, homeless))}\]"):
                self.envs.step(self.actions(self.everyone))
            self.reset("reset", homeless)
        if self.is_idle and not any(env.phase == "none" for env in self.model.envs):
            actions = self._ask_steps(self.everyone, "step")
            self._take(call, of_tuple, actions=actions)

    def send(self, ids: Sequence[int]) -> None:
        """Send to these envs, those of them that have an episode."""
        if able := [i for i in ids if self.model.envs[i].phase != "none"]:
            actions = self._ask_steps(able, STREAM)
            self._take("send", of_step, actions=actions, env_ids=list(able))

    def fetch(self, timeout: float | None) -> None:
        """Fetch the step or the reset that is under way."""
        self._take(f"{self.pending}_fetch", of_tuple if self.pending == "step" else of_reset, timeout=timeout)

    def recv(self, least: int, timeout: float | None) -> None:
        """Receive so many envs at least, or all."""
        least = min(least, len(self.model.waiting))
        step = self._take("recv", of_step, min_envs=least, timeout=timeout)
        assert step is None or len(step) >= least

    def drain(self, timeout: float | None) -> None:
        """Receive all."""
        waiting = self.model.waiting
        step = self._take("drain", of_step, timeout=timeout)
        assert step is None or sorted(step.env_ids.tolist()) == waiting

    def actions(self, ids: Sequence[int]) -> NDArray[np.int64]:
        """Actions that differ from call to call; who does not act says nonsense."""
        self._serial += 1
        here = [[a in self.model.envs[i].world.acting for a in range(AGENT_NUM)] for i in ids]
        legal = [[(3 * self._serial + 5 * i + 2 * a) % 5 for a in range(AGENT_NUM)] for i in ids]
        return np.where(here, legal, NONSENSE).astype(np.int64)

    def _ask_steps(self, ids: Sequence[int], call: str) -> NDArray[np.int64]:
        actions = self.actions(ids)
        for k, i in enumerate(ids):
            self.model.ask_step(i, {a: np.int64(action) for a, action in enumerate(actions[k].tolist())})
        self.pending = call
        return actions

    # --- control

    def look(self, ids: Sequence[int], *, at_once: bool) -> None:
        """Ask these envs where they are."""
        self._asked, self._doomed = list(ids), (self.model.unnoticed - self.model.masked) & set(ids)
        self.pending = CONTROL
        if at_once:
            self._answers("exec_func", where, self._asked)
        else:
            self.call("exec_func_send", where, self._asked)

    def fetch_answers(self, timeout: float | None) -> None:
        """Fetch what `look` asked for."""
        self._answers("exec_func_fetch", timeout=timeout)

    def _answers(self, call: str, *what: Any, **arguments: Any) -> None:
        ids, unnoticed = self._asked, set(self.model.unnoticed)
        failed: set[int] = set()
        try:
            answers = self.call(call, *what, **arguments)
        except EnvRaised as error:
            self.books.audit()
            failed, told = set(error.env_ids), error.result
        else:
            if answers is None:
                return
            told = dict(zip(ids, answers, strict=True))
        self.pending = None
        assert failed >= self._doomed, "their worker was dead"
        assert failed <= unnoticed | {i for i in ids if self.model.envs[i].gone is not Gone.NO}
        assert told.keys() | failed | self.model.masked >= set(ids)
        for i, answer in told.items():
            env = self.model.envs[i]
            if answer is None:
                assert i in self.model.masked
            elif env.gone is Gone.NO and not env.fresh:
                world = env.world.driver.env.world
                assert answer == (env.stamp, world.episode, world.t), f"env {i}"
            else:
                assert answer[0] >= env.stamp
        if not failed:
            self.books.answered({self.books.owner(i) for i in ids})

    # --- calls at the wrong time

    def refused(self, k: int) -> None:
        """Make a call at the wrong time: it says what is wrong with it, and changes nothing."""
        envs, everyone = self.envs, self.actions(self.everyone)
        asking: list[Callable[[], Any]] = [
            lambda: envs.step(everyone),
            lambda: envs.step_send(everyone),
            lambda: envs.reset(),
            lambda: envs.reset_send(env_ids=[0]),
            lambda: envs.get_attr("plan"),
            lambda: envs.exec_func_send(where),
            lambda: envs.send(everyone),
            lambda: envs.async_reset(),
        ]
        fetches = {"step": envs.step_fetch, "reset": envs.reset_fetch, CONTROL: envs.exec_func_fetch}
        wrong: list[tuple[Callable[[], Any], type[StateError]]]
        wrong = [(fetch, NothingPendingError) for call, fetch in fetches.items() if call != self.pending]
        if self.end or self.pending:
            wrong += [(call, BusyError) for call in asking]
        if self.end or not self.pending:
            wrong += [(envs.recv, NothingPendingError)]
        if self.end or self.pending == CONTROL:
            wrong += [(envs.recv, BusyError), (envs.drain, BusyError)]
        call, error = wrong[k % len(wrong)]
        with pytest.raises(self.end or error):
            call()

    # --- how calls go

    def call(self, name: str, *what: Any, **arguments: Any) -> Any:
        """Make a call, and read the books; None if nothing was there in time, or a worker is gone for good."""
        asks = name.endswith("_send") or name in ("send", "async_reset")
        if not asks and arguments.get("timeout") is None:
            # Nobody is stopped who would be waited for in vain; steps and resets time out, but not every time.
            if not self.setup.times_out or self.hangs or name.startswith(CONTROL):
                self.books.wake_all()
            self.hangs += bool(self.books.stopped)
        self.note(name, *what, {key: value for key, value in arguments.items() if key != "actions"})
        try:
            result = getattr(self.envs, name)(*what, **arguments)
        except FetchTimeout:
            assert arguments["timeout"] is not None
            result = None
        except (WorkerDied, EnvTimeout) as error:
            self._lost(error)
            return None
        self.books.audit()
        return result

    def _take(self, call: str, parts: Callable[[Any, Any], list[Row]], **arguments: Any) -> Any:
        """Make a call that brings rows, or asks for them; look at what came, and return it."""
        try:
            result = self.call(call, **arguments)
        except EnvRaised as error:
            self.books.audit()
            for failure in error.failures:
                self.model.failed(failure.env_id, failure.operation)
            self._look_at(of_step(self.envs, error.result))
            if len(self.model.masked) == self.n:
                self.end = BrokenError
            return None
        if result is not None:
            self._look_at(parts(self.envs, result))
        return result

    def _look_at(self, rows: list[Row]) -> None:
        """Rows of envs that were asked, and of others beside them."""
        assert len({row.i for row in rows}) == len(rows)
        for row in rows:
            (self.model.answered if self.model.envs[row.i].asked else self.model.idle_row)(row)
        if not self.model.waiting:
            self.pending = None

    def _lost(self, error: EnvFault) -> None:
        """A worker is gone, and only `close` is left."""
        on_fault = self.setup.on_fault
        assert on_fault != "restart" or self.setup.limited
        if on_fault == "mask":
            self.books.audit()
            assert len(self.model.masked) == self.n
        else:
            self.books.last_words(error)
        if error.result is not None:
            self._look_at(of_step(self.envs, error.result))
        self.pending, self.end = None, BrokenError


RUN_SECONDS = 20.0  # for all calls of one run

setups = st.builds(
    Setup,
    on_fault=st.sampled_from(("restart", "restart", "restart", "restart", "mask", "mask", "raise")),
    mode=st.sampled_from(MODES),
    n=st.sampled_from((3, 4, 2, 1)),
    num_workers=st.sampled_from((2, 1, 3)),
    shared=st.booleans(),
    copy=st.booleans(),
    limited=st.integers(0, 3).map(lambda k: k == 2),
    times_out=st.integers(0, 15).map(lambda k: k == 5),
    seed=st.sampled_from((None, 3, 2**40 + 1)),
)
some = st.lists(st.integers(0, 3), unique=True, max_size=4)
seconds = st.sampled_from((None, None, 0.0, 0.002))
seeds = st.sampled_from((None, None, 7, 2**50))
salts = st.sampled_from((None, 1, 2))


class Hung(BaseException):
    """A run took too long. Not an Exception: nobody may swallow it, and nobody should wait for it again and again."""


def noted(move: Callable[..., None]) -> Callable[..., None]:
    """Write down what a rule does; an error then tells of all that was done, also where nothing repeats it."""

    @wraps(move)
    def wrapped(self: Machine, **arguments: Any) -> None:
        self.note(f"- {move.__name__}", arguments)
        try:
            move(self, **arguments)
        except BaseException as error:
            error.add_note("\n".join(self.history))
            self.finds.append(error)
            raise

    return wrapped


class Machine(RuleBasedStateMachine):
    """One vectorizer after the other, and whatever may happen to them.

    What may be called depends on who was faster, and what is drawn must not: so no rule has a precondition, and each
    finds something to do at any time.

    Attributes:
        finds: What went wrong in any run: Hypothesis tries it again, and a race may not come out the same.
    """

    finds: ClassVar[list[BaseException]] = []

    def __init__(self) -> None:
        super().__init__()
        self.history: list[str] = []
        self.caller: Caller | None = None
        self._before = signal.signal(signal.SIGALRM, self._ring)
        signal.setitimer(signal.ITIMER_REAL, RUN_SECONDS)

    def _ring(self, *_: Any) -> None:
        raise Hung(f"a run takes more than {RUN_SECONDS:g} s")

    def note(self, *words: Any) -> None:
        """Write down what is done."""
        self.history.append(" ".join(getattr(word, "__name__", str(word)) for word in words))

    @initialize(setup=setups)
    @noted
    def make(self, setup: Setup) -> None:
        """Begin."""
        self.caller = Caller(setup, self.note)

    def teardown(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, self._before)
        if self.caller is not None:
            self.caller.clear_away()

    # --- calls

    @rule(
        call=st.sampled_from(("step", "step_send", "step_send", "reset", "reset_send")),
        who=some,
        seed=seeds,
        salt=salts,
    )
    @noted
    def ask_all(self, call: str, who: list[int], seed: int | None, salt: int | None) -> None:
        """Step all envs, or reset some; while something is under way, send."""
        caller = self.on()
        if caller.pending == STREAM:
            caller.send(caller.free(self.among(who)))
        elif caller.pending:
            caller.refused(len(who))
        elif call.startswith("reset"):
            caller.reset(call, self.among(who), seed, salt)
        else:
            caller.step(call)

    @rule(call=st.sampled_from(("send", "send", "send", "async_reset")), who=some, seed=seeds, salt=salts)
    @noted
    def ask_some(self, call: str, who: list[int], seed: int | None, salt: int | None) -> None:
        """Send to some envs that are free, or reset them."""
        caller = self.on()
        if caller.pending not in (None, STREAM):
            caller.settle()
        elif (ids := caller.free(self.among(who))) and call == "send":
            caller.send(ids)
        elif ids:
            caller.reset(call, ids, seed, salt)

    @rule(call=st.sampled_from(("fetch", "recv", "recv", "drain")), least=st.integers(1, 4), timeout=seconds)
    @noted
    def fetch(self, call: str, least: int, timeout: float | None) -> None:
        """Fetch what is there, or wait for it; without anything to fetch, step."""
        caller = self.on()
        if caller.pending is None:
            caller.step("step")
        elif caller.pending == CONTROL:
            caller.fetch_answers(timeout)
        elif call == "fetch" and caller.pending != STREAM:
            caller.fetch(timeout)
        elif call == "recv":
            caller.recv(least, timeout)
        else:
            caller.drain(timeout)

    @rule(who=some, at_once=st.booleans())
    @noted
    def look(self, who: list[int], at_once: bool) -> None:
        """Ask envs where they are."""
        caller = self.on()
        caller.settle()
        if caller.is_idle:
            caller.look(self.among(who), at_once=at_once)

    # --- harm

    @rule(
        i=st.integers(0, 3),
        operation=st.sampled_from(("step", "step", "reset")),
        how=st.sampled_from(("raise", "raise", "quiet", "exit", "hang")),
        who=some,
    )
    @noted
    def plan(self, i: int, operation: str, how: str, who: list[int]) -> None:
        """Something is to happen to an env when it is asked for this the next time."""
        caller = self.on()
        caller.settle()
        env = caller.model.envs[i % caller.n]
        able = env.gone is Gone.NO and not env.fresh and env.phase != "masked" and not env.plan
        if how == "hang":
            able = able and caller.setup.times_out and not caller.hangs
        if caller.setup.limited:  # a worker may be restarted once too often, an env may not
            able = able and how != "quiet" and caller.books.own_restarts[env.i] < caller.books.limit
        if caller.is_idle and able and caller.call("exec_func", order, [env.i], operation, how) is not None:
            caller.hangs += how == "hang"
            env.plan[operation] = how
            caller.send(self.among(who))

    @rule(w=st.integers(0, 2), answered=st.booleans())
    @noted
    def kill(self, w: int, answered: bool) -> None:
        """Kill a worker: now, or as soon as it has answered all that it was asked."""
        books = self.on().books
        w %= len(books.shares)
        if books.is_up(w):
            books.kill(w, answered=answered and books.has_answered(w))

    @rule(w=st.integers(0, 2))
    @noted
    def stop(self, w: int) -> None:
        """Stop a worker, or let those that are stopped go on."""
        books = self.on().books
        w %= len(books.shares)
        if books.stopped:
            books.wake_all()
        elif books.is_up(w):
            books.stop(w)

    # --- calls at the wrong time

    @rule(k=st.integers(0, 20))
    @noted
    def misuse(self, k: int) -> None:
        """Let workers get on, and make a call at the wrong time; now and then close, whatever is under way."""
        time.sleep(0.003)
        caller = self.on()
        if k == 13:
            caller.close(0.3)
        caller.refused(k)

    # --- what rules have in common

    def on(self) -> Caller:
        """The caller; a new one where only ``close()`` was left, or that has been called."""
        assert self.caller is not None
        if self.caller.end is not None:
            for k in range(13):
                self.caller.refused(k)
            self.caller.clear_away()
            setup, self.caller = self.caller.setup, None
            self.caller = Caller(setup, self.note)
        return self.caller

    def among(self, who: list[int]) -> list[int]:
        """Those of these envs that there are; all if there are none."""
        assert self.caller is not None
        return [i for i in who if i < self.caller.n] or self.caller.everyone

"""Calling a vectorizer, and holding all that comes back against the model of its envs and against its books."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from marlvec import AsyncVectorEnv, RestartLimit, env_seeds
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
from tests.faults.harness.books import Books
from tests.faults.harness.fragile import FragileEnv, where
from tests.faults.harness.model import Gone, Model
from tests.faults.harness.rows import Row, of_reset, of_step, of_tuple
from tests.vector.support.reference import NONSENSE

__all__ = ["CONTROL", "STREAM", "Caller", "Setup"]

AGENT_NUM = 2
STEP_TIMEOUT = 1.0
FEW = 1  # restarts, where they are limited
STREAM, CONTROL = "send", "exec_func"


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

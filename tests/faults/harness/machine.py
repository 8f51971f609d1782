"""Any calls in any order while workers are killed, stopped and hang, and envs raise: a machine for Hypothesis."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.faults.harness.caller import CONTROL, STREAM, Caller, Setup
from tests.faults.harness.fragile import order
from tests.faults.harness.model import Gone
from tests.vector.support.reference import MODES

__all__ = ["Hung", "Machine"]

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

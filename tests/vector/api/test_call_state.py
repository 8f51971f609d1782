"""The state machine of calls, driven by random events: what its tables say is what it does, and no request is lost."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from marlvec.errors import BrokenError, BusyError, ClosedError, NotResetError, StateError
from marlvec.vector.calls import (
    CONTROL_CALLS,
    PUBLIC_CALLS,
    STREAM_CALLS,
    TRANSITIONS,
    CallEvent,
    CallKind,
    CallPhase,
    CallState,
)

N = 5
IDS = st.lists(st.integers(0, N - 1), unique=True, max_size=N)


def array(ids: Iterable[int]) -> NDArray[np.int64]:
    return np.array(list(ids), np.int64)


class CallsMachine(RuleBasedStateMachine):
    """What is known of each env, by plain sets; `CallState` must agree after each event."""

    @initialize()
    def start(self) -> None:
        self.state = CallState(N)
        self.phase = CallPhase.IDLE
        self.pending: str | None = None
        self.in_flight: set[int] = set()
        self.arrived: list[int] = []
        self.episodes: set[int] = set()

    def check(self, call: str, ids: list[int]) -> type[StateError] | None:
        """What a public call does before it asks, and the error that the rules ask for."""
        kind = PUBLIC_CALLS[call].kind
        if self.phase is CallPhase.CLOSED:
            return ClosedError
        if self.phase is CallPhase.BROKEN:
            return BrokenError
        if kind is CallKind.STREAM:
            if self.pending is not None and self.pending not in STREAM_CALLS:
                return BusyError
            if (self.in_flight | set(self.arrived)) & set(ids):
                return BusyError
        elif self.pending is not None:
            return BusyError
        if PUBLIC_CALLS[call].operation in ("step", "send", "state") and set(ids) - self.episodes:
            return NotResetError
        return None

    @precondition(lambda self: self.phase in (CallPhase.IDLE, CallPhase.PENDING, CallPhase.BROKEN, CallPhase.CLOSED))
    @rule(call=st.sampled_from(sorted(PUBLIC_CALLS)), ids=IDS, undone=st.integers(0, 4))
    def ask(self, call: str, ids: list[int], undone: int) -> None:
        expected, chosen = self.check(call, ids), array(ids)
        refused: type[StateError] | None = None
        try:
            if call in STREAM_CALLS:
                self.state.check_free(chosen, call)
            else:
                self.state.check_idle(call)
            if PUBLIC_CALLS[call].operation in ("step", "send", "state"):
                self.state.check_episodes(chosen, call)
        except StateError as error:
            refused = type(error)
        assert refused is expected
        if refused is not None:
            return
        if call in STREAM_CALLS and not ids:
            return  # nobody to wait for: `VectorEnvBase` asks nothing
        before = self.state.outstanding
        self.state.begin(call, chosen)
        if undone == 0:  # it could not be sent
            self.state.undo_begin(chosen, before)
            if not before:
                self.phase, self.pending = CallPhase.IDLE, None
            else:
                self.pending = call
            return
        if PUBLIC_CALLS[call].operation == "reset":
            self.state.lose_episodes(chosen)
            self.episodes -= set(ids)
        self.phase, self.pending = CallPhase.PENDING, call
        self.in_flight |= set(ids)

    @precondition(lambda self: self.in_flight and self.phase < CallPhase.TORN)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.in_flight)), unique=True, min_size=1))
        self.state.arrive(array(ids))
        self.in_flight -= set(ids)
        self.arrived += ids

    @precondition(lambda self: self.phase is CallPhase.PENDING)
    @rule()
    def hand_out(self) -> None:
        brings_rows = self.pending not in CONTROL_CALLS
        got = self.state.hand_out()
        assert sorted(got.tolist()) == sorted(self.arrived), "each once"
        if self.pending in STREAM_CALLS and len(got) < N:
            assert got.tolist() == self.arrived, "first come first"
        if brings_rows:
            self.state.have_episodes(got)
            self.episodes |= set(self.arrived)
        self.arrived = []
        if not self.in_flight:
            self.phase, self.pending = CallPhase.IDLE, None

    @rule()
    def interrupt(self) -> None:
        self.state.on(CallEvent.INTERRUPT)
        if self.phase is CallPhase.PENDING:
            self.phase = CallPhase.INTERRUPTED

    @precondition(lambda self: self.phase is CallPhase.INTERRUPTED)
    @rule()
    def drop(self) -> None:
        """What the next call does: wait for all of it, and throw it away."""
        if self.in_flight:
            self.state.arrive(array(self.in_flight))
        if self.pending not in CONTROL_CALLS:
            self.state.lose_episodes(self.state.asked)
            self.episodes -= self.in_flight | set(self.arrived)
        self.state.hand_out()
        self.in_flight, self.arrived = set(), []
        self.phase, self.pending = CallPhase.IDLE, None

    @precondition(lambda self: self.phase < CallPhase.BROKEN)
    @rule()
    def tear(self) -> None:
        self.state.on(CallEvent.TEAR, "it was interrupted")
        self.phase = CallPhase.TORN

    @precondition(lambda self: self.phase is CallPhase.TORN)
    @rule()
    def forget(self) -> None:
        self.state.forget()
        self.in_flight, self.arrived, self.episodes = set(), [], set()
        self.phase, self.pending = CallPhase.IDLE, None

    @precondition(lambda self: self.phase < CallPhase.CLOSED)
    @rule(rarely=st.integers(0, 9))
    def break_or_close(self, rarely: int) -> None:
        if rarely == 0:
            self.state.on(CallEvent.BREAK, BrokenError("a worker is gone"))
            self.phase = CallPhase.BROKEN
        elif rarely == 1:
            self.state.on(CallEvent.CLOSE)
            self.phase = CallPhase.CLOSED

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "state"):
            return
        state = self.state
        assert state.phase is self.phase
        assert state.pending == self.pending
        assert set(state.in_flight.tolist()) == self.in_flight
        assert set(state.asked.tolist()) == self.in_flight | set(self.arrived)
        assert (state.outstanding, state.arrived) == (len(self.in_flight) + len(self.arrived), len(self.arrived))
        if state.all_run:
            assert self.episodes == set(range(N))
        if self.phase is CallPhase.IDLE:
            assert not self.in_flight
            assert not self.arrived
            assert self.pending is None
        for i in range(N):
            if i in self.episodes:
                state.check_episodes(array([i]), "step")
            else:
                with pytest.raises(NotResetError, match=rf"envs \[{i}\]"):
                    state.check_episodes(array([i]), "step")


TestCallState = CallsMachine.TestCase


def test_what_no_table_has_cannot_happen() -> None:
    """Nothing begins in a call that nobody will fetch, or that is in pieces; nothing comes after close()."""
    state = CallState(N)
    state.begin("step", array(range(N)))
    state.on(CallEvent.INTERRUPT)
    with pytest.raises(KeyError):
        state.begin("step", array(range(N)))
    assert all(
        after is CallPhase.CLOSED
        for table in TRANSITIONS.values()
        for before, after in table.items()
        if before is CallPhase.CLOSED
    )
    assert {before for before, after in TRANSITIONS[CallEvent.FORGET].items() if after is CallPhase.IDLE} == {
        CallPhase.TORN
    }
    left = {(event, before) for event in CallEvent for before in CallPhase if before not in TRANSITIONS[event]}
    assert left == {
        (CallEvent.BEGIN, CallPhase.INTERRUPTED),
        (CallEvent.BEGIN, CallPhase.TORN),
        (CallEvent.BEGIN, CallPhase.BROKEN),
        (CallEvent.FINISH, CallPhase.TORN),
        *((CallEvent.FORGET, phase) for phase in CallPhase if phase not in (CallPhase.TORN, CallPhase.CLOSED)),
    }
